"""What trainings are asked for, checked before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specexport.contract.errors import TrainError
from specexport.training.data import Windows, read_windows
from specexport.training.loop import Schedule

_SHORTEST = 8
"""Tokens of a continuation, at least."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What every training from the command line is asked for; each field is the flag of its name.

    Attributes:
        target: folder or hub id.
        data: files, see :mod:`specexport.training.data`.
        output: folder to write.
        seq_len: tokens a window; None is 512, or the model's maximum if that is less.
        batch_size: windows a batch.
        accumulate: batches a step.
        epochs: times through the data.
        steps: instead of epochs.
        lr: learning rate, after the warm-up and before a cosine to zero; None is what suits what is trained.
        warmup: share of the steps in which the rate rises.
        prompt_len: tokens of the prompts that a model is to continue; None is a quarter of seq_len.
        sample_batch: texts sampled together.
        held_out: a share of the data, or a file, to measure with.
        device: ``auto``, ``cpu`` or ``cuda``.
        precision: ``auto``, ``bf16`` or ``fp32``.
        seed: of everything random.
        save_every: steps from a checkpoint to the next.
        work: folder for checkpoints, kept.
        overwrite: replace the output.
    """

    target: str
    data: Sequence[Path]
    output: Path
    seq_len: int | None = None
    batch_size: int = 8
    accumulate: int = 1
    epochs: float = 2.0
    steps: int | None = None
    lr: float | None = None
    warmup: float = 0.1
    prompt_len: int | None = None
    sample_batch: int = 64
    held_out: str = "0.05"
    device: str = "auto"
    precision: str = "auto"
    seed: int = 0
    save_every: int | None = None
    work: Path | None = None
    overwrite: bool = False

    def check(self) -> None:
        """Checks what can be checked without a model.

        Raises:
            TrainError: an option is out of its range, or the output exists; names the flag.
        """
        for flag, lowest in {
            "seq_len": 2 * _SHORTEST, "batch_size": 1, "accumulate": 1, "steps": 1, "prompt_len": 1, "sample_batch": 1,
            "seed": 0, "save_every": 1,
        }.items():  # fmt: skip
            within(flag, getattr(self, flag), lowest)
        within("epochs", self.epochs, 0, above=True)
        within("lr", self.lr, 0, 1, above=True)
        within("warmup", self.warmup, 0, 1)
        if not self.data:
            raise TrainError("--data: no files; expected text, .jsonl or .json")
        if self.output.exists() and not self.overwrite:
            raise TrainError(f"{self.output}: exists already; choose another folder or pass --overwrite to replace it")

    def settings(self) -> dict[str, Any]:
        """What the result depends on, as JSON has it; the data and the models are told by their contents instead."""
        left_out = ("data", "output", "save_every", "work", "overwrite")
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    def lengths(self, longest: int) -> tuple[int, int]:
        """Tokens a window and tokens a prompt, for a model of so many positions.

        Raises:
            TrainError: the model, or the window, is too short.
        """
        window = self.seq_len or min(512, longest)
        within("seq_len", window, 2 * _SHORTEST, longest, "the model's max_position_embeddings")
        prompt = self.prompt_len or window // 4
        within("prompt_len", prompt, 1, window - _SHORTEST, f"{_SHORTEST} less than --seq-len")
        return window, prompt

    def total_steps(self, windows: int) -> int:
        """Steps of the optimizers over so many windows."""
        return self.steps or max(1, round(self.epochs * windows / (self.batch_size * self.accumulate)))

    def read(self, tokenizer: Any, window: int) -> tuple[Windows, Windows]:
        """The windows to learn, and those to measure with.

        Raises:
            TrainError: a file is missing or malformed, there is too little of them, or the share is none.
        """
        windows = read_windows(self.data, tokenizer, seq_len=window, seed=self.seed)
        try:
            share = float(self.held_out)
        except ValueError:
            return windows, read_windows([Path(self.held_out)], tokenizer, seq_len=window, seed=self.seed)
        within("held_out", share, 0, 0.5, above=True)
        return windows.hold_out(share)


@dataclass(frozen=True)
class HeadOptions:
    """How heads, or stages, are trained; the defaults are those of Medusa's paper.

    Attributes:
        steps: of the optimizer.
        batch_size: windows a batch.
        accumulate: batches a step.
        lr: the learning rate, after the warm-up and before a cosine to zero.
        warmup: share of the steps that is the warm-up.
        decay: head i counts ``decay ** i``.
        seed: of the batches.
        save_every: steps from a checkpoint to the next.
    """

    steps: int
    batch_size: int = 8
    accumulate: int = 1
    lr: float = 1e-3
    warmup: float = 0.1
    decay: float = 0.8
    seed: int = 0
    save_every: int | None = None

    @property
    def schedule(self) -> Schedule:
        """The schedule of every learning rate."""
        return Schedule(self.steps, round(self.warmup * self.steps))


@dataclass(frozen=True, kw_only=True)
class HeadRunOptions(RunOptions):
    """What is asked of every training of what reads a model's hidden states.

    Attributes:
        decay: head, or stage, i counts ``decay ** i``.
        self_distill: texts to sample from the model and learn; the data give their prompts.
        cache_hidden: compute the model's hidden states once and keep them on disk.
    """

    decay: float
    self_distill: int = 0
    cache_hidden: bool = False

    @property
    def rate(self) -> float:
        """The learning rate of what is trained over the model."""
        return self.lr or 1e-3

    def check(self) -> None:
        super().check()
        within("decay", self.decay, 0, 1, above=True)
        within("self_distill", self.self_distill, 0)

    def head_options(self, steps: int, seed: int) -> HeadOptions:
        """The options of one stage of the training: so many steps, over batches drawn by a seed."""
        return HeadOptions(
            steps=steps,
            batch_size=self.batch_size,
            accumulate=self.accumulate,
            lr=self.rate,
            warmup=self.warmup,
            decay=self.decay,
            seed=seed,
            save_every=self.save_every,
        )


def within(
    flag: str, value: float | None, lowest: float, highest: float = math.inf, why: str = "", *, above: bool = False
) -> None:
    """Checks a flag's number, if it has one.

    Args:
        flag: the field's name.
        value: what was given.
        lowest: allowed, but with ``above``.
        highest: allowed.
        why: what ``highest`` is.
        above: ``lowest`` itself is too low.

    Raises:
        TrainError: it is out of range; names the flag.
    """
    if value is None or (lowest <= value <= highest and not (above and value == lowest)):
        return
    expected = f"more than {lowest:g}" if above else f"at least {lowest:g}"
    expected += "" if highest == math.inf else f" and at most {highest:g}" + (f" ({why})" if why else "")
    raise TrainError(f"--{flag.replace('_', '-')}: {value:g}; expected {expected}")
