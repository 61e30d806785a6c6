"""The KV cache of all layers on the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specexport.contract.model import CacheLayer
from specexport.runtime.backend import caches_by_shape
from specexport.runtime.backends.cuda.memory import Device, Memory, MemoryPlan, Tensor, align


@dataclass(frozen=True)
class NewRows:
    """A run's new rows that lie outside the cache: ``fed`` rows for each of some slots."""

    fed: int
    slots: range


@dataclass
class _Block:
    """The rows of layers with the same shape.

    Attributes:
        layers: their names.
        row: bytes of a row.
        address: of the cache.
        new: address of new rows that a run returns.
    """

    layers: list[str]
    heads: int
    width: int
    row: int
    address: int = 0
    new: int = 0

    @property
    def name(self) -> str:
        return f"{self.heads}x{self.width}"


class DeviceCache:
    """The keys and values of all layers: a block ``[L,B,Hkv,S,D]`` for each shape of a layer's rows.

    Blocks have the size of the largest cache from the start, and smaller caches use their front, so that growing takes
    no memory.

    Args:
        batch: B, the number of slots.
        sizes: the possible numbers of rows of a slot, ascending.
        fed: the greatest number of new rows of a run, if the graph returns them instead of writing them into the cache;
            else 0.

    Attributes:
        rows: S, the present number of rows of a slot.
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
        self._stream = device.stream
        self._batch = batch
        self._dtype = dtype
        self._sizes = tuple(sizes)
        self._fed = fed
        self._blocks = [
            _Block(names, heads, width, width * dtype.itemsize)
            for (heads, width), names in caches_by_shape(layers).items()
        ]
        self._plane = 0  # address of a spare plane
        self.rows = self._sizes[0]

    def plan(self, plan: MemoryPlan) -> None:
        """Adds its regions to a plan."""
        for block in self._blocks:
            plan.add(f"cache.{block.name}", len(block.layers) * self._stride(block, self._sizes[-1]))
            plan.add(f"cache.new.{block.name}", len(block.layers) * self._stride(block, self._fed))
        widest = max((block.row for block in self._blocks), default=0)
        plan.add("cache.plane", max(self._sizes[:-1], default=0) * widest)

    def place(self, memory: Memory) -> None:
        """Takes its regions and fills them with zeros."""
        self._plane = memory["cache.plane"].address
        for block in self._blocks:
            region = memory[f"cache.{block.name}"]
            block.address, block.new = region.address, memory[f"cache.new.{block.name}"].address
            self._stream.fill(region.address, 0, region.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache at its present size."""
        return sum(len(block.layers) * self._batch * block.heads * self.rows * block.row for block in self._blocks)

    def tensors(self, rows: int, slots: range) -> dict[str, Tensor]:
        """The layers' caches for neighbouring slots, ``[B,Hkv,rows,D]``, by input name."""
        return self._parts([block.address for block in self._blocks], rows, slots)

    def new_rows(self, fed: int, slots: range) -> dict[str, Tensor]:
        """The memory for a run's new rows, ``[B,Hkv,fed,D]``, by the cache's input name; all windows share it."""
        return self._parts([block.new for block in self._blocks], fed, range(len(slots)))

    def _parts(self, addresses: Sequence[int], rows: int, slots: range) -> dict[str, Tensor]:
        parts = {}
        for block, address in zip(self._blocks, addresses, strict=True):
            first, stride = address + slots.start * block.heads * rows * block.row, self._stride(block, rows)
            shape = (len(slots), block.heads, rows, block.width)
            for index, layer in enumerate(block.layers):
                parts[layer] = Tensor(first + index * stride, self._dtype, shape)
        return parts

    def _stride(self, block: _Block, rows: int) -> int:
        """Bytes from a layer's part of a block to the next layer's; parts are aligned, as libraries require."""
        return align(self._batch * block.heads * rows * block.row)

    def resize(self, rows: int) -> None:
        """Moves the rows apart for a larger size, or together for a smaller one, in place.

        Each plane is copied via a spare one, as its old and new places may overlap. Growing begins with the last plane,
        and shrinking with the first, so that no plane is overwritten before it is moved.
        """
        old, self.rows = self.rows, rows
        for block in self._blocks:
            before, after, nbytes = self._stride(block, old), self._stride(block, rows), min(old, rows) * block.row
            planes = list(itertools.product(range(len(block.layers)), range(self._batch * block.heads)))
            planes = planes[1:]  # the first stays
            for layer, plane in reversed(planes) if rows > old else planes:
                self._stream.copy(self._plane, block.address + layer * before + plane * old * block.row, nbytes)
                self._stream.copy(block.address + layer * after + plane * rows * block.row, self._plane, nbytes)

    def copy(self, source: int, to: int, rows: int) -> None:
        for block in self._blocks:
            pitch, stride = self.rows * block.row, self._stride(block, self.rows)
            for layer in range(len(block.layers)):
                at = block.address + layer * stride
                to_slot, from_slot = (at + slot * block.heads * pitch for slot in (to, source))
                self._stream.copy_rows(to_slot, pitch, from_slot, pitch, rows * block.row, block.heads)

    def move(self, slot: int, past: int, nodes: Sequence[int], new: NewRows | None) -> None:
        """Moves the rows of a run's tokens ``nodes`` to the place after a slot's first ``past`` rows.

        ``new`` describes the run's rows if they lie outside the cache; None if they are in it, from ``past`` on.
        """
        for block in self._blocks:
            heads, row = block.heads, block.row
            to_pitch, to_stride = self.rows * row, self._stride(block, self.rows)
            source, at, pitch, stride = block.address + past * row, slot, to_pitch, to_stride
            if new is not None:
                source, at = block.new, slot - new.slots.start
                pitch, stride = new.fed * row, self._stride(block, new.fed)
            # A layer's planes are equally spaced; with one slot, those of all layers may be.
            uniform = self._batch == 1 and to_stride == heads * to_pitch and stride == heads * pitch
            layers, planes = (1, len(block.layers) * heads) if uniform else (len(block.layers), heads)
            for first, node, count in _runs(nodes, skip=new is None):
                for layer in range(layers):
                    to = block.address + layer * to_stride + slot * heads * to_pitch + (past + first) * row
                    from_row = source + layer * stride + at * heads * pitch + node * row
                    self._stream.copy_rows(to, to_pitch, from_row, pitch, count * row, planes)


def _runs(nodes: Sequence[int], *, skip: bool) -> list[tuple[int, int, int]]:
    """Groups rows that one copy can move: their new place, their first node, and their number.

    ``skip`` leaves out rows that are in place.
    """
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
