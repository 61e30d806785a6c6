"""Options of ``specexport train mlp-speculator``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated

from specexport.contract.options import option
from specexport.methods.mlp_speculator.spec import MAX_STAGES
from specexport.training.options import HiddenStateOptions, Training, report_chain

_stages = partial(option, group="stages")


class SpeculatorTraining(HiddenStateOptions, frozen=True, kw_only=True):
    """Options of ``specexport train mlp-speculator``.

    Attributes:
        n_predict: number of stages; stage i, from 0, predicts the token i + 2 positions ahead and sees those before it.
        inner_dim: width of the states between stages (default: the model's).
        tie_weights: stages share embedding, head and norm, and all but the first their projection.
        scale_input: normalize the model's hidden state first.
        data_first: share of the steps that learn the data, before the sampled texts.
    """

    n_predict: Annotated[int, _stages("N", ge=1, le=MAX_STAGES)] = 3
    inner_dim: Annotated[int | None, _stages("I", ge=16)] = None
    tie_weights: Annotated[bool, _stages()] = False
    scale_input: Annotated[bool, _stages()] = False
    data_first: Annotated[float, _stages("SHARE", ge=0, le=1)] = 0.5

    def unused(self) -> Iterator[tuple[str, str]]:
        yield from super().unused()
        if not self.self_distill:
            yield "data_first", "without --self-distill, the only one to use it"


TRAINING = Training(
    "mlp-speculator",
    "Train an MLP speculator for a target.",
    SpeculatorTraining,
    partial(report_chain, "stage_accuracy"),
)
