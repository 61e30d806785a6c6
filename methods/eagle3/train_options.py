"""Options of ``specexport train eagle3``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from specexport.contract.errors import TrainError
from specexport.training.options import StatesDraftTraining, Training, dashed, draft_option, report_chain


class Eagle3Training(StatesDraftTraining, frozen=True, kw_only=True):
    """Options of ``specexport train eagle3``.

    Attributes:
        draft: draft to start from; with --intermediate-size its MLP keeps the strongest units (default: a new draft).
        draft_vocab_size: number of tokens it may propose: the most frequent of the training texts (default: all).
        tie_lm_head: the draft ends in the target's own projection, which is not stored again.
        ttt_steps: tokens drafted from each position in training; 1: none from its own states.
    """

    draft: Annotated[str | None, draft_option("DIR_OR_ID")] = None
    draft_vocab_size: Annotated[int | None, draft_option("N", ge=64)] = None
    tie_lm_head: Annotated[bool, draft_option()] = False
    ttt_steps: Annotated[int, draft_option("N", ge=1, le=16)] = 7

    def check(self) -> None:
        super().check()
        for name in ("states", "draft_vocab_size"):
            if self.draft is not None and getattr(self, name) is not None:
                raise TrainError(f"--draft was given together with {dashed(name)}, which is of a draft that is new")


TRAINING = Training("eagle3", "Train an EAGLE-3 draft for a target.", Eagle3Training, partial(report_chain, "accuracy"))
