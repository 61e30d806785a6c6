"""Speculation by a smaller model with another tokenizer."""
