"""Options of trainings: each field is a flag of ``specexport train``, with help, default and range.

Imports no torch, so that ``--help`` needs none.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from specexport.contract.errors import TrainError
from specexport.tables import Table

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "tvd")
LEARNING_RATES = {"adamw": 3e-4, "muon": 4e-3}
"""Default learning rates of drafts by optimizer."""
RATE_HELP = "highest learning rate (default: 3e-4 with adamw, 4e-3 with muon)"
OPTIMIZER_HELP = "muon serves a draft that starts from nothing"
_SHORTEST = 8
"""Minimum length of a continuation in tokens."""
_REQUIRED: Any = object()
_TYPES = {"int": int, "float": float, "str": str, "Path": Path, "Sequence[Path]": Path, "Sequence[int]": int}


def flag(
    text: str,
    default: Any = _REQUIRED,
    metavar: str | None = None,
    *,
    low: float | None = None,
    high: float = math.inf,
    above: float | None = None,
    choices: Sequence[Any] | None = None,
    group: str | None = None,
    short: str | None = None,
    keyed: bool = True,
) -> Any:
    """A field that is a flag; if ``keyed``, a resumed training must have the same value."""
    about = {
        "help": text, "metavar": metavar, "range": (low, high, above), "choices": choices, "group": group,
        "short": short, "keyed": keyed,
    }  # fmt: skip
    return field(metadata=about) if default is _REQUIRED else field(default=default, metadata=about)


_data, training_flag, draft_flag, ahead_flag = (
    partial(flag, group=group) for group in ("data", "training", "draft", "heads or stages")
)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options common to all trainings."""

    target: str = flag("Hugging Face folder or hub id", metavar="DIR_OR_ID")
    data: Sequence[Path] = flag(
        "text files; .jsonl or .json with text, conversations (ShareGPT) or messages: of chats only the "
        "assistant's turns are learned",
        metavar="FILE",
        keyed=False,
    )
    output: Path = flag("folder to write", metavar="DIR", short="-o", keyed=False)
    overwrite: bool = flag("replace an existing output", False, keyed=False)
    seq_len: int | None = _data("tokens a window (default: 512)", None, "N", low=2 * _SHORTEST)
    held_out: str = _data("share of the data, or a file, used only to evaluate", "0.05", "SHARE_OR_FILE")
    prompt_len: int | None = _data("tokens of a prompt to continue (default: a quarter of --seq-len)", None, "N", low=1)
    sample_batch: int = _data("texts sampled at once", 64, "N", low=1)
    epochs: float = training_flag("times through the data", 2.0, "N", above=0)
    steps: int | None = training_flag(
        "steps of the optimizer, instead of --epochs (default: as --epochs says)", None, "N", low=1
    )
    batch_size: int = training_flag("windows a batch", 8, "N", low=1)
    accumulate: int = training_flag("batches a step", 1, "N", low=1)
    lr: float | None = training_flag("highest learning rate", 1e-3, "RATE", above=0, high=1)
    warmup: float = training_flag("share of the steps in which the learning rate rises", 0.1, "SHARE", low=0, high=1)
    device: str = training_flag("where to compute", "auto", choices=("auto", "cpu", "cuda"))
    precision: str = training_flag(
        "type that products are computed in; auto: bf16 where it is fast", "auto", choices=("auto", "bf16", "fp32")
    )
    seed: int = training_flag("random seed", 0, "N", low=0)
    work: Path | None = training_flag(
        "folder for checkpoints, from which the same command resumes (default: DIR.work beside the output, removed at "
        "the end)",
        None,
        "DIR",
        keyed=False,
    )
    save_every: int | None = training_flag(
        "steps between checkpoints (default: 10 to 50)", None, "N", low=1, keyed=False
    )

    def check(self) -> None:
        """Runs the checks that need no model.

        Raises:
            TrainError: an option is out of its range, or the output exists; names the flag.
        """
        for option in fields(self):
            value, (low, high, above) = getattr(self, option.name), option.metadata["range"]
            if value is not None and (low is not None or above is not None):
                within(option.name, value, low, high, above=above)
            choices = option.metadata["choices"]
            if choices is not None and value is not None and value not in choices:
                raise TrainError(f"{dashed(option.name)}: {value!r}; expected one of {', '.join(map(str, choices))}")
        if not self.data:
            raise TrainError("--data: no files; expected text, .jsonl or .json")
        if self.output.exists() and not self.overwrite:
            raise TrainError(f"{self.output}: exists already; choose another folder or pass --overwrite to replace it")

    def settings(self) -> dict[str, Any]:
        """The options that affect the result, except data and models, which are identified by their contents."""
        keyed = {option.name for option in fields(self) if option.metadata["keyed"]}
        return {name: value for name, value in asdict(self).items() if name in keyed}

    def lengths(self, longest: int) -> tuple[int, int]:
        """The lengths of a window and of a prompt in tokens, for a model with ``positions`` positions.

        Raises:
            TrainError: the model, or the window, is too short.
        """
        window = self.seq_len or min(512, longest)
        within("seq_len", window, 2 * _SHORTEST, longest, "the model's max_position_embeddings")
        prompt = self.prompt_len or window // 4
        within("prompt_len", prompt, 1, window - _SHORTEST, f"{_SHORTEST} less than --seq-len")
        return window, prompt

    def total_steps(self, windows: int) -> int:
        """The number of optimizer steps over ``windows`` windows."""
        return self.steps or max(1, round(self.epochs * windows / (self.batch_size * self.accumulate)))


@dataclass(frozen=True, kw_only=True)
class HiddenStateOptions(RunOptions):
    """Options for training heads and stages over a model's hidden states."""

    lr: float = training_flag("highest learning rate", 1e-3, "RATE", above=0, high=1)
    decay: float = ahead_flag("head, or stage, i counts D**i in the loss", 1.0, "D", above=0, high=1)
    cache_hidden: bool = ahead_flag(
        "compute the model's hidden states once and keep them in the work folder, so that epochs run only the heads",
        False,
    )
    self_distill: int = ahead_flag(
        "number of texts sampled from the model to learn, half of them greedy: heads learn them instead of the data, "
        "which give the prompts, stages after the data",
        0,
        "TEXTS",
        low=0,
    )


Options = TypeVar("Options", bound=RunOptions)
Report = Iterator[Table | str]


@dataclass(frozen=True)
class Training:
    """A method's command of ``specexport train``: ``TRAINING`` in its module ``train_options``.

    Its module ``train`` has a function ``train_<command>``, which takes the options and a log, and returns the
    training's record.

    Attributes:
        command: the word after ``specexport train``.
        summary: for ``--help``.
        options: its flags.
        report: formats a record.
        example: flags that an example needs besides ``--target``, ``--data`` and ``-o``.
    """

    command: str
    summary: str
    options: type[RunOptions]
    report: Callable[[dict[str, Any]], Report]
    example: str = ""


def add_flags(parser: argparse.ArgumentParser, kind: type[RunOptions]) -> None:
    """Adds the flags of a kind of training to a parser."""
    groups: dict[str | None, Any] = {None: parser}
    for option in fields(kind):
        about = option.metadata
        if about["group"] not in groups:
            groups[about["group"]] = parser.add_argument_group(about["group"])
        settings: dict[str, Any] = {"help": about["help"]}
        if option.type == "bool":
            settings["action"] = "store_true"
        else:
            of = str(option.type)
            settings |= {
                "metavar": about["metavar"],
                "choices": about["choices"],
                "type": _TYPES[of.removesuffix(" | None")],
            }
            settings |= (
                {"required": True} if about["metavar"] and option.default is MISSING else {"default": option.default}
            )
            settings |= {"nargs": "+"} if of.startswith("Sequence") else {}
        groups[about["group"]].add_argument(*filter(None, (about["short"], dashed(option.name))), **settings)


def from_flags(kind: type[Options], arguments: argparse.Namespace) -> Options:
    """The options from parsed flags."""
    return kind(**{option.name: getattr(arguments, option.name) for option in fields(kind)})


def within(
    flag: str, value: float, low: float | None, high: float = math.inf, why: str = "", *, above: float | None = None
) -> None:
    """Checks a flag's range; ``above`` is an exclusive bound instead of ``low``, and ``why`` explains ``high``.

    Raises:
        TrainError: it is out of range; names the flag.
    """
    if value <= high and (value > above if above is not None else low is None or value >= low):
        return
    expected = f"more than {above:g}" if above is not None else f"at least {low:g}"
    expected += "" if high == math.inf else f" and at most {high:g}" + (f" ({why})" if why else "")
    raise TrainError(f"{dashed(flag)}: {value:g}; expected {expected}")


def dashed(name: str) -> str:
    """The flag of an option."""
    return f"--{name.replace('_', '-')}"


def shares(label: str, accuracy: list[list[float]]) -> Table:
    """A table of how often the true token is among the first candidates."""
    ranks = (1, 2, 3, 5, 10)
    table = Table("", (label, *(f"top-{rank}" for rank in ranks)))
    for number, row in enumerate(accuracy):
        table.add_row(str(number), *(f"{sum(row[:rank]):.3f}" for rank in ranks))
    return table


def report_chain(key: str, record: dict[str, Any]) -> Report:
    """Reports the accuracy of each of a chain's tokens: the record's shares under a key."""
    accuracy, length = record[key], record["acceptance_length"]
    output = record["options"]["output"]
    yield f"{output}: {len(accuracy)} drafted tokens; share of held-out tokens they predict"
    yield shares("token", accuracy)
    yield f"a chain of {len(accuracy)} would commit {length:.2f} tokens a step of these texts"
