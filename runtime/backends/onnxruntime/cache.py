"""The rows of all layers' KV caches on the host."""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Sequence

import numpy as np

from specexport.contract.model import CacheLayer
from specexport.runtime.backend import Array, caches_by_shape

_NO_RESERVE = 0x4000
"""``MAP_NORESERVE`` of Linux, which :mod:`mmap` lacks before Python 3.13."""


class Rows:
    """The cache of all layers in several slots, initially zeros, which take no memory until they are written.

    Attributes:
        rows: S, the number of rows of a slot.
        blocks: float32 ``[L,B,Hkv,S,D]`` each. Layers whose rows have the same shape share a block, so that a commit
            copies the rows of all of them together.
        parts: each layer's part of a block, by cache name.

    Raises:
        MemoryError: the system refuses so large an address range.
    """

    def __init__(self, layers: Sequence[CacheLayer], slots: int, rows: int) -> None:
        self.rows = rows
        self.blocks: list[Array] = []
        self.parts: dict[str, Array] = {}
        for (heads, width), names in caches_by_shape(layers).items():
            block = _zeros((len(names), slots, heads, rows, width))
            self.blocks.append(block)
            self.parts.update(zip(names, block, strict=True))

    def copy_from(self, other: Rows, filled: Sequence[int]) -> None:
        """Copies the ``filled`` rows of each slot, as far as they fit."""
        for block, source in zip(self.blocks, other.blocks, strict=True):
            for slot, count in enumerate(filled):
                end = min(count, self.rows)
                block[:, slot, :, :end] = source[:, slot, :, :end]


def _zeros(shape: tuple[int, ...]) -> Array:
    nbytes = 4 * math.prod(shape)
    if not nbytes or sys.platform != "linux":
        return np.zeros(shape, np.float32)
    # Not np.zeros() on Linux, which asks for huge pages: a text's first row would allocate those of thousands.
    try:
        memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes: {error}") from error
    with contextlib.suppress(OSError):  # kernels without huge pages do not know the advice
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.float32).reshape(shape)
