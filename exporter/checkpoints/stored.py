"""Reading of a small ``config.json`` and of single tensors, for checkpoints of models, heads and drafts."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from specexport.contract.errors import UNREADABLE, BuildError

CONFIG = "config.json"
_MAX_CONFIG = 1 << 20
_MOST_PARTS, _LARGEST, _MAX_INT = 4096, 1 << 24, 1 << 53
_PARTS = re.compile(r"(^|_)(layers?|experts?|heads?|blocks?|stages?)($|_)")
_SIZES = re.compile(r"size|dim|vocab|position|embd|inner|ctx")

_Config = TypeVar("_Config")


def read_config(path: Path, kind: type[_Config], what: str) -> _Config:
    """Reads the fields of ``kind`` from a ``config.json``; other fields are ignored.

    Args:
        path: the file, which must exist.
        kind: a struct with the fields.
        what: the described object, for error messages.

    Raises:
        BuildError: the file is too large or not JSON, or a field is invalid.
    """
    if path.stat().st_size > _MAX_CONFIG:
        raise BuildError(f"{path}: {path.stat().st_size} bytes; expected at most {_MAX_CONFIG}")
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except UNREADABLE as error:
        raise BuildError(f"{path}: not a configuration of {what}: {error}") from error


def require_sane(path: Path, document: dict[str, Any]) -> None:
    """Refuses absurd numbers in a model's configuration, before the model is created.

    Raises:
        BuildError: a number is absurd; names the file and the field.
    """
    for name, value in _integers(document):
        most = _LARGEST if _SIZES.search(name) else _MOST_PARTS if _PARTS.search(name) else _MAX_INT
        if abs(value) > most:
            raise BuildError(f"{path}: {name} is {str(value)[:20]}; expected at most {most}")


def _integers(document: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """All integers with the names of their fields."""
    left: list[tuple[str, Any]] = list(document.items())
    while left:  # no recursion, as JSON may be nested deeply
        name, value = left.pop()
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += ((name, inner) for inner in value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1:
            yield name, int(value)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file.

    Attributes:
        name: in the file.
        shape: its shape.
        dtype: safetensors' name of its type.
        read: reads it as stored.
        form: identifies the representation; matrices of different forms cannot be joined without rounding again.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], torch.Tensor]
    form: str = ""

    @property
    def floating(self) -> bool:
        """Whether it holds floating-point numbers."""
        return "F" in self.dtype

    def finite(self, path: Path) -> torch.Tensor:
        """Reads it in fp32.

        Raises:
            BuildError: a number is not finite; names the tensor and ``path``.
        """
        tensor = self.read().to(torch.float32)
        if not bool(tensor.isfinite().all()):
            raise BuildError(f"{path}: tensor {self.name!r} holds numbers that are not finite; train it again")
        return tensor


def stored_tensors(path: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file, of which only the header is read.

    Raises:
        BuildError: it is not a safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            known = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise BuildError(f"{path}: not a safetensors file: {error}") from error
    return [StoredTensor(name, *described, partial(_read, path, name)) for name, described in known.items()]


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def head_tensors(folder: Path) -> list[StoredTensor]:
    """The tensors of heads or of a draft: from a folder's safetensors, or else from ``pytorch_model.bin``.

    Raises:
        BuildError: a file does not have the format of its name.
    """
    if files := sorted(folder.glob("*.safetensors")):
        return [tensor for file in files for tensor in stored_tensors(file)]
    return pickled_tensors(folder / "pytorch_model.bin")


def pickled_tensors(path: Path) -> list[StoredTensor]:
    """The tensors of a file pickled by torch, memory-mapped, so that unused ones are not read. No code in it is run.

    Raises:
        BuildError: it holds anything other than named tensors.
    """
    try:
        mapped = zipfile.is_zipfile(path)  # files of old versions of torch cannot be mapped
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # pickle and zip errors of many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BuildError(
            f"{path}: refused: only plain tensors are read from a {path.suffix}, as anything else could run code "
            f"({reason}). Convert it to safetensors where you trust it: "
            "safetensors.torch.save_file(torch.load(...), 'model.safetensors')"
        ) from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in loaded.items()
    ):
        raise BuildError(f"{path}: holds {type(loaded).__name__}; expected a dictionary of tensors by name")
    return [
        StoredTensor(name, tuple(tensor.shape), "F32" if tensor.is_floating_point() else "I64", tensor.detach)
        for name, tensor in loaded.items()
    ]
