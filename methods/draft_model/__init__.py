"""Speculation by a smaller model with the target's tokenizer."""
