"""Proposes with a DFlash draft, which drafts a whole block of tokens in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specexport.contract import tensors
from specexport.methods.dflash.spec import DFlash
from specexport.methods.hidden_states.propose import StatesProposer
from specexport.runtime.backend import Array, RunShape
from specexport.runtime.proposal import Opening, SlotView


class DFlashProposer(StatesProposer):
    """Fills a tree with the candidates of a block's rows, one for each depth.

    A row's q does not depend on the tokens drafted before it, so all nodes of a depth may have the same children, and
    acceptance remains exact. One call computes the context rows of the accepted tokens and the rows of the block.
    """

    def write_inputs(self, views: Sequence[SlotView], tokens: int, drafts: int) -> range:
        """See :class:`StatesProposer`; each block is as long as its tree requires, whatever the rest of the batch."""
        slots = super().write_inputs(views, tokens, drafts)
        inputs = self.graph.inputs(RunShape(tokens, drafts=drafts, slots=slots))
        for view in views:
            inputs[tensors.BLOCK_ROWS][view.slot - slots.start] = view.tree.depth + 1
        return slots

    def _write_tokens(self, inputs: Mapping[str, Array], at: int, view: SlotView, rows: range) -> None:
        inputs[tensors.INPUT_IDS][at] = view.tokens[-1]


def open_proposer(method: DFlash, opening: Opening) -> DFlashProposer:
    return DFlashProposer(opening.graph(method), opening.bundle.manifest, method)
