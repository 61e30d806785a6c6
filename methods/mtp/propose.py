"""The target's MTP layer drafts as an EAGLE-3 draft does."""

from specexport.methods.eagle3.propose import open_proposer

__all__ = ["open_proposer"]
