"""Speculation by Medusa heads on the target."""
