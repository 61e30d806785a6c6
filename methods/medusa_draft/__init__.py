"""Speculation by a smaller model with Medusa heads."""
