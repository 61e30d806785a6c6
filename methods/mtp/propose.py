"""The target's MTP layer drafts like an EAGLE-3 draft."""

from specexport.methods.eagle3.propose import open_proposer

__all__ = ["open_proposer"]
