"""The KV cache of one model on the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specexport.contract.model import CacheLayer
from specexport.runtime.backend import caches_by_shape
from specexport.runtime.backends.cuda.memory import Device, Memory, MemoryPlan, Tensor, aligned


@dataclass(frozen=True)
class NewRows:
    """The new rows of a run that are outside the cache: ``fed`` a slot, of some slots."""

    fed: int
    slots: range


class DeviceCache:
    """Keys and values of all layers: one block ``[L,B,Hkv,S,D]`` for each shape of a layer's rows.

    Blocks have the size of the largest cache from the start, and smaller caches use their front, so that growing needs
    no memory. ``sizes`` are the rows a slot may have, ascending. ``fed`` is the most new rows of a run if the graph
    returns them instead of writing them into the cache; else 0.
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
        """Adds its regions to a plan."""
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
        """Bytes of the cache at its present size."""
        return sum(
            len(members) * self._batch * heads * self.rows * width * self._dtype.itemsize
            for (heads, width), members in self._members.items()
        )

    def tensors(self, rows: int, slots: range) -> dict[str, Tensor]:
        """The layers' caches for neighbouring slots, by input name, ``[B,Hkv,rows,D]``."""
        return self._parts("", rows, slots)

    def new_rows(self, fed: int, slots: range) -> dict[str, Tensor]:
        """The memory of a run's new rows, by the name of their cache, ``[B,Hkv,fed,D]``, for any slots."""
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
        """Bytes from one layer's part of a block to the next; each is aligned, as libraries require."""
        return aligned(self._batch * heads * rows * width * self._dtype.itemsize)

    def _base(self, name: str) -> int:
        assert self._memory is not None
        return self._memory[f"cache.{name}"].address

    def resize(self, rows: int) -> None:
        """Moves the rows apart for a larger size or together for a smaller one, in place.

        Each plane is copied by way of a spare one, as its old and new places may overlap. Growing begins with the last
        plane and shrinking with the first, so that no plane is overwritten before it is moved.
        """
        old, self.rows = self.rows, rows
        for (heads, width), members in self._members.items():
            base, spare = self._base(f"{heads}x{width}"), self._base("plane")
            before, after = self._stride(heads, width, old), self._stride(heads, width, rows)
            row = width * self._dtype.itemsize
            planes = list(itertools.product(range(len(members)), range(self._batch * heads)))[1:]  # the first stays
            for layer, plane in reversed(planes) if rows > old else planes:
                nbytes = min(old, rows) * row
                self._device.copy(spare, base + layer * before + plane * old * row, nbytes)
                self._device.copy(base + layer * after + plane * rows * row, spare, nbytes)

    def copy(self, source: int, to: int, rows: int) -> None:
        """Copies the first rows of a slot to another one."""
        for (heads, width), members in self._members.items():
            pitch = self.rows * width * self._dtype.itemsize
            base, stride = self._base(f"{heads}x{width}"), self._stride(heads, width, self.rows)
            for layer in range(len(members)):
                at, nbytes = base + layer * stride, rows * width * self._dtype.itemsize
                to_slot, from_slot = (at + slot * heads * pitch for slot in (to, source))
                self._device.copy_rows(to_slot, pitch, from_slot, pitch, nbytes, heads)

    def move(self, slot: int, past: int, nodes: Sequence[int], new: NewRows | None) -> None:
        """Moves the rows of a run's kept tokens, ``nodes``, behind a slot's first ``past`` rows.

        ``new`` describes the run's rows if they are outside the cache; None if they are in it, from ``past`` on.
        """
        for (heads, width), members in self._members.items():
            row = width * self._dtype.itemsize
            to, to_pitch = self._base(f"{heads}x{width}"), self.rows * row
            to_stride = self._stride(heads, width, self.rows)
            source, pitch, apart = to + past * row, to_pitch, to_stride
            at = slot
            if new is not None:
                pitch, apart = new.fed * row, self._stride(heads, width, new.fed)
                source, at = self._base(f"new.{heads}x{width}"), slot - new.slots.start
            # A layer's planes are equally spaced; with one slot, those of all layers may be.
            together = self._batch == 1 and to_stride == heads * to_pitch and apart == heads * pitch
            layers, planes = (1, len(members) * heads) if together else (len(members), heads)
            for first, node, count in _runs(nodes, skip=new is None):
                for layer in range(layers):
                    there = to + layer * to_stride + slot * heads * to_pitch + (past + first) * row
                    here = source + layer * apart + at * heads * pitch + node * row
                    self._device.copy_rows(there, to_pitch, here, pitch, count * row, planes)


def _runs(nodes: Sequence[int], *, skip: bool) -> list[tuple[int, int, int]]:
    """Groups rows that can be copied at once: their place, the first node, and their number."""
    runs: list[tuple[int, int, int]] = []
    for to, node in enumerate(nodes):
        if skip and to == node:
            continue
        if not skip and runs and runs[-1][1] + runs[-1][2] == node:
            first, start, count = runs[-1]
            runs[-1] = (first, start, count + 1)
        else:
            runs.append((to, node, 1))
    return runs
