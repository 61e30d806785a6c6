"""Training what a target speculates with: Medusa heads and draft models."""
