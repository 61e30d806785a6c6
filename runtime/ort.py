"""The onnxruntime backend: one session a model over its symbolic master, buffers bound once a shape point."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specexport.contract import tensors
from specexport.contract.errors import BackendError
from specexport.contract.manifest import Model
from specexport.contract.shapes import ShapePoint
from specexport.runtime.backend import Array, Buffers

MINIMUM = (1, 28)
"""Earlier releases compute TensorScatter and Attention with fully masked rows wrongly."""


def _import_onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendError(
            "onnxruntime is not installed, and this bundle runs on it; install it with: pip install 'specexport[cpu]' "
            "(Python 3.11 or newer: its wheels for 3.10 are too old)"
        ) from error
    found = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
    if found < MINIMUM:
        raise BackendError(
            f"onnxruntime {onnxruntime.__version__} is too old; expected {MINIMUM[0]}.{MINIMUM[1]} or newer: earlier "
            "ones compute attention with masks wrongly. Upgrade with: pip install -U 'specexport[cpu]'"
        )
    return onnxruntime


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def open_session(path: Path, threads: int) -> Any:
    """An ``onnxruntime.InferenceSession`` over a master graph on the CPU, with the options the engine runs it with.

    Raises:
        BackendError: onnxruntime is missing, too old, or refuses the graph.
    """
    onnxruntime = _import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Threads of one model must not spin while the other model runs.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Quantized weights are multiplied as integers.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "4")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no public base
        raise BackendError(f"{path}: onnxruntime refused the graph: {error}") from error


class OnnxRuntimeGraph:
    """A graph in an onnxruntime session on the CPU.

    The session runs the symbolic master, so weights are held once; only the manifest's shape points are ever run. A
    point's input, output and cache buffers are bound once, the caches as input and output alike, which is what makes
    TensorScatter write in place.

    Args:
        path: the master.
        model: its description.
        batch: slots.
        buffers: makes the input and output arrays of a shape point.
        threads: intra-op threads.

    Raises:
        BackendError: onnxruntime is missing, too old, or refuses the graph.
    """

    def __init__(self, path: Path, model: Model, batch: int, buffers: Buffers, threads: int) -> None:
        self._ort = _import_onnxruntime()
        self._session = open_session(path, threads)
        self._model = model
        self._batch = batch
        self._buffers = buffers
        points = [graph.point for graph in model.graph.points if graph.point.batch == batch]
        self._cache_sizes = sorted({point.cache for point in points})
        self._points = set(points)
        self._rows = 0
        self._blocks: list[Array] = []
        self._caches: dict[str, Array] = {}
        self._bound: dict[tuple[int, int, int], _Bound] = {}
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
        # Caches of one shape lie in one block, so that a commit is one copy over all their layers.
        names: dict[tuple[int, int], list[str]] = {}
        for layer, shape in enumerate(self._model.cache):
            names.setdefault((shape.heads, shape.key_size), []).append(tensors.past_key(layer))
            names.setdefault((shape.heads, shape.value_size), []).append(tensors.past_value(layer))
        blocks, caches = [], {}
        for (heads, width), members in names.items():
            block = np.zeros((len(members), self._batch, heads, size, width), np.float32)
            blocks.append(block)
            for name, cache in zip(members, block, strict=True):
                caches[name] = cache
                if name in self._caches:
                    cache[:, :, : self._rows] = self._caches[name]
        self._blocks, self._caches, self._rows = blocks, caches, size
        self._bound.clear()

    def commit(self, slot: int, past: int, path: Sequence[int]) -> None:
        """See :class:`~specexport.runtime.backend.Graph`."""
        rows = past + np.asarray(path, np.int64)
        for block in self._blocks:
            block[:, slot, :, past + 1 : past + 1 + len(rows)] = block[:, slot, :, rows].transpose(1, 2, 0, 3)

    def inputs(self, tokens: int, rows: int = 0, drafts: int = 0) -> dict[str, Array]:
        """See :class:`~specexport.runtime.backend.Graph`."""
        return self._at(tokens, rows, drafts).inputs

    def run(self, tokens: int, rows: int = 0, drafts: int = 0) -> dict[str, Array]:
        """See :class:`~specexport.runtime.backend.Graph`."""
        bound = self._at(tokens, rows, drafts)
        self._session.run_with_iobinding(bound.binding)
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
        for name, array in self._caches.items():
            value = self._ort.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("past_", "present_", 1), value)
        return _Bound(binding, inputs, outputs)


class _Bound:
    """The buffers of one shape point and their binding."""

    def __init__(self, binding: Any, inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
        self.binding = binding
        self.inputs = inputs
        self.outputs = outputs
