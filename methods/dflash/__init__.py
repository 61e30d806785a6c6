"""Speculation by a DFlash draft."""
