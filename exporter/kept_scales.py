"""Scales of a quantized checkpoint that a bundle keeps, so that its matrices are not rounded again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specexport.exporter.checkpoints.stored import Factors, Scales
from specexport.exporter.storage import SMALLEST_BLOCK, Storage

_LARGEST_KEPT_BLOCK = 128
BlockFactors = tuple[npt.NDArray[np.float32], npt.NDArray[np.int8] | None, npt.NDArray[np.float32] | None]
"""Scales, zero points and offsets."""


@dataclass(frozen=True)
class KeptScales:
    """Scales of the checkpoint that a matrix is stored with.

    Attributes:
        block: weights along the summed axis that share one; None where each column has one.
        scale: ``[...,K/block,N]``, or ``[1,N]`` by columns.
        zero: int8 like ``scale``, or None.
        offset: like ``scale``, or None.
        any_scales: whether they are of a kind that only CPUs read.
    """

    block: int | None
    scale: Factors
    zero: npt.NDArray[np.int8] | None
    offset: Factors | None
    any_scales: bool

    def for_rows(self) -> BlockFactors:
        """For a matrix that is stored by rows, ``[N,K]``."""
        scale, zero, offset = self.values()
        return scale.T, None if zero is None else zero.T, None if offset is None else offset.T

    def values(self) -> BlockFactors:
        """Scales, zero points and offsets in full."""
        scale = self.scale.values()
        offset = None if self.offset is None else self.offset.values()
        return (scale[0] if self.block is None else scale), self.zero, offset


def kept_scales(
    parts: Sequence[Scales | None], role: str, shape: tuple[int, ...], storage: Storage
) -> KeptScales | None:
    """The checkpoint's own scales of a matrix ``[...,K,N]``, if its integers can be stored with them.

    Args:
        parts: of each matrix that it was joined of; None where one is not quantized.
        role: how it is read.
        shape: its own.
        storage: how it is to be stored.
    """
    scales = [part for part in parts if part is not None]
    by_rows = role == "lookup" or (role == "tied" and storage.any_scales)
    if by_rows:
        shape = shape[::-1]
    if (role not in ("matmul", "experts") and not (by_rows and storage.any_scales)) or len(scales) < len(parts):
        return None
    # Pairs of experts' integers hold -7 to 7 only.
    allowed = {"int4": {"int4"}, "int8": {"int4", "int8"}, "fp8": {"fp8"}}["int8" if by_rows else storage.kind]
    if not {part.kind for part in scales} <= allowed or (role, storage.kind) == ("experts", "int4"):
        return None
    by_column = all(part.group == shape[-2] for part in scales)
    if storage.block_size is None or storage.kind == "fp8":
        block = None
        if not by_column:
            if storage.kind != "fp8" or not storage.any_scales or storage.block_size is None:
                return None
            block = min(part.group & -part.group for part in scales)
    else:
        block = min(_LARGEST_KEPT_BLOCK, *(part.group & -part.group for part in scales))
    zeros, offsets = any(part.zero is not None for part in scales), any(part.offset is not None for part in scales)
    if (block is not None and block < SMALLEST_BLOCK) or (role == "experts" and (zeros or block is None)):
        return None
    rest = (zeros or offsets, *(part.scale.fine is not None for part in scales))
    if role == "experts" and any(rest):
        return None

    def joined(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        size = shape[-2] if block is None else block
        wide = [np.repeat(array, part.group // size, -2) for array, part in zip(arrays, scales, strict=True)]
        return np.concatenate(wide, axis=-1)

    def factors(each: list[Factors]) -> Factors:
        kinds = {(part.group == block, value.fine is None) for part, value in zip(scales, each, strict=True)}
        if not storage.any_scales or len(kinds) > 1 or not kinds.pop()[0]:
            return Factors(joined([value.values() for value in each]))
        fine = [value.fine for value in each if value.fine is not None]
        coarse = np.concatenate([value.coarse for value in each], axis=-1)
        return Factors(coarse, np.concatenate(fine, axis=-1) if fine else None)

    scale = factors([part.scale for part in scales])
    zero = joined([_zero(part) for part in scales]) if zeros else None
    offset = factors([_offset(part) for part in scales]) if offsets else None
    columns = scale.coarse.shape[-1]
    if columns != shape[-1] or (any(rest) and not storage.any_scales) or (zeros and columns % 2):
        return None
    return KeptScales(block, scale, zero, offset, any(rest) or (storage.kind == "fp8" and block is not None))


def _zero(scales: Scales) -> npt.NDArray[np.int8]:
    return np.zeros(scales.scale.values().shape, np.int8) if scales.zero is None else scales.zero


def _offset(scales: Scales) -> Factors:
    return Factors(np.zeros(scales.scale.values().shape, np.float32)) if scales.offset is None else scales.offset
