"""EAGLE-3: a draft whose rows are computed from the target's hidden states."""

from __future__ import annotations

from collections.abc import Mapping

from specexport.contract import tensors
from specexport.methods.hidden_states.propose import StatesProposer
from specexport.methods.hidden_states.spec import OwnStateDraft
from specexport.runtime.backend import Array
from specexport.runtime.proposal import Opening, SlotView


class Eagle3Proposer(StatesProposer):
    """Drafts a chain from the target's states at each token of the text; see ``hidden_states/graph.py``.

    The row of a token is computed from the target's states there and from the next token. Rows computed from the
    draft's own output are dropped after each call.
    """

    def _write_tokens(self, inputs: Mapping[str, Array], at: int, view: SlotView, rows: range) -> None:
        inputs[tensors.INPUT_IDS][at, : len(rows)] = view.tokens[rows.start + 1 : rows.stop + 1]


def open_proposer(method: OwnStateDraft, opening: Opening) -> Eagle3Proposer:
    return Eagle3Proposer(opening.graph(method), opening.bundle.manifest, method)
