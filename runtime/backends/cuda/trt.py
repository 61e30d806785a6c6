"""Engines of TensorRT and TensorRT-RTX, which have the same Python interface."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from specexport.contract.engines import CompiledEngine, EngineRuntime, ProgramGraph
from specexport.contract.errors import BackendError
from specexport.contract.model import Model
from specexport.contract.shapes import ShapePoint
from specexport.runtime.backends.cuda.api import CudaStream
from specexport.runtime.backends.cuda.library import CACHE_TYPES, Enqueue, Library
from specexport.runtime.backends.cuda.memory import Device, Region, Tensor
from specexport.runtime.backends.cuda.nccl import Communicator
from specexport.runtime.bundle import Bundle
from specexport.runtime.machine import MachineRecord

_MAX_KERNELS = 1 << 28
"""Most bytes of a file of compiled kernels."""


def import_tensorrt(runtime: EngineRuntime) -> Any:
    """Imports the module that runs a library's engines."""
    try:
        return importlib.import_module(runtime.replace("-", "_"))
    except ImportError as error:
        raise BackendError(
            f"{runtime} is not installed ({error}), and this bundle is to run on it; install it with: "
            f"pip install 'specexport[{runtime}]'"
        ) from error


def check_version(engine: CompiledEngine, installed: str) -> None:
    """Checks that the installed library can read an engine."""
    if engine.version != installed:
        raise BackendError(
            f"{engine.file}: compiled by {engine.runtime} {engine.version}, and {installed} is installed, which reads "
            f"only its own engines; install {engine.runtime} {engine.version}, or compile again: specexport compile "
            f"BUNDLE --backend {engine.runtime}"
        )


def load_engine(trt: Any, runtime: Any, folder: Path, engine: CompiledEngine) -> Any:
    """Reads an engine."""
    loaded = runtime.deserialize_cuda_engine((folder / engine.file).read_bytes())
    if loaded is None:
        raise BackendError(
            f"{engine.file}: {engine.runtime} {trt.__version__} cannot load the engine (its own message is above); "
            "compile it on this machine with: specexport compile BUNDLE"
        )
    return loaded


class _Kernels(msgspec.Struct):
    """Kernels in TensorRT-RTX's format, with their SHA-256, so that damaged ones are never used."""

    sha256: str
    data: bytes


class CompiledKernels:
    """The kernels that TensorRT-RTX compiles on the device, in one cache for all execution contexts of a bundle.

    They are stored in the cache folder, by the bundle's files, the device and the version. Execution contexts must be
    freed before this object.
    """

    def __init__(self, bundle: Bundle, device: Device) -> None:
        self._bundle = bundle
        self._device = str(device.cuda.device)
        self._cache: Any = None
        self._record: MachineRecord[_Kernels]
        self._saved = ""

    def settings(self, trt: Any, engine: Any) -> Any:
        """The settings of an engine's execution contexts.

        By default kernels for known shapes are compiled in the background while generic kernels run, which a graph that
        is captured meanwhile would launch for ever. So they are compiled within the first run.
        """
        settings = engine.create_runtime_config()
        settings.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        settings.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        settings.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED  # whole steps are captured here
        if self._cache is None:
            self._cache = settings.create_runtime_cache()
            about = (self._bundle.files_hash, self._device, str(trt.__version__))
            self._record = MachineRecord("kernels", about, _Kernels, _MAX_KERNELS)
            stored = self._record.load()
            # The library itself refuses kernels of another driver or device.
            if stored and _digest(stored.data) == stored.sha256 and self._cache.deserialize(stored.data):
                self._saved = stored.sha256
        settings.set_runtime_cache(self._cache)
        return settings

    def save(self) -> None:
        """Stores the compiled kernels if any are new."""
        written = self._cache.serialize() if self._cache is not None else None
        if written is not None:
            data = bytes(written)
            if (digest := _digest(data)) != self._saved:
                self._record.save(_Kernels(digest, data))
                self._saved = digest


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class EngineExecutor:
    """Runs a model's engines, with an execution context for each shape point.

    See :class:`~specexport.runtime.backends.cuda.library.Executor`. Contexts share a block of scratch memory, as only
    one runs at a time. ``kernels`` is None for TensorRT, which compiles nothing on the device. The ranks of a split
    target create their contexts in the same order and combine their parts through the communicator.
    """

    def __init__(
        self,
        trt: Any,
        stream: CudaStream,
        folder: Path,
        engines: Sequence[CompiledEngine],
        kernels: CompiledKernels | None,
        communicator: Communicator | None,
    ) -> None:
        self._trt = trt
        self._stream = stream
        self._kernels = kernels
        self._communicator = communicator
        self._logger = trt.Logger(trt.Logger.ERROR)
        self._runtime = trt.Runtime(self._logger)
        # For each shape point: a loaded engine, the index of its optimization profile, and its file.
        self._profiles: dict[ShapePoint, tuple[Any, int, str]] = {}
        self._contexts: list[Any] = []
        self.workspace = 0
        for engine in engines:
            check_version(engine, str(trt.__version__))
            loaded = load_engine(trt, self._runtime, folder, engine)
            for index, point in enumerate(engine.profiles):
                self._profiles.setdefault(point, (loaded, index, engine.file))
                self.workspace = max(self.workspace, int(loaded.get_device_memory_size_for_profile_v2(index)))
        self.points = frozenset(self._profiles)
        self.cache_dtype = CACHE_TYPES[engines[0].compute]

    def prepare(self, point: ShapePoint, tensors: Mapping[str, Tensor], workspace: Region) -> Enqueue:
        engine, profile, file = self._profiles[point]
        stream = self._stream.handle
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        settings = strategy if self._kernels is None else self._kernels.settings(self._trt, engine)
        context = engine.create_execution_context(settings)
        if context is None:
            raise BackendError(f"{file}: no execution context could be created for {point}; see the message above")
        if self._communicator is not None and not context.set_communicator(self._communicator.capsule):
            raise BackendError(f"{file}: the engine refused the NCCL communicator; see the message above")
        context.set_device_memory(workspace.address, workspace.nbytes)
        if not context.set_optimization_profile_async(profile, stream):
            raise BackendError(f"{file}: there is no optimization profile {profile} for {point}")
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        for name in sorted(names, key=lambda name: engine.get_tensor_mode(name) != self._trt.TensorIOMode.INPUT):
            if name not in tensors:
                raise BackendError(f"{file}: the engine has a tensor {name!r}, which no graph of a bundle has")
            self._bind(engine, context, file, name, tensors[name])
        self._contexts.append(context)
        capturable = self._kernels is None

        def enqueue() -> None:
            nonlocal capturable
            if self._stream.capturing and not capturable:
                raise BackendError(f"{file}: tensorrt-rtx says that {point} cannot be captured")
            if not context.execute_async_v3(stream):
                raise BackendError(f"{file}: the engine did not run at {point}; see the message above")
            # Known only after a run, which compiles kernels, and before a capture begins.
            capturable = capturable or context.is_stream_capturable(stream)

        return enqueue

    def _bind(self, engine: Any, context: Any, file: str, name: str, tensor: Tensor) -> None:
        is_input = engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT
        if is_input and not context.set_input_shape(name, tensor.shape):
            raise BackendError(f"{file}: the engine does not take {name} of shape {list(tensor.shape)}")
        shape = tuple(context.get_tensor_shape(name))
        if shape != tensor.shape:
            raise BackendError(
                f"{file}: {name} has shape {list(shape)}, expected {list(tensor.shape)}; compile it again"
            )
        size = int(engine.get_tensor_dtype(name).itemsize)
        if size != tensor.dtype.itemsize:
            raise BackendError(
                f"{file}: an element of {name} takes {size} bytes, expected {tensor.dtype.itemsize} ({tensor.dtype}); "
                "compile it again"
            )
        if not context.set_tensor_address(name, tensor.address):
            raise BackendError(f"{file}: the engine refused the memory of {name}")

    def close(self) -> None:
        if self._kernels is not None:
            self._kernels.save()
        self._contexts.clear()
        self._profiles.clear()


class EngineLibrary(Library):
    """The engines of a bundle in TensorRT or TensorRT-RTX."""

    def __init__(self, bundle: Bundle, device: Device, name: EngineRuntime) -> None:
        super().__init__(bundle, device, name)
        self._kernels = CompiledKernels(bundle, device) if name == "tensorrt-rtx" else None

    def _open(
        self, graph: Model | ProgramGraph, engines: Sequence[CompiledEngine], communicator: Communicator | None
    ) -> EngineExecutor:
        trt = import_tensorrt(self.name)
        if self._kernels is not None:
            self._kernels.save()  # of earlier models, so that a killed process loses only the last model's
        size = sum(self._bundle.file(engine.file).stat().st_size for engine in engines)
        self._device.budget.require(size, "loading its engines")
        return EngineExecutor(trt, self._device.stream, self._bundle.folder, engines, self._kernels, communicator)
