"""The onnxruntime-cuda backend: a session a model, bound to memory of ours, on a stream of ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specexport.contract.engines import CompiledEngine, ProgramGraph
from specexport.contract.errors import BackendError
from specexport.contract.model import Model
from specexport.contract.program import program_sizes
from specexport.contract.shapes import ShapePoint
from specexport.runtime.bundle import Bundle
from specexport.runtime.cuda.executor import CACHE_TYPES, Enqueue
from specexport.runtime.cuda.library import Library
from specexport.runtime.cuda.memory import Device, Region, Tensor

MINIMUM = (1, 31)
"""Older releases were not looked at: what is asked of a session below may not be there."""
PROVIDER = "CUDAExecutionProvider"
_RECORD_ASSIGNMENT = "session.record_ep_graph_assignment_info"
_OF_SHAPES = frozenset(
    {
        "Add",
        "Cast",
        "Concat",
        "Div",
        "Gather",
        "Min",
        "Mul",
        "Neg",
        "Range",
        "Reshape",
        "Shape",
        "Slice",
        "Squeeze",
        "Sub",
        "Unsqueeze",
    }
)
"""What works out sizes on the CPU, from other sizes. Where it worked on anything else, what is on the device would be
copied to the host and waited for, and no run could be captured."""
_SHOWN = 5
_BFLOAT16 = 16
"""ONNX's number for the type, of which NumPy has none."""


def import_onnxruntime() -> Any:
    """The onnxruntime that runs on GPUs.

    Raises:
        BackendError: it is missing, too old, or the one for CPUs, which has the same module's name.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendError(
            "onnxruntime-gpu is not installed, and the backend onnxruntime-cuda needs it; install it with: "
            "pip install 'specexport[gpu]'"
        ) from error
    found = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
    if PROVIDER not in onnxruntime.get_available_providers():
        raise BackendError(
            f"onnxruntime {onnxruntime.__version__} is installed without {PROVIDER}; onnxruntime and onnxruntime-gpu "
            "provide the same module, so install one: pip uninstall -y onnxruntime && pip install 'specexport[gpu]'"
        )
    if found < MINIMUM:
        raise BackendError(
            f"onnxruntime-gpu {onnxruntime.__version__} is too old; expected {MINIMUM[0]}.{MINIMUM[1]} or newer. "
            "Upgrade with: pip install -U 'specexport[gpu]'"
        )
    # CUDA's and cuDNN's libraries may lie in packages of their own, where the loader would not look.
    onnxruntime.preload_dlls()
    onnxruntime.set_default_logger_severity(3)  # or it warns of every session that no plugin brings the provider
    return onnxruntime


class OnnxRuntimeLibrary(Library):
    """A bundle's graphs in onnxruntime.

    Raises:
        BackendError: onnxruntime-gpu is missing or too old.
    """

    def __init__(self, bundle: Bundle, device: Device) -> None:
        super().__init__(bundle, device, "onnxruntime-cuda")
        self._ort = import_onnxruntime()
        self._counted: set[str] = set()

    def _open(self, graph: Model | ProgramGraph, engines: Sequence[CompiledEngine]) -> SessionExecutor:
        """What runs a graph; that of a model is opened once, as every session has its own copy of the weights.

        Those of the step program have no weights: they are opened once a shape, so that onnxruntime works out sizes as
        it opens them.
        """
        (engine,) = engines
        if isinstance(graph, Model) and graph.weights not in self._counted:
            self._counted.add(graph.weights)
            self._device.budget.require(self._bundle.file(graph.weights).stat().st_size, f"loading {graph.weights}")
        path, vocab = self._bundle.file(engine.file), self._bundle.manifest.target.vocab_size
        sizes = {point: program_sizes(point, vocab) for point in engine.profiles}
        first = next(iter(sizes.values()))
        if isinstance(graph, Model):
            same = {name for name in first if all(of_one[name] == first[name] for of_one in sizes.values())}
            session = self._session(path, {name: first[name] for name in same})
            sessions = dict.fromkeys(sizes, session)
        else:
            sessions = {point: self._session(path, of_one) for point, of_one in sizes.items()}
        return SessionExecutor(self._ort, sessions, CACHE_TYPES[engine.compute], self._device.cuda.device.index)

    def _session(self, path: Path, sizes: Mapping[str, int]) -> Any:
        """A session over a graph, all of it on the device, with the sizes of these dimensions fixed.

        Raises:
            BackendError: onnxruntime refuses the graph, or would run some of it on the CPU; names those nodes.
        """
        options = self._ort.SessionOptions()
        for name, size in sizes.items():
            options.add_free_dimension_override_by_name(name, size)
        options.log_severity_level = 3
        options.add_session_config_entry(_RECORD_ASSIGNMENT, "1")
        provider = {
            "device_id": str(self._device.cuda.device.index),
            "user_compute_stream": str(self._device.stream.handle),
            "gpu_mem_limit": str(max(0, self._device.budget.left)),
            "arena_extend_strategy": "kSameAsRequested",
            # Its own capture would be made anew by every thread that runs a session, and is no part of a larger graph.
            "enable_cuda_graph": "0",
            "use_tf32": "0",  # fp32 is to mean fp32: what is accepted is compared with the CPU token by token
        }
        try:
            session = self._ort.InferenceSession(str(path), options, providers=[(PROVIDER, provider)])
        except Exception as error:  # onnxruntime's exceptions share no public base
            raise BackendError(f"{path}: onnxruntime refused the graph: {error}") from error
        on_device(path, session)
        return session


def on_device(path: Path, session: Any) -> None:
    """Checks that a session runs nothing on the CPU but arithmetic on sizes.

    Raises:
        BackendError: names the nodes that are elsewhere, or says that nothing can be on the GPU.
    """
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
        if node.op_type not in _OF_SHAPES
    ]
    if elsewhere:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(node.op_type for node in elsewhere).items())
        shown = ", ".join(node.name for node in elsewhere[:_SHOWN]) + (", ..." if len(elsewhere) > _SHOWN else "")
        raise BackendError(
            f"{path}: onnxruntime would run {len(elsewhere)} nodes on the CPU ({kinds}): {shown}. Each would stop the "
            "GPU in every step; a newer onnxruntime-gpu may have kernels for them, a bundle of another --lowering or "
            "--precision may need none, and --backend onnxruntime runs on the CPU"
        )


class SessionExecutor:
    """Runs a graph in a session, or one a shape; see :class:`~specexport.runtime.cuda.executor.Executor`."""

    workspace = 0  # onnxruntime takes its own

    def __init__(self, ort: Any, sessions: Mapping[ShapePoint, Any], cache_dtype: np.dtype[Any], device: int) -> None:
        self._ort = ort
        self._sessions = dict(sessions)
        self._device = device
        self.cache_dtype = cache_dtype
        self.points = frozenset(sessions)

    def prepare(self, point: ShapePoint, tensors: Mapping[str, Tensor], workspace: Region) -> Enqueue:
        session, options = self._sessions[point], self._ort.RunOptions()
        # The loop waits once a step, for what it reads back.
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        binding = session.io_binding()
        for values, bind in (
            (session.get_inputs(), binding.bind_input),
            (session.get_outputs(), binding.bind_output),
        ):
            for value in values:
                if value.name not in tensors:
                    raise BackendError(f"the graph has a tensor {value.name!r}, which no graph of a bundle has")
                tensor = tensors[value.name]
                kind = _BFLOAT16 if tensor.dtype == CACHE_TYPES["bf16"] else tensor.dtype.type
                bind(value.name, "cuda", self._device, kind, tensor.shape, tensor.address)

        def enqueue() -> None:
            try:
                session.run_with_iobinding(binding, options)
            except Exception as error:  # onnxruntime's exceptions share no public base
                raise BackendError(f"onnxruntime did not run the graph at {point}: {error}") from error

        return enqueue

    def close(self) -> None:
        self._sessions.clear()
