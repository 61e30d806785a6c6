"""Quantization of matrices: the arithmetic, the copies that nodes read, and scales that are kept from a checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

from specexport.exporter.checkpoints.stored import Blocks, Factors, Kind, QuantizedTensor, Scales
from specexport.exporter.options import Storage

SMALLEST_BLOCK = 16
Float8 = ml_dtypes.float8_e4m3fn
MIN_INT4, MAX_INT4 = -8, 7
_MAX_INT8 = np.float32(127)
_MAX_FLOAT8 = np.float32(448)
_TINY = float(np.finfo(np.float32).tiny)
_CHUNK_ELEMENTS = 4 << 20
_DTYPES: dict[Kind, ir.DataType] = {
    "int8": ir.DataType.INT8,
    "int4": ir.DataType.INT4,
    "fp8": ir.DataType.FLOAT8E4M3FN,
}
_Scalar = TypeVar("_Scalar", bound=np.generic)
_MIN_EXPONENT, _MAX_EXPONENT = -24, 15
"""Range of the exponents of fp16's powers of two."""
_MAX_KEPT_BLOCK = 128
_PIECE = 1 << 17
"""Number of weights to fit at once, so that intermediate results stay in a core's cache."""
_SPANS = (1.0, 0.93, 0.86, 0.79)
"""Shares of a block's range that its levels may span; clipping the largest weights rounds the others less."""


@dataclass
class RoundingError:
    """The error of rounded weights.

    Attributes:
        error: sum of the squared errors.
        energy: sum of the squared weights.
    """

    error: float = 0.0
    energy: float = 0.0

    @property
    def rms(self) -> float:
        """Root mean square of the errors, relative to that of the weights."""
        return float(np.sqrt(self.error / self.energy)) if self.energy else 0.0

    @classmethod
    def of(cls, original: npt.NDArray[np.float32], restored: npt.NDArray[np.float32]) -> RoundingError:
        error = float(np.square(original - restored, dtype=np.float64).sum())
        return cls(error, float(np.square(original, dtype=np.float64).sum()))

    def add(self, other: RoundingError) -> None:
        self.error += other.error
        self.energy += other.energy


@dataclass(frozen=True, kw_only=True)
class RoundedTensor(QuantizedTensor):
    """A matrix that this build has rounded by calibration."""

    rounding: RoundingError


def quantize_blocks(matrix: npt.NDArray[np.float32], axis: int, block: int, largest: int) -> Blocks:
    """Rounds symmetrically, with a scale from the largest of every ``block`` weights along ``axis``.

    ONNX's DequantizeLinear with ``block_size`` is the inverse. Scales are those of :func:`in_half`.
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

    If the matrix was dequantized from such numbers, these are restored exactly: a product of 8 bits and a float32 is
    rounded once, by far less than half a step. Numbers with a scale of 0 are 0.

    Returns:
        int8 integers (for int4 in -8..7, with offsets in 0..15) or the bytes of float8_e4m3fn numbers; and the
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
    """A scale for each column of a matrix, from the column's largest magnitude; never 0, which TensorRT refuses.

    Scales of fp8 are powers of two, which lose no precision and are the same numbers in fp32, fp16 and bf16: a graph in
    fp32 and an engine in fp16 then multiply the same weights.
    """
    if kind == "fp8":
        exponent = np.ceil(np.log2(np.maximum(largest, _TINY) / _MAX_FLOAT8))
        return np.exp2(exponent.clip(_MIN_EXPONENT, _MAX_EXPONENT)).astype(np.float32)
    return np.where(largest > 0, np.maximum(largest / _MAX_INT8, _TINY), np.float32(1))


def fit_blocks(matrix: npt.NDArray[np.float32], axis: int, block: int, *, zero_points: bool) -> Blocks:
    """Rounds a matrix to int4, with the scale of least squared error for each block; see :func:`fit_scales`."""
    leading, trailing = int(np.prod(matrix.shape[:axis])), int(np.prod(matrix.shape[axis + 1 :]))
    x = torch.from_numpy(np.ascontiguousarray(matrix)).reshape(-1, block, trailing)
    integers = torch.empty(x.shape, dtype=torch.int8)
    scale, zero = (torch.empty((len(x), trailing), dtype=dtype) for dtype in (torch.float32, torch.int8))
    columns = min(trailing, max(1, _PIECE // block))
    rows = max(1, _PIECE // (block * columns))
    for at in itertools.product(range(0, len(x), rows), range(0, trailing, columns)):
        part = tuple(slice(start, start + length) for start, length in zip(at, (rows, columns), strict=True))
        piece = x[part[0], :, part[1]].contiguous()
        scales, zeros = fit_scales(piece, 1, zero_points=zero_points)
        least = MIN_INT4 if zero_points else -MAX_INT4
        integers[part[0], :, part[1]] = to_integers(piece, scales, zeros, least, MAX_INT4).to(torch.int8)
        scale[part], zero[part] = scales[:, 0], zeros[:, 0].to(torch.int8)
    shape = (*matrix.shape[:axis], len(x) // leading, *matrix.shape[axis + 1 :])
    return Blocks(
        integers.reshape(matrix.shape).numpy(),
        scale.reshape(shape).numpy(),
        zero.reshape(shape).numpy() if zero_points else None,
    )


def fit_scales(
    x: torch.Tensor, dim: int, *, zero_points: bool, weight: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The int4 scale and zero point of least squared error for each block, a fiber of ``x`` along ``dim``.

    ``x`` is rounded over each of a few ranges, and a scale is fitted to the integers by least squares. Without
    ``zero_points``, these are 0 and integers are -7 to 7. ``weight`` weights the errors. Scales are those of
    :func:`in_half`.
    """
    least, largest = MIN_INT4 if zero_points else -MAX_INT4, MAX_INT4
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
    """Rounds numbers to integers between two bounds, as floating-point numbers; a scale of 0 yields ``zero``."""
    return (x / scale.clamp_min(_TINY)).round_().add_(zero).clamp_(least, largest)


def in_half(scale: torch.Tensor) -> torch.Tensor:
    """The nearest fp16 numbers, or the numbers themselves where the relative error would exceed 2^-8."""
    half = scale.half().float()
    return torch.where((half - scale).abs() <= scale.abs() * 2.0**-8, half, scale)


def fits_half(scale: npt.NDArray[np.float32]) -> bool:
    """Whether fp16 holds all of these numbers exactly."""
    with np.errstate(over="ignore"):
        return bool(np.array_equal(scale.astype(np.float16).astype(np.float32), scale))


def row_chunks(array: npt.NDArray[_Scalar], multiple: int = 1) -> Iterator[npt.NDArray[_Scalar]]:
    """Consecutive rows as contiguous arrays of a few megabytes, each of a multiple of ``multiple`` rows."""
    if array.ndim == 0:
        yield array
        return
    width = max(1, array.size // max(1, array.shape[0]))
    rows = max(1, _CHUNK_ELEMENTS // width // multiple) * multiple
    for start in range(0, array.shape[0], rows):
        yield np.ascontiguousarray(array[start : start + rows])


@dataclass(frozen=True, kw_only=True)
class MatrixCopy:
    """A quantized copy of a matrix, for a single node that reads it.

    Attributes:
        matrix: ``[K,N]``, or ``[N,K]`` if ``by_rows``; experts are ``[E,K,N]``.
        axis: the axis along which neighbours share a scale.
        block: number of neighbours that share a scale; None for one scale per column.
        any_scales: whether new scales may be of a kind that only CPUs read.
        kept: the checkpoint's own scales of ``[K,N]``, if the matrix keeps them.
        rounded: the matrix's parts, if this build rounded them by calibration.
        again: whether the checkpoint's matrix is quantized and has to be rounded again.
    """

    name: str
    matrix: npt.NDArray[np.float32]
    axis: int
    block: int | None
    kind: Kind
    gathered: bool
    by_rows: bool
    any_scales: bool
    kept: Scales | None
    rounded: tuple[RoundedTensor, ...]
    again: bool

    @property
    def dtype(self) -> ir.DataType:
        if self.gathered and self.block is not None:
            return ir.DataType.INT8
        unsigned = self.kind == "int4" and self.kept is not None and self.kept.offset is not None
        return ir.DataType.UINT4 if unsigned else _DTYPES[self.kind]

    @property
    def blocks_shape(self) -> tuple[int, ...]:
        """The shape of the integers; a gathered matrix is divided into blocks, so that scales broadcast."""
        if not self.gathered or self.block is None:
            return self.matrix.shape
        rows, length, *columns = self.matrix.shape
        return (rows, length // self.block, self.block, *columns)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the initializer, in which gathered four-bit integers lie in pairs."""
        shape = self.blocks_shape
        return (*shape[:2], shape[2] // 2, *shape[3:]) if self.gathered and self.kind == "int4" else shape

    def chunks(self) -> Iterator[npt.NDArray[np.float32]]:
        """Consecutive rows, in whole blocks."""
        return row_chunks(self.matrix, multiple=self.block if self.block is not None and self.axis == 0 else 1)

    def per_weight(self, array: npt.NDArray[_Scalar], start: int, end: int) -> npt.NDArray[_Scalar]:
        """Scales, or zero points or offsets, of rows from ``start`` to ``end``, repeated for each weight of a block."""
        if self.block is None:
            return array
        rows = slice(start // self.block, end // self.block) if self.axis == 0 else slice(start, end)
        return np.repeat(array[rows], self.block, axis=self.axis)


def kept_scales(parts: Sequence[Scales | None], shape: tuple[int, ...], kind: Kind, storage: Storage) -> Scales | None:
    """The checkpoint's own scales of a matrix, if the bundle can store its integers with them.

    Args:
        parts: the scales of the matrices that were joined into it; None for a part that is not quantized.
        shape: ``[K,N]``, or ``[E,K,N]`` for a stack of experts.
    """
    scales = [part for part in parts if part is not None]
    zeros, offsets = any(part.zero is not None for part in scales), any(part.offset is not None for part in scales)
    storable = {"int4": ("int4",), "int8": ("int4", "int8"), "fp8": ("fp8",)}[kind]
    *experts, depth, columns = shape
    if (
        len(scales) < len(parts)
        or any(part.kind not in storable for part in scales)
        or sum(part.scale.coarse.shape[-1] for part in scales) != columns
        or (zeros and columns % 2)
        or (not all(part.plain for part in scales) and (experts or not storage.any_scales))
        or (experts and kind == "int4")  # stored in pairs, which hold only -7 to 7
    ):
        return None
    whole = (kind == "fp8" or storage.block_size is None) and all(part.group == depth for part in scales)
    group = depth if whole else _common_group(scales, kind, storage)
    if group is None or (experts and whole):
        return None

    def spread(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        each = [np.repeat(array, part.group // group, -2) for array, part in zip(arrays, scales, strict=True)]
        return np.concatenate(each, axis=-1)

    def joined(factors: list[Factors]) -> Factors:
        fine = [value.fine for value in factors if value.fine is not None]
        alike = all(part.group == group for part in scales) and len(fine) in (0, len(factors))
        if whole or not alike or not storage.any_scales:
            return Factors(spread([value.values() for value in factors]))
        coarse = np.concatenate([value.coarse for value in factors], axis=-1)
        return Factors(coarse, np.concatenate(fine, axis=-1) if fine else None)

    def zeros_like(part: Scales, dtype: type[np.generic]) -> npt.NDArray[Any]:
        return np.zeros(part.scale.values().shape, dtype)

    zero = spread([zeros_like(part, np.int8) if part.zero is None else part.zero for part in scales]) if zeros else None
    offset = joined([part.offset or Factors(zeros_like(part, np.float32)) for part in scales]) if offsets else None
    return Scales(kind, group, joined([part.scale for part in scales]), zero, offset)


def _common_group(scales: Sequence[Scales], kind: Kind, storage: Storage) -> int | None:
    """The largest block that divides the blocks of all scales; None if the bundle cannot store blocks of that size."""
    group = min(part.group & -part.group for part in scales)
    if storage.block_size is None or (kind == "fp8" and not storage.any_scales):
        return None
    group = group if kind == "fp8" else min(_MAX_KEPT_BLOCK, group)
    return group if group >= SMALLEST_BLOCK else None


def block_for(length: int, preferred: int | None) -> int | None:
    """The preferred block size, halved until it divides ``length``; None if only smaller blocks than allowed do."""
    block = preferred or 0
    while block >= SMALLEST_BLOCK:
        if length % block == 0:
            return block
        block //= 2
    return None
