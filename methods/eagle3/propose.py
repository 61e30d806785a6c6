"""EAGLE-3: a draft whose rows are made of the target's states at the tokens of the text."""

from __future__ import annotations

from collections.abc import Mapping

from specexport.contract import tensors
from specexport.methods.hidden_states.propose import StatesProposer
from specexport.methods.hidden_states.spec import OwnStateDraft
from specexport.runtime.backend import Array
from specexport.runtime.proposal import SlotView
from specexport.runtime.proposers import Opening


class Eagle3Proposer(StatesProposer):
    """Drafts a chain from what the target said at each token of the text; see ``hidden_states/graph.py``.

    The draft's row of a token is made of the target's states there and of the token after it. Rows that the draft makes
    of its own output are dropped after each call.
    """

    def _write_tokens(self, given: Mapping[str, Array], at: int, view: SlotView, rows: range) -> None:
        given[tensors.INPUT_IDS][at, : len(rows)] = view.tokens[rows.start + 1 : rows.stop + 1]


def open_proposer(method: OwnStateDraft, opening: Opening) -> Eagle3Proposer:
    return Eagle3Proposer(opening.graph(method), opening.bundle.manifest, method)
