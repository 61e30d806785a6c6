"""The onnxruntime backend: one session a model over its symbolic master, buffers bound once a shape point."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specexport.contract import tensors
from specexport.contract.errors import BackendError
from specexport.contract.manifest import LoweredAs, Model
from specexport.contract.shapes import ShapePoint
from specexport.runtime.backend import Array, Buffers
from specexport.runtime.bundle import Bundle

MINIMUM: dict[LoweredAs, tuple[int, int]] = {"native": (1, 28), "portable": (1, 23)}
"""Releases before 1.28 compute TensorScatter and Attention with fully masked rows wrongly; those before 1.23 are not
tested."""


def _import_onnxruntime(lowering: LoweredAs) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendError(
            "onnxruntime is not installed, and this bundle runs on it; install it with: pip install 'specexport[cpu]'"
        ) from error
    found = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
    needed = MINIMUM[lowering]
    if found < needed:
        raise BackendError(
            f"onnxruntime {onnxruntime.__version__} is too old for a bundle of the {lowering} lowering; expected "
            f"{needed[0]}.{needed[1]} or newer. Upgrade with: pip install -U 'specexport[cpu]'" + _instead(found)
        )
    return onnxruntime


def _instead(found: tuple[int, ...]) -> str:
    """What else helps where there is no newer onnxruntime, as on Python 3.10."""
    if found < MINIMUM["portable"]:
        return ""
    return "; there is none for Python 3.10, where bundles built with --lowering portable run"


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def open_session(path: Path, threads: int, lowering: LoweredAs) -> Any:
    """An ``onnxruntime.InferenceSession`` over a master graph on the CPU, with the options the engine runs it with.

    Args:
        path: the master.
        threads: intra-op threads.
        lowering: of the graph; says which releases compute it right.

    Raises:
        BackendError: onnxruntime is missing, too old, or refuses the graph.
    """
    onnxruntime = _import_onnxruntime(lowering)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Threads of one model must not spin while the other model runs.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Quantized weights are multiplied as integers.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "4")
    if lowering == "portable":
        # There is no kernel for integers with one scale a column: undo them once, not in every step.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no public base
        raise BackendError(f"{path}: onnxruntime refused the graph: {error}") from error


class OnnxRuntimeBackend:
    """onnxruntime on the CPU; see :class:`~specexport.runtime.backend.Backend`.

    Args:
        bundle: what it runs.
        threads: None for every core this process may use.
    """

    execution = "host"
    fallback = ""

    def __init__(self, bundle: Bundle, threads: int | None) -> None:
        self._bundle = bundle
        self._threads = threads or available_cores()

    def open(self, model: Model, batch: int, buffers: Buffers) -> OnnxRuntimeGraph:
        """See :class:`~specexport.runtime.backend.Backend`."""
        master, lowering = self._bundle.file(model.graph.master), self._bundle.manifest.lowering
        return OnnxRuntimeGraph(master, model, lowering, batch, buffers, self._threads)

    def close(self) -> None:
        """See :class:`~specexport.runtime.backend.Backend`; graphs go when nothing refers to them."""


class OnnxRuntimeGraph:
    """A graph in an onnxruntime session on the CPU.

    The session runs the symbolic master, so weights are held once; only the manifest's shape points are ever run. A
    point's input, output and cache buffers are bound once: lowered natively the caches as input and output alike, which
    is what makes TensorScatter write in place; lowered portably as input, and the new rows as output.

    Args:
        path: the master.
        model: its description.
        lowering: the bundle's.
        batch: slots.
        buffers: makes the input and output arrays of a shape point.
        threads: intra-op threads.

    Raises:
        BackendError: onnxruntime is missing, too old, or refuses the graph.
    """

    def __init__(
        self, path: Path, model: Model, lowering: LoweredAs, batch: int, buffers: Buffers, threads: int
    ) -> None:
        self._ort = _import_onnxruntime(lowering)
        self._session = open_session(path, threads, lowering)
        self._model = model
        self._in_place = lowering == "native"
        self._batch = batch
        self._buffers = buffers
        points = [graph.point for graph in model.graph.points if graph.point.batch == batch]
        self._cache_sizes = sorted({point.cache for point in points})
        self._points = set(points)
        self._rows = 0
        self._blocks: list[Array] = []
        self._caches: dict[str, Array] = {}
        self._bound: dict[tuple[int, int, int], _Bound] = {}
        self._made: list[Array] = []
        self.reserve(1)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache at its present size."""
        return sum(cache.nbytes for cache in self._caches.values())

    def reserve(self, rows: int) -> None:
        """Grows the cache to the next declared size that holds ``rows`` rows; content is copied.

        Raises:
            BackendError: no declared size is large enough.
        """
        if rows <= self._rows:
            return
        size = next((size for size in self._cache_sizes if size >= rows), None)
        if size is None:
            raise BackendError(f"{rows} cache rows wanted, but the bundle's largest cache has {self._cache_sizes[-1]}")
        self._resize(size)

    def release(self) -> None:
        """Shrinks the cache to its smallest size; its content is lost."""
        if self._rows != self._cache_sizes[0]:
            self._caches = {}
            self._resize(self._cache_sizes[0])

    def _resize(self, size: int) -> None:
        blocks, caches = self._rows_of_layers(size)
        for name, cache in self._caches.items():
            caches[name][:, :, : self._rows] = cache
        self._blocks, self._caches, self._rows = blocks, caches, size
        self._bound.clear()

    def _rows_of_layers(self, rows: int) -> tuple[list[Array], dict[str, Array]]:
        """Zeros for ``rows`` rows of every layer's cache: blocks ``[L,B,Hkv,rows,D]``, and their parts by cache name.

        Rows of one shape lie in one block, so that a commit is one copy over all their layers.
        """
        names: dict[tuple[int, int], list[str]] = {}
        for layer, shape in enumerate(self._model.cache):
            names.setdefault((shape.heads, shape.key_size), []).append(tensors.past_key(layer))
            names.setdefault((shape.heads, shape.value_size), []).append(tensors.past_value(layer))
        blocks: list[Array] = []
        parts: dict[str, Array] = {}
        for (heads, width), members in names.items():
            block = np.zeros((len(members), self._batch, heads, rows, width), np.float32)
            blocks.append(block)
            parts.update(zip(members, block, strict=True))
        return blocks, parts

    def commit(self, slot: int, past: int, nodes: Sequence[int]) -> None:
        """See :class:`~specexport.runtime.backend.Graph`."""
        count = len(nodes)
        in_order = count == 0 or nodes[-1] == count - 1
        if self._in_place and in_order:
            return
        start = past if self._in_place else 0
        for block, made in zip(self._blocks, self._blocks if self._in_place else self._made, strict=True):
            rows = made[:, slot, :, start:]
            # Not take(), which would copy the whole cache first to make it contiguous.
            block[:, slot, :, past : past + count] = rows[:, :, :count] if in_order else rows[:, :, list(nodes)]

    def inputs(self, tokens: int, rows: int = 0, drafts: int = 0) -> dict[str, Array]:
        """See :class:`~specexport.runtime.backend.Graph`."""
        return self._at(tokens, rows, drafts).inputs

    def run(self, tokens: int, rows: int = 0, drafts: int = 0) -> dict[str, Array]:
        """See :class:`~specexport.runtime.backend.Graph`."""
        bound = self._at(tokens, rows, drafts)
        self._session.run_with_iobinding(bound.binding)
        self._made = bound.made
        return bound.outputs

    def _at(self, tokens: int, rows: int, drafts: int) -> _Bound:
        bound = self._bound.get((tokens, rows, drafts))
        if bound is None:
            point = ShapePoint(self._batch, tokens, self._rows, rows, drafts)
            bound = self._bound[tokens, rows, drafts] = self._bind(point)
        return bound

    def _bind(self, point: ShapePoint) -> _Bound:
        if point not in self._points:
            raise BackendError(f"shape point {point} was not built; this is a defect of specexport, please report it")
        binding = self._session.io_binding()
        inputs, outputs = self._buffers(point)
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, self._ort.OrtValue.ortvalue_from_numpy(array))
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, self._ort.OrtValue.ortvalue_from_numpy(array))
        caches = {name: self._ort.OrtValue.ortvalue_from_numpy(array) for name, array in self._caches.items()}
        for name, value in caches.items():
            binding.bind_ortvalue_input(name, value)
        if self._in_place:
            for name, value in caches.items():
                binding.bind_ortvalue_output(name.replace("past_", "present_", 1), value)
            return _Bound(binding, inputs, outputs, [])
        blocks, parts = self._rows_of_layers(point.fed)
        for name, array in parts.items():
            value = self._ort.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_output(name.replace("past_", "new_", 1), value)
        return _Bound(binding, inputs, outputs, blocks)


class _Bound:
    """The buffers of one shape point and their binding; those of new rows are blocks ``[L,B,Hkv,F,D]``."""

    def __init__(self, binding: Any, inputs: dict[str, Array], outputs: dict[str, Array], made: list[Array]) -> None:
        self.binding = binding
        self.inputs = inputs
        self.outputs = outputs
        self.made = made
