"""DFlash: a draft that proposes a whole block of tokens in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specexport.contract import tensors
from specexport.methods.dflash.spec import DFlash
from specexport.methods.hidden_states.propose import StatesProposer
from specexport.runtime.backend import Array
from specexport.runtime.proposal import SlotView
from specexport.runtime.proposers import Opening


class DFlashProposer(StatesProposer):
    """Fills a tree with what the rows of a block say, each of the tokens at its own depth.

    A row's q does not depend on the tokens drafted before it, so that below each token of a tree there may be the same
    ones, and acceptance stays exact. One call makes the context's rows of what was accepted and those of the block.
    """

    def ask(self, views: Sequence[SlotView], tokens: int, drafts: int) -> range:
        """See :class:`StatesProposer`; a block is as long as its own tree takes, whatever else is in the batch."""
        slots = super().ask(views, tokens, drafts)
        given = self.graph.inputs(tokens, drafts=drafts, slots=slots)
        for view in views:
            given[tensors.BLOCK_ROWS][view.slot - slots.start] = view.tree.depth + 1
        return slots

    def _write_tokens(self, given: Mapping[str, Array], at: int, view: SlotView, rows: range) -> None:
        given[tensors.INPUT_IDS][at] = view.tokens[-1]


def open_proposer(method: DFlash, opening: Opening) -> DFlashProposer:
    return DFlashProposer(opening.graph(method), opening.bundle.manifest, method)
