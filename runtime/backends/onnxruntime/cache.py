"""The KV cache of all layers on the host, and its growth."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import numpy as np

from specexport.contract.model import CacheLayer
from specexport.runtime.backend import Array, caches_by_shape

_HUGE_PAGE = 2 << 20
_SPARE = 16
"""Rows that are still free when the next cache is ready, as a step may write this many."""
_FREED_PER_STEP = 4 << 20
"""Bytes of the old cache that a step frees; freeing all of it would take as long as copying it."""


class Rows:
    """The cache of all layers in several slots, initially zeros.

    Attributes:
        rows: S, the number of rows of a slot.
        blocks: float32 ``[L,B,Hkv,S,D]`` each. Layers whose rows have the same shape share a block, so that a commit
            copies the rows of all of them together.
        parts: each layer's part of a block, by cache name.
    """

    def __init__(self, layers: Sequence[CacheLayer], slots: int, rows: int) -> None:
        self.rows = rows
        self.blocks: list[Array] = []
        self.parts: dict[str, Array] = {}
        self._memory: list[mmap.mmap] = []
        for (heads, width), names in caches_by_shape(layers).items():
            block = self._zeros((len(names), slots, heads, rows, width))
            self.blocks.append(block)
            self.parts.update(zip(names, block, strict=True))

    def _zeros(self, shape: tuple[int, int, int, int, int]) -> Array:
        """An array of zeros, whose pages take no memory until they are written."""
        nbytes = 4 * math.prod(shape)
        if not nbytes:
            return np.zeros(shape, np.float32)
        memory = mmap.mmap(-1, nbytes, access=mmap.ACCESS_COPY)
        # If a slot's part of a layer is smaller than a huge page, its first row would also allocate its neighbours'
        # pages, all of which the system would fill with zeros within a step.
        if 4 * math.prod(shape[2:]) >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory.append(memory)
        return np.frombuffer(memory, np.float32).reshape(shape)

    def free_bytes(self, start: int, count: int) -> bool:
        """Gives ``count`` bytes of each block, from ``start`` on, back to the system; returns whether more follow."""
        for memory in self._memory:
            end = min(start + count, len(memory))
            if start < end and hasattr(mmap, "MADV_DONTNEED"):
                memory.madvise(mmap.MADV_DONTNEED, start, end - start)
        return any(start + count < len(memory) for memory in self._memory)


class GrowingCache:
    """The cache of a graph on the host, which grows with its texts.

    Allocating memory takes several times as long as copying into it. So the next larger cache is filled a few layers a
    step while the present one still has room, and the old one is freed a few megabytes a step.

    Args:
        sizes: the possible numbers of rows of a slot, ascending.

    Attributes:
        now: the present cache.
    """

    def __init__(self, layers: Sequence[CacheLayer], slots: int, sizes: Sequence[int]) -> None:
        self._layers, self._slots, self._sizes = layers, slots, (0, *sizes)
        self.now = Rows(layers, slots, 0)
        self._next: Rows | None = None
        self._begin(None, 0)
        self._old: Rows | None = None
        self._freed = 0

    def resize(self, rows: int, filled: Sequence[int]) -> None:
        """Resizes the cache, and keeps the ``filled`` rows of each slot that fit."""
        if self._next is None or self._next.rows != rows:
            self._next = Rows(self._layers, self._slots, rows)
            self._copied[:] = 0
        for layer in range(len(self._copied)):
            self._copy(layer, [min(count, rows) for count in filled])
        self._old, self._freed = (self.now, 0) if self.now.rows < rows else (None, 0)
        self.now = self._next
        self._begin(None, 0)

    def _begin(self, following: Rows | None, longest: int) -> None:
        """Begins to fill the cache ``following``, if any, when the longest text has ``longest`` rows."""
        self._next, self._since, self._begun = following, longest, 0
        # Number of rows that are copied, by layer and slot.
        self._copied = np.zeros((sum(len(block) for block in self.now.blocks), self._slots), np.int64)

    def mark_changed(self, slot: int, rows: int) -> None:
        """Records that a slot's rows have changed, from row ``rows`` on."""
        np.minimum(self._copied[:, slot], rows, out=self._copied[:, slot])

    def advance(self, filled: Sequence[int]) -> None:
        """Fills the next cache and frees the old one, as far as a step should; ``filled`` are each slot's rows."""
        if self._old is not None:
            unfreed = self._old.free_bytes(self._freed, _FREED_PER_STEP)
            self._freed += _FREED_PER_STEP
            self._old = self._old if unfreed else None
        at = self._sizes.index(self.now.rows)
        if at + 1 == len(self._sizes):
            return
        longest, end = max(filled), self.now.rows - _SPARE
        near = longest > self.now.rows - (self.now.rows - self._sizes[at - 1]) // 2
        if near != (self._next is not None):
            self._begin(Rows(self._layers, self._slots, self._sizes[at + 1]) if near else None, longest)
        share = (longest - self._since + 1) / max(1, end - self._since) if near else 0.0
        goal = min(len(self._copied), math.ceil(share * len(self._copied)))
        while self._begun < goal:
            self._copy(self._begun, filled)
            self._begun += 1

    def _copy(self, layer: int, filled: Sequence[int]) -> None:
        """Copies the rows of a layer that the next cache lacks."""
        assert self._next is not None
        index = layer
        for old, new in zip(self.now.blocks, self._next.blocks, strict=True):
            if index < len(old):
                for slot, (start, end) in enumerate(zip(self._copied[layer].tolist(), filled, strict=True)):
                    if start < end:
                        new[index, slot, :, start:end] = old[index, slot, :, start:end]
                break
            index -= len(old)
        self._copied[layer] = filled
