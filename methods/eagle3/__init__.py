"""Speculation by an EAGLE-3 draft."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from specexport.contract.errors import TrainError
from specexport.contract.methods.base import CHECKPOINT, DEFAULT_DRAFT_TOKENS, Flag
from specexport.contract.methods.suggestion import Suggestion
from specexport.contract.options import dashed
from specexport.methods.hidden_states import OwnStateDraft, StatesCheckpointOptions
from specexport.training.options import StatesDraftTraining, Training, draft_option, report_chain


class Eagle3Options(StatesCheckpointOptions, frozen=True, kw_only=True, tag="eagle3"):
    """Options of an EAGLE-3 draft."""

    flag = Flag(
        "--eagle3", "model", "EAGLE-3 draft of the target (SafeAILab's or the speculators library's)", "DIR_OR_ID"
    )


class Eagle3(OwnStateDraft, frozen=True, kw_only=True, tag="eagle3"):
    """A layer drafts from states between the target's layers (EAGLE-3, arXiv 2503.01840)."""

    model: str

    options = Eagle3Options
    sources = CHECKPOINT
    needs_training = "an EAGLE-3 draft"
    role = "eagle3"
    draft_name = "EAGLE-3 draft"

    suggestion = Suggestion(
        "eagle3",
        f"K = {DEFAULT_DRAFT_TOKENS}",
        "one layer over the target's own states, which agrees with it more often than heads do; published for many "
        "targets (SafeAILab, speculators)",
        1,
    )


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
                raise TrainError(f"--draft was given together with {dashed(name)}, which is for a new draft")


TRAINING = Training("eagle3", "Train an EAGLE-3 draft for a target.", Eagle3Training, partial(report_chain, "accuracy"))
