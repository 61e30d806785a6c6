"""What a training starts from and where it leaves things: device, models, work folder, output folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from specexport import __version__
from specexport.checkpoints.locate import locate
from specexport.checkpoints.quiet import quiet
from specexport.contract.errors import TrainError
from specexport.training.data import Windows
from specexport.training.loop import Trained
from specexport.training.options import RunOptions


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


@dataclass(frozen=True)
class TrainingModel:
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


def load_model(source: str, place: Place, *, frozen: bool) -> TrainingModel:
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
    return TrainingModel(
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


def _windows_fingerprint(windows: Windows) -> str:
    """A hash of the data as they are trained on."""
    digest = hashlib.sha256(repr(tuple(windows.ids.shape)).encode())
    for tensor in (windows.ids, windows.learn):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def run_settings(
    options: RunOptions, target: TrainingModel, windows: Windows, held_out: Windows, place: Place
) -> dict[str, Any]:
    """Everything the result of a training depends on, as :func:`work_folder` wants it."""
    return options.settings() | {
        "target": fingerprint(target.path),
        "data": _windows_fingerprint(windows),
        "held_out": _windows_fingerprint(held_out),
        "bf16": place.bf16,
    }


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
