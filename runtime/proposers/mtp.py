"""The target's MTP layer drafts as an EAGLE-3 draft does."""

from specexport.runtime.proposers.eagle3 import open_proposer

__all__ = ["open_proposer"]
