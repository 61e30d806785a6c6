"""Speculation by the target's own first layers."""
