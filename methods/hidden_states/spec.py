"""Options and manifest entries of drafts over the target's hidden states: EAGLE-3, DFlash and MTP."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from specexport.contract import tensors
from specexport.contract.methods.base import MethodOptions
from specexport.contract.shapes import Size
from specexport.contract.signature import GraphSignature
from specexport.contract.tensors import Dim, Tensor
from specexport.methods.draft_model.spec import ChainDraft

MAX_STATES = 16


class StatesDraftOptions(MethodOptions, frozen=True, kw_only=True):
    """Options of a draft over the target's hidden states.

    Attributes:
        dynamic_tree: whether the nodes of a tree are chosen anew in each step, by how probable the draft finds the
            paths to them: at most as many, and at most as deep, as those of the chosen tree (EAGLE-2, arXiv
            2406.16858, section 4).
    """

    dynamic_tree: bool = False


class StatesCheckpointOptions(StatesDraftOptions, frozen=True, kw_only=True):
    """Options of such a draft with its own checkpoint.

    Attributes:
        model: its folder or hub id.
    """

    model: str

    main: ClassVar[str] = "model"


class StatesDraft(ChainDraft, frozen=True, kw_only=True):
    """A draft that reads states between the target's layers.

    Attributes:
        states: the numbers of layers after which it reads the target's residual stream.
        hidden: the target's hidden size.
        rows: most rows of a text in a run that drafts: as many tokens as a step of its deepest tree can commit.
        dynamic_tree: see :class:`StatesDraftOptions`.
    """

    dynamic_tree: bool
    states: Annotated[tuple[Annotated[int, Meta(ge=0, le=4096)], ...], Meta(max_length=MAX_STATES)]
    hidden: Size
    rows: Size

    @property
    def target_outputs(self) -> tuple[Tensor, ...]:
        return tuple(tensors.LAYER_STATES.at(count).sized(H=self.hidden) for count in self.states)

    @property
    def catch_up(self) -> int:
        return self.rows

    def describe(self) -> str:
        dynamic = ", dynamic trees" if self.dynamic_tree else ""
        return f"{self.name}, states after {', '.join(map(str, self.states))} of the target's layers{dynamic}"


class OwnStateDraft(StatesDraft, frozen=True, kw_only=True):
    """A draft with a pass for each token, which reads its own state at tokens that the target has not read yet.

    Attributes:
        draft_hidden: H of the draft's own states.
    """

    draft_hidden: Size

    def validate(self) -> str | None:
        if self.dynamic_tree and self.trees and all(tree.is_chain for tree in self.token_trees()):
            return "dynamic_tree: its trees are chains, which leave nothing to choose; give trees of more nodes (trees)"
        return super().validate()

    @property
    def call_widths(self) -> frozenset[int]:
        return frozenset({self.rows, 1})  # later calls continue from its state and read one token

    @property
    def signature(self) -> GraphSignature:
        chain, inputs = super().signature, own_state_inputs(len(self.states) * self.hidden, self.draft_hidden)
        outputs = (*chain.outputs, tensors.NEXT_STATE.sized(H=self.draft_hidden))
        return GraphSignature((*chain.inputs, *inputs), outputs, chain.fed)


def own_state_inputs(states: Dim, hidden: Dim) -> tuple[Tensor, ...]:
    """The inputs for the target's concatenated states, of width ``states``, and for the draft's own state."""
    return tensors.LAYER_STATES.sized(H=states), tensors.OWN_STATE.sized(H=hidden), tensors.READS_OWN
