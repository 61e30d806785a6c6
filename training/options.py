"""Options of trainings, the flags of ``specexport train``. Imports no torch, so that ``--help`` needs none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union

import msgspec

from specexport.contract.errors import TrainError
from specexport.contract.options import Options, dashed, option, options

if TYPE_CHECKING:
    from specexport.tables import Table

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "tvd"]
Optimizer = Literal["adamw", "muon"]
LEARNING_RATES: dict[Optimizer, float] = {"adamw": 3e-4, "muon": 4e-3}
"""Default learning rates of drafts by optimizer."""
RECORD = "training.json"
"""The file of an output that says how it was trained."""
_MIN_CONTINUATION = 8
"""Minimum number of tokens of a continuation."""
_data, training_option, draft_option, ahead_option = (
    partial(option, group=group) for group in ("data", "training", "draft", "heads or stages")
)


class RunOptions(Options, frozen=True, kw_only=True):
    """Options of every training. A resumed training must have the same values, but for options with ``fixed=False``.

    Attributes:
        target: a model: Hugging Face folder, hub id or .gguf file.
        data: text files, or .jsonl or .json with text, conversations (ShareGPT) or messages; only the assistant's turns
            of chats are learned.
        output: folder to write.
        overwrite: replace an existing output.
        seq_len: tokens per window (default: 512).
        held_out: share of the data, or a file, that is used only for evaluation.
        prompt_len: tokens per prompt of sampled texts (default: a quarter of --seq-len).
        sample_batch: number of texts sampled at once.
        epochs: number of passes over the data.
        steps: number of optimizer steps, instead of --epochs (default: given by --epochs).
        batch_size: windows per batch.
        accumulate: batches per step.
        lr: maximum learning rate.
        warmup: share of the steps in which the learning rate rises.
        device: device to train on.
        precision: precision of matrix products; auto is bf16 where it is fast.
        seed: random seed.
        work: folder for checkpoints, from which the same command resumes (default: DIR.work beside the output, deleted
            at the end).
        save_every: steps between checkpoints (default: 10 to 50).
    """

    target: Annotated[str, option("MODEL")]
    data: Annotated[tuple[Path, ...], option("FILE", fixed=False)]
    output: Annotated[Path, option("DIR", short="-o", fixed=False)]
    overwrite: Annotated[bool, option(fixed=False)] = False
    seq_len: Annotated[int | None, _data("N", ge=2 * _MIN_CONTINUATION)] = None
    held_out: Annotated[str, _data("SHARE_OR_FILE")] = "0.05"
    prompt_len: Annotated[int | None, _data("N", ge=1)] = None
    sample_batch: Annotated[int, _data("N", ge=1)] = 64
    epochs: Annotated[float, training_option("N", gt=0)] = 2.0
    steps: Annotated[int | None, training_option("N", ge=1)] = None
    batch_size: Annotated[int, training_option("N", ge=1)] = 8
    accumulate: Annotated[int, training_option("N", ge=1)] = 1
    lr: Annotated[float | None, training_option("RATE", gt=0, le=1)] = 1e-3
    warmup: Annotated[float, training_option("SHARE", ge=0, le=1)] = 0.1
    device: Annotated[Literal["auto", "cpu", "cuda"], training_option()] = "auto"
    precision: Annotated[Literal["auto", "bf16", "fp32"], training_option()] = "auto"
    seed: Annotated[int, training_option("N", ge=0)] = 0
    work: Annotated[Path | None, training_option("DIR", fixed=False)] = None
    save_every: Annotated[int | None, training_option("N", ge=1, fixed=False)] = None

    @classmethod
    def refusal(cls, message: str, name: str) -> TrainError:
        return TrainError(message, param=name)

    def check(self) -> None:
        if not self.data:
            raise TrainError("--data: no files; expected text, .jsonl or .json")
        files = [("--data", path) for path in self.data]
        files += [("--held-out", Path(self.held_out))] if self.held_out_share() is None else []
        for flag, path in files:
            if not path.is_file():
                problem = "is a folder" if path.is_dir() else "no such file"
                raise TrainError(f"{flag}: {path}: {problem}; expected a file of text, .jsonl or .json")
        if self.output.exists() and not self.overwrite:
            raise TrainError(f"{self.output}: exists already; choose another folder or pass --overwrite to replace it")
        if self.output.exists() and not (self.output / RECORD).is_file():
            raise TrainError(f"{self.output}: exists and was not trained here (no {RECORD}); not replacing it")
        for name, why in self.unused():
            if getattr(self, name) != options(type(self))[name].default:
                raise TrainError(f"{dashed(name)} was given {why}; leave it out")

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yields options that the others leave without effect, and the reason: the end of "--option was given"."""
        if self.steps is not None:
            yield "epochs", "with --steps, which is used instead"

    def held_out_share(self) -> float | None:
        """The share of the data to hold out; None if it is a file."""
        try:
            share = float(self.held_out)
        except ValueError:
            return None
        if not 0 < share <= 0.5:
            raise TrainError(f"--held-out is {share:g}; expected a file, or a share in (0, 0.5]")
        return share

    def settings(self) -> dict[str, Any]:
        """The options that determine the result; data and models are identified by their content instead."""
        fixed = [name for name, declared in options(type(self)).items() if declared.about.get("fixed", True)]
        return {name: getattr(self, name) for name in fixed}

    def record(self) -> dict[str, Any]:
        """All options as JSON values."""
        return dict(msgspec.json.decode(msgspec.json.encode(self, enc_hook=str)))

    def lengths(self, longest: int) -> tuple[int, int]:
        """The numbers of tokens of a window and of a prompt, for a model with ``longest`` positions."""
        window = self.seq_len or min(512, longest)
        within("seq_len", window, 2 * _MIN_CONTINUATION, longest, "the model's max_position_embeddings")
        prompt = self.prompt_len or window // 4
        within("prompt_len", prompt, 1, window - _MIN_CONTINUATION, f"{_MIN_CONTINUATION} less than --seq-len")
        return window, prompt


class DraftRunOptions(RunOptions, frozen=True, kw_only=True):
    """Options of trainings of drafts.

    Attributes:
        lr: maximum learning rate (default: 3e-4 with adamw, 4e-3 with muon).
        optimizer: muon suits drafts that are trained from scratch.
    """

    lr: Annotated[float | None, training_option("RATE", gt=0, le=1)] = None
    optimizer: Annotated[Optimizer, draft_option()] = "adamw"


class StatesDraftTraining(DraftRunOptions, frozen=True, kw_only=True):
    """Options of trainings of drafts that read the target's layer states: EAGLE-3 and DFlash.

    Attributes:
        states: the draft reads the target's states after these numbers of layers, any number of them; for DFlash from 1
            (default: as in published drafts, 2, L/2 and L - 3 of L layers for EAGLE-3, and as many evenly spread ones
            as it has layers for DFlash).
        self_distill: learn this many texts sampled from the target, half of them greedy, instead of the data, from
            which their prompts are cut.
        intermediate_size: width of the draft's MLPs (default: the target's).
        decay: draft token i counts D**i in the loss.
    """

    states: Annotated[tuple[int, ...] | None, draft_option("N")] = None
    self_distill: Annotated[int, draft_option("TEXTS", ge=0)] = 0
    intermediate_size: Annotated[int | None, draft_option("I", ge=16)] = None
    decay: Annotated[float, draft_option("D", gt=0, le=1)] = 0.8

    def unused(self) -> Iterator[tuple[str, str]]:
        yield from super().unused()
        yield from _unused_without_texts(self.self_distill)


class HiddenStateOptions(RunOptions, frozen=True, kw_only=True):
    """Options of trainings of heads and stages over a model's hidden states.

    Attributes:
        lr: maximum learning rate.
        decay: head or stage i counts D**i in the loss.
        cache_hidden: compute the model's hidden states once and store them in the work folder; epochs then run only the
            heads.
        self_distill: learn this many texts sampled from the model, half of them greedy, whose prompts are cut from the
            data; heads learn them instead of the data, stages after the data.
    """

    lr: Annotated[float, training_option("RATE", gt=0, le=1)] = 1e-3
    decay: Annotated[float, ahead_option("D", gt=0, le=1)] = 1.0
    cache_hidden: Annotated[bool, ahead_option()] = False
    self_distill: Annotated[int, ahead_option("TEXTS", ge=0)] = 0

    def unused(self) -> Iterator[tuple[str, str]]:
        yield from super().unused()
        yield from _unused_without_texts(self.self_distill)


def _unused_without_texts(texts: int) -> Iterator[tuple[str, str]]:
    """The options of sampling, if no texts are sampled."""
    if not texts:
        for name in ("prompt_len", "sample_batch"):
            yield name, "without --self-distill, which alone uses it"


O = TypeVar("O", bound=RunOptions)
Report = Iterator[Union["Table", str]]


@dataclass(frozen=True)
class Training:
    """A method's command of ``specexport train``: ``TRAINING`` beside the method's struct.

    The method's module ``train`` has a function ``train_<command>``, which takes the options and a log, writes the
    output and returns the record of ``training.json``. Started again with the same options, it resumes an interrupted
    run from the last checkpoint. It raises a SpecExportError that names an invalid option, file or checkpoint.

    Attributes:
        command: the word after ``specexport train``.
        report: formats a record.
        example: flags of an example besides ``--target``, ``--data`` and ``-o``.
    """

    command: str
    summary: str
    options: type[RunOptions]
    report: Callable[[dict[str, Any]], Report]
    example: str = ""


def within(name: str, value: float, low: float, high: float, why: str) -> None:
    """Checks an option against limits given by a model or the data; ``why`` explains ``high``."""
    if not low <= value <= high:
        raise TrainError(f"{dashed(name)} is {value}; expected {low} to {high}, {why}")


def accuracy_table(label: str, accuracy: list[list[float]]) -> Table:
    """A table of the shares of texts' tokens that are among the best candidates."""
    from specexport.tables import Table  # not loaded to run bundles

    ranks = (1, 2, 3, 5, 10)
    table = Table("", (label, *(f"top-{rank}" for rank in ranks)))
    for number, row in enumerate(accuracy):
        table.add_row(str(number), *(f"{sum(row[:rank]):.3f}" for rank in ranks))
    return table


def report_chain(key: str, record: dict[str, Any]) -> Report:
    """Reports the accuracy of each draft token of a chain: the shares under ``key`` in the record."""
    accuracy, length = record[key], record["acceptance_length"]
    output = record["options"]["output"]
    yield f"{output}: accuracy of {len(accuracy)} draft tokens on held-out texts"
    yield accuracy_table("token", accuracy)
    yield f"a chain of {len(accuracy)} would commit {length:.2f} tokens per step on these texts"
