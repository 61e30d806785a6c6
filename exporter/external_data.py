"""Files of ONNX external data, and the packing of four-bit integers. Imports no torch."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

if TYPE_CHECKING:
    from typing_extensions import Self

INLINE_BYTES = 1024
"""Constants up to this size stay in the graph: shapes, axes, scales of one element."""
Chunks = Iterator[npt.NDArray[np.generic]]
Places = Mapping[int, Sequence[tuple[Path, int]]]
"""The files and offsets of stored tensors, by their sizes in bytes."""
_ALIGN = 4096
_COMPARED = 2**24
"""Bytes of tensors that are compared at once, as a comparison takes as much memory."""


class DataFile:
    """An open file of ONNX external data; each tensor begins on a page boundary, so that it can be memory-mapped.

    Args:
        path: the file; graphs that refer to it must lie in the same folder.
        shared: tensors in other files of the folder; those that equal them are not stored again.

    Attributes:
        shared_bytes: the size of the tensors that were found in other files.
    """

    def __init__(self, path: Path, shared: Places | None = None) -> None:
        self._path, self._shared = path, shared or {}
        self.shared_bytes = 0
        self._file: BinaryIO = path.open("w+b")
        # Files and offsets by size and hash, so that graphs of one model share equal tensors.
        self._places: dict[tuple[int, bytes], tuple[Path, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, name: str, dtype: ir.DataType, shape: tuple[int, ...], chunks: Chunks) -> ir.ExternalTensor:
        """Appends a tensor from consecutive chunks of its content; equal content is stored once."""
        end = self._file.tell()
        self._file.write(b"\0" * (-end % _ALIGN))
        start = self._file.tell()
        digest = hashlib.sha256()
        for chunk in chunks:
            data = np.ascontiguousarray(chunk).data
            digest.update(data)
            self._file.write(data)
        written, length = (self._path, start), self._file.tell() - start
        place = self._places.setdefault((length, digest.digest()), written)
        if place == written and (other := self._in_others(start, length)) is not None:
            place = self._places[length, digest.digest()] = other
            self.shared_bytes += length
        if place != written:
            self._file.seek(end)
            self._file.truncate()
        path, offset = place
        return ir.ExternalTensor(
            path.name, offset, length, dtype, shape=ir.Shape(shape), name=name, base_dir=path.parent
        )

    def _in_others(self, start: int, length: int) -> tuple[Path, int] | None:
        """The place of a tensor of another file that equals the last one written."""
        if length not in self._shared:
            return None
        self._file.flush()
        written = np.memmap(self._path, np.uint8, "r", start, length)
        for path, offset in self._shared[length]:
            other = np.memmap(path, np.uint8, "r", offset, length)
            parts = (slice(at, at + _COMPARED) for at in range(0, length, _COMPARED))
            if all(np.array_equal(written[part], other[part]) for part in parts):
                return path, offset
        return None


def stored_tensors(graph: Path) -> Places:
    """The places of a graph's constants that are stored in files."""
    places = defaultdict[int, list[tuple[Path, int]]](list)
    for value in ir.load(graph).graph.initializers.values():
        if isinstance(tensor := value.const_value, ir.ExternalTensor):
            places[tensor.nbytes].append((Path(tensor.path), tensor.offset or 0))
    return places


def pack_int4(values: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Packs two integers per byte, the first in the low half, as ONNX stores INT4."""
    nibbles = values.reshape(-1).view(np.uint8) & np.uint8(0xF)
    return nibbles[0::2] | (nibbles[1::2] << np.uint8(4))


def pair_int4(blocks: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """Packs two integers in -7..7 per byte as ``16 * first + second``, which floating-point arithmetic undoes exactly.

    The first half of a block, of integers ``[R,blocks,block,...]``, pairs with the second half; the result is
    ``[R,blocks,block/2,...]``.
    """
    first, second = np.split(blocks, 2, axis=2)
    return first * np.int8(16) + second


def split_int4(pairs: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """Undoes :func:`pair_int4`."""
    first = (pairs + np.int8(8)) >> 4
    return np.concatenate([first, pairs - first * np.int8(16)], axis=2)


def unpack_int4(packed: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> npt.NDArray[np.int8]:
    """Undoes :func:`pack_int4`."""
    both = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=1).reshape(shape)
    return (both.astype(np.int8) ^ np.int8(8)) - np.int8(8)
