"""What runs a bundle's graphs on a device: onnxruntime's sessions, or the engines of TensorRT and TensorRT-RTX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from specexport.contract.engines import CompiledEngine, EngineRuntime, ProgramGraph
from specexport.contract.errors import BackendError
from specexport.contract.model import Model
from specexport.contract.program import program_points, program_sizes
from specexport.contract.shapes import uncached_points
from specexport.runtime.bundle import Bundle
from specexport.runtime.cuda.api import Cuda
from specexport.runtime.cuda.executor import Executor
from specexport.runtime.cuda.memory import MemoryBudget
from specexport.runtime.cuda.ort import SessionExecutor, Sessions, StaticGraph
from specexport.runtime.cuda.stream import CudaStream
from specexport.runtime.cuda.trt import EngineExecutor, choose, import_tensorrt


class GraphLibrary(Protocol):
    """A library on a device, with a bundle to run; ``name`` is the backend's."""

    @property
    def name(self) -> str: ...

    @property
    def batch_sizes(self) -> Sequence[int]:
        """How many slots it can run at once, ascending."""

    def model(self, model: Model) -> Executor:
        """What runs a model's graph.

        Raises:
            BackendError: it is refused, or there is none for this device.
        """

    def program(self, slots: int) -> list[tuple[ProgramGraph, Executor]]:
        """What runs the graphs of the step program for so many slots; nothing where steps are driven from the host."""

    @property
    def without_program(self) -> str:
        """Why there is none, where the host drives steps."""


class OnnxRuntimeLibrary:
    """A bundle's graphs in onnxruntime: the static ones of its models, and those of the step program.

    The latter are opened once for each size of tree, their dimensions fixed as they are. Runs cannot be recorded into a
    graph of ours, as onnxruntime captures by itself: a step is several of its graphs, given to the stream together.
    """

    name = "onnxruntime-cuda"

    def __init__(self, bundle: Bundle, cuda: Cuda, stream: CudaStream, budget: MemoryBudget) -> None:
        self._bundle = bundle
        self._sessions = Sessions(cuda, stream, budget)
        self.batch_sizes = bundle.manifest.batch_sizes
        self.without_program = ""

    def model(self, model: Model) -> SessionExecutor:
        graphs = {graph.point: StaticGraph(self._bundle.file(graph.file)) for graph in model.graph.points}
        if not model.cache:
            graphs = {point: graphs[point] for point in uncached_points(graphs)}
        return SessionExecutor(self._sessions, graphs, np.dtype(np.float32))

    def program(self, slots: int) -> list[tuple[ProgramGraph, Executor]]:
        """See :class:`GraphLibrary`; bundles built for the CPU have none, nor is one that needs the CPU taken."""
        manifest = self._bundle.manifest
        if manifest.methods and not manifest.program:
            self.without_program = (
                f"the bundle was built for {manifest.backend}, so the host decides what is accepted; build it with "
                f"--backend {self.name} to decide on the device"
            )
            return []
        rows = max(graph.point.cache for graph in manifest.target.graph.points)
        executors = []
        for graph in manifest.program:
            file, vocab = self._bundle.file(graph.file), manifest.target.vocab_size
            points = program_points(graph, manifest, slots, rows)
            graphs = {point: StaticGraph(file, program_sizes(point, vocab)) for point in points}
            executors.append(SessionExecutor(self._sessions, graphs, np.dtype(np.float32)))
        try:
            for executor in executors:
                executor.open()
        except BackendError as error:
            for executor in executors:
                executor.close()
            self.without_program = f"the host decides what is accepted: {error}"
            return []
        return list(zip(manifest.program, executors, strict=True))


class EngineLibrary:
    """The engines of a bundle in TensorRT or TensorRT-RTX."""

    def __init__(
        self, bundle: Bundle, cuda: Cuda, stream: CudaStream, budget: MemoryBudget, runtime: EngineRuntime
    ) -> None:
        self._bundle = bundle
        self._device = cuda.device
        self._stream = stream
        self._budget = budget
        self._runtime = runtime
        self.name: str = runtime
        self.without_program = ""

    @property
    def batch_sizes(self) -> list[int]:
        """See :class:`GraphLibrary`; those that steps of the target were compiled for."""
        engines = choose(self._bundle.manifest.target.engines, self._runtime, self._device)
        return sorted({p.batch for engine in engines for p in engine.profiles if p.rows == p.tokens})

    def model(self, model: Model) -> EngineExecutor:
        return self._executor(choose(model.engines, self._runtime, self._device))

    def program(self, slots: int) -> list[tuple[ProgramGraph, Executor]]:
        """See :class:`GraphLibrary`; bundles that only decode plainly have none, older ones none for this device."""
        try:
            return [
                (graph, self._executor(choose(graph.engines, self._runtime, self._device)))
                for graph in self._bundle.manifest.program
                if graph.engines
            ]
        except BackendError as error:
            self.without_program = str(error)
            return []

    def _executor(self, engines: Sequence[CompiledEngine]) -> EngineExecutor:
        trt: Any = import_tensorrt(self._runtime)
        size = sum(self._bundle.file(engine.file).stat().st_size for engine in engines)
        self._budget.require(size, "loading its engines")
        return EngineExecutor(trt, self._stream, self._bundle.folder, engines)
