"""The KV cache of one model on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specexport.contract import tensors
from specexport.contract.manifest import CacheLayer
from specexport.runtime.cuda.api import Cuda
from specexport.runtime.cuda.memory import Memory, Plan, Tensor


class DeviceCache:
    """Keys and values of all layers: for each shape of a layer's rows one block ``[L,B,Hkv,S,D]``.

    Blocks are as large as the largest cache from the start; a smaller one uses the front of them, so that growing takes
    no memory.

    Args:
        cuda: the device.
        layers: of the model.
        batch: slots.
        dtype: of an element.
        sizes: rows a slot may have, ascending.
        fed: most rows one run makes, where a graph returns them instead of writing them into the cache; 0 otherwise.
        name: what its regions are called in a plan.
    """

    def __init__(
        self,
        cuda: Cuda,
        layers: Sequence[CacheLayer],
        batch: int,
        dtype: np.dtype[Any],
        sizes: Sequence[int],
        fed: int,
        name: str = "cache",
    ) -> None:
        self._cuda = cuda
        self._batch = batch
        self._dtype = dtype
        self._sizes = tuple(sizes)
        self._fed = fed
        self._name = name
        self._members: dict[tuple[int, int], list[str]] = {}
        for index, layer in enumerate(layers):
            self._members.setdefault((layer.heads, layer.key_size), []).append(tensors.past_key(index))
            self._members.setdefault((layer.heads, layer.value_size), []).append(tensors.past_value(index))
        self.rows = self._sizes[0]
        self._memory: Memory | None = None

    def plan(self, plan: Plan) -> None:
        """Says what it needs."""
        widest = 0
        for (heads, width), members in self._members.items():
            planes = len(members) * self._batch * heads
            row = width * self._dtype.itemsize
            plan.add(f"{self._name}.{heads}x{width}", planes * self._sizes[-1] * row)
            if self._fed:
                plan.add(f"{self._name}.new.{heads}x{width}", planes * self._fed * row)
            widest = max(widest, row)
        if len(self._sizes) > 1:
            plan.add(f"{self._name}.plane", self._sizes[-2] * widest)

    def place(self, memory: Memory, stream: int) -> None:
        """Takes its regions; rows that were never written are zero."""
        self._memory = memory
        for heads, width in self._members:
            region = memory[f"{self._name}.{heads}x{width}"]
            self._cuda.fill(region.address, 0, region.nbytes, stream)

    @property
    def nbytes(self) -> int:
        """Of the cache at its present size."""
        return sum(
            len(members) * self._batch * heads * self.rows * width * self._dtype.itemsize
            for (heads, width), members in self._members.items()
        )

    def tensors(self, rows: int) -> dict[str, Tensor]:
        """The layers' caches by input name, ``[B,Hkv,rows,D]``."""
        return self._parts("", rows)

    def new_rows(self, fed: int) -> dict[str, Tensor]:
        """Where a run's new rows go, by the name of the cache they belong to, ``[B,Hkv,fed,D]``."""
        return self._parts("new.", fed)

    def _parts(self, kind: str, rows: int) -> dict[str, Tensor]:
        parts = {}
        for (heads, width), members in self._members.items():
            base = self._base(f"{kind}{heads}x{width}")
            size = self._batch * heads * rows * width * self._dtype.itemsize
            for index, member in enumerate(members):
                parts[member] = Tensor(base + index * size, self._dtype, (self._batch, heads, rows, width))
        return parts

    def _base(self, name: str) -> int:
        assert self._memory is not None
        return self._memory[f"{self._name}.{name}"].address

    def grow(self, rows: int, stream: int) -> None:
        """Spreads the rows of a smaller cache out to a larger size, in place.

        From the last plane to the first, each by way of a spare one: where it goes may overlap where it is, and never
        reaches those before it.
        """
        old, self.rows = self.rows, rows
        for (heads, width), members in self._members.items():
            base, spare = self._base(f"{heads}x{width}"), self._base("plane")
            row = width * self._dtype.itemsize
            for plane in reversed(range(1, len(members) * self._batch * heads)):
                self._cuda.copy(spare, base + plane * old * row, old * row, stream)
                self._cuda.copy(base + plane * rows * row, spare, old * row, stream)

    def move(self, slot: int, past: int, nodes: Sequence[int], fed: int | None, stream: int) -> None:
        """Puts kept rows behind a slot's first ``past`` ones, in order.

        Args:
            slot: index into the batch.
            past: rows it has.
            nodes: which of a run's tokens are kept, ascending.
            fed: tokens of that run, whose rows lie apart; None where they lie in the cache, from ``past`` on.
            stream: does it.
        """
        for (heads, width), members in self._members.items():
            row = width * self._dtype.itemsize
            to, to_pitch = self._base(f"{heads}x{width}") + past * row, self.rows * row
            source, pitch = (to, to_pitch) if fed is None else (self._base(f"new.{heads}x{width}"), fed * row)
            for first, node, count in _runs(nodes, skip=fed is None):
                # With one slot all planes of all layers are the same distance apart; with more, those of a layer are.
                groups = 1 if self._batch == 1 else len(members)
                planes = len(members) * heads if self._batch == 1 else heads
                for group in range(groups):
                    plane = (group * self._batch + slot) * heads
                    self._cuda.copy_rows(
                        to + plane * to_pitch + first * row,
                        to_pitch,
                        source + plane * pitch + node * row,
                        pitch,
                        count * row,
                        planes,
                        stream,
                    )


def _runs(nodes: Sequence[int], *, skip: bool) -> list[tuple[int, int, int]]:
    """Rows that can be copied at once: where they go, the first node, and how many.

    Args:
        nodes: ascending; the i-th goes to row i.
        skip: leave out those that lie where they belong. Then each is copied by itself, as what a longer copy reads
            could lie in what it writes.
    """
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
