"""The target's own first layers draft as a smaller model does."""

from specexport.methods.draft_model.propose import open_proposer

__all__ = ["open_proposer"]
