"""The rows of every layer's cache on the host, and how they come into a larger one."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specexport.contract.model import CacheLayer
from specexport.runtime.graph import Array, caches_by_shape

_HUGE_PAGE = 2 << 20
_SPARE = 16
"""Rows before the end of a cache at which the next is ready: a step may write so many."""
_FREED = 4 << 20
"""Bytes of what is left behind that a step gives back: all at once takes as long as copying it."""


class Rows:
    """Zeros for ``rows`` rows of every layer's cache in several slots.

    Attributes:
        rows: S.
        blocks: float32 ``[L,B,Hkv,S,D]``. Rows of one shape lie in one block, so that a commit is one copy over all
            their layers.
        parts: those of each layer, by cache name.
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
        """Zeros of which those of slots and texts that are not there take no memory."""
        nbytes = 4 * math.prod(shape)
        if not nbytes:
            return np.zeros(shape, np.float32)
        memory = mmap.mmap(-1, nbytes, access=mmap.ACCESS_COPY)
        # Where a slot's part of a layer is smaller than a huge page, its first row would take those of its neighbours
        # too, all to be filled with zeros by the kernel within a step.
        if 4 * math.prod(shape[2:]) >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory.append(memory)
        return np.frombuffer(memory, np.float32).reshape(shape)

    def give_back(self, start: int, count: int) -> bool:
        """Has the kernel take so many bytes of every block from a place on, whose content is lost; whether more is left
        behind them.
        """
        for memory in self._memory:
            end = min(start + count, len(memory))
            if start < end and hasattr(mmap, "MADV_DONTNEED"):
                memory.madvise(mmap.MADV_DONTNEED, start, end - start)
        return any(start + count < len(memory) for memory in self._memory)


class GrowingCache:
    """The cache of a graph on the host, which becomes larger while texts grow.

    New memory costs several times what copying into it does. So a larger cache is begun while the present one still has
    room, a few layers a step, and what the old one took is given back in the same way.

    Args:
        layers: the graph's.
        slots: how many texts it holds.
        sizes: rows it may have, ascending.
    """

    def __init__(self, layers: Sequence[CacheLayer], slots: int, sizes: Sequence[int]) -> None:
        self._layers, self._slots, self._sizes = layers, slots, (0, *sizes)
        self.now = Rows(layers, slots, 0)
        self._next: Rows | None = None
        self._begin(None, 0)
        self._old: Rows | None = None
        self._given = 0

    def _nothing(self) -> npt.NDArray[np.int64]:
        """Rows of each slot that are in the next cache already, by layer: none."""
        return np.zeros((sum(len(block) for block in self.now.blocks), self._slots), np.int64)

    def resize(self, rows: int, filled: Sequence[int]) -> None:
        """Makes the cache one of so many rows, and keeps those that are filled in each slot."""
        if self._next is None or self._next.rows != rows:
            self._next = Rows(self._layers, self._slots, rows)
            self._copied[:] = 0
        for layer in range(len(self._copied)):
            self._copy(layer, [min(count, rows) for count in filled])
        self._old, self._given = (self.now, 0) if self.now.rows < rows else (None, 0)
        self.now = self._next
        self._begin(None, 0)

    def _begin(self, following: Rows | None, longest: int) -> None:
        """Begins a larger cache while the longest text has so many rows."""
        self._next, self._since, self._begun, self._copied = following, longest, 0, self._nothing()

    def changed(self, slot: int, rows: int) -> None:
        """Says that rows of a slot from one on are no longer what they were."""
        np.minimum(self._copied[:, slot], rows, out=self._copied[:, slot])

    def advance(self, filled: Sequence[int]) -> None:
        """Does a step's share of what a larger cache will need, and of giving back a smaller one's memory."""
        if self._old is not None:
            more = self._old.give_back(self._given, _FREED)
            self._given += _FREED
            self._old = self._old if more else None
        at = self._sizes.index(self.now.rows)
        if at + 1 == len(self._sizes):
            return
        longest, end = max(filled), self.now.rows - _SPARE
        near = longest > self.now.rows - (self.now.rows - self._sizes[at - 1]) // 2
        if near != (self._next is not None):
            self._begin(Rows(self._layers, self._slots, self._sizes[at + 1]) if near else None, longest)
        share = (longest - self._since + 1) / max(1, end - self._since) if near else 0.0
        wanted = min(len(self._copied), math.ceil(share * len(self._copied)))
        while self._begun < wanted:
            self._copy(self._begun, filled)
            self._begun += 1

    def _copy(self, layer: int, filled: Sequence[int]) -> None:
        """Copies a layer's rows that are not in the next cache yet."""
        assert self._next is not None
        of = layer
        for old, new in zip(self.now.blocks, self._next.blocks, strict=True):
            if of < len(old):
                for slot, (start, end) in enumerate(zip(self._copied[layer].tolist(), filled, strict=True)):
                    if start < end:
                        new[of, slot, :, start:end] = old[of, slot, :, start:end]
                break
            of -= len(old)
        self._copied[layer] = filled
