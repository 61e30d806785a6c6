"""The GPU backends: a device, its stream and what may be used of it, shared by all graphs of a bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from specexport.contract.engines import EngineRuntime
from specexport.contract.errors import BackendError
from specexport.contract.model import Model
from specexport.runtime.bundle import Bundle
from specexport.runtime.cuda.api import Cuda
from specexport.runtime.cuda.executor import Enqueue, Execution, worst
from specexport.runtime.cuda.graph import DeviceGraph
from specexport.runtime.cuda.memory import Device
from specexport.runtime.cuda.ort import OnnxRuntimeLibrary
from specexport.runtime.cuda.program import DeviceProgram
from specexport.runtime.cuda.step_variants import StepVariants
from specexport.runtime.cuda.steps import Steps
from specexport.runtime.cuda.trt import EngineLibrary
from specexport.runtime.graph import Buffers, Graph
from specexport.runtime.program import Speculation, StepProgram
from specexport.runtime.step import HostProgram
from specexport.runtime.widths import BuiltWidths, Exactness, Widths


class CudaBackend:
    """Runs a bundle on the first GPU that CUDA shows; see :class:`~specexport.runtime.backend.Backend`.

    Attributes:
        cuda: the device.
        stream: does its work.
        graphs: those opened, the target's first.

    Raises:
        BackendError: a package, a driver or a device is missing.
    """

    def __init__(self, bundle: Bundle, runtime: EngineRuntime, utilization: float) -> None:
        self._bundle = bundle
        self._shared = Device.share(Cuda.load(), utilization)
        self.cuda, self.stream = self._shared.cuda, self._shared.stream
        self._run = self._shared.thread.run
        self._library = (
            OnnxRuntimeLibrary(bundle, self._shared)
            if runtime == "onnxruntime-cuda"
            else EngineLibrary(bundle, self._shared, runtime)
        )
        self.graphs: list[DeviceGraph] = []
        self._steps: Steps | None = None

    @property
    def default_slots(self) -> int:
        """See :class:`~specexport.runtime.backend.Backend`; the fewest, as caches take their largest size at first."""
        return self._library.batch_sizes[0]

    @property
    def execution(self) -> Execution:
        """How steps that stay on the device reach it, else the least of what its graphs manage."""
        return self._steps.execution if self._steps is not None else worst(graph.execution for graph in self.graphs)

    @property
    def device(self) -> str:
        return f"{self._library.name}, {self.cuda.device}"

    @property
    def fallback(self) -> str:
        reasons = [graph.fallback for graph in self.graphs]
        reasons.append(self._library.without_program if self._steps is None else self._steps.fallback)
        return next((reason for reason in reasons if reason), "")

    def open(self, model: Model, slots: int, buffers: Buffers) -> DeviceGraph:
        """See :class:`~specexport.runtime.backend.Backend`.

        Raises:
            BackendError: the library does not run so many slots, the graph is refused, or it does not fit.
        """
        sizes = self._library.batch_sizes
        if slots not in sizes:
            raise BackendError(
                f"{slots} requests at once were asked for, and the engines run {', '.join(map(str, sizes))}; compile "
                f"them with: specexport compile BUNDLE --engine-batch-sizes {slots}"
            )
        manifest = self._bundle.manifest
        role = next(role for role, known in manifest.models.items() if known is model)

        def opened() -> DeviceGraph:
            executor = self._library.model(model)
            try:
                return DeviceGraph(self._shared, model, manifest.lowering, buffers, executor, slots, role)
            except BaseException:
                executor.close()
                raise

        graph = self._run(opened)
        self.graphs.append(graph)
        return graph

    def widths(self, target: Graph, exactness: Exactness | None = None) -> Widths:
        """See :class:`~specexport.runtime.backend.Backend`; whether rows of a device agree is not looked at."""
        if exactness == "exact":
            raise BackendError(
                f"exactness is 'exact', which backend {self._bundle.manifest.backend!r} cannot promise: a device's "
                "kernels were not compared row by row; leave it out, or run the bundle with backend 'onnxruntime'"
            )
        return BuiltWidths(target)

    def program(self, target: Graph, speculations: Mapping[str, Speculation], widths: Widths) -> StepProgram:
        """See :class:`~specexport.runtime.backend.Backend`; on the device where the library runs its graphs."""
        return self._run(lambda: self._program(target, speculations, widths))

    def _program(self, target: Graph, speculations: Mapping[str, Speculation], widths: Widths) -> StepProgram:
        manifest = self._bundle.manifest
        graphs = self._library.program()
        host = HostProgram(manifest, target, speculations, widths, self.execution)
        if not graphs or not isinstance(target, DeviceGraph):
            return host
        try:
            variants = StepVariants(manifest, target, speculations, graphs)
            self._steps = Steps(self._shared, target, graphs, variants.all)
        except BaseException:
            for _, executor in graphs:
                executor.close()
            raise
        return DeviceProgram(host, target, self.stream, variants, self._steps)

    def watch(self, around: Callable[[Enqueue], None]) -> None:
        """Gives everything that is launched to the stream through a function that is called with it; to measure it."""
        for graph in self.graphs:
            graph.watch(around)
        if self._steps is not None:
            self._steps.watch(around)

    def close(self) -> None:
        self._run(self._close)
        self._shared.thread.close()

    def _close(self) -> None:
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        for graph in self.graphs:
            graph.close()
        self.graphs.clear()
        self.stream.close()
