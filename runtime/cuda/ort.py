"""The onnxruntime-cuda backend: sessions, one a shape point, bound to memory of ours, on a stream of ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specexport.contract.engines import ProgramGraph
from specexport.contract.errors import BackendError
from specexport.contract.model import Model
from specexport.contract.program import program_points, program_sizes
from specexport.contract.shapes import ShapePoint, uncached_points
from specexport.runtime.bundle import Bundle
from specexport.runtime.cuda.executor import Enqueue, Execution, Executor
from specexport.runtime.cuda.memory import Device, Region, Tensor

MINIMUM = (1, 31)
"""Older releases were not looked at: what is asked of a session below may not be there."""
PROVIDER = "CUDAExecutionProvider"
_RECORD_ASSIGNMENT = "session.record_ep_graph_assignment_info"
_SHOWN = 5


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
    return onnxruntime


@dataclass(frozen=True)
class StaticGraph:
    """An ONNX file at one shape, with the sizes of the dimensions that are symbolic in it."""

    path: Path
    sizes: Mapping[str, int] = field(default_factory=dict)


class OnnxRuntimeLibrary:
    """A bundle's graphs in onnxruntime: the static ones of its models, and those of the step program.

    The latter are opened once for each size of tree, their dimensions fixed as they are. Runs cannot be recorded into a
    graph of ours, as onnxruntime captures by itself: a step is several of its graphs, given to the stream together.

    Attributes:
        batch_sizes: how many slots it can run at once, ascending.
        without_program: why the host drives steps, where it does.

    Raises:
        BackendError: onnxruntime-gpu is missing or too old.
    """

    name = "onnxruntime-cuda"

    def __init__(self, bundle: Bundle, device: Device) -> None:
        self._bundle = bundle
        self._ort = import_onnxruntime()
        self._index = device.cuda.device.index
        self._device = device
        self.batch_sizes = bundle.manifest.batch_sizes
        self.without_program = ""

    def model(self, model: Model) -> SessionExecutor:
        """What runs a model's graph."""
        graphs = {graph.point: StaticGraph(self._bundle.file(graph.file)) for graph in model.graph.points}
        if not model.cache:
            graphs = {point: graphs[point] for point in uncached_points(graphs)}
        return SessionExecutor(self, graphs)

    def program(self, slots: int) -> list[tuple[ProgramGraph, Executor]]:
        """What runs the graphs of the step program; bundles built for the CPU have none.

        Nor is one taken of which a node would run on the CPU.
        """
        manifest = self._bundle.manifest
        if manifest.methods and not manifest.program:
            self.without_program = (
                f"the bundle was built for {manifest.backend}, so the host decides what is accepted; build it with "
                f"--backend {self.name} to decide on the device"
            )
            return []
        rows = max(graph.point.cache for graph in manifest.target.graph.points)
        executors = []
        for graph in manifest.program:
            file, vocab = self._bundle.file(graph.file), manifest.target.vocab_size
            points = program_points(graph, manifest, slots, rows)
            graphs = {point: StaticGraph(file, program_sizes(point, vocab)) for point in points}
            executors.append(SessionExecutor(self, graphs))
        try:
            for executor in executors:
                executor.open()
        except BackendError as error:
            for executor in executors:
                executor.close()
            self.without_program = f"the host decides what is accepted: {error}"
            return []
        return list(zip(manifest.program, executors, strict=True))

    def open(self, graph: StaticGraph) -> tuple[Any, str]:
        """A session over a graph, all of it on the device, and why it does not capture its runs, or nothing.

        Raises:
            BackendError: onnxruntime refuses the graph, or would run some of it on the CPU; names those nodes.
        """
        refusal = ""
        try:
            session = self._session(graph, captures=True)
        except Exception as first:  # onnxruntime's exceptions share no public base
            refusal = str(first)
            try:
                session = self._session(graph, captures=False)
            except Exception as error:
                raise BackendError(f"{graph.path}: onnxruntime refused the graph: {error}") from error
        on_device(graph.path, session, refusal)
        return session, refusal

    def _session(self, graph: StaticGraph, *, captures: bool) -> Any:
        options = self._ort.SessionOptions()
        for name, size in graph.sizes.items():
            options.add_free_dimension_override_by_name(name, size)
        options.log_severity_level = 3
        options.add_session_config_entry(_RECORD_ASSIGNMENT, "1")
        provider = {
            "device_id": str(self._index),
            "user_compute_stream": str(self._device.stream.handle),
            "gpu_mem_limit": str(max(0, self._device.budget.left)),
            "arena_extend_strategy": "kSameAsRequested",
            "enable_cuda_graph": str(int(captures)),
            "use_tf32": "0",  # fp32 is to mean fp32: what is accepted is compared with the CPU token by token
        }
        return self._ort.InferenceSession(str(graph.path), options, providers=[(PROVIDER, provider)])

    def bind(self, session: Any, tensors: Mapping[str, Tensor], graph: int) -> Enqueue:
        """A run of a session over fixed addresses."""
        options = self._ort.RunOptions()
        # The loop waits once a step, for what it reads back.
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        options.add_run_config_entry("gpu_graph_id", str(graph))
        binding = session.io_binding()
        inputs, outputs = session.get_inputs(), session.get_outputs()
        for values, bind in ((inputs, binding.bind_input), (outputs, binding.bind_output)):
            for value in values:
                tensor = tensors[value.name]
                bind(value.name, "cuda", self._index, tensor.dtype.type, tensor.shape, tensor.address)

        def enqueue() -> None:
            session.run_with_iobinding(binding, options)

        return enqueue


def on_device(path: Path, session: Any, refusal: str) -> None:
    """Checks that a session runs nothing on the CPU.

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
    ]
    if elsewhere:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(node.op_type for node in elsewhere).items())
        shown = ", ".join(node.name for node in elsewhere[:_SHOWN]) + (", ..." if len(elsewhere) > _SHOWN else "")
        raise BackendError(
            f"{path}: onnxruntime would run {len(elsewhere)} nodes on the CPU ({kinds}): {shown}. Each would stop the "
            "GPU in every step; a newer onnxruntime-gpu may have kernels for them, a bundle of another --lowering or "
            "--precision may need none, and --backend onnxruntime runs on the CPU"
            + (f". onnxruntime said: {refusal}" if refusal else "")
        )


class SessionExecutor:
    """Runs a graph at fixed shapes, a session for each; see :class:`~specexport.runtime.cuda.executor.Executor`.

    Only the largest cache is run at: every session has its own copy of the weights, and on a GPU attention over unused
    rows is cheap beside reading them.
    """

    workspace = 0
    capturable = False  # onnxruntime allocates and synchronises where it pleases; it captures by itself
    cache_dtype: np.dtype[Any] = np.dtype(np.float32)

    def __init__(self, library: OnnxRuntimeLibrary, graphs: Mapping[ShapePoint, StaticGraph]) -> None:
        largest = {batch: max(p.cache for p in graphs if p.batch == batch) for batch in {p.batch for p in graphs}}
        self._library = library
        self._graphs = {point: graph for point, graph in graphs.items() if point.cache == largest[point.batch]}
        self._opened: dict[ShapePoint, Any] = {}
        self._bound = 0
        self.fallback = ""
        self.points = frozenset(self._graphs)

    @property
    def execution(self) -> Execution:
        """By onnxruntime's own capture, unless it refused one of the graphs."""
        return "plain" if self.fallback else "graph per engine"

    def open(self) -> None:
        """Opens all its sessions, which otherwise happens as their points are prepared.

        Raises:
            BackendError: onnxruntime refuses one, or would run some of it on the CPU.
        """
        for point in sorted(self.points):
            self._session(point)

    def prepare(self, point: ShapePoint, tensors: Mapping[str, Tensor], workspace: Region) -> Enqueue:
        self._bound += 1
        return self._library.bind(self._session(point), tensors, self._bound)

    def close(self) -> None:
        self._opened.clear()

    def _session(self, point: ShapePoint) -> Any:
        if point not in self._opened:
            self._opened[point], refusal = self._library.open(self._graphs[point])
            self.fallback = self.fallback or refusal
        return self._opened[point]
