"""Options of ``specexport train dflash``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from specexport.methods.dflash.spec import MAX_BLOCK
from specexport.training.options import StatesDraftTraining, Training, draft_option, report_chain


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
