"""The target's own first layers draft as a smaller model does."""

from specexport.runtime.proposers.draft_model import open_proposer

__all__ = ["open_proposer"]
