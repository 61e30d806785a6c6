"""Options of trainings: a field here is a flag of ``specexport train``, with help, default and range.

Imports no torch, so that ``--help`` needs none.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from specexport.contract.errors import TrainError
from specexport.contract.methods.mlp_speculator import MAX_STAGES

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "tvd")
LEARNING_RATES = {"adamw": 3e-4, "muon": 4e-3}
"""A draft's default learning rate by optimizer."""
_RATE = "highest learning rate (default: 3e-4 with adamw, 4e-3 with muon)"
_OPTIMIZER = "muon serves a draft that starts from nothing"
_SHORTEST = 8
"""Tokens of a continuation, at least."""
_REQUIRED: Any = object()
_TYPES = {"int": int, "float": float, "str": str, "Path": Path, "Sequence[Path]": Path, "Sequence[int]": int}


def _flag(
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
    """A field that is a flag; ``keyed``: a resumed training must have the same value."""
    about = {
        "help": text, "metavar": metavar, "range": (low, high, above), "choices": choices, "group": group,
        "short": short, "keyed": keyed,
    }  # fmt: skip
    return field(metadata=about) if default is _REQUIRED else field(default=default, metadata=about)


_STAGE_2 = "together with the model (--stage 2)"
_data, _training, _heads, _stages, _both, _draft, _together = (
    partial(_flag, group=group)
    for group in ("data", "training", "heads", "stages", "heads or stages", "draft", _STAGE_2)
)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of every training."""

    target: str = _flag("Hugging Face folder or hub id", metavar="DIR_OR_ID")
    data: Sequence[Path] = _flag(
        "text files; .jsonl or .json with text, conversations (ShareGPT) or messages: of chats only the "
        "assistant's turns are learned",
        metavar="FILE",
        keyed=False,
    )
    output: Path = _flag("folder to write", metavar="DIR", short="-o", keyed=False)
    overwrite: bool = _flag("replace an existing output", False, keyed=False)
    seq_len: int | None = _data("tokens a window (default: 512)", None, "N", low=2 * _SHORTEST)
    held_out: str = _data("share of the data, or a file, used only to evaluate", "0.05", "SHARE_OR_FILE")
    prompt_len: int | None = _data("tokens of a prompt to continue (default: a quarter of --seq-len)", None, "N", low=1)
    sample_batch: int = _data("texts sampled at once", 64, "N", low=1)
    epochs: float = _training("times through the data", 2.0, "N", above=0)
    steps: int | None = _training(
        "steps of the optimizer, instead of --epochs (default: as --epochs says)", None, "N", low=1
    )
    batch_size: int = _training("windows a batch", 8, "N", low=1)
    accumulate: int = _training("batches a step", 1, "N", low=1)
    lr: float | None = _training("highest learning rate", 1e-3, "RATE", above=0, high=1)
    warmup: float = _training("share of the steps in which the learning rate rises", 0.1, "SHARE", low=0, high=1)
    device: str = _training("where to compute", "auto", choices=("auto", "cpu", "cuda"))
    precision: str = _training(
        "type that products are computed in; auto: bf16 where it is fast", "auto", choices=("auto", "bf16", "fp32")
    )
    seed: int = _training("random seed", 0, "N", low=0)
    work: Path | None = _training(
        "folder for checkpoints, from which the same command resumes (default: DIR.work beside the output, removed at "
        "the end)",
        None,
        "DIR",
        keyed=False,
    )
    save_every: int | None = _training("steps between checkpoints (default: 10 to 50)", None, "N", low=1, keyed=False)

    def check(self) -> None:
        """Checks what can be checked without a model.

        Raises:
            TrainError: an option is out of its range, or the output exists; names the flag.
        """
        for option in fields(self):
            value, (low, high, above) = getattr(self, option.name), option.metadata["range"]
            if value is not None and (low is not None or above is not None):
                within(option.name, value, low, high, above=above)
            choices = option.metadata["choices"]
            if choices is not None and value is not None and value not in choices:
                raise TrainError(f"{_dashed(option.name)}: {value!r}; expected one of {', '.join(map(str, choices))}")
        if not self.data:
            raise TrainError("--data: no files; expected text, .jsonl or .json")
        if self.output.exists() and not self.overwrite:
            raise TrainError(f"{self.output}: exists already; choose another folder or pass --overwrite to replace it")

    def settings(self) -> dict[str, Any]:
        """What the result depends on; the data and the models are told by their contents instead."""
        keyed = {option.name for option in fields(self) if option.metadata["keyed"]}
        return {name: value for name, value in asdict(self).items() if name in keyed}

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


@dataclass(frozen=True, kw_only=True)
class HiddenStateOptions(RunOptions):
    """Options of trainings of heads and stages over a model's hidden states."""

    lr: float = _training("highest learning rate", 1e-3, "RATE", above=0, high=1)
    decay: float = _both("head, or stage, i counts D**i in the loss", 1.0, "D", above=0, high=1)
    cache_hidden: bool = _both(
        "compute the model's hidden states once and keep them in the work folder, so that epochs run only the heads",
        False,
    )
    self_distill: int = _both(
        "number of texts sampled from the model to learn, half of them greedy: heads learn them instead of the data, "
        "which give the prompts, stages after the data",
        0,
        "TEXTS",
        low=0,
    )


@dataclass(frozen=True, kw_only=True)
class MedusaOptions(HiddenStateOptions):
    """Options of ``specexport train medusa``."""

    heads: int = _heads(
        "number of heads; head i, from 0, predicts the token i + 2 positions ahead", 4, "N", low=1, high=16
    )
    layers: int = _heads("residual blocks a head", 1, "N", low=0, high=16)
    tie_lm_head: bool = _heads("heads end in the model's own projection and are many times smaller", False)
    decay: float = _both("head i counts D**i in the loss", 0.8, "D", above=0, high=1)
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
                raise TrainError(f"{_dashed(option.name)} was given without --stage 2, the only one to use it")


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


@dataclass(frozen=True, kw_only=True)
class DraftOptions(RunOptions):
    """Options of ``specexport train draft``."""

    lr: float | None = _training(_RATE, None, "RATE", above=0, high=1)
    draft: str | None = _draft(
        "model to start from, with the target's tokenizer (default: a new Llama)", None, "DIR_OR_ID"
    )
    layers: int | None = _draft(
        "layers of a new Llama; required without --draft (default: none)", None, "N", low=1, high=64
    )
    hidden: int | None = _draft(
        "hidden size of a new Llama; required without --draft (default: none)", None, "H", low=32, high=8192
    )
    divergence: str = _draft(
        "divergence between the target's and the draft's next-token distributions to minimize",
        "forward_kl",
        choices=DIVERGENCES,
    )
    samples: str = _draft(
        "what to learn: texts of the target, texts of the draft at that step (on-policy), or the data; prompts are cut "
        "from the data",
        "target",
        choices=("target", "draft", "data"),
    )
    texts: int = _draft("number of texts sampled from the target", 1024, "N", low=1)
    optimizer: str = _draft(_OPTIMIZER, "adamw", choices=tuple(LEARNING_RATES))

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


@dataclass(frozen=True, kw_only=True)
class StatesDraftOptions(RunOptions):
    """Options of trainings of drafts that see the target's layer states."""

    lr: float | None = _training(_RATE, None, "RATE", above=0, high=1)
    self_distill: int = _draft(
        "number of texts sampled from the target to learn, half of them greedy, instead of the data, which give the "
        "prompts",
        0,
        "TEXTS",
        low=0,
    )
    intermediate_size: int | None = _draft("width of the draft's MLPs (default: the target's)", None, "I", low=16)
    decay: float = _draft("drafted token i counts D**i in the loss", 0.8, "D", above=0, high=1)
    optimizer: str = _draft(_OPTIMIZER, "adamw", choices=tuple(LEARNING_RATES))


@dataclass(frozen=True, kw_only=True)
class Eagle3Options(StatesDraftOptions):
    """Options of ``specexport train eagle3``."""

    states: Sequence[int] | None = _draft(
        "after how many of the target's layers the draft sees its residual stream (default: 2, L/2 and L - 3 of L)",
        None,
        "N",
    )
    draft: str | None = _draft(
        "draft to start from; with --intermediate-size its MLP keeps the strongest units (default: a new draft)",
        None,
        "DIR_OR_ID",
    )
    draft_vocab_size: int | None = _draft(
        "number of tokens it may propose: the most frequent of the training texts (default: all)", None, "N", low=64
    )
    tie_lm_head: bool = _draft("the draft ends in the target's own projection, which is not stored again", False)
    ttt_steps: int = _draft(
        "tokens drafted from each position in training; 1: none from its own states", 7, "N", low=1, high=16
    )

    def check(self) -> None:
        super().check()
        for name in ("states", "draft_vocab_size"):
            if self.draft is not None and getattr(self, name) is not None:
                raise TrainError(f"--draft was given together with {_dashed(name)}, which is of a draft that is new")


@dataclass(frozen=True, kw_only=True)
class DFlashOptions(StatesDraftOptions):
    """Options of ``specexport train dflash``."""

    layers: int = _draft("layers of the draft", 5, "N", low=1, high=16)
    states: Sequence[int] | None = _draft(
        "after how many of the target's layers the draft sees its residual stream (default: one for each of its own "
        "layers, spread evenly)",
        None,
        "N",
    )
    draft_block: int = _draft("tokens of a block; all but the first are drafted", 16, "N", low=2, high=33)
    mask_token_id: int | None = _draft(
        "token that marks positions to draft (default: the tokenizer's mask, padding or end)", None, "ID", low=0
    )
    anchors: int = _draft("blocks trained in each window, drawn anew for each batch", 32, "N", low=1)


Options = TypeVar("Options", bound=RunOptions)


def add_flags(parser: argparse.ArgumentParser, kind: type[RunOptions]) -> None:
    """Declares the flags of a kind of training."""
    groups: dict[str | None, Any] = {None: parser}
    for option in fields(kind):
        about = option.metadata
        if about["group"] not in groups:
            groups[about["group"]] = parser.add_argument_group(about["group"])
        how: dict[str, Any] = {"help": about["help"]}
        if option.type == "bool":
            how["action"] = "store_true"
        else:
            of = str(option.type)
            how |= {
                "metavar": about["metavar"],
                "choices": about["choices"],
                "type": _TYPES[of.removesuffix(" | None")],
            }
            how |= {"required": True} if about["metavar"] and option.default is MISSING else {"default": option.default}
            how |= {"nargs": "+"} if of.startswith("Sequence") else {}
        groups[about["group"]].add_argument(*filter(None, (about["short"], _dashed(option.name))), **how)


def from_flags(kind: type[Options], arguments: argparse.Namespace) -> Options:
    """The options of a kind from the flags of their names."""
    return kind(**{option.name: getattr(arguments, option.name) for option in fields(kind)})


def within(
    flag: str, value: float, low: float | None, high: float = math.inf, why: str = "", *, above: float | None = None
) -> None:
    """Checks a flag's number; ``above``, instead of ``low``, is what it must exceed, and ``why`` what ``high`` is.

    Raises:
        TrainError: it is out of range; names the flag.
    """
    if value <= high and (value > above if above is not None else low is None or value >= low):
        return
    expected = f"more than {above:g}" if above is not None else f"at least {low:g}"
    expected += "" if high == math.inf else f" and at most {high:g}" + (f" ({why})" if why else "")
    raise TrainError(f"{_dashed(flag)}: {value:g}; expected {expected}")


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"
