"""GGUF files, read lazily, with transformers' names and shapes of tensors."""
