"""specexport: speculative decoding, compiled ahead of time."""

__version__ = "0.1.0"
