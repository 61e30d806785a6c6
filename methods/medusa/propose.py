"""Proposes with Medusa heads on the target: candidates from one step fill the tree of the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specexport.contract import tensors
from specexport.methods.medusa.spec import Medusa
from specexport.runtime.backend import Array
from specexport.runtime.proposal import Ints, Opening, Proposal, Proposer, SlotProposer, SlotView, fill


class MedusaProposer(SlotProposer[Ints]):
    """Fills a tree with the heads' candidates at the last token in the target's cache, without a further call.

    Head i has read the text up to that token, t, and predicts token t+2+i. The root of the next step is t+1, so the
    candidates of head i belong to depth 1+i.
    """

    observes = frozenset({tensors.CANDIDATES})

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        """See :class:`Proposer`; proposes nothing before the target's first step."""
        proposals = {}
        for view in views:
            candidates = self._slots.get(view.slot)
            if candidates is not None:
                tokens = fill(view.tree, candidates)
                proposals[view.slot] = Proposal(tokens, view.tree, None, candidates)
        return proposals

    def observe(self, slot: int, outputs: Mapping[str, Array], row: int) -> None:
        self._slots[slot] = outputs[tensors.CANDIDATES][:, row].copy()


def open_proposer(method: Medusa, opening: Opening) -> Proposer:
    return MedusaProposer()
