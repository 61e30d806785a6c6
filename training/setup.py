"""What a training starts from and where it leaves things: device, models, work folder, output folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from specexport import __version__
from specexport.contract.errors import TrainError
from specexport.exporter.locate import locate
from specexport.exporter.trace import quiet
from specexport.training.data import Windows, read_windows
from specexport.training.loop import Trained

_SHORTEST = 8
"""Tokens of a continuation, at least."""


@dataclass(frozen=True)
class Place:
    """Where and how finely numbers are computed.

    Attributes:
        device: of models and batches.
        bf16: matrices are multiplied in bfloat16; what is trained stays in float32.
    """

    device: torch.device
    bf16: bool

    @property
    def frozen_dtype(self) -> torch.dtype:
        """Of weights that are not trained."""
        return torch.bfloat16 if self.bf16 else torch.float32

    def autocast(self) -> torch.autocast:
        """The context to compute in."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)


def choose_place(device: str, precision: str) -> Place:
    """``auto``, ``cpu`` or ``cuda``; ``auto``, ``bf16`` or ``fp32``, of which auto takes bfloat16 where it is fast.

    Raises:
        TrainError: there is no such device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise TrainError("--device cuda: torch finds no CUDA device; pass --device cpu, or install torch with CUDA")
    kind = "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"
    if precision == "auto":
        # Without these instructions a CPU emulates bfloat16, several times slower than float32.
        fast = torch.cuda.is_bf16_supported() if kind == "cuda" else torch.cpu._is_avx512_bf16_supported()
        return Place(torch.device(kind), fast)
    return Place(torch.device(kind), precision == "bf16")


@dataclass(frozen=True)
class Watch:
    """Where a training says how it goes.

    Attributes:
        log: given lines.
        console: where bars are drawn.
    """

    log: Callable[[str], None]
    console: Console | None = None


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


@dataclass(frozen=True)
class Model:
    """A causal LM and its tokenizer.

    Attributes:
        source: what the user named.
        path: the local folder.
        model: in evaluation mode, so without dropout, whatever is trained.
        tokenizer: a fast transformers tokenizer.
        stored: dtype of the checkpoint's weights.
        ends: tokens that end a text.
        max_positions: longest text.
    """

    source: str
    path: Path
    model: Any
    tokenizer: Any
    stored: torch.dtype
    ends: tuple[int, ...]
    max_positions: int


def load_model(source: str, place: Place, *, frozen: bool) -> Model:
    """Loads a model to train with, or to train.

    Args:
        source: a folder or a hub id.
        place: where to.
        frozen: its weights are not trained, and may be rounded.

    Raises:
        BuildError: it is not there.
        TrainError: it cannot be loaded.
    """
    path = locate(source)
    try:
        with quiet():
            config = AutoConfig.from_pretrained(path)
            text = config.get_text_config()
            # torch's own attention would leave Gemma 2's soft cap out without a word.
            attention = "eager" if getattr(text, "attn_logit_softcapping", None) else "sdpa"
            dtype = place.frozen_dtype if frozen else torch.float32
            model = AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=dtype, attn_implementation=attention, use_safetensors=True
            )
            stored = AutoConfig.from_pretrained(path).dtype
    except Exception as error:  # transformers raises whatever the model's code raises
        raise TrainError(f"{path}: could not be loaded: {error}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # from missing files to malformed JSON
        raise TrainError(f"{path}: its tokenizer could not be loaded: {error}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise TrainError(f"{path}: its tokenizer ({type(tokenizer).__name__}) has no fast form")
    if model.get_output_embeddings() is None:
        raise TrainError(f"{path}: model family '{config.model_type}' has no language-model head; expected a causal LM")
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    longest = getattr(text, "max_position_embeddings", None)
    return Model(
        source=source,
        path=path,
        model=model.to(place.device).eval().requires_grad_(not frozen),
        tokenizer=tokenizer,
        stored=stored if isinstance(stored, torch.dtype) else torch.float32,
        ends=(ends,) if isinstance(ends, int) else tuple(ends or ()),
        max_positions=longest if isinstance(longest, int) else 1 << 30,
    )


def fingerprint(path: Path) -> str:
    """A hash that differs between checkpoints, from their settings and a sample of their weights."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as stream:
            stream.seek(max(0, size - (1 << 20)))
            digest.update(f"{file.name} {size}".encode() + stream.read())
    return digest.hexdigest()[:16]


def windows_fingerprint(windows: Windows) -> str:
    """A hash of the data as they are trained on."""
    digest = hashlib.sha256(repr(tuple(windows.ids.shape)).encode())
    for tensor in (windows.ids, windows.learn):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def work_folder(folder: Path | None, output: Path, settings: Mapping[str, Any]) -> Iterator[Path]:
    """A folder a training leaves checkpoints in, and a second run with the same settings goes on from.

    Args:
        folder: what the user named, which is kept in the end; None is ``OUTPUT.work``, which is not.
        output: the training's output.
        settings: everything the result depends on, as JSON has it.

    Raises:
        TrainError: the folder is of a training with other settings, or of something else.
    """
    work = folder if folder is not None else output.parent / f"{output.name}.work"
    path = work / "settings.json"
    wanted = json.loads(json.dumps(settings))
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise TrainError(f"{path}: {error}; delete the folder to train from the start") from error
        if not isinstance(found, dict):
            raise TrainError(f"{path}: holds {type(found).__name__}; delete the folder to train from the start")
        for name in [*wanted, *found]:
            if found.get(name) != wanted.get(name):
                raise TrainError(
                    f"{work}: holds an unfinished training with {name} {found.get(name)}, and this one has "
                    f"{wanted.get(name)}. Train with the same options to go on, delete the folder to start anew, or "
                    "choose another with --work"
                )
    elif work.exists() and (not work.is_dir() or any(work.iterdir())):
        raise TrainError(f"{work}: exists, and is not of a training; choose another folder with --work")
    else:
        work.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".tmp")
        partial.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    yield work
    if folder is None:
        shutil.rmtree(work)


def described(windows: Windows, held_out: Windows) -> str:
    """The data in a line."""
    learnt = int(windows.learn.sum()) / windows.learn.numel()
    return (
        f"data: {len(windows)} windows of {windows.ids.shape[1]} tokens, {learnt:.0%} of them to learn; "
        f"{len(held_out)} windows held out"
    )


def new_record(command: str, options: RunOptions, place: Place, windows: Windows, held_out: Windows) -> dict[str, Any]:
    """What a training writes down about itself, before it has measured anything."""
    return {
        "command": command,
        "specexport": __version__,
        "torch": torch.__version__,
        "options": json.loads(json.dumps(asdict(options), default=str)),
        "device": str(place.device),
        "bf16": place.bf16,
        "windows": len(windows),
        "tokens": windows.ids.numel(),
        "learnt_tokens": int(windows.learn.sum()),
        "held_out_windows": len(held_out),
    }


def told(trained: Trained) -> dict[str, Any]:
    """What a record says of a training."""
    return {"seconds": round(trained.seconds, 1), "history": trained.history}


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Writes ``training.json``: options, losses on the way, what was measured in the end."""
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def save_model(folder: Path, model: Any, tokenizer: Any, more: Mapping[str, torch.Tensor] | None = None) -> None:
    """Writes a Hugging Face folder, with ``more`` tensors among the weights."""
    with quiet():
        model.save_pretrained(folder, state_dict=model.state_dict() | dict(more or {}))
        tokenizer.save_pretrained(folder)
