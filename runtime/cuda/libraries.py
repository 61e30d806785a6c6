"""What runs a bundle's graphs on a device: onnxruntime's sessions, or the engines of TensorRT and TensorRT-RTX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from specexport.contract.engines import Engine, EngineRuntime, ProgramGraph
from specexport.contract.errors import BackendError
from specexport.contract.model import Model
from specexport.runtime.bundle import Bundle
from specexport.runtime.cuda.api import Cuda
from specexport.runtime.cuda.executor import Executor
from specexport.runtime.cuda.memory import Budget
from specexport.runtime.cuda.ort import SessionExecutor, Sessions
from specexport.runtime.cuda.stream import Stream
from specexport.runtime.cuda.trt import EngineExecutor, choose, import_tensorrt


class Library(Protocol):
    """A library on a device, with a bundle to run."""

    @property
    def name(self) -> str:
        """Its name as a backend."""

    @property
    def batches(self) -> bool:
        """Whether it can run several slots at once."""

    def model(self, model: Model) -> Executor:
        """What runs a model's graph.

        Raises:
            BackendError: it is refused, or there is none for this device.
        """

    def program(self) -> list[tuple[ProgramGraph, Executor]]:
        """What runs the graphs of the step program; nothing where steps are driven from the host."""

    @property
    def without_program(self) -> str:
        """Why steps are driven from the host where there is no step program."""


class OnnxRuntimeLibrary:
    """The static graphs of a bundle's models in onnxruntime.

    Its runs cannot be recorded into a graph of ours, as it captures by itself, so there is no step to be captured.

    Args:
        bundle: the bundle.
        cuda: the device.
        stream: does the work.
        budget: what may be used of the device.
    """

    name = "onnxruntime-cuda"
    batches = True
    without_program = "onnxruntime captures its own runs, and what it captured cannot be part of a larger graph"

    def __init__(self, bundle: Bundle, cuda: Cuda, stream: Stream, budget: Budget) -> None:
        self._bundle = bundle
        self._sessions = Sessions(cuda, stream, budget)

    def model(self, model: Model) -> SessionExecutor:
        """See :class:`Library`."""
        files = {graph.point: self._bundle.file(graph.file) for graph in model.graph.points}
        return SessionExecutor(self._sessions, files, np.dtype(np.float32))

    def program(self) -> list[tuple[ProgramGraph, Executor]]:
        """See :class:`Library`."""
        return []


class EngineLibrary:
    """The engines of a bundle in TensorRT or TensorRT-RTX.

    Args:
        bundle: the bundle.
        cuda: the device.
        stream: does the work.
        budget: what may be used of the device.
        runtime: the library.
    """

    batches = False

    def __init__(self, bundle: Bundle, cuda: Cuda, stream: Stream, budget: Budget, runtime: EngineRuntime) -> None:
        self._bundle = bundle
        self._device = cuda.device
        self._stream = stream
        self._budget = budget
        self._runtime = runtime
        self.name: str = runtime
        self.without_program = ""

    def model(self, model: Model) -> EngineExecutor:
        """See :class:`Library`."""
        return self._executor(choose(model.engines, self._runtime, self._device))

    def program(self) -> list[tuple[ProgramGraph, Executor]]:
        """See :class:`Library`; bundles that only decode plainly have none, older ones none for this device."""
        try:
            return [
                (graph, self._executor(choose(graph.engines, self._runtime, self._device)))
                for graph in self._bundle.manifest.program
                if graph.engines
            ]
        except BackendError as error:
            self.without_program = str(error)
            return []

    def _executor(self, engines: Sequence[Engine]) -> EngineExecutor:
        trt: Any = import_tensorrt(
            self._runtime, version_compatible=all(engine.version_compatible for engine in engines)
        )
        size = sum(self._bundle.file(engine.file).stat().st_size for engine in engines)
        self._budget.require(size, "loading its engines")
        return EngineExecutor(trt, self._stream, self._bundle.folder, engines)
