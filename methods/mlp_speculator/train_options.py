"""Options of ``specexport train mlp-speculator``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from specexport.methods.mlp_speculator.spec import MAX_STAGES
from specexport.training.options import (
    HiddenStateOptions,
    Training,
    flag,
    report_chain,
)

_stages = partial(flag, group="stages")


@dataclass(frozen=True, kw_only=True)
class SpeculatorOptions(HiddenStateOptions):
    """Options of ``specexport train mlp-speculator``."""

    n_predict: int = _stages(
        "number of stages; stage i, from 0, predicts the token i + 2 positions ahead and sees those before it",
        3,
        "N",
        low=1,
        high=MAX_STAGES,
    )
    inner_dim: int | None = _stages("width of the states between stages (default: the model's)", None, "I", low=16)
    tie_weights: bool = _stages("stages share embedding, head and norm, and all but the first their projection", False)
    scale_input: bool = _stages("normalize the model's hidden state first", False)
    data_first: float = _stages(
        "share of the steps that learn the data, before the sampled texts", 0.5, "SHARE", low=0, high=1
    )


TRAINING = Training(
    "mlp-speculator",
    "Train an MLP speculator for a target.",
    SpeculatorOptions,
    partial(report_chain, "stage_accuracy"),
)
