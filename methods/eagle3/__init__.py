"""Speculation by an EAGLE-3 draft."""
