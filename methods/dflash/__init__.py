"""Speculation by a DFlash draft."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

from msgspec import Meta

from specexport.contract import tensors
from specexport.contract.methods.base import CHECKPOINT, DEFAULT_DRAFT_TOKENS, Flag, RankedMethod
from specexport.contract.methods.suggestion import Suggestion
from specexport.contract.signature import GraphSignature
from specexport.contract.tensors import Dim, Tensor
from specexport.contract.tree import TokenTree
from specexport.methods.hidden_states import StatesCheckpointOptions, StatesDraft
from specexport.training.options import StatesDraftTraining, Training, draft_option, report_chain

MAX_BLOCK = 33


class DFlashOptions(StatesCheckpointOptions, frozen=True, kw_only=True, tag="dflash"):
    """Options of a DFlash draft."""

    flag = Flag("--dflash", "model", "DFlash draft of the target (z-lab's or the speculators library's)", "DIR_OR_ID")


class DFlash(StatesDraft, frozen=True, kw_only=True, tag="dflash"):
    """A few layers draft a block of tokens in one pass, from states between the target's layers (arXiv 2602.06036).

    Attributes:
        block_size: tokens of the longest block; the first of them is the tree's root.
    """

    model: str
    block_size: Annotated[int, Meta(ge=2, le=MAX_BLOCK)]

    options = DFlashOptions
    sources = CHECKPOINT
    needs_training = "a DFlash draft"
    role = "dflash"
    draft_name = "DFlash draft"
    default_sizes = (DEFAULT_DRAFT_TOKENS, 7, 15)  # up to its block size
    branching = 2

    suggestion = Suggestion(
        "dflash",
        f"K = {DEFAULT_DRAFT_TOKENS} to 15",
        "a few layers over the target's own states draft a whole block in one pass; published for many targets "
        "(z-lab, speculators)",
        1,
    )

    @property
    def call_widths(self) -> frozenset[int]:
        return frozenset()

    @property
    def signature(self) -> GraphSignature:
        """See :class:`Method`: the propose graph, rows of T tokens and a block of 1 + K."""
        inputs = (*block_inputs(len(self.states) * self.hidden), *tensors.SAMPLING)
        return replace(super().signature, inputs=inputs)

    def validate_tree(self, tree: TokenTree) -> str | None:
        # Its candidates at a depth do not depend on the tokens before, so any node may have children.
        if (reason := RankedMethod.validate_tree(self, tree)) is not None or tree.depth < self.block_size:
            return reason
        return f"depth {tree.depth}, with a block of {self.block_size} tokens"


def block_inputs(states: Dim) -> tuple[Tensor, ...]:
    """The propose graph's inputs but the sampling parameters; ``states`` is the width of the target's states."""
    return (
        tensors.INPUT_IDS.shaped("B", 1),
        tensors.LAYER_STATES.sized(H=states),
        tensors.LAST_ROW,
        tensors.PAST_LENGTH,
        tensors.BLOCK_ROWS,
        tensors.UNIFORM,
    )


class DFlashTraining(StatesDraftTraining, frozen=True, kw_only=True):
    """Options of ``specexport train dflash``.

    Attributes:
        layers: layers of the draft.
        draft_block: tokens of a block; all but the first are drafted.
        mask_token_id: token that marks positions to draft (default: the tokenizer's mask, padding or end).
        anchors: blocks trained in each window, drawn anew for each batch.
    """

    layers: Annotated[int, draft_option("N", ge=1, le=16)] = 5
    draft_block: Annotated[int, draft_option("N", ge=2, le=MAX_BLOCK)] = 16
    mask_token_id: Annotated[int | None, draft_option("ID", ge=0)] = None
    anchors: Annotated[int, draft_option("N", ge=1)] = 32


TRAINING = Training("dflash", "Train a DFlash draft for a target.", DFlashTraining, partial(report_chain, "accuracy"))
