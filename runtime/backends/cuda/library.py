"""The interface of libraries that run a bundle's engines on a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from specexport.contract.engines import CompiledEngine, EngineRuntime, ProgramGraph
from specexport.contract.errors import BackendError
from specexport.contract.model import Model
from specexport.runtime.backends.cuda.api import CudaDevice
from specexport.runtime.backends.cuda.executor import Executor
from specexport.runtime.backends.cuda.memory import Device
from specexport.runtime.backends.cuda.nccl import Communicator
from specexport.runtime.bundle import Bundle


def choose(engines: Sequence[CompiledEngine], runtime: EngineRuntime, device: CudaDevice) -> list[CompiledEngine]:
    """The engines of a graph that run on a device.

    Raises:
        BackendError: there are none; lists the engines that exist and says what to do.
    """
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
        name: the library's name.
        without_program: why the host drives steps, if it does.
    """

    def __init__(self, bundle: Bundle, device: Device, name: EngineRuntime) -> None:
        self._bundle = bundle
        self._device = device
        self.name: EngineRuntime = name
        self.without_program = ""

    @property
    def batch_sizes(self) -> list[int]:
        """Batch sizes that the target's steps were compiled for, ascending."""
        engines = choose(self._bundle.manifest.target.of_rank(0).engines, self.name, self._device.cuda.device)
        return sorted({p.batch for engine in engines for p in engine.profiles if p.rows == p.tokens})

    def model(self, model: Model) -> Executor:
        """Opens a model's graph.

        Raises:
            BackendError: there are no engines for this device, or they cannot be loaded.
        """
        return self._open(model, choose(model.engines, self.name, self._device.cuda.device))

    def rank(self, model: Model, rank: int, communicator: Communicator) -> Executor:
        """Opens a rank's part of a split model; see :meth:`model`."""
        part = model.of_rank(rank)
        return self._open(part, choose(part.engines, self.name, self._device.cuda.device), communicator)

    def program(self) -> list[tuple[ProgramGraph, Executor]]:
        """Opens the graphs of the step program; bundles for plain decoding have none."""
        if self._bundle.manifest.target.ranks:
            self.without_program = "the host takes the steps, as GPUs share the target"
        opened: list[tuple[ProgramGraph, Executor]] = []
        try:
            for graph in self._bundle.manifest.program:
                if graph.engines:
                    chosen = choose(graph.engines, self.name, self._device.cuda.device)
                    opened.append((graph, self._open(graph, chosen)))
        except BackendError as error:
            for _, executor in opened:
                executor.close()
            self.without_program = f"the host decides what is accepted: {error}"
            return []
        return opened

    @abstractmethod
    def _open(
        self,
        graph: Model | ProgramGraph,
        engines: Sequence[CompiledEngine],
        communicator: Communicator | None = None,
    ) -> Executor:
        """Opens engines of a graph; the ranks of a split model combine their parts through the communicator.

        Raises:
            BackendError: the library is missing or cannot load them.
        """
