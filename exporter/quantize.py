"""Matrices in fewer bits: the arithmetic, without files or graphs."""

from __future__ import annotations

from typing import Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

Float8 = ml_dtypes.float8_e4m3fn
_LARGEST_INT8 = np.float32(127)
_LARGEST_FLOAT8 = np.float32(448)
_TINY = np.finfo(np.float32).tiny
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -24, 15
"""Of powers of two that fp16 holds."""


def quantize_blocks(
    matrix: npt.NDArray[np.float32], axis: int, block: int, largest: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Symmetric round-to-nearest with one scale for every ``block`` consecutive weights along ``axis``.

    Returns:
        int8 integers in ``-largest..largest``, shaped like ``matrix``, and fp32 scales, shaped like ``matrix`` with
        ``axis`` divided by ``block``. ONNX DequantizeLinear with ``block_size`` multiplies them again.
    """
    shape = list(matrix.shape)
    shape[axis : axis + 1] = [shape[axis] // block, block]
    blocks = matrix.reshape(shape)
    scale = np.abs(blocks).max(axis=axis + 1) / np.float32(largest)
    # A block of zeros has scale 0 and integers 0; dividing by the smallest normal number keeps that finite.
    divisor = np.maximum(np.expand_dims(scale, axis + 1), _TINY)
    quantized = np.rint(blocks / divisor).clip(-largest, largest).astype(np.int8)
    return quantized.reshape(matrix.shape), scale.astype(np.float32)


def apply_scales(
    matrix: npt.NDArray[np.float32],
    scale: npt.NDArray[np.float32],
    zero: npt.NDArray[np.int8] | None,
    kind: Literal["int4", "int8", "fp8"],
    offset: npt.NDArray[np.float32] | None = None,
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Numbers ``(matrix - offset) / scale + zero``, rounded; what they are made with broadcasts to the matrix.

    Where the matrix was made of such numbers they are found again exactly: a product of 8 bits and a float32 is within
    one rounding of it, far less than half a step. Where a scale is 0 they are 0.

    Returns:
        int8 integers (four-bit ones in -8..7, with offsets in 0..15), or the bytes of float8_e4m3fn numbers, and what
        they stand for.
    """
    divided = (matrix if offset is None else matrix - offset) / np.where(scale == 0, np.float32(1), scale)
    if kind == "fp8":
        numbers = divided.clip(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).astype(Float8)
        return numbers.view(np.int8), numbers.astype(np.float32) * scale
    moved = np.rint(divided) if zero is None else np.rint(divided) + zero
    least, most = (-128, 127) if kind == "int8" else (-8, 7) if offset is None else (0, 15)
    integers = moved.clip(least, most).astype(np.int8)
    restored = (integers.astype(np.float32) if zero is None else integers.astype(np.float32) - zero) * scale
    return integers, restored if offset is None else restored + offset


def pack_int4(values: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Two integers a byte, the first in the low half, as ONNX stores INT4."""
    nibbles = values.reshape(-1).view(np.uint8) & np.uint8(0xF)
    packed: npt.NDArray[np.uint8] = nibbles[0::2] | (nibbles[1::2] << np.uint8(4))
    return packed


def pair_int4(blocks: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """Two integers in -7..7 a byte, ``16 * first + second``; arithmetic takes them apart again, as 16ths are exact.

    The first half of a block's integers ``[R,blocks,block,...]`` are the firsts: ``[R,blocks,block/2,...]`` is made.
    """
    first, second = np.split(blocks, 2, axis=2)
    pairs: npt.NDArray[np.int8] = first * np.int8(16) + second
    return pairs


def split_int4(pairs: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """Undoes :func:`pair_int4`."""
    first = (pairs + np.int8(8)) >> 4
    return np.concatenate([first, pairs - first * np.int8(16)], axis=2)


def column_scales(largest: npt.NDArray[np.float32], kind: Literal["int8", "fp8"]) -> npt.NDArray[np.float32]:
    """One scale for each column of a matrix, from the largest magnitude in it; none is 0, which TensorRT refuses.

    Those of fp8 are powers of two: floating point is as exact at any scale, and a power of two is the same number in
    fp32, fp16 and bf16, so that a graph in fp32 and an engine in fp16 multiply the same weights.
    """
    scales: npt.NDArray[np.float32]
    if kind == "int8":
        scales = np.where(largest > 0, np.maximum(largest / _LARGEST_INT8, _TINY), np.float32(1))
    else:
        exponent = np.ceil(np.log2(np.maximum(largest, _TINY) / _LARGEST_FLOAT8))
        scales = np.exp2(exponent.clip(_SMALLEST_EXPONENT, _LARGEST_EXPONENT)).astype(np.float32)
    return scales


def quantize_columns(
    matrix: npt.NDArray[np.float32], scales: npt.NDArray[np.float32], kind: Literal["int8", "fp8"]
) -> npt.NDArray[np.generic]:
    """A matrix ``[K,N]`` over its columns' scales ``[N]``, rounded to int8 or to float8_e4m3fn."""
    scaled = matrix / scales
    rounded: npt.NDArray[np.generic]
    if kind == "int8":
        rounded = np.rint(scaled).clip(-_LARGEST_INT8, _LARGEST_INT8).astype(np.int8)
    else:
        rounded = scaled.clip(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).astype(Float8)
    return rounded
