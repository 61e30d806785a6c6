"""onnxruntime as if it had a GPU: real sessions on the CPU, run in the order of a stand-in's stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as real
import pytest

from specexport.runtime.backends.cuda import ort
from tests import cuda_stand_in
from tests.cuda_stand_in import StandIn

CUDA = "CUDAExecutionProvider"


class OnnxRuntimeGpu:
    """The part of the module ``onnxruntime`` that the backend uses.

    Attributes:
        on_cpu: types of nodes it cannot place on the GPU.
        without_libraries: sessions silently run on the CPU, as where CUDA's libraries cannot be loaded.
        providers: the options of every session opened.
        opened: the names of the files that sessions were opened over.
        runs: how often any session ran but in a replay.
        failing: makes every run fail.
    """

    __version__ = real.__version__
    RunOptions = real.RunOptions

    def __init__(self, cuda: StandIn) -> None:
        self.cuda = cuda
        self.on_cpu: tuple[str, ...] = ()
        self.without_libraries = False
        self.providers: list[dict[str, str]] = []
        self.opened: list[str] = []
        self.failing = False
        self.runs = 0
        self.SessionOptions = real.SessionOptions

    def get_available_providers(self) -> list[str]:
        return [CUDA, "CPUExecutionProvider"]

    def preload_dlls(self) -> None: ...

    def set_default_logger_severity(self, severity: int) -> None: ...

    def InferenceSession(self, path: str, options: Any, providers: Sequence[tuple[str, dict[str, str]]]) -> Any:
        (name, inputs), *others = providers
        assert name == CUDA and not others and Path(path).is_file()
        self.providers.append(inputs)
        self.opened.append(Path(path).name)
        assert inputs["enable_cuda_graph"] == "0"
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "4")
        session = real.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return Session(self, session, int(inputs["user_compute_stream"]))


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnnxRuntimeGpu]:
    """Puts an imaginary GPU, and onnxruntime for it, into the machine."""
    with cuda_stand_in.installed(monkeypatch) as cuda:
        module = OnnxRuntimeGpu(cuda)
        monkeypatch.setattr(ort, "import_onnxruntime", lambda: module)
        yield module


class Session:
    def __init__(self, module: OnnxRuntimeGpu, session: Any, stream: int) -> None:
        self._module, self._session, self.stream, self.cuda = module, session, stream, module.cuda
        self.get_inputs, self.get_outputs = session.get_inputs, session.get_outputs
        self._threads: set[int] = set()

    def get_providers(self) -> list[str]:
        return ["CPUExecutionProvider"] if self._module.without_libraries else [CUDA, "CPUExecutionProvider"]

    def get_provider_graph_assignment_info(self) -> list[Any]:
        nodes = [n for part in self._session.get_provider_graph_assignment_info() for n in part.get_nodes()]
        assert nodes, "nothing was recorded"
        away = [n for n in nodes if n.op_type in self._module.on_cpu or self._module.without_libraries]
        kept = [n for n in nodes if n not in away]
        return [
            SimpleNamespace(ep_name=name, get_nodes=lambda nodes=nodes: nodes)
            for name, nodes in ((CUDA, kept), ("CPUExecutionProvider", away))
            if nodes
        ]

    def io_binding(self) -> Binding:
        return Binding(self.cuda, self._session.io_binding())

    def run_with_iobinding(self, binding: Binding, options: Any) -> None:
        assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
        self._threads.add(threading.get_ident())
        assert len(self._threads) == 1, "onnxruntime has handles and scratch memory of its own for every thread"
        if self._module.failing:
            raise RuntimeError("out of kernels")
        self._module.runs += 1
        self.cuda.give(self.stream, lambda: self._session.run_with_iobinding(binding.real), *binding.spans)


class Binding:
    def __init__(self, cuda: StandIn, binding: Any) -> None:
        self.real, self._cuda, self.spans = binding, cuda, list[tuple[int, int]]()
        self.outputs: dict[str, tuple[int, Any, Any]] = {}  # address, type and shape by name

    def bind_input(self, name: str, device: str, index: int, dtype: Any, shape: Any, address: int) -> None:
        self._check(device, index, dtype, shape, address)
        self.real.bind_input(name, "cpu", 0, dtype, shape, address)

    def bind_output(self, name: str, device: str, index: int, dtype: Any, shape: Any, address: int) -> None:
        self._check(device, index, dtype, shape, address)
        self.outputs[name] = (address, dtype, shape)
        self.real.bind_output(name, "cpu", 0, dtype, shape, address)

    def _check(self, device: str, index: int, dtype: Any, shape: Any, address: int) -> None:
        assert (device, index) == ("cuda", 0)
        assert address % 256 == 0 or np.prod(shape) == 0
        span = (address, int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize)
        self._cuda.check(*span)
        self.spans.append(span)
