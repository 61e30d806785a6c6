"""Speculation by an EAGLE-3 draft."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from specexport.contract import tensors
from specexport.contract.methods.base import Flag, SourceKind
from specexport.contract.methods.draft_model import ChainDraft
from specexport.contract.model import Size
from specexport.contract.signature import GraphSignature, Signature, Spec

MAX_STATES = 16


class Eagle3(ChainDraft, frozen=True, kw_only=True, tag="eagle3"):
    """A layer drafts from states between the target's layers (EAGLE-3, arXiv 2503.01840).

    Attributes:
        model: folder or hub id of the draft.
        states: after how many of the target's layers it sees the residual stream.
        hidden: the target's hidden size.
        draft_hidden: H of the draft's own states.
        rows: that a run which drafts makes of a text, at most: as many as a step of its deepest tree can accept.
    """

    model: str
    states: Annotated[tuple[Annotated[int, Meta(ge=0, le=4096)], ...], Meta(max_length=MAX_STATES)] = ()
    hidden: Size = 1
    draft_hidden: Size = 1
    rows: Size = 1

    main: ClassVar[str] = "model"
    built: ClassVar[frozenset[str]] = ChainDraft.built | {"states", "hidden", "draft_hidden", "rows"}
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            "--eagle3", "model", "EAGLE-3 draft of the target (SafeAILab's or the speculators library's)", "DIR_OR_ID"
        ),
    )
    sources: ClassVar[dict[str, SourceKind]] = {"model": "checkpoint"}
    needs_training: ClassVar[str | None] = "an EAGLE-3 draft"
    role: ClassVar[str] = "eagle3"

    @property
    def target_outputs(self) -> Signature:
        return {tensors.layer_states(count): Spec("float32", ("B", "T", self.hidden)) for count in self.states}

    @property
    def catch_up(self) -> int:
        return self.rows

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

    def describe(self) -> str:
        return f"eagle3, states after {', '.join(map(str, self.states))} of the target's layers"
