"""The GPU backends: a device, its stream and what may be used of it, shared by all graphs of a bundle."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from specexport.contract.engines import Engine, EngineRuntime
from specexport.contract.errors import BackendError
from specexport.contract.model import Model
from specexport.runtime.backend import Buffers
from specexport.runtime.bundle import Bundle
from specexport.runtime.cuda.api import Cuda
from specexport.runtime.cuda.executor import Execution, Executor
from specexport.runtime.cuda.graph import DeviceGraph
from specexport.runtime.cuda.memory import Budget
from specexport.runtime.cuda.ort import SessionExecutor, Sessions
from specexport.runtime.cuda.stream import Stream
from specexport.runtime.cuda.trt import EngineExecutor, choose, import_tensorrt

_WORST_FIRST: tuple[Execution, ...] = ("plain", "graph per engine", "graph per step")


class CudaBackend:
    """Runs a bundle on a GPU; see :class:`~specexport.runtime.backend.Backend`.

    Attributes:
        batches: whether it runs several slots at once; it does not.
        cuda: the device.
        stream: does its work.
        graphs: those opened, the target's first.

    Args:
        bundle: what it runs.
        cuda: the device.
        utilization: the part of its memory that may be used.
        executors: makes what runs a model's graph.
    """

    batches = False

    def __init__(
        self, bundle: Bundle, cuda: Cuda, utilization: float, executors: Callable[[Stream, Budget], Executors]
    ) -> None:
        self._bundle = bundle
        self.cuda = cuda
        self._budget = Budget(cuda, utilization)
        self.stream = Stream(cuda)
        self._executor = executors(self.stream, self._budget)
        self.graphs: list[DeviceGraph] = []

    @classmethod
    def load(cls, bundle: Bundle, runtime: Runtime, utilization: float) -> CudaBackend:
        """Opens the first GPU that CUDA shows.

        Args:
            bundle: what is to run.
            runtime: the library that runs it.
            utilization: the part of the device's memory that may be used.

        Raises:
            BackendError: a package, a driver or a device is missing.
        """
        cuda = Cuda.load()
        if runtime == "onnxruntime-cuda":
            return cls(bundle, cuda, utilization, functools.partial(onnxruntime_executors, bundle, cuda))
        return cls(bundle, cuda, utilization, functools.partial(tensorrt_executors, bundle, cuda, runtime))

    @property
    def execution(self) -> Execution:
        """The least of what its graphs manage."""
        return min((graph.execution for graph in self.graphs), key=_WORST_FIRST.index, default="plain")

    @property
    def fallback(self) -> str:
        """See :class:`~specexport.runtime.backend.Backend`."""
        return next((graph.fallback for graph in self.graphs if graph.fallback), "")

    def open(self, model: Model, slots: int, buffers: Buffers) -> DeviceGraph:
        """See :class:`~specexport.runtime.backend.Backend`.

        Raises:
            BackendError: more than one slot is asked for, the graph is refused, or it does not fit.
        """
        if not model.cache:
            raise BackendError(
                "GPU backends run no MLP speculators; use the onnxruntime backend, or a bundle without one"
            )
        if slots != 1:
            raise BackendError(f"{slots} requests at once were asked for; GPU backends run one, pass max_batch_size=1")
        manifest = self._bundle.manifest
        role = next(role for role, known in manifest.models.items() if known is model)
        executor = self._executor(model)
        try:
            graph = DeviceGraph(self.cuda, self.stream, self._budget, model, manifest.lowering, buffers, executor, role)
        except BaseException:
            executor.close()
            raise
        self.graphs.append(graph)
        return graph

    def close(self) -> None:
        """See :class:`~specexport.runtime.backend.Backend`."""
        for graph in self.graphs:
            graph.close()
        self.graphs.clear()
        self.stream.close()


Executors = Callable[[Model], Executor]
Runtime = Literal["onnxruntime-cuda", "tensorrt", "tensorrt-rtx"]


def onnxruntime_executors(bundle: Bundle, cuda: Cuda, stream: Stream, budget: Budget) -> Executors:
    """What runs the static graphs of a bundle's models in onnxruntime."""
    sessions = Sessions(cuda, stream, budget)

    def make(model: Model) -> SessionExecutor:
        files = {graph.point: bundle.file(graph.file) for graph in model.graph.points}
        return SessionExecutor(sessions, files, np.dtype(np.float32))

    return make


def tensorrt_executors(bundle: Bundle, cuda: Cuda, runtime: EngineRuntime, stream: Stream, budget: Budget) -> Executors:
    """What runs the engines of a bundle's models in TensorRT or TensorRT-RTX."""

    def make(model: Model) -> EngineExecutor:
        engines = choose(model.engines, runtime, cuda.device)
        _require_drafts(model, engines)
        trt = import_tensorrt(runtime, version_compatible=all(engine.version_compatible for engine in engines))
        budget.require(sum(bundle.file(engine.file).stat().st_size for engine in engines), "loading its engines")
        return EngineExecutor(trt, stream, bundle.folder, engines)

    return make


def _require_drafts(model: Model, engines: Sequence[Engine]) -> None:
    """Checks that a draft's engines draft as many tokens a call as the bundle's trees ask for.

    Raises:
        BackendError: they do not; says what runs the bundle instead.
    """
    wanted = max(graph.point.drafts for graph in model.graph.points)
    most = max(profile.drafts for engine in engines for profile in engine.profiles)
    if most < wanted:
        raise BackendError(
            f"{engines[0].file}: the engine drafts {most} token a call, and {wanted} are wanted; calling it again for "
            "each is not there yet. Run the bundle with --backend onnxruntime-cuda, or build one without a draft model"
        )
