"""Options of ``specexport train eagle3``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from specexport.contract.errors import TrainError
from specexport.methods.hidden_states.train_options import StatesDraftOptions
from specexport.training.options import (
    Training,
    dashed,
    draft_flag,
    report_chain,
)


@dataclass(frozen=True, kw_only=True)
class Eagle3Options(StatesDraftOptions):
    """Options of ``specexport train eagle3``."""

    states: Sequence[int] | None = draft_flag(
        "after how many of the target's layers the draft sees its residual stream (default: 2, L/2 and L - 3 of L)",
        None,
        "N",
    )
    draft: str | None = draft_flag(
        "draft to start from; with --intermediate-size its MLP keeps the strongest units (default: a new draft)",
        None,
        "DIR_OR_ID",
    )
    draft_vocab_size: int | None = draft_flag(
        "number of tokens it may propose: the most frequent of the training texts (default: all)", None, "N", low=64
    )
    tie_lm_head: bool = draft_flag("the draft ends in the target's own projection, which is not stored again", False)
    ttt_steps: int = draft_flag(
        "tokens drafted from each position in training; 1: none from its own states", 7, "N", low=1, high=16
    )

    def check(self) -> None:
        super().check()
        for name in ("states", "draft_vocab_size"):
            if self.draft is not None and getattr(self, name) is not None:
                raise TrainError(f"--draft was given together with {dashed(name)}, which is of a draft that is new")


TRAINING = Training("eagle3", "Train an EAGLE-3 draft for a target.", Eagle3Options, partial(report_chain, "accuracy"))
