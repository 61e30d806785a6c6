"""Speculation methods, a module or a folder each, found by entry points: no other package imports them by name."""
