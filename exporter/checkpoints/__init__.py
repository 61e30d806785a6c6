"""Checkpoints on disk, read and checked: models, tokenizers, Medusa heads, MLP speculators."""
