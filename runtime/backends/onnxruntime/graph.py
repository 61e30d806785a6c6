"""Graphs on onnxruntime: a session of each model's symbolic master, its KV cache, and buffers bound once a shape."""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specexport.contract import tensors
from specexport.contract.errors import BackendError, BundleError
from specexport.contract.model import CacheLayer, LoweredAs, Model
from specexport.contract.shapes import ShapePoint
from specexport.contract.signature import Interface, cache_inputs, cache_outputs, describe, interfaces
from specexport.contract.tensors import DECLARED
from specexport.runtime.backend import TILE, Array, Buffers, Graph, RunShape, caches_by_shape
from specexport.runtime.backends.onnxruntime.kernels import kernels, not_claimed
from specexport.runtime.backends.onnxruntime.session import import_onnxruntime
from specexport.runtime.states import KeptStates

_LONG_CHUNKS = 128, 256
"""Tokens of a prompt that are read in one run if no request waits, on onnxruntime's kernels and on ours, which need no
memory for all scores. Chunks of 64 take up to 1.2 times as long as those of 256, and 2 times with many experts."""
_NO_RESERVE = 0x4000
"""``MAP_NORESERVE`` of Linux, which :mod:`mmap` lacks before Python 3.13."""
_TYPES = {"tensor(float)": "float32", "tensor(int64)": "int64", "tensor(bool)": "bool"}


class OnnxRuntimeGraph(Graph):
    """A graph in an onnxruntime session on the CPU; see :class:`~specexport.runtime.backend.Graph`.

    The session runs the symbolic master, so weights are in memory once, and a step may have any width. The buffers of a
    shape point are allocated once. They are bound once for each window, together with the caches of its slots, which
    are neighbours in memory: natively as input and output, so that TensorScatter writes in place; portably as input,
    with the new rows as output. ``not_claimed`` counts the operators that may round a row by the number of rows.
    """

    def __init__(
        self, path: Path, session: Any, model: Model, lowering: LoweredAs, slots: int, buffers: Buffers
    ) -> None:
        super().__init__([point for point in model.graph.points if point.batch <= slots], slots)
        self.sizes = tuple(sorted({point.batch for point in self._points}))
        self._ort = import_onnxruntime(lowering)
        self._path = path
        self._session = session
        _require_declared(path, self._session, model, lowering, buffers)
        self._layers = model.cache
        self._states = KeptStates(model.states, slots)
        # Recurrent states cannot go back to read tokens again, as a run that is widened for another slot would.
        self.any_width = not model.states
        self._in_place = lowering == "native"
        claimed = kernels().devices
        self.not_claimed = not_claimed(session) if claimed else Counter[str]()
        ours = bool(claimed) and not self.not_claimed
        self._narrowest = 1 if ours else 2
        self._long_chunk = _LONG_CHUNKS[ours]
        self._buffers = buffers
        # Our kernels read the rows of a text alone, so for them a cache has its largest size from the start.
        self._reserved = self.cache_sizes[-1] if ours and self._in_place else 0
        self._cache = Rows(model.cache, slots, 0)
        self._cache_rows = 0
        self._arrays: dict[ShapePoint, _Arrays] = {}  # by shape points with cache 0, as they fit all cache sizes
        self._bound: dict[RunShape, Any] = {}
        self._last: tuple[int, _Arrays] | None = None  # the first slot of the last run, and its arrays
        self.reserve(1)

    @property
    def cache_rows(self) -> int:
        return self._cache_rows

    def reusable(self, slot: int, rows: int) -> int:
        rows = super().reusable(slot, rows)
        return rows if self._states.can_continue(slot, rows) else 0

    def _require(self, point: ShapePoint) -> ShapePoint:
        # The session runs the master, whose dimensions are free: T may differ from that of a built point.
        tiled = point.rows != 1 or point.tokens == 1 or point.tokens % TILE == 0  # so that chunks have few shapes
        free = tiled and (self._layers or not point.drafts)
        if free and _kind(point) in map(_kind, self._points):
            return point
        return super()._require(point)

    def step_width(self, slots: int, nodes: int) -> int:
        """See :class:`Graph`; a step may have any width.

        onnxruntime's operators compute one row differently from several, so a step that uses them has at least two.
        """
        return max(nodes, self._narrowest)

    def chunk(self, size: int, tokens: int, alone: bool = False) -> int:
        """See :class:`Graph`; the last part of a prompt takes as many tiles as it fills."""
        if not self.any_width:
            return size
        return min(max(size, self._long_chunk) if alone else size, -(-tokens // TILE) * TILE)

    def _resize(self, rows: int) -> None:
        # Freeing rows means copying the others, which half of the cache is worth.
        if not self._reserved or self._cache.rows < rows or 2 * rows <= self._cache_rows:
            cache = self._allocate(rows)
            cache.copy_from(self._cache, self._filled)
            self._cache = cache
            self._bound.clear()
        self._cache_rows = rows

    def _allocate(self, rows: int) -> Rows:
        with contextlib.suppress(MemoryError):
            return Rows(self._layers, self._slots, max(rows, self._reserved))
        self._reserved = 0  # where address space is limited, the cache grows with its texts
        return Rows(self._layers, self._slots, rows)

    def _copy(self, source: int, to: int, rows: int) -> None:
        for block in self._cache.blocks:
            block[:, to, :, :rows] = block[:, source, :, :rows]
        if rows:
            self._states.copy(source, to)

    def _commit(self, slot: int, past: int, nodes: Sequence[int]) -> None:
        count = len(nodes)
        assert self._last is not None
        first, arrays = self._last
        self._states.commit(slot, past, nodes, arrays.states, slot - first)
        in_order = count == 0 or nodes[-1] == count - 1
        if self._in_place and in_order:
            return
        start, at = (past, slot) if self._in_place else (0, slot - first)
        blocks = self._cache.blocks
        for block, source in zip(blocks, blocks if self._in_place else arrays.new_rows, strict=True):
            rows = source[:, at, :, start:]
            # Not take(), which would first copy the whole cache to make it contiguous.
            block[:, slot, :, past : past + count] = rows[:, :, :count] if in_order else rows[:, :, list(nodes)]

    def inputs(self, shape: RunShape) -> dict[str, Array]:
        return self._arrays_of(shape).inputs

    def prepare(self, shape: RunShape, rows: int = 0) -> dict[str, Array]:
        inputs = super().prepare(shape, rows)
        if tensors.KNOWN_TOKENS in inputs:
            inputs[tensors.KNOWN_TOKENS][:] = -self._states.back  # leaves out tokens that may be taken back
        return inputs

    def _run(self, shape: RunShape) -> dict[str, Array]:
        arrays, slots = self._arrays_of(shape), shape.slots
        binding = self._bound.get(shape)
        if binding is None:
            binding = self._bound[shape] = self._bind(slots, arrays)
        if self._states.arrays:
            past = arrays.inputs[tensors.PAST_LENGTH].tolist()
            for name, array in self._states.cells(slots, past, arrays.fed).items():
                binding.bind_ortvalue_input(name, self._ort.OrtValue.ortvalue_from_numpy(array))
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime's exceptions share no public base
            if type(error) is not RuntimeError and not type(error).__module__.startswith("onnxruntime"):
                raise  # such as a TimeoutError of a signal's handler
            raise BackendError(f"{self._path}: onnxruntime failed to run the graph: {error}; build it again") from error
        if tensors.KNOWN_TOKENS in arrays.inputs:
            self._states.advance(slots, past, arrays.inputs[tensors.KNOWN_TOKENS].tolist())
        self._last = slots.start, arrays
        return arrays.outputs

    def _arrays_of(self, shape: RunShape) -> _Arrays:
        arrays = self._arrays.get(shape.point(0))
        if arrays is None:
            point = self._require(shape.point(self.cache_rows))
            rows_out = Rows(() if self._in_place else self._layers, point.batch, point.fed)
            states, parts = self._states.outputs(point.batch, point.fed)
            parts |= {name.replace("past_", "new_", 1): part for name, part in rows_out.parts.items()}
            arrays = _Arrays(*self._buffers(point), rows_out.blocks, parts, point.fed, states)
            self._arrays[shape.point(0)] = arrays
        return arrays

    def _bind(self, slots: range, arrays: _Arrays) -> Any:
        binding, value_of = self._session.io_binding(), self._ort.OrtValue.ortvalue_from_numpy
        for name, array in arrays.inputs.items():
            binding.bind_ortvalue_input(name, value_of(array))
        for name, array in arrays.outputs.items():
            binding.bind_ortvalue_output(name, value_of(array))
        for name, array in self._cache.parts.items():
            value = value_of(array[slots.start : slots.stop])
            binding.bind_ortvalue_input(name, value)
            if self._in_place:
                binding.bind_ortvalue_output(name.replace("past_", "present_", 1), value)
        for name, array in arrays.parts.items():
            binding.bind_ortvalue_output(name, value_of(array))
        for name, array in self._states.arrays.items():
            binding.bind_ortvalue_input(name, value_of(array[slots.start : slots.stop]))
        return binding


def _kind(point: ShapePoint) -> tuple[int, int, int, bool]:
    """A point without T: batch, cache, drafts, and whether all tokens have logits."""
    return point.batch, point.cache, point.drafts, point.rows == point.tokens


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


@dataclass
class _Arrays:
    """The buffers of a shape at any cache size.

    Attributes:
        new_rows: lowered portably, the blocks of new rows, ``[L,B,Hkv,F,D]``.
        parts: each layer's new rows and states, by output.
        fed: F.
        states: blocks of the states' rows; see :meth:`KeptStates.outputs`.
    """

    inputs: dict[str, Array]
    outputs: dict[str, Array]
    new_rows: list[Array]
    parts: dict[str, Array]
    fed: int
    states: list[Array]


def _require_declared(path: Path, session: Any, model: Model, lowering: LoweredAs, buffers: Buffers) -> None:
    """Compares a session's inputs and outputs with the buffers and caches that follow from the manifest.

    Intact files may still not match the manifest.
    """
    points = model.graph.points
    # The smallest of the points with all stages.
    point = min(points, key=lambda point: (-point.drafts, point.sizes["B"], point.tokens, point.cache))
    inputs, outputs = buffers(point)
    _compare(path, "input", session.get_inputs(), _of(inputs) | interfaces(cache_inputs(model)))
    returned = cache_outputs(model.cache, model.states, lowering, "F")
    _compare(path, "output", session.get_outputs(), _of(outputs) | interfaces(returned))


def _of(arrays: Mapping[str, Array]) -> dict[str, Interface]:
    return {name: (array.dtype.name, array.shape) for name, array in arrays.items()}


def _compare(path: Path, kind: str, values: Sequence[Any], expected: Mapping[str, Interface]) -> None:
    actual: dict[str, Interface] = {
        value.name: (_TYPES.get(value.type, value.type), tuple(value.shape)) for value in values
    }
    for name in (*expected, *actual):
        if name in expected and name in actual and _matches(actual[name], expected[name]):
            continue
        stem, _, index = name.partition(".")
        field = DECLARED[stem].field if stem in DECLARED else "methods"
        if field in ("cache", "states"):
            field = f"{field}[{index}]"
        raise BundleError(
            f"{path}: {kind} {name!r} is {describe(actual.get(name))}, but {describe(expected.get(name))} by {field} "
            "of the manifest; build the bundle again"
        )


def _matches(a: Interface, b: Interface) -> bool:
    """Whether two interfaces have the same type and, where both sizes are numbers, the same size."""
    sizes = zip(a[1], b[1], strict=False)
    numbers = all(m == n for m, n in sizes if isinstance(m, int) and isinstance(n, int))
    return a[0] == b[0] and len(a[1]) == len(b[1]) and numbers
