"""What every backend's graphs can do: static buffers, and a cache of several slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from specexport.contract import tensors
from specexport.contract.errors import BackendError
from specexport.contract.model import CacheLayer
from specexport.contract.shapes import ShapePoint

Array = npt.NDArray[Any]
Buffers = Callable[[ShapePoint], tuple[dict[str, Array], dict[str, Array]]]
"""Makes the input and output arrays of a shape point, caches aside."""
FIRST = range(1)
"""The window of a single request: the first slot alone."""


TILE = 16
"""What is left of a prompt is read in a run of a multiple of this many tokens: shapes are few, and tiles full."""


class Graph(ABC):
    """A loaded graph with its static buffers and a cache of several slots.

    A run takes a window of neighbouring slots, as many as one of the batch sizes, at one of the bundle's shape points:
    T tokens; R rows of logits for step graphs; K draft tokens for propose graphs. Inputs are written into the arrays
    :meth:`inputs` returns; results are read from those :meth:`run` returns; their first dimension is the window's. Both
    are the same memory call after call: copy what must outlive the next run.

    Attributes:
        sizes: batch sizes a window may have, ascending; the last is the number of slots.
        cache_sizes: rows a slot's cache may have, ascending.
        any_width: whether a draft's run takes any T, as dimensions are free.
    """

    sizes: tuple[int, ...]
    any_width: bool = False

    def __init__(self, points: Collection[ShapePoint], slots: int) -> None:
        self._points = frozenset(points)
        self._slots = slots
        self._filled = [0] * slots
        self.cache_sizes = tuple(sorted({point.cache for point in points}))

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Bytes of the KV cache at its present size."""

    def widths(self, slots: int) -> tuple[int, ...]:
        """T of the steps that compute logits of every token, ascending, for a window of so many slots."""
        return tuple(sorted({p.tokens for p in self._points if p.batch == slots and p.rows == p.tokens}))

    def step_width(self, slots: int, needed: int) -> int:
        """T of the step that a window of so many slots takes where the largest of their trees has ``needed`` nodes."""
        return next(width for width in self.widths(slots) if width >= needed)

    def drafts(self, slots: int) -> tuple[tuple[int, int], ...]:
        """K and T of the runs of a propose graph, ascending, for a window of so many slots."""
        return tuple(sorted({(p.drafts, p.tokens) for p in self._points if p.batch == slots and p.drafts}))

    def filled(self, slot: int) -> int:
        """How many rows of a slot's cache are what was committed there, from the first on."""
        return self._filled[slot]

    def reusable(self, slot: int, rows: int) -> int:
        """How many of a slot's first ``rows`` rows another text may reuse: all of them.

        With layers without attention all but the last few that a draft may take back, or nothing.
        """
        return min(rows, self._filled[slot])

    @abstractmethod
    def reserve(self, rows: int) -> None:
        """Makes every slot's cache hold at least ``rows`` rows, keeping its content.

        Raises:
            BackendError: the bundle has no cache so large.
        """

    @abstractmethod
    def shrink_cache(self, rows: int) -> None:
        """Makes the cache as small as ``rows`` rows allow, if it is larger; rows beyond its new size are lost."""

    @abstractmethod
    def copy(self, source: int, to: int, rows: int) -> None:
        """Makes the first ``rows`` rows of a slot's cache those of another one, as far as they are ``reusable``."""

    @abstractmethod
    def commit(self, slot: int, past: int, nodes: Sequence[int]) -> None:
        """Puts the rows of those tokens of the last run that are kept into the cache, one after the other.

        To be called after every run whose rows are wanted; where they lie already nothing is copied.

        Args:
            slot: one of the run's window.
            past: the run's ``past_length``.
            nodes: which of the tokens fed are kept, ascending; their rows go to ``past``, ``past + 1``, ...
        """

    @abstractmethod
    def inputs(self, tokens: int, rows: int = 0, drafts: int = 0, slots: range = FIRST) -> dict[str, Array]:
        """The input arrays of a shape point at the present cache size, by name."""

    @abstractmethod
    def protect_rows(self, tokens: int, rows: int = 0, drafts: int = 0, slots: range = FIRST) -> None:
        """Sets ``past_length`` so that the next run leaves every slot's committed rows alone.

        To be called before ``past_length`` is set for the slots that take part. Where another one is too full for the
        rows that the run writes in any case, its last rows are given up.
        """

    @abstractmethod
    def run(self, tokens: int, rows: int = 0, drafts: int = 0, slots: range = FIRST) -> dict[str, Array]:
        """Runs at that shape point; the outputs by name, without the caches."""

    def chunk(self, most: int, tokens: int) -> int:
        """T of a run that reads so many tokens of a prompt, at most ``most`` of them: that is its only shape."""
        return most

    def _cache_size(self, rows: int) -> int:
        """The smallest cache of at least ``rows`` rows."""
        size = next((size for size in self.cache_sizes if size >= rows), None)
        if size is None:
            raise BackendError(f"{rows} cache rows wanted, but the bundle's largest cache has {self.cache_sizes[-1]}")
        return size

    def _require(self, point: ShapePoint) -> ShapePoint:
        if point not in self._points:
            raise BackendError(f"shape point {point} was not built; this is a defect of specexport, please report it")
        return point

    def _protect(self, inputs: Mapping[str, Array], slots: range, most: int) -> None:
        """Has a run write behind what slots hold, of which ``most`` rows leave it room; see :class:`Graph`."""
        if tensors.PAST_LENGTH in inputs:  # none without a cache
            for at, slot in enumerate(slots):
                inputs[tensors.PAST_LENGTH][at] = self._filled[slot] = self.reusable(slot, most)


def caches_by_shape(layers: Sequence[CacheLayer]) -> dict[tuple[int, int], list[str]]:
    """The inputs that are the layers' caches, by the heads and the width of a row they have."""
    names: dict[tuple[int, int], list[str]] = {}
    for index, layer in enumerate(layers):
        names.setdefault((layer.heads, layer.key_size), []).append(tensors.past_key(index))
        names.setdefault((layer.heads, layer.value_size), []).append(tensors.past_value(index))
    return names
