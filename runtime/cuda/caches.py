"""The KV cache of one model on the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specexport.contract.model import CacheLayer
from specexport.runtime.cuda.memory import Device, Memory, MemoryPlan, Tensor, aligned
from specexport.runtime.graph import caches_by_shape


@dataclass(frozen=True)
class Made:
    """A run whose new rows lie apart from the cache: so many a slot, of these slots."""

    fed: int
    slots: range


class DeviceCache:
    """Keys and values of all layers: for each shape of a layer's rows one block ``[L,B,Hkv,S,D]``.

    Blocks are as large as the largest cache from the start; a smaller one uses the front of them, so that growing takes
    no memory.
    ``sizes`` are the rows a slot may have, ascending. ``fed`` is how many rows one run makes at most, where a graph
    returns them instead of writing them into the cache; 0 otherwise.
    """

    def __init__(
        self,
        device: Device,
        layers: Sequence[CacheLayer],
        batch: int,
        dtype: np.dtype[Any],
        sizes: Sequence[int],
        fed: int,
    ) -> None:
        self._device = device
        self._batch = batch
        self._dtype = dtype
        self._sizes = tuple(sizes)
        self._fed = fed
        self._members = caches_by_shape(layers)
        self.rows = self._sizes[0]
        self._memory: Memory | None = None

    def plan(self, plan: MemoryPlan) -> None:
        """Adds the regions it needs."""
        widest = 0
        for (heads, width), members in self._members.items():
            plan.add(f"cache.{heads}x{width}", len(members) * self._stride(heads, width, self._sizes[-1]))
            if self._fed:
                plan.add(f"cache.new.{heads}x{width}", len(members) * self._stride(heads, width, self._fed))
            widest = max(widest, width * self._dtype.itemsize)
        if len(self._sizes) > 1:
            plan.add("cache.plane", self._sizes[-2] * widest)

    def place(self, memory: Memory) -> None:
        """Takes its regions; rows that were never written are zero."""
        self._memory = memory
        for heads, width in self._members:
            region = memory[f"cache.{heads}x{width}"]
            self._device.cuda.fill(region.address, 0, region.nbytes, self._device.stream.handle)

    @property
    def nbytes(self) -> int:
        """Of the cache at its present size."""
        return sum(
            len(members) * self._batch * heads * self.rows * width * self._dtype.itemsize
            for (heads, width), members in self._members.items()
        )

    def tensors(self, rows: int, slots: range) -> dict[str, Tensor]:
        """The layers' caches of some neighbouring slots by input name, ``[B,Hkv,rows,D]``."""
        return self._parts("", rows, slots)

    def new_rows(self, fed: int, slots: range) -> dict[str, Tensor]:
        """Where a run's new rows go, by the name of the cache they belong to, ``[B,Hkv,fed,D]``, for any slots."""
        return self._parts("new.", fed, range(len(slots)))

    def _parts(self, kind: str, rows: int, slots: range) -> dict[str, Tensor]:
        parts = {}
        for (heads, width), members in self._members.items():
            base, stride = self._base(f"{kind}{heads}x{width}"), self._stride(heads, width, rows)
            first = slots.start * heads * rows * width * self._dtype.itemsize
            for index, member in enumerate(members):
                parts[member] = Tensor(base + index * stride + first, self._dtype, (len(slots), heads, rows, width))
        return parts

    def _stride(self, heads: int, width: int, rows: int) -> int:
        """Bytes from one layer's part of a block to the next; each is aligned, as libraries want it."""
        return aligned(self._batch * heads * rows * width * self._dtype.itemsize)

    def _base(self, name: str) -> int:
        assert self._memory is not None
        return self._memory[f"cache.{name}"].address

    def resize(self, rows: int) -> None:
        """Spreads the rows out to a larger size or draws them together to a smaller one, in place.

        Each plane goes by way of a spare one: where it goes may overlap where it is, and never reaches those that are
        still to be moved if growing begins with the last and shrinking with the first.
        """
        old, self.rows = self.rows, rows
        for (heads, width), members in self._members.items():
            base, spare = self._base(f"{heads}x{width}"), self._base("plane")
            before, after = self._stride(heads, width, old), self._stride(heads, width, rows)
            row = width * self._dtype.itemsize
            planes = list(itertools.product(range(len(members)), range(self._batch * heads)))[1:]  # the first stays
            for layer, plane in reversed(planes) if rows > old else planes:
                kept = min(old, rows) * row
                self._device.copy(spare, base + layer * before + plane * old * row, kept)
                self._device.copy(base + layer * after + plane * rows * row, spare, kept)

    def copy(self, source: int, to: int, rows: int) -> None:
        """Makes the first rows of a slot those of another one."""
        for (heads, width), members in self._members.items():
            pitch = self.rows * width * self._dtype.itemsize
            base, stride = self._base(f"{heads}x{width}"), self._stride(heads, width, self.rows)
            for layer in range(len(members)):
                at, nbytes = base + layer * stride, rows * width * self._dtype.itemsize
                to_slot, from_slot = (at + slot * heads * pitch for slot in (to, source))
                self._device.copy_rows(to_slot, pitch, from_slot, pitch, nbytes, heads)

    def move(self, slot: int, past: int, nodes: Sequence[int], made: Made | None) -> None:
        """Puts the rows of those of a run's tokens that are kept, ``nodes``, behind a slot's first ``past`` ones.

        ``made`` is that run if its rows lie apart; None where they lie in the cache, from ``past`` on.
        """
        for (heads, width), members in self._members.items():
            row = width * self._dtype.itemsize
            to, to_pitch = self._base(f"{heads}x{width}"), self.rows * row
            to_stride = self._stride(heads, width, self.rows)
            source, pitch, apart = to + past * row, to_pitch, to_stride
            at = slot
            if made is not None:
                pitch, apart = made.fed * row, self._stride(heads, width, made.fed)
                source, at = self._base(f"new.{heads}x{width}"), slot - made.slots.start
            # With one slot the planes of all layers may be the same distance apart; those of a layer always are.
            together = self._batch == 1 and to_stride == heads * to_pitch and apart == heads * pitch
            layers, planes = (1, len(members) * heads) if together else (len(members), heads)
            for first, node, count in _runs(nodes, skip=made is None):
                for layer in range(layers):
                    there = to + layer * to_stride + slot * heads * to_pitch + (past + first) * row
                    here = source + layer * apart + at * heads * pitch + node * row
                    self._device.copy_rows(there, to_pitch, here, pitch, count * row, planes)


def _runs(nodes: Sequence[int], *, skip: bool) -> list[tuple[int, int, int]]:
    """Rows that can be copied at once: where they go, the first node, and how many."""
    found: list[tuple[int, int, int]] = []
    for to, node in enumerate(nodes):
        if skip and to == node:
            continue
        if not skip and found and found[-1][1] + found[-1][2] == node:
            first, start, count = found[-1]
            found[-1] = (first, start, count + 1)
        else:
            found.append((to, node, 1))
    return found
