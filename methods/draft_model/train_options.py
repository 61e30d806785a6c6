"""Options of ``specexport train draft``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from specexport.contract.errors import TrainError
from specexport.tables import Table
from specexport.training.options import (
    Divergence,
    DraftRunOptions,
    Report,
    Training,
    draft_option,
)


class DraftTraining(DraftRunOptions, frozen=True, kw_only=True):
    """Options of ``specexport train draft``.

    Attributes:
        draft: model to start from, with the target's tokenizer (default: a new Llama).
        layers: layers of a new Llama; required without --draft (default: none).
        hidden: hidden size of a new Llama; required without --draft (default: none).
        divergence: divergence between the target's and the draft's next-token distributions to minimize.
        samples: what to learn: texts of the target, texts of the draft at that step (on-policy), or the data; prompts
            are cut from the data.
        texts: number of texts sampled from the target.
    """

    draft: Annotated[str | None, draft_option("DIR_OR_ID")] = None
    layers: Annotated[int | None, draft_option("N", ge=1, le=64)] = None
    hidden: Annotated[int | None, draft_option("H", ge=32, le=8192)] = None
    divergence: Annotated[Divergence, draft_option()] = "forward_kl"
    samples: Annotated[Literal["target", "draft", "data"], draft_option()] = "target"
    texts: Annotated[int, draft_option("N", ge=1)] = 1024

    def check(self) -> None:
        super().check()
        new = [f"--{name}" for name in ("layers", "hidden") if getattr(self, name) is not None]
        if self.draft is not None and new:
            raise TrainError(f"--draft was given together with {new[0]}, which is for a new draft")
        if self.draft is None and len(new) < 2:
            raise TrainError("no draft to train; expected --draft, or --layers and --hidden for a new one")

    def unused(self) -> Iterator[tuple[str, str]]:
        yield from super().unused()
        if self.samples != "target":
            yield "texts", f"with --samples {self.samples}, which samples none beforehand"


def _report(record: dict[str, Any]) -> Report:
    options, acceptance = record["options"], record["acceptance"]
    table = Table("", ("draft tokens a step", *map(str, range(1, 7))))
    for name in acceptance["after"]:
        for when in ("before", "after"):
            table.add_row(f"{name}, {when}", *(f"{length:.2f}" for length in acceptance[when][name]))
    yield f"{options['output']}: a draft of {options['target']}; acceptance length over held-out prompts"
    yield table


TRAINING = Training("draft", "Distil a target into a draft model.", DraftTraining, _report, " --layers 4 --hidden 512")
