"""Quantization of matrices: the arithmetic, and scales of a quantized checkpoint that a bundle keeps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from specexport.exporter.checkpoints.stored import Factors, Kind, QuantizedTensor, Scales
from specexport.exporter.options import Storage

SMALLEST_BLOCK = 16
Float8 = ml_dtypes.float8_e4m3fn
_MAX_INT8 = np.float32(127)
_MAX_FLOAT8 = np.float32(448)
_TINY = float(np.finfo(np.float32).tiny)
_CHUNK_ELEMENTS = 4 << 20
_Scalar = TypeVar("_Scalar", bound=np.generic)
_MIN_EXPONENT, _MAX_EXPONENT = -24, 15
"""Range of the exponents of fp16's powers of two."""
_MAX_KEPT_BLOCK = 128
_PIECE = 1 << 17
"""Number of weights fitted at once, so that intermediate results stay in a core's cache."""
_SPANS = (1.0, 0.93, 0.86, 0.79)
"""Shares of a block's range that its levels may span: clipping the largest weights rounds the others less."""
BlockFactors = tuple[npt.NDArray[np.float32], npt.NDArray[np.int8] | None, npt.NDArray[np.float32] | None]
"""Scales, zero points and offsets."""


@dataclass(frozen=True, kw_only=True)
class RoundedTensor(QuantizedTensor):
    """A matrix that this build rounded earlier, by calibration.

    Attributes:
        error: sum of the squared changes.
        energy: sum of the squared weights.
    """

    error: float
    energy: float


@dataclass(frozen=True)
class Blocks:
    """A matrix in integers: ``scale * (integers - zero)``, or ``scale * integers`` without zero points.

    Attributes:
        integers: int8, shaped like the matrix; four-bit ones in -8..7.
        scale: float32, shaped like the matrix with its axis divided by the block.
        zero: int8 like ``scale``, or None.
    """

    integers: npt.NDArray[np.int8]
    scale: npt.NDArray[np.float32]
    zero: npt.NDArray[np.int8] | None = None

    def restored(self, axis: int) -> npt.NDArray[np.float32]:
        block = self.integers.shape[axis] // self.scale.shape[axis]
        numbers = self.integers.astype(np.float32)
        if self.zero is not None:
            numbers -= np.repeat(self.zero, block, axis=axis)
        numbers *= np.repeat(self.scale, block, axis=axis)
        return numbers


def quantize_blocks(matrix: npt.NDArray[np.float32], axis: int, block: int, largest: int) -> Blocks:
    """Symmetric round-to-nearest, with one scale for every ``block`` weights along ``axis``, from the largest of them.

    ONNX's DequantizeLinear with ``block_size`` is the inverse. For scales see :func:`in_half`.
    """
    shape = list(matrix.shape)
    shape[axis : axis + 1] = [shape[axis] // block, block]
    x, dim = torch.from_numpy(np.ascontiguousarray(matrix)).reshape(shape), axis + 1
    scale = in_half(torch.maximum(x.amax(dim, keepdim=True), -x.amin(dim, keepdim=True)) / largest)
    integers = to_integers(x, scale, torch.zeros(()), -largest, largest).to(torch.int8).reshape(matrix.shape)
    return Blocks(integers.numpy(), scale.squeeze(dim).numpy())


def apply_scales(
    matrix: npt.NDArray[np.float32],
    scale: npt.NDArray[np.float32],
    zero: npt.NDArray[np.int8] | None,
    kind: Kind,
    offset: npt.NDArray[np.float32] | None = None,
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """The rounded numbers ``(matrix - offset) / scale + zero``; scale, zero and offset broadcast to the matrix.

    A matrix that was dequantized from such numbers yields exactly the same ones: a product of 8 bits and a float32 is
    rounded once, by far less than half a step. Numbers with a scale of 0 are 0.

    Returns:
        int8 integers (four-bit ones in -8..7, with offsets in 0..15), or the bytes of float8_e4m3fn numbers, and the
        dequantized matrix.
    """
    divided = (matrix if offset is None else matrix - offset) / np.where(scale == 0, np.float32(1), scale)
    if kind == "fp8":
        numbers = divided.clip(-_MAX_FLOAT8, _MAX_FLOAT8).astype(Float8)
        return numbers.view(np.int8), numbers.astype(np.float32) * scale
    moved = np.rint(divided) if zero is None else np.rint(divided) + zero
    least, greatest = (-128, 127) if kind == "int8" else (-8, 7) if offset is None else (0, 15)
    integers = moved.clip(least, greatest).astype(np.int8)
    restored = (integers.astype(np.float32) if zero is None else integers.astype(np.float32) - zero) * scale
    return integers, restored if offset is None else restored + offset


def column_scales(largest: npt.NDArray[np.float32], kind: Kind) -> npt.NDArray[np.float32]:
    """One scale for each column of a matrix, from its largest magnitude; none is 0, which TensorRT refuses.

    Scales of fp8 are powers of two: these lose no precision, and are the same numbers in fp32, fp16 and bf16, so that a
    graph in fp32 and an engine in fp16 multiply the same weights.
    """
    scales: npt.NDArray[np.float32]
    if kind == "fp8":
        exponent = np.ceil(np.log2(np.maximum(largest, _TINY) / _MAX_FLOAT8))
        scales = np.exp2(exponent.clip(_MIN_EXPONENT, _MAX_EXPONENT)).astype(np.float32)
    else:
        scales = np.where(largest > 0, np.maximum(largest / _MAX_INT8, _TINY), np.float32(1))
    return scales


def quantize_columns(
    matrix: npt.NDArray[np.float32], scales: npt.NDArray[np.float32], kind: Kind
) -> npt.NDArray[np.generic]:
    """A matrix ``[K,N]`` over its columns' scales ``[N]``, rounded to float8_e4m3fn, or to int8."""
    scaled = matrix / scales
    rounded: npt.NDArray[np.generic]
    if kind == "fp8":
        rounded = scaled.clip(-_MAX_FLOAT8, _MAX_FLOAT8).astype(Float8)
    else:
        rounded = np.rint(scaled).clip(-_MAX_INT8, _MAX_INT8).astype(np.int8)
    return rounded


def fit_blocks(
    matrix: npt.NDArray[np.float32],
    axis: int,
    block: int,
    least: int,
    largest: int,
    *,
    zero_points: bool,
) -> Blocks:
    """Rounds a matrix with the scale, and zero point, of least squared error for each block along ``axis``.

    Args:
        matrix: of any rank.
        axis: the axis of the blocks.
        block: how many weights share a scale.
        least: smallest integer.
        largest: largest integer.
        zero_points: whether to choose a zero point for each block; otherwise it is 0.

    Returns:
        Integers, and scales that fp16 holds exactly if possible (:func:`in_half`).
    """
    leading, trailing = int(np.prod(matrix.shape[:axis])), int(np.prod(matrix.shape[axis + 1 :]))
    x = torch.from_numpy(np.ascontiguousarray(matrix)).reshape(-1, block, trailing)
    integers = torch.empty(x.shape, dtype=torch.int8)
    scale, zero = (torch.empty((len(x), trailing), dtype=dtype) for dtype in (torch.float32, torch.int8))
    columns = min(trailing, max(1, _PIECE // block))
    rows = max(1, _PIECE // (block * columns))
    for at in itertools.product(range(0, len(x), rows), range(0, trailing, columns)):
        part = tuple(slice(start, start + length) for start, length in zip(at, (rows, columns), strict=True))
        piece = x[part[0], :, part[1]].contiguous()
        scales, zeros = fit_scales(piece, 1, least, largest, zero_points=zero_points)
        integers[part[0], :, part[1]] = to_integers(piece, scales, zeros, least, largest).to(torch.int8)
        scale[part], zero[part] = scales[:, 0], zeros[:, 0].to(torch.int8)
    shape = (*matrix.shape[:axis], len(x) // leading, *matrix.shape[axis + 1 :])
    return Blocks(
        integers.reshape(matrix.shape).numpy(),
        scale.reshape(shape).numpy(),
        zero.reshape(shape).numpy() if zero_points else None,
    )


def fit_scales(
    x: torch.Tensor, dim: int, least: int, largest: int, *, zero_points: bool, weight: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and zero point of least squared error for each block, a fiber of ``x`` along ``dim``.

    For each of a few ranges, ``x`` is rounded, and a scale is fitted to the resulting integers by least squares.
    """
    high, low = x.amax(dim, keepdim=True).clamp_min_(0), x.amin(dim, keepdim=True).clamp_max_(0)
    if not zero_points:
        high = torch.maximum(high, -low)
        low = -high
    levels = largest - least
    center, span = (high + low) / 2, high - low
    best = best_scale = best_zero = None
    for share in _SPANS:
        scale = in_half(span * (share / levels))
        zero = torch.zeros_like(scale)
        if zero_points:
            zero = torch.where(scale > 0, (least + largest) / 2 - center / scale, zero).round_().clamp_(least, largest)
        for last in (False, True):
            numbers = to_integers(x, scale, zero, least, largest).sub_(zero)
            error = (x - numbers * scale).square_()
            error = (error if weight is None else error.mul_(weight)).sum(dim, keepdim=True)
            if best is None or best_scale is None or best_zero is None:
                best, best_scale, best_zero = error, scale, zero
            else:
                better = error < best
                best = torch.where(better, error, best)
                best_scale, best_zero = torch.where(better, scale, best_scale), torch.where(better, zero, best_zero)
            if not last:
                weighed = numbers if weight is None else numbers * weight
                products, squares = (x * weighed).sum(dim, keepdim=True), (numbers * weighed).sum(dim, keepdim=True)
                scale = torch.where((products > 0) & (squares > 0), in_half(products / squares), scale)
    assert best_scale is not None and best_zero is not None
    return best_scale, best_zero


def to_integers(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, least: int, largest: int) -> torch.Tensor:
    """Rounds numbers to integers between two bounds, in floating point; a block of zeros has a scale of 0."""
    return (x / scale.clamp_min(_TINY)).round_().add_(zero).clamp_(least, largest)


def in_half(scale: torch.Tensor) -> torch.Tensor:
    """The nearest fp16 numbers, or the numbers themselves if those are off by more than 2^-8 of them."""
    half = scale.half().float()
    return torch.where((half - scale).abs() <= scale.abs() * 2.0**-8, half, scale)


def fits_half(scale: npt.NDArray[np.float32]) -> bool:
    """Whether fp16 holds all of these numbers exactly."""
    with np.errstate(over="ignore"):
        return bool(np.array_equal(scale.astype(np.float16).astype(np.float32), scale))


def factors_of_rows(factors: BlockFactors, start: int, end: int, axis: int, block: int | None) -> BlockFactors:
    """The factors of some rows of a matrix, repeated along ``axis`` for each weight."""

    def spread(array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
        if block is None:
            return array
        return np.repeat(array[start // block : end // block] if axis == 0 else array[start:end], block, axis=axis)

    scale, zero, offset = factors
    return spread(scale), None if zero is None else spread(zero), None if offset is None else spread(offset)


def row_chunks(array: npt.NDArray[_Scalar], multiple: int = 1) -> Iterator[npt.NDArray[_Scalar]]:
    """Consecutive rows, a few megabytes at a time, as contiguous arrays."""
    if array.ndim == 0:
        yield array
        return
    width = max(1, array.size // max(1, array.shape[0]))
    rows = max(1, _CHUNK_ELEMENTS // width // multiple) * multiple
    for start in range(0, array.shape[0], rows):
        yield np.ascontiguousarray(array[start : start + rows])


@dataclass(frozen=True)
class KeptScales:
    """The checkpoint's own scales, which a matrix is stored with.

    Attributes:
        block: weights along the summed axis that share a scale; None for one scale per column.
        scale: ``[...,K/block,N]``, or ``[1,N]`` for columns.
        zero: int8, shaped like ``scale``, or None.
        offset: shaped like ``scale``, or None.
        any_scales: whether only CPUs read scales of this kind.
    """

    block: int | None
    scale: Factors
    zero: npt.NDArray[np.int8] | None
    offset: Factors | None
    any_scales: bool

    def for_rows(self) -> BlockFactors:
        """The factors of a matrix that is stored transposed, ``[N,K]``."""
        scale, zero, offset = self.values()
        return scale.T, None if zero is None else zero.T, None if offset is None else offset.T

    def values(self) -> BlockFactors:
        """Scales, zero points and offsets, computed from their factors."""
        scale = self.scale.values()
        offset = None if self.offset is None else self.offset.values()
        return (scale[0] if self.block is None else scale), self.zero, offset


def kept_scales(
    parts: Sequence[Scales | None], role: str, shape: tuple[int, ...], storage: Storage
) -> KeptScales | None:
    """The checkpoint's own scales of a matrix ``[...,K,N]``, if the bundle can store its integers with them.

    ``parts`` are the scales of the matrices that were joined into it, None for one that is not quantized; ``role`` says
    how it is read.
    """
    scales = [part for part in parts if part is not None]
    by_rows = role == "lookup" or (role == "tied" and storage.any_scales)
    if by_rows:
        shape = shape[::-1]
    if (role not in ("matmul", "experts") and not (by_rows and storage.any_scales)) or len(scales) < len(parts):
        return None
    # Experts' integers are stored in pairs, which hold only -7 to 7.
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
        block = min(_MAX_KEPT_BLOCK, *(part.group & -part.group for part in scales))
    zeros, offsets = any(part.zero is not None for part in scales), any(part.offset is not None for part in scales)
    if (block is not None and block < SMALLEST_BLOCK) or (role == "experts" and (zeros or block is None)):
        return None
    only_cpu = (zeros or offsets, *(part.scale.fine is not None for part in scales))
    if role == "experts" and any(only_cpu):
        return None

    def joined(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        size = shape[-2] if block is None else block
        wide = [np.repeat(array, part.group // size, -2) for array, part in zip(arrays, scales, strict=True)]
        return np.concatenate(wide, axis=-1)

    def factors(parts_factors: list[Factors]) -> Factors:
        kinds = {(part.group == block, value.fine is None) for part, value in zip(scales, parts_factors, strict=True)}
        if not storage.any_scales or len(kinds) > 1 or not kinds.pop()[0]:
            return Factors(joined([value.values() for value in parts_factors]))
        fine = [value.fine for value in parts_factors if value.fine is not None]
        coarse = np.concatenate([value.coarse for value in parts_factors], axis=-1)
        return Factors(coarse, np.concatenate(fine, axis=-1) if fine else None)

    def zeros_like(part: Scales, dtype: type[np.generic]) -> npt.NDArray[Any]:
        return np.zeros(part.scale.values().shape, dtype)

    scale = factors([part.scale for part in scales])
    zero = joined([zeros_like(part, np.int8) if part.zero is None else part.zero for part in scales]) if zeros else None
    offset = factors([part.offset or Factors(zeros_like(part, np.float32)) for part in scales]) if offsets else None
    columns = scale.coarse.shape[-1]
    if columns != shape[-1] or (any(only_cpu) and not storage.any_scales) or (zeros and columns % 2):
        return None
    return KeptScales(block, scale, zero, offset, any(only_cpu) or (storage.kind == "fp8" and block is not None))


def block_for(length: int, preferred: int | None) -> int | None:
    """The preferred block size, halved until it divides ``length``; None if that takes it below the smallest block."""
    block = preferred or 0
    while block >= SMALLEST_BLOCK:
        if length % block == 0:
            return block
        block //= 2
    return None
