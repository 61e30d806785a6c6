"""Speculation by an EAGLE-3 draft."""

from __future__ import annotations

from typing import ClassVar

from specexport.contract import tensors
from specexport.contract.methods.base import Flag
from specexport.contract.methods.draft_model import StatesDraft
from specexport.contract.model import Size
from specexport.contract.signature import GraphSignature, Spec


class Eagle3(StatesDraft, frozen=True, kw_only=True, tag="eagle3"):
    """A layer drafts from states between the target's layers (EAGLE-3, arXiv 2503.01840).

    Attributes:
        draft_hidden: H of the draft's own states.
    """

    draft_hidden: Size = 1

    built: ClassVar[frozenset[str]] = StatesDraft.built | {"draft_hidden"}
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            "--eagle3", "model", "EAGLE-3 draft of the target (SafeAILab's or the speculators library's)", "DIR_OR_ID"
        ),
    )
    needs_training: ClassVar[str | None] = "an EAGLE-3 draft"
    role: ClassVar[str] = "eagle3"

    @property
    def follow_up(self) -> int:
        return 1  # it goes on from its own state, and not from tokens it has seen

    @property
    def signatures(self) -> dict[str, GraphSignature]:
        (chain,) = super().signatures.values()
        inputs = {
            tensors.LAYER_STATES: Spec("float32", ("B", "T", len(self.states) * self.hidden)),
            tensors.OWN_STATE: Spec("float32", ("B", self.draft_hidden)),
            tensors.READS_OWN: Spec("bool", ("B",)),
        }
        outputs = {tensors.NEXT_STATE: Spec("float32", ("B", 1, self.draft_hidden))}
        return {self.role: GraphSignature(chain.inputs | inputs, chain.outputs | outputs, chain.fed)}
