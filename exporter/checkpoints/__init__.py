"""Reading and checking of checkpoints: models, tokenizers, heads and drafts."""
