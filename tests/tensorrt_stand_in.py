"""TensorRT's runtime interface over real graphs on the CPU, run in the order of a stand-in's stream.

An engine of it is JSON: a symbolic ONNX file, and the sizes of its dimensions in each optimization profile. Its names
are those of the real package; a test compares them where that is installed.
"""

from __future__ import annotations

import enum
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from specexport.contract import tensors
from specexport.runtime.cuda import api, trt
from tests.cuda_stand_in import StandIn

WORKSPACE = 1000
_TYPES = {"tensor(int64)": np.int64, "tensor(float)": np.float32, "tensor(bool)": np.bool_}


class TensorIOMode(enum.Enum):
    INPUT = 1
    OUTPUT = 2


class ExecutionContextAllocationStrategy(enum.Enum):
    USER_MANAGED = 2


class TensorRT:
    """The module.

    Attributes:
        folder: of the bundle, which engines' files are relative to.
        cannot_load: makes every engine unreadable.
        contexts: every execution context made.
    """

    __version__ = "1.7.1.116"
    TensorIOMode = TensorIOMode
    ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy

    class Logger:
        ERROR = 1

        def __init__(self, severity: int) -> None: ...

    def __init__(self, cuda: StandIn, folder: Path) -> None:
        self.cuda, self.folder = cuda, folder
        self.cannot_load = False
        self.contexts: list[ExecutionContext] = []

    def Runtime(self, logger: Any) -> Runtime:
        return Runtime(self)


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[TensorRT]:
    """Puts an imaginary GPU, and TensorRT for a bundle's folder, into the machine; nothing may be left on it."""
    cuda = StandIn()
    module = TensorRT(cuda, folder)
    monkeypatch.setattr(api.Cuda, "load", lambda: api.Cuda(cuda))
    monkeypatch.setattr(trt, "import_tensorrt", lambda runtime: module)
    yield module
    gc.collect()
    assert cuda.leaks == []


class Runtime:
    engine_host_code_allowed = False

    def __init__(self, module: TensorRT) -> None:
        self._module = module

    def deserialize_cuda_engine(self, data: bytes) -> CudaEngine | None:
        return None if self._module.cannot_load else CudaEngine(self._module, json.loads(data))


class CudaEngine:
    def __init__(self, module: TensorRT, described: dict[str, Any]) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self.module = module
        self.session = onnxruntime.InferenceSession(str(module.folder / described["file"]), options)
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

    def create_execution_context(self, strategy: Any) -> ExecutionContext:
        assert strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        context = ExecutionContext(self)
        self.module.contexts.append(context)
        return context


class ExecutionContext:
    def __init__(self, engine: CudaEngine) -> None:
        self._engine = engine
        self._cuda = engine.module.cuda
        self.memory: tuple[int, int] | None = None
        self.addresses: dict[str, int] = {}
        self._given: set[str] = set()

    def set_device_memory(self, memory: int, size: int) -> None:
        self._cuda.check(memory, size)
        self.memory = memory, size

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert self.memory is not None
        assert self.memory[1] >= self._engine.get_device_memory_size_for_profile_v2(profile_index)
        self._shapes = self._engine.shapes[profile_index]
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

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert self.memory is not None
        assert set(self.addresses) == set(self._shapes)
        names = {mode: {n for n, m in self._engine._modes.items() if m is mode} for mode in TensorIOMode}
        assert self._given == names[TensorIOMode.INPUT]
        binding = self._engine.session.io_binding()
        if self._engine.loops:
            binding.bind_cpu_input(tensors.NUM_DRAFT_TOKENS, np.array(1, np.int64))
        for mode, bind in ((TensorIOMode.INPUT, binding.bind_input), (TensorIOMode.OUTPUT, binding.bind_output)):
            for name in names[mode]:
                bind(name, "cpu", 0, self._engine.types[name].type, self._shapes[name], self.addresses[name])
        spans = [(address, self._nbytes(name)) for name, address in self.addresses.items()]
        self._cuda.give(stream_handle, lambda: self._engine.session.run_with_iobinding(binding), *spans, self.memory)
        return True
