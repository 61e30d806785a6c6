"""Options of ``specexport train dflash``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from specexport.methods.hidden_states.train_options import StatesDraftOptions
from specexport.training.options import (
    Training,
    draft_flag,
    report_chain,
)


@dataclass(frozen=True, kw_only=True)
class DFlashOptions(StatesDraftOptions):
    """Options of ``specexport train dflash``."""

    layers: int = draft_flag("layers of the draft", 5, "N", low=1, high=16)
    states: Sequence[int] | None = draft_flag(
        "after how many of the target's layers the draft sees its residual stream (default: one for each of its own "
        "layers, spread evenly)",
        None,
        "N",
    )
    draft_block: int = draft_flag("tokens of a block; all but the first are drafted", 16, "N", low=2, high=33)
    mask_token_id: int | None = draft_flag(
        "token that marks positions to draft (default: the tokenizer's mask, padding or end)", None, "ID", low=0
    )
    anchors: int = draft_flag("blocks trained in each window, drawn anew for each batch", 32, "N", low=1)


TRAINING = Training("dflash", "Train a DFlash draft for a target.", DFlashOptions, partial(report_chain, "accuracy"))
