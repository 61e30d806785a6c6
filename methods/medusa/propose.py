"""Medusa heads on the target: what it said of the tokens to come in its last step is the next proposal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specexport.contract import tensors
from specexport.methods.medusa.spec import Medusa
from specexport.runtime.backend import Array
from specexport.runtime.proposal import Ints, Proposal, Proposer, SlotProposer, SlotView, fill
from specexport.runtime.proposers import Opening


class MedusaProposer(SlotProposer[Ints]):
    """Fills a tree with the candidates the target's heads made at the last token in its cache.

    Head i saw the text up to that token, t, and predicts t+2+i: the root of the next step is t+1, so its candidates
    belong to depth 1+i. They cost no call of their own.
    """

    observes = frozenset({tensors.CANDIDATES})

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        """See :class:`Proposer`; before the target's first step there is nothing to propose."""
        made = {}
        for view in views:
            candidates = self._slots.get(view.slot)
            if candidates is not None:
                tokens = fill(view.tree, candidates)
                made[view.slot] = Proposal(tokens, view.tree, None, candidates)
        return made

    def observe(self, slot: int, outputs: Mapping[str, Array], row: int) -> None:
        self._slots[slot] = outputs[tensors.CANDIDATES][:, row].copy()


def open_proposer(method: Medusa, opening: Opening) -> Proposer:
    return MedusaProposer()
