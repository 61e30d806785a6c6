"""GGUF files: read lazily, and by the names and shapes that transformers has for their models."""
