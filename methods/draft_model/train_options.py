"""Options of ``specexport train draft``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specexport.contract.errors import TrainError
from specexport.tables import Table
from specexport.training.options import (
    DIVERGENCES,
    LEARNING_RATES,
    OPTIMIZER_HELP,
    RATE_HELP,
    Report,
    RunOptions,
    Training,
    draft_flag,
    training_flag,
)


@dataclass(frozen=True, kw_only=True)
class DraftOptions(RunOptions):
    """Options of ``specexport train draft``."""

    lr: float | None = training_flag(RATE_HELP, None, "RATE", above=0, high=1)
    draft: str | None = draft_flag(
        "model to start from, with the target's tokenizer (default: a new Llama)", None, "DIR_OR_ID"
    )
    layers: int | None = draft_flag(
        "layers of a new Llama; required without --draft (default: none)", None, "N", low=1, high=64
    )
    hidden: int | None = draft_flag(
        "hidden size of a new Llama; required without --draft (default: none)", None, "H", low=32, high=8192
    )
    divergence: str = draft_flag(
        "divergence between the target's and the draft's next-token distributions to minimize",
        "forward_kl",
        choices=DIVERGENCES,
    )
    samples: str = draft_flag(
        "what to learn: texts of the target, texts of the draft at that step (on-policy), or the data; prompts are cut "
        "from the data",
        "target",
        choices=("target", "draft", "data"),
    )
    texts: int = draft_flag("number of texts sampled from the target", 1024, "N", low=1)
    optimizer: str = draft_flag(OPTIMIZER_HELP, "adamw", choices=tuple(LEARNING_RATES))

    def check(self) -> None:
        super().check()
        new = [f"--{name}" for name in ("layers", "hidden") if getattr(self, name) is not None]
        if self.draft is not None and new:
            raise TrainError(f"--draft was given together with {new[0]}, which is for a new draft")
        if self.draft is None and len(new) < 2:
            raise TrainError("no draft to train; expected --draft, or --layers and --hidden for a new one")
        if self.samples != "target" and self.texts != DraftOptions.texts:
            raise TrainError(
                f"--texts was given with --samples {self.samples}; only those of a target are sampled once"
            )


def _report(record: dict[str, Any]) -> Report:
    options, acceptance = record["options"], record["acceptance"]
    table = Table("", ("draft tokens a step", *map(str, range(1, 7))))
    for name in acceptance["after"]:
        for when in ("before", "after"):
            table.add_row(f"{name}, {when}", *(f"{length:.2f}" for length in acceptance[when][name]))
    yield f"{options['output']}: a draft of {options['target']}; acceptance length over held-out prompts"
    yield table


TRAINING = Training("draft", "Distil a target into a draft model.", DraftOptions, _report, " --layers 4 --hidden 512")
