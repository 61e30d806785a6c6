"""The interface that onnxruntime and TensorRT implement: a library of engines, and an executor for each graph.

Only one thread calls them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from specexport.contract.engines import CompiledEngine, ComputedIn, EngineRuntime, ProgramGraph
from specexport.contract.errors import BackendError
from specexport.contract.model import Model
from specexport.contract.shapes import ShapePoint
from specexport.runtime.backends.cuda.api import CudaDevice
from specexport.runtime.backends.cuda.memory import Device, Region, Tensor
from specexport.runtime.backends.cuda.nccl import Communicator
from specexport.runtime.bundle import Bundle

Execution = Literal["host", "plain", "graph per engine", "graph per step"]
"""The way in which work reaches a device, if there is one: by calls, or by a captured graph an engine or a step; the
slowest first."""
CACHE_TYPES: dict[ComputedIn, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),  # only the size matters here
}
"""The element type of the KV cache."""
Enqueue = Callable[[], None]
"""Enqueues a run of a graph on the stream, with the addresses that it was prepared for."""


class Executor(Protocol):
    """Runs a compiled graph at its shape points, in the caller's memory.

    Attributes:
        points: the shapes it runs at.
        cache_dtype: the element type of the KV cache; two-byte integers if NumPy lacks the type.
        workspace: bytes of scratch memory that it needs; 0 if its library allocates it.
    """

    points: frozenset[ShapePoint]
    cache_dtype: np.dtype[Any]
    workspace: int

    def prepare(self, point: ShapePoint, tensors: Mapping[str, Tensor], workspace: Region) -> Enqueue:
        """Prepares runs at a shape point.

        ``tensors`` are all inputs and outputs, whose addresses must not change; ``workspace`` is scratch memory of at
        least :attr:`workspace` bytes, which all points share.
        """

    def close(self) -> None:
        """Frees what the library holds."""


def choose(engines: Sequence[CompiledEngine], runtime: EngineRuntime, device: CudaDevice) -> list[CompiledEngine]:
    """The engines of a graph that run on a device."""
    candidates = [engine for engine in engines if engine.runtime == runtime]
    if not candidates:
        raise BackendError(
            f"the bundle holds no engines for {runtime}; compile it with: specexport compile BUNDLE --backend {runtime}"
        )
    running = [engine for engine in candidates if engine.runs_on(device.capability)]
    if not running:
        built = sorted({text for engine in candidates for text in engine.compute_capabilities})
        raise BackendError(
            f"the bundle's {runtime} engines were compiled for compute capability {', '.join(built)}, and this GPU is "
            f"{device}; compile it here with: specexport compile BUNDLE --backend {runtime}, or build it with "
            "--compute-capability {}{}".format(*device.capability)
        )
    return running


class Library(ABC):
    """Opens a bundle's engines on a device.

    Attributes:
        without_program: why the host drives steps; empty if it does not.
    """

    def __init__(self, bundle: Bundle, device: Device, name: EngineRuntime) -> None:
        self._bundle = bundle
        self._device = device
        self.name: EngineRuntime = name
        self.without_program = ""

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes that the target's steps were compiled for, ascending."""
        engines = choose(self._bundle.manifest.target.of_rank(0).engines, self.name, self._device.cuda.device)
        return sorted({p.batch for engine in engines for p in engine.profiles if p.rows == p.tokens})

    def open(self, graph: Model | ProgramGraph, communicator: Communicator | None = None) -> Executor:
        """Opens a graph; ranks of a split model combine their parts through the communicator."""
        return self._open(graph, choose(graph.engines, self.name, self._device.cuda.device), communicator)

    def program(self) -> dict[ProgramGraph, Executor]:
        """Opens the graphs of the step program, of which bundles for plain decoding have none."""
        if self._bundle.manifest.target.ranks:
            self.without_program = "the host takes the steps, as GPUs share the target"
        opened: dict[ProgramGraph, Executor] = {}
        try:
            for graph in self._bundle.manifest.program:
                if graph.engines:
                    opened[graph] = self.open(graph)
        except BackendError as error:
            for executor in opened.values():
                executor.close()
            self.without_program = f"the host decides what is accepted: {error}"
            return {}
        return opened

    @abstractmethod
    def _open(
        self, graph: Model | ProgramGraph, engines: Sequence[CompiledEngine], communicator: Communicator | None
    ) -> Executor:
        """Opens these engines of a graph; see :meth:`open`."""
