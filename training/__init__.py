"""Training what a target speculates with: Medusa heads, MLP speculators and draft models."""
