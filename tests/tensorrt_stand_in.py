"""TensorRT's runtime interface over real graphs on the CPU, run in the order of a stand-in's stream.

An engine of it is JSON: a symbolic ONNX file, or the segments of a rank's part, and the sizes of its dimensions in each
optimization profile. Its names are those of the real package; a test compares them where that is installed.
"""

from __future__ import annotations

import ctypes
import enum
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from specexport.contract import tensors
from specexport.runtime.backends.cuda import trt
from specexport.runtime.backends.onnxruntime.segments import Segments
from tests import cuda_stand_in
from tests.cuda_stand_in import StandIn

WORKSPACE = 1000
_TYPES = {"tensor(int64)": np.int64, "tensor(float)": np.float32, "tensor(bool)": np.bool_}


class TensorIOMode(enum.Enum):
    INPUT = 1
    OUTPUT = 2


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    USER_MANAGED = 2


class DynamicShapesKernelSpecializationStrategy(enum.Enum):
    LAZY = 0
    EAGER = 1


class CudaGraphStrategy(enum.Enum):
    DISABLED = 0


class TensorRT:
    """The module.

    Attributes:
        folder: of the bundle, which engines' files are relative to.
        cannot_load: makes every engine unreadable.
        contexts: every execution context made.
        capturable: whether contexts say that they can be captured.
        compiled: kernels that contexts ran and their cache did not have.
    """

    __version__ = "1.7.1.116"
    TensorIOMode = TensorIOMode
    ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy
    DynamicShapesKernelSpecializationStrategy = DynamicShapesKernelSpecializationStrategy
    CudaGraphStrategy = CudaGraphStrategy

    class Logger:
        ERROR = 1

        def __init__(self, severity: int) -> None: ...

    def __init__(self, cuda: StandIn, folder: Path) -> None:
        self.cuda, self.folder = cuda, folder
        self.cannot_load = False
        self.contexts: list[ExecutionContext] = []
        self.capturable = True
        self.compiled: list[str] = []

    def Runtime(self, logger: Any) -> Runtime:
        return Runtime(self)


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[TensorRT]:
    """Puts an imaginary GPU, and TensorRT for a bundle's folder, into the machine."""
    with cuda_stand_in.installed(monkeypatch) as cuda:
        module = TensorRT(cuda, folder)
        monkeypatch.setattr(trt, "import_tensorrt", lambda runtime: module)
        yield module


class Runtime:
    def __init__(self, module: TensorRT) -> None:
        self._module = module

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> CudaEngine | None:
        return None if self._module.cannot_load else CudaEngine(self._module, json.loads(serialized_engine))


class CudaEngine:
    def __init__(self, module: TensorRT, described: dict[str, Any]) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self.module = module
        self.file = described["file"]
        names = described.get("segments", [self.file])
        sessions = [onnxruntime.InferenceSession(str(module.folder / name), options) for name in names]
        self.ranks = described.get("ranks", 0)
        self.session = InterleavedSession(sessions, self.ranks) if self.ranks else sessions[0]
        # An engine's loop is unrolled: how many tokens to draft is no input of it.
        inputs = [value for value in self.session.get_inputs() if value.name != tensors.NUM_DRAFT_TOKENS]
        self.loops = len(inputs) < len(self.session.get_inputs())
        outputs = self.session.get_outputs()
        self._modes = {value.name: TensorIOMode.INPUT for value in inputs}
        self._modes |= {value.name: TensorIOMode.OUTPUT for value in outputs}
        self.types = {value.name: np.dtype(_TYPES[value.type]) for value in (*inputs, *outputs)}
        self.shapes = [
            {
                value.name: tuple(size if isinstance(size, int) else sizes[size] for size in value.shape)
                for value in (*inputs, *outputs)
            }
            for sizes in described["profiles"]
        ]
        self.num_io_tensors = len(self._modes)

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return WORKSPACE * (profile_index + 1)

    def get_tensor_name(self, index: int) -> str:
        return list(self._modes)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return self._modes[name]

    def get_tensor_dtype(self, name: str) -> np.dtype[Any]:
        return self.types[name]

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig()

    def create_execution_context(
        self, runtime_config: RuntimeConfig | ExecutionContextAllocationStrategy
    ) -> ExecutionContext:
        """TensorRT has only the overload that takes the strategy."""
        if not isinstance(runtime_config, RuntimeConfig):
            strategy, runtime_config = runtime_config, RuntimeConfig()
            runtime_config.set_execution_context_allocation_strategy(strategy)
        assert runtime_config.strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        context = ExecutionContext(self, runtime_config)
        self.module.contexts.append(context)
        return context


class InterleavedSession:
    """The segments of a rank, and between them the other ranks, as if it were one ``InferenceSession``."""

    def __init__(self, sessions: list[Any], ranks: int) -> None:
        self.whole = Segments(sessions, ranks, "native", lambda *_: None)
        self.get_inputs, self.get_outputs = self.whole.get_inputs, self.whole.get_outputs

    def io_binding(self) -> Bound:
        return Bound()

    def run_with_iobinding(self, bound: Bound) -> None:
        known: dict[str, Any] = {name: array.copy() for name, array in bound.inputs.items()}
        for at, session in enumerate(self.whole.sessions):
            outputs = session.run(self.whole.outputs[at], {name: known[name] for name in self.whole.inputs[at]})
            known.update(zip(self.whole.outputs[at], outputs, strict=True))
            for name in self.whole.outputs[at]:
                if name.startswith(tensors.COLLECTIVES):
                    known[name] = bound.communicator.meet(name, known[name])
        for name, array in bound.outputs.items():
            array[...] = known[name]


class Bound:
    communicator: Any = None

    def __init__(self) -> None:
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}

    def bind_input(self, name: str, device: str, number: int, kind: Any, shape: tuple[int, ...], address: int) -> None:
        self.inputs[name] = self._array(kind, shape, address)

    def bind_output(self, name: str, device: str, number: int, kind: Any, shape: tuple[int, ...], address: int) -> None:
        self.outputs[name] = self._array(kind, shape, address)

    def _array(self, kind: Any, shape: tuple[int, ...], address: int) -> np.ndarray[Any, Any]:
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize
        return np.frombuffer((ctypes.c_char * nbytes).from_address(address), kind).reshape(shape)


class RuntimeCache:
    """Kernels by their names."""

    _HEAD = b"kernels of the stand-in: "

    def __init__(self) -> None:
        self._names: set[str] = set()

    def _add(self, name: str) -> bool:
        """Whether it is new."""
        new = name not in self._names
        self._names.add(name)
        return new

    def serialize(self) -> memoryview:
        return memoryview(self._HEAD + json.dumps(sorted(self._names)).encode())

    def deserialize(self, blob: bytes) -> bool:
        if not blob.startswith(self._HEAD):
            return False
        self._names = set(json.loads(blob.removeprefix(self._HEAD)))
        return True


class RuntimeConfig:
    dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY
    cuda_graph_strategy = CudaGraphStrategy.DISABLED

    def __init__(self) -> None:
        self.strategy = ExecutionContextAllocationStrategy.STATIC
        self.cache: RuntimeCache | None = None

    def set_execution_context_allocation_strategy(self, strategy: ExecutionContextAllocationStrategy) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> RuntimeCache:
        return RuntimeCache()

    def set_runtime_cache(self, cache: RuntimeCache) -> bool:
        self.cache = cache
        return True


class ExecutionContext:
    def __init__(self, engine: CudaEngine, config: RuntimeConfig) -> None:
        self.config = config
        self._engine = engine
        self._cuda = engine.module.cuda
        self._ran = False
        self.memory: tuple[int, int] | None = None
        self.addresses: dict[str, int] = {}
        self.communicator: Any = None
        self._given: set[str] = set()

    def set_communicator(self, communicator: Any) -> bool:
        communicator.barrier()  # the real one waits for all ranks too
        self.communicator = communicator
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        self._cuda.check(memory, size)
        self.memory = memory, size

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert self.memory[1] >= self._engine.get_device_memory_size_for_profile_v2(profile_index)
        self._shapes = self._engine.shapes[profile_index]
        self._kernels = f"{self._engine.file} {profile_index}"
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._given.add(name)
        return self._shapes[name] == shape

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert memory % 256 == 0
        self._cuda.check(memory, self._nbytes(name))
        self.addresses[name] = memory
        return True

    def _nbytes(self, name: str) -> int:
        return int(np.prod(self._shapes[name], dtype=np.int64)) * self._engine.types[name].itemsize

    def is_stream_capturable(self, stream: int) -> bool:
        assert not self._cuda.capturing
        assert self.config.cache is not None, "TensorRT has no such method"
        assert self._ran, "nothing is compiled before the first run"
        return self._engine.module.capturable

    def execute_async_v3(self, stream_handle: int) -> bool:
        if not self._ran and self.config.cache is not None and self.config.cache._add(self._kernels):
            self._engine.module.compiled.append(self._kernels)
        self._ran = True
        assert self.memory is not None
        assert set(self.addresses) == set(self._shapes)
        names = {mode: {n for n, m in self._engine._modes.items() if m is mode} for mode in TensorIOMode}
        assert self._given == names[TensorIOMode.INPUT]
        binding = self._engine.session.io_binding()
        if self._engine.ranks:
            assert self.communicator is not None
            binding.communicator = self.communicator
        if self._engine.loops:
            binding.bind_cpu_input(tensors.NUM_DRAFT_TOKENS, np.array(1, np.int64))
        for mode, bind in ((TensorIOMode.INPUT, binding.bind_input), (TensorIOMode.OUTPUT, binding.bind_output)):
            for name in names[mode]:
                bind(name, "cpu", 0, self._engine.types[name].type, self._shapes[name], self.addresses[name])
        spans = [(address, self._nbytes(name)) for name, address in self.addresses.items()]
        self._cuda.give(stream_handle, lambda: self._engine.session.run_with_iobinding(binding), *spans, self.memory)
        return True
