"""Options of trainings of drafts over the target's hidden states."""

from __future__ import annotations

from typing import Annotated

from specexport.training.options import DraftRunOptions, draft_option


class StatesDraftOptions(DraftRunOptions, frozen=True, kw_only=True):
    """Options of trainings of drafts that see the target's layer states.

    Attributes:
        self_distill: number of texts sampled from the target to learn, half of them greedy, instead of the data, which
            give the prompts.
        intermediate_size: width of the draft's MLPs (default: the target's).
        decay: drafted token i counts D**i in the loss.
    """

    self_distill: Annotated[int, draft_option("TEXTS", ge=0)] = 0
    intermediate_size: Annotated[int | None, draft_option("I", ge=16)] = None
    decay: Annotated[float, draft_option("D", gt=0, le=1)] = 0.8
