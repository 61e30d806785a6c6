"""Options of trainings of drafts over the target's hidden states."""

from __future__ import annotations

from dataclasses import dataclass

from specexport.training.options import (
    LEARNING_RATES,
    OPTIMIZER_HELP,
    RATE_HELP,
    RunOptions,
    draft_flag,
    training_flag,
)


@dataclass(frozen=True, kw_only=True)
class StatesDraftOptions(RunOptions):
    """Options of trainings of drafts that see the target's layer states."""

    lr: float | None = training_flag(RATE_HELP, None, "RATE", above=0, high=1)
    self_distill: int = draft_flag(
        "number of texts sampled from the target to learn, half of them greedy, instead of the data, which give the "
        "prompts",
        0,
        "TEXTS",
        low=0,
    )
    intermediate_size: int | None = draft_flag("width of the draft's MLPs (default: the target's)", None, "I", low=16)
    decay: float = draft_flag("drafted token i counts D**i in the loss", 0.8, "D", above=0, high=1)
    optimizer: str = draft_flag(OPTIMIZER_HELP, "adamw", choices=tuple(LEARNING_RATES))
