"""The block layouts of GGUF's types: ``scale * integer + offset``, as in ggml.

A block's scale and offset are fp16 numbers, or small integers times the fp16 number of a block of 256.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from specexport.exporter.checkpoints.quantized import Factors, Kind, Scales

_Bytes = npt.NDArray[np.uint8]
_Parts = tuple[Factors, Factors | None]


@dataclass(frozen=True)
class BlockType:
    """A type whose blocks are kept.

    Attributes:
        kind: our smallest type that holds its integers.
        group: number of neighbours in a row that share a scale.
        scales: the kind of scales and offsets.
        parts: extracts the scales, and the offsets if any, of blocks ``[N,blocks,bytes]``.
    """

    kind: Kind
    group: int
    scales: Literal["half", "half, offset", "two levels", "two levels, offset"]
    parts: Callable[[_Bytes], _Parts]

    @property
    def form(self) -> str:
        """Identifies the representation of matrices."""
        return f"{self.kind}, {self.group}, {self.scales}"


def _half(blocks: _Bytes, at: int) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _flat(fine: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
    """Concatenates the integers of all blocks of 256 in a row, as int8."""
    return fine.reshape(len(fine), -1).astype(np.int8)


def _halves(scale: int, offset: int | None = None) -> Callable[[_Bytes], _Parts]:
    """For types with an fp16 scale per block, and optionally an fp16 offset."""

    def parts(blocks: _Bytes) -> _Parts:
        return Factors(_half(blocks, scale)), None if offset is None else Factors(_half(blocks, offset))

    return parts


def _six_bits(blocks: _Bytes) -> _Parts:
    """Q4_K, Q5_K: twelve bytes hold eight scales and eight minima, to be subtracted, of six bits each."""
    packed = blocks[..., 4:16]
    first, second, both = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (both & 15) | (first >> 6 << 4)], axis=-1)
    minima = np.concatenate([second & 63, (both >> 4) | (second >> 6 << 4)], axis=-1)
    return Factors(_half(blocks, 0), _flat(scales)), Factors(-_half(blocks, 2), _flat(minima))


def _q2_k(blocks: _Bytes) -> _Parts:
    packed = blocks[..., :16]
    return Factors(_half(blocks, 80), _flat(packed & 15)), Factors(-_half(blocks, 82), _flat(packed >> 4))


def _q3_k(blocks: _Bytes) -> _Parts:
    packed = blocks[..., 96:108]
    low = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1)
    high = np.concatenate([packed[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    return Factors(_half(blocks, 108), _flat((low | high << 4).astype(np.int16) - 32)), None


def _q6_k(blocks: _Bytes) -> _Parts:
    return Factors(_half(blocks, 208), _flat(blocks[..., 192:208].view(np.int8))), None


def _iq4_xs(blocks: _Bytes) -> _Parts:
    high = np.ascontiguousarray(blocks[..., 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], axis=-1).reshape(*high.shape)
    return Factors(_half(blocks, 0), _flat((low | high << 4).astype(np.int16) - 32)), None


_Type = GGMLQuantizationType
KEPT: dict[GGMLQuantizationType, BlockType] = {
    _Type.Q4_0: BlockType("int4", 32, "half", _halves(0)),
    _Type.Q4_1: BlockType("int4", 32, "half, offset", _halves(0, 2)),
    _Type.Q5_0: BlockType("int8", 32, "half", _halves(0)),
    _Type.Q5_1: BlockType("int8", 32, "half, offset", _halves(0, 2)),
    _Type.Q8_0: BlockType("int8", 32, "half", _halves(0)),
    _Type.Q2_K: BlockType("int4", 16, "two levels, offset", _q2_k),
    _Type.Q3_K: BlockType("int4", 16, "two levels", _q3_k),
    _Type.Q4_K: BlockType("int4", 32, "two levels, offset", _six_bits),
    _Type.Q5_K: BlockType("int8", 32, "two levels, offset", _six_bits),
    _Type.Q6_K: BlockType("int8", 16, "two levels", _q6_k),
    _Type.IQ4_NL: BlockType("int8", 32, "half", _halves(0)),  # its sixteen values are integers from -127 to 113
    _Type.IQ4_XS: BlockType("int8", 32, "two levels", _iq4_xs),
}
"""The types whose integers and scales are stored unchanged."""


def scales_of(data: _Bytes, kind: GGMLQuantizationType) -> Scales:
    """The scales and offsets of a matrix.

    Args:
        data: its rows, ``[N,bytes]``.
        kind: a type of :data:`KEPT`.
    """
    block = KEPT[kind]
    scale, offset = block.parts(data.reshape(len(data), -1, GGML_QUANT_SIZES[kind][1]))
    return Scales(block.kind, block.group, scale.turned(), None, None if offset is None else offset.turned())
