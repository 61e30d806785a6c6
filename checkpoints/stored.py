"""Tensors of safetensors files, read by name, one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from specexport.contract.errors import BuildError


class StoredTensors:
    """Named tensors of files.

    Args:
        files: the file of each.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def names(self) -> list[str]:
        """Of all."""
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one; it is not read."""
        with safe_open(self._files[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        """One, as it is stored."""
        with safe_open(self._files[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def stored_names(path: Path) -> list[str]:
    """The names of a file's tensors.

    Raises:
        BuildError: it is no safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise BuildError(f"{path}: not a safetensors file: {error}") from error
