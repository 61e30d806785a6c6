"""The onnxruntime-cuda library: a session for each model, with our memory and our stream."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from specexport.contract.engines import CompiledEngine, ProgramGraph
from specexport.contract.errors import BackendError
from specexport.contract.manifest import program_sizes
from specexport.contract.model import Model
from specexport.contract.shapes import ShapePoint
from specexport.contract.tensors import CARRIED, COLLECTIVES
from specexport.contract.values import counted
from specexport.runtime.backends.cuda.api import DEVICE
from specexport.runtime.backends.cuda.library import CACHE_TYPES, Enqueue, Library
from specexport.runtime.backends.cuda.memory import Device, Region, Tensor, align
from specexport.runtime.backends.cuda.nccl import Communicator
from specexport.runtime.backends.links import open_linked
from specexport.runtime.bundle import Bundle
from specexport.runtime.machine import disable_telemetry

MINIMUM = (1, 31)
"""Older releases were not tested, and may lack features that this module uses."""
PROVIDER = "CUDAExecutionProvider"
_RECORD_ASSIGNMENT = "session.record_ep_graph_assignment_info"
_SHAPE_OPERATORS = frozenset(
    (
        *("Add", "Cast", "Concat", "Div", "Gather", "Min", "Mul", "Neg"),
        *("Range", "Reshape", "Shape", "Slice", "Squeeze", "Sub", "Unsqueeze"),
    )
)
"""Operators that may run on the CPU, as they compute sizes. Inputs of others would have to be copied from the device,
which a run would wait for and a capture does not allow."""
_SHOWN = 5
_BFLOAT16 = 16
"""ONNX's number of the type, which NumPy lacks."""
_TYPES = {
    "tensor(float)": CACHE_TYPES["fp32"],
    "tensor(float16)": CACHE_TYPES["fp16"],
    "tensor(bfloat16)": CACHE_TYPES["bf16"],
    "tensor(int64)": np.dtype(np.int64),
    "tensor(bool)": np.dtype(np.bool_),
}
_, _JOIN = COLLECTIVES


def import_onnxruntime() -> Any:
    """Imports the onnxruntime for GPUs."""
    disable_telemetry()
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendError(
            "onnxruntime-gpu is not installed, and the backend onnxruntime-cuda needs it; install it with: "
            "pip install 'specexport[gpu]'"
        ) from error
    version = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
    if PROVIDER not in onnxruntime.get_available_providers():
        raise BackendError(
            f"onnxruntime {onnxruntime.__version__} is installed without {PROVIDER}; onnxruntime and onnxruntime-gpu "
            "provide the same module, so install one: pip uninstall -y onnxruntime && pip install 'specexport[gpu]'"
        )
    if version < MINIMUM:
        raise BackendError(
            f"onnxruntime-gpu {onnxruntime.__version__} is too old; expected {MINIMUM[0]}.{MINIMUM[1]} or newer. "
            "Upgrade with: pip install -U 'specexport[gpu]'"
        )
    # The libraries of CUDA and cuDNN may be in Python packages, where the loader does not look.
    onnxruntime.preload_dlls()
    onnxruntime.set_default_logger_severity(3)  # or every session logs that no plugin has the provider
    return onnxruntime


class OnnxRuntimeLibrary(Library):
    """A bundle's graphs in onnxruntime."""

    def __init__(self, bundle: Bundle, device: Device) -> None:
        super().__init__(bundle, device, "onnxruntime-cuda")
        self._ort = import_onnxruntime()
        self._counted: set[str] = set()

    def _open(
        self, graph: Model | ProgramGraph, engines: Sequence[CompiledEngine], communicator: Communicator | None
    ) -> SessionExecutor:
        """Opens a graph: a model's once, as every session has a copy of the weights.

        Graphs of the step program have no weights. They are opened once for each shape, so that onnxruntime computes
        sizes when it opens them.
        """
        (engine,) = engines
        if isinstance(graph, Model) and graph.weights not in self._counted:
            self._counted.add(graph.weights)
            size = self._bundle.file(graph.weights).stat().st_size + graph.shared_bytes
            self._device.budget.require(size, f"loading {graph.weights}")
        paths = [self._bundle.file(name) for name in engine.segments or (engine.file,)]
        vocab = self._bundle.manifest.target.vocab_size
        sizes = {point: program_sizes(point, vocab) for point in engine.profiles}
        first = next(iter(sizes.values()))
        if isinstance(graph, Model):
            fixed = {name for name in first if all(dims[name] == first[name] for dims in sizes.values())}
            opened = [self._session(path, {name: first[name] for name in fixed}) for path in paths]
            sessions = dict.fromkeys(sizes, opened)
        else:
            sessions = {point: [self._session(path, dims) for path in paths] for point, dims in sizes.items()}
        ranks = len(self._bundle.manifest.target.ranks)
        return SessionExecutor(self._ort, sessions, CACHE_TYPES[engine.compute], self._device, ranks, communicator)

    def _session(self, path: Path, sizes: Mapping[str, int]) -> Any:
        """Opens a session that runs a graph on the device, with the sizes of some dimensions fixed."""
        options = self._ort.SessionOptions()
        for name, size in sizes.items():
            options.add_free_dimension_override_by_name(name, size)
        options.log_severity_level = 3
        options.add_session_config_entry(_RECORD_ASSIGNMENT, "1")
        provider = {
            "device_id": str(DEVICE),
            "user_compute_stream": str(self._device.stream.handle),
            "gpu_mem_limit": str(max(0, self._device.budget.available)),
            "arena_extend_strategy": "kSameAsRequested",
            # onnxruntime captures once a thread, and its captures cannot be part of a larger graph.
            "enable_cuda_graph": "0",
            # Flash and memory-efficient attention; by default cuDNN's comes first, which compiles a kernel a shape.
            "sdpa_kernel": "3",
            "use_tf32": "0",  # accepted tokens are compared with those on the CPU
        }
        try:
            session = open_linked(
                path,
                lambda graph: self._ort.InferenceSession(str(graph), options, providers=[(PROVIDER, provider)]),
            )
        except Exception as error:  # onnxruntime's exceptions share no public base
            raise BackendError(f"{path}: onnxruntime refused the graph: {error}") from error
        on_device(path, session)
        return session


def on_device(path: Path, session: Any) -> None:
    """Checks that a session runs only arithmetic on sizes on the CPU."""
    if PROVIDER not in session.get_providers():
        raise BackendError(
            f"onnxruntime's {PROVIDER} could not be loaded; it needs the libraries of CUDA 13 and cuDNN 9, which "
            "pip install 'specexport[gpu]' brings, and a driver for CUDA 13"
        )
    elsewhere = [
        node
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name != PROVIDER
        for node in part.get_nodes()
        if node.op_type not in _SHAPE_OPERATORS
    ]
    if elsewhere:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(node.op_type for node in elsewhere).items())
        shown = ", ".join(node.name for node in elsewhere[:_SHOWN]) + (", ..." if len(elsewhere) > _SHOWN else "")
        raise BackendError(
            f"{path}: onnxruntime would run {counted(len(elsewhere), 'node')} on the CPU ({kinds}): {shown}. Each "
            "would stop the GPU in every step; a newer onnxruntime-gpu may have kernels for them, a bundle of another "
            "--lowering or --precision may need none, and --backend onnxruntime runs on the CPU"
        )


@dataclass
class _Exchange:
    """The tensors that go from one segment to another at a shape; addresses are relative to the workspace.

    Attributes:
        outputs: outputs of segments, by name.
        inputs: inputs of later segments, by name: the same tensors, or the whole of a joined one.
        nbytes: bytes of workspace that they take.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    nbytes: int = 0

    @classmethod
    def of(cls, sessions: Sequence[Any], point: ShapePoint, ranks: int) -> _Exchange:
        """Lays out the tensors; memory that is no longer read is reused for tensors of equal size."""
        exchange, free = cls(), defaultdict[int, list[int]](list)
        last = {value.name: at for at, session in enumerate(sessions) for value in session.get_inputs()}

        def place(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Tensor:
            nbytes = align(Tensor(0, dtype, shape).nbytes)
            if free[nbytes]:
                return Tensor(free[nbytes].pop(), dtype, shape)
            exchange.nbytes += nbytes
            return Tensor(exchange.nbytes - nbytes, dtype, shape)

        for at, session in enumerate(sessions):
            unused = [exchange.inputs[name] for name, until in last.items() if until == at and name in exchange.inputs]
            for value in session.get_outputs():
                if value.name.startswith((CARRIED, *COLLECTIVES)):
                    dtype, shape = _declared(value, point)
                    part = exchange.outputs[value.name] = exchange.inputs[value.name] = place(dtype, shape)
                    if value.name.startswith(_JOIN):
                        exchange.inputs[value.name] = place(part.dtype, (ranks, *shape))
                        unused.append(part)
            for tensor in unused:
                free[align(tensor.nbytes)].append(tensor.address)
        return exchange


def _declared(value: Any, point: ShapePoint) -> tuple[np.dtype[Any], tuple[int, ...]]:
    try:
        return _TYPES[value.type], tuple(map(point.size, value.shape))
    except KeyError as unknown:
        raise BackendError(
            f"{value.name}, which goes from one segment to another, has an unknown type or size ({unknown}); compile "
            "the bundle again"
        ) from None


class SessionExecutor:
    """Runs a graph in a session; see :class:`~specexport.runtime.backends.cuda.library.Executor`.

    A rank's part of a split target has a session for each segment, which run one after the other; between them the
    ranks combine their parts through the communicator.
    """

    def __init__(
        self,
        ort: Any,
        sessions: Mapping[ShapePoint, Sequence[Any]],
        cache_dtype: np.dtype[Any],
        device: Device,
        ranks: int,
        communicator: Communicator | None,
    ) -> None:
        self._ort = ort
        self._sessions = dict(sessions)
        self._device = device
        self._communicator = communicator
        # Graphs that are not split exchange nothing, whatever the names of their tensors.
        self._exchanges = {at: _Exchange.of(each if communicator else (), at, ranks) for at, each in sessions.items()}
        self.workspace = max(exchange.nbytes for exchange in self._exchanges.values())  # onnxruntime allocates more
        self.cache_dtype = cache_dtype
        self.points = frozenset(sessions)

    def prepare(self, point: ShapePoint, tensors: Mapping[str, Tensor], workspace: Region) -> Enqueue:
        options = self._ort.RunOptions()
        # The loop waits once a step, for the results.
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        outputs, inputs = (
            {name: replace(tensor, address=tensor.address + workspace.address) for name, tensor in tensors_of.items()}
            for tensors_of in (self._exchanges[point].outputs, self._exchanges[point].inputs)
        )
        runs = []
        for session in self._sessions[point]:
            binding = session.io_binding()
            for values, bind, arrays in (
                (session.get_inputs(), binding.bind_input, {**tensors, **inputs}),
                (session.get_outputs(), binding.bind_output, {**tensors, **outputs}),
            ):
                for value in values:
                    if value.name not in arrays:
                        raise BackendError(f"the graph has a tensor {value.name!r}, which no graph of a bundle has")
                    tensor = arrays[value.name]
                    kind = _BFLOAT16 if tensor.dtype == CACHE_TYPES["bf16"] else tensor.dtype.type
                    bind(value.name, "cuda", DEVICE, kind, tensor.shape, tensor.address)
            returned = [value.name for value in session.get_outputs()]
            collectives = [name for name in returned if name in outputs and name.startswith(COLLECTIVES)]
            runs.append((session, binding, collectives))
        communicator, stream = self._communicator, self._device.stream.handle

        def enqueue() -> None:
            for session, binding, collectives in runs:
                try:
                    session.run_with_iobinding(binding, options)
                except Exception as error:  # onnxruntime's exceptions share no public base
                    raise BackendError(f"onnxruntime did not run the graph at {point}: {error}") from error
                for name in collectives:
                    assert communicator is not None  # only a rank's part has segments
                    if name.startswith(_JOIN):
                        communicator.all_gather(outputs[name], inputs[name], stream)
                    else:
                        communicator.all_reduce(outputs[name], stream)

        return enqueue

    def close(self) -> None:
        self._sessions.clear()
