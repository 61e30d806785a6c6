"""Engines of TensorRT and TensorRT-RTX, which share one Python interface under two names."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specexport.contract.engines import CompiledEngine, EngineRuntime, ProgramGraph
from specexport.contract.errors import BackendError
from specexport.contract.model import Model
from specexport.contract.shapes import ShapePoint
from specexport.runtime.cuda.executor import CACHE_TYPES, Enqueue
from specexport.runtime.cuda.library import Library
from specexport.runtime.cuda.memory import Region, Tensor
from specexport.runtime.cuda.stream import CudaStream


def import_tensorrt(runtime: EngineRuntime) -> Any:
    """The module that runs engines of a library.

    Raises:
        BackendError: there is none; names the extra.
    """
    try:
        return importlib.import_module(runtime.replace("-", "_"))
    except ImportError as error:
        raise BackendError(
            f"{runtime} is not installed ({error}), and this bundle is to run on it; install it with: "
            f"pip install 'specexport[{runtime}]'"
        ) from error


def check_version(engine: CompiledEngine, installed: str) -> None:
    """Checks that an engine can be read by the installed library.

    Raises:
        BackendError: it was made by another release.
    """
    if engine.version != installed:
        raise BackendError(
            f"{engine.file}: compiled by {engine.runtime} {engine.version}, and {installed} is installed, which reads "
            f"only its own engines; install {engine.runtime} {engine.version}, or compile again: specexport compile "
            f"BUNDLE --backend {engine.runtime}"
        )


def load_engine(trt: Any, runtime: Any, folder: Path, engine: CompiledEngine) -> Any:
    """Reads an engine.

    Raises:
        BackendError: the library cannot read it.
    """
    loaded = runtime.deserialize_cuda_engine((folder / engine.file).read_bytes())
    if loaded is None:
        raise BackendError(
            f"{engine.file}: {engine.runtime} {trt.__version__} cannot load the engine (its own message is above); "
            "compile it on this machine with: specexport compile BUNDLE"
        )
    return loaded


class EngineExecutor:
    """Runs a model's engines, an execution context a shape point; see
    :class:`~specexport.runtime.cuda.executor.Executor`.

    Contexts share one piece of scratch memory, as one of them runs at a time.

    Raises:
        BackendError: an engine cannot be loaded.
    """

    def __init__(self, trt: Any, stream: CudaStream, folder: Path, engines: Sequence[CompiledEngine]) -> None:
        self._trt = trt
        self._stream = stream
        self._logger = trt.Logger(trt.Logger.ERROR)
        self._runtime = trt.Runtime(self._logger)
        # Where a shape point runs: a loaded engine, which of its optimization profiles, and its file.
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
        context = engine.create_execution_context(self._trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise BackendError(f"{file}: no execution context could be made for {point}; see the message above")
        context.set_device_memory(workspace.address, workspace.nbytes)
        if not context.set_optimization_profile_async(profile, stream):
            raise BackendError(f"{file}: there is no optimization profile {profile} for {point}")
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        for name in sorted(names, key=lambda name: engine.get_tensor_mode(name) != self._trt.TensorIOMode.INPUT):
            if name not in tensors:
                raise BackendError(f"{file}: the engine has a tensor {name!r}, which no graph of a bundle has")
            self._bind(engine, context, file, name, tensors[name])
        self._contexts.append(context)

        def enqueue() -> None:
            if not context.execute_async_v3(stream):
                raise BackendError(f"{file}: the engine did not run at {point}; see the message above")

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
        self._contexts.clear()
        self._profiles.clear()


class EngineLibrary(Library):
    """The engines of a bundle in TensorRT or TensorRT-RTX."""

    def _open(self, graph: Model | ProgramGraph, engines: Sequence[CompiledEngine]) -> EngineExecutor:
        trt = import_tensorrt(self.name)
        size = sum(self._bundle.file(engine.file).stat().st_size for engine in engines)
        self._device.budget.require(size, "loading its engines")
        return EngineExecutor(trt, self._device.stream, self._bundle.folder, engines)
