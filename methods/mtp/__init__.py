"""Speculation by the multi-token prediction layer of the target's own checkpoint."""
