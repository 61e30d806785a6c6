"""The target's own first layers draft like a smaller model."""

from specexport.methods.draft_model.propose import open_proposer

__all__ = ["open_proposer"]
