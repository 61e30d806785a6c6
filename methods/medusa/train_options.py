"""Options of ``specexport train medusa``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from specexport.contract.errors import TrainError
from specexport.training.options import (
    HiddenStateOptions,
    Report,
    Training,
    ahead_flag,
    dashed,
    flag,
    shares,
)

_STAGE_2 = "together with the model (--stage 2)"
_heads, _together = (partial(flag, group=group) for group in ("heads", _STAGE_2))


@dataclass(frozen=True, kw_only=True)
class MedusaOptions(HiddenStateOptions):
    """Options of ``specexport train medusa``."""

    heads: int = _heads(
        "number of heads; head i, from 0, predicts the token i + 2 positions ahead", 4, "N", low=1, high=16
    )
    layers: int = _heads("residual blocks a head", 1, "N", low=0, high=16)
    tie_lm_head: bool = _heads("heads end in the model's own projection and are many times smaller", False)
    decay: float = ahead_flag("head i counts D**i in the loss", 0.8, "D", above=0, high=1)
    stage: int = _together("1: heads alone; 2: first alone, then both", 1, choices=(1, 2))
    tune: str = _together("how the model is trained", "lora", choices=("lora", "full"))
    lora_rank: int = _together("rank of the adapters", 16, "R", low=1)
    base_lr: float | None = _together(
        "the model's learning rate (default: lr/4 with LoRA, lr/50 with full tuning)", None, "RATE", above=0, high=1
    )
    heads_weight: float = _together("the loss is the model's plus λ times the heads'", 0.2, "λ", above=0)
    heads_first: float = _together(
        "share of the steps in which the heads are trained alone", 0.4, "SHARE", low=0, high=0.95
    )
    lm_loss: str | None = _together(
        "the model's loss: cross-entropy, or divergence from the original model (default: ce; kl with --self-distill)",
        None,
        choices=("ce", "kl"),
    )

    def check(self) -> None:
        super().check()
        for option in fields(self):
            if (
                self.stage == 1
                and option.metadata["group"] == _STAGE_2
                and getattr(self, option.name) != option.default
            ):
                raise TrainError(f"{dashed(option.name)} was given without --stage 2, the only one to use it")


def _report(record: dict[str, Any]) -> Report:
    heads = record["head_accuracy"]
    yield f"{record['options']['output']}: {len(heads)} heads; share of held-out tokens they predict"
    yield shares("head", heads)
    if "lm_loss" in record:
        before, after = record["lm_loss_before"], record["lm_loss"]
        yield f"held-out loss of the model {before:.4f} before, {after:.4f} now, in nats a token"


TRAINING = Training("medusa", "Train Medusa heads for a target, alone or together with it.", MedusaOptions, _report)
