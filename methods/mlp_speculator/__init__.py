"""Speculation by an MLP speculator."""
