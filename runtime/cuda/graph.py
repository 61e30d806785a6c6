"""A model's graph on the device, with its caches and staging: what the engine's loop runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from specexport.contract import tensors
from specexport.contract.errors import BackendError
from specexport.contract.model import LoweredAs, Model
from specexport.contract.shapes import CATCH_UP_TOKENS, ShapePoint
from specexport.runtime.backend import FIRST, Array, Buffers
from specexport.runtime.cuda.api import Cuda
from specexport.runtime.cuda.caches import DeviceCache
from specexport.runtime.cuda.executor import Enqueue, Execution, Executor
from specexport.runtime.cuda.memory import Budget, Layout, Plan, Staged, Tensor
from specexport.runtime.cuda.stream import Captured, Stream

Width = tuple[int, int, int]
"""T, R and K: a shape point but for its batch and its cache."""


@dataclass
class _Width:
    """What runs at one width share: their inputs and outputs, and how each cache size is run."""

    inputs: Staged
    outputs: Staged
    launches: dict[int, Callable[[], None]] = field(default_factory=dict)


class DeviceGraph:
    """A graph over device memory that is planned and taken when it is opened; see ``runtime.backend.Graph``.

    A run is: inputs to the device, the graph, outputs back, wait. Where the executor lets it, the first three are one
    captured CUDA graph a shape point, captured when the model is opened. Nothing is allocated afterwards.

    Attributes:
        execution: how runs reach the device.
        fallback: why not by a captured graph, where they do not; empty otherwise.
        cache: the model's.

    Args:
        cuda: the device.
        stream: does the work.
        budget: what may be used of the device.
        model: its description.
        lowering: the bundle's.
        buffers: makes the input and output arrays of a shape point.
        executor: runs it.
        role: ``target`` or ``draft``, for messages.

    Raises:
        BackendError: it does not fit, or the library refuses it.
    """

    def __init__(
        self,
        cuda: Cuda,
        stream: Stream,
        budget: Budget,
        model: Model,
        lowering: LoweredAs,
        buffers: Buffers,
        executor: Executor,
        role: str,
    ) -> None:
        self._cuda = cuda
        self._stream = stream
        self._executor = executor
        self._in_place = lowering == "native"
        self._points = {point for point in executor.points if point.batch == 1}
        if not self._points:
            raise BackendError(f"the {role} was not built for one slot; build the bundle with that batch size")
        self._sizes = sorted({point.cache for point in self._points})
        fed = 0 if self._in_place else max(point.fed for point in self._points)
        self.cache = DeviceCache(cuda, model.cache, 1, executor.cache_dtype, self._sizes, fed)
        self._made = 0
        self._filled = 0
        self._captured: list[Captured] = []
        widths = {_width(point): point for point in self._points}
        # A compiled propose graph drafts the same number of tokens behind a prefill chunk: nobody reads them.
        self._instead = _wider_drafts(widths)
        self._beyond = max((drafts - 1 for _, _, drafts in self._instead.values()), default=0)
        layouts = {width: tuple(map(Layout, buffers(point))) for width, point in widths.items()}

        plan = Plan()
        self.cache.plan(plan)
        plan.add("workspace", executor.workspace)
        for inputs, outputs in layouts.values():  # one width runs at a time
            plan.add("inputs", inputs.nbytes)
            plan.add("outputs", outputs.nbytes)
        self._memory = plan.allocate(cuda, budget, f"the {role}'s cache and buffers")
        self.cache.place(self._memory, stream.handle)
        self._widths = {
            width: _Width(Staged(cuda, inputs, self._memory["inputs"]), Staged(cuda, outputs, self._memory["outputs"]))
            for width, (inputs, outputs) in layouts.items()
        }
        runs = {point: self._ready(point) for point in sorted(self._points)}
        self.execution: Execution = executor.execution
        self.fallback = executor.fallback
        if executor.capturable:
            self._capture(runs)

    @property
    def sizes(self) -> tuple[int, ...]:
        """See :class:`~specexport.runtime.backend.Graph`."""
        return (1,)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache at its present size."""
        return self.cache.nbytes

    def reserve(self, rows: int) -> None:
        """See :class:`~specexport.runtime.backend.Graph`; takes no memory, as all of it was taken at first.

        Raises:
            BackendError: no declared size is large enough.
        """
        rows = min(rows + self._beyond, max(rows, self._sizes[-1]))
        if rows <= self.cache.rows:
            return
        size = next((size for size in self._sizes if size >= rows), None)
        if size is None:
            raise BackendError(f"{rows} cache rows wanted, but the bundle's largest cache has {self._sizes[-1]}")
        self.cache.resize(size, self._stream.handle)

    def fit(self, rows: int) -> None:
        """See :class:`~specexport.runtime.backend.Graph`."""
        size = next((size for size in self._sizes if size >= rows + self._beyond), self._sizes[-1])
        if size < self.cache.rows:
            self._filled = min(self._filled, size)
            self.cache.resize(size, self._stream.handle)

    def filled(self, slot: int) -> int:
        """See :class:`~specexport.runtime.backend.Graph`."""
        return self._filled

    def copy(self, source: int, to: int, rows: int) -> None:
        """See :class:`~specexport.runtime.backend.Graph`; with one slot there is nowhere to copy to."""
        self._filled = rows

    def commit(self, slot: int, past: int, nodes: Sequence[int]) -> None:
        """See :class:`~specexport.runtime.backend.Graph`; done in the stream's order."""
        self._filled = past + len(nodes)
        self.cache.move(slot, past, nodes, None if self._in_place else self._made, self._stream.handle)

    def inputs(self, tokens: int, rows: int = 0, drafts: int = 0, slots: range = FIRST) -> dict[str, Array]:
        """See :class:`~specexport.runtime.backend.Graph`."""
        given = self._at(tokens, rows, drafts).inputs.host
        given[tensors.PAST_LENGTH][:] = self._filled
        return given

    def run(self, tokens: int, rows: int = 0, drafts: int = 0, slots: range = FIRST) -> dict[str, Array]:
        """See :class:`~specexport.runtime.backend.Graph`."""
        width = self._at(tokens, rows, drafts)
        drafts = self._instead.get((tokens, rows, drafts), (tokens, rows, drafts))[2]
        fed = ShapePoint(1, tokens, self.cache.rows, rows, drafts).fed
        past = int(width.inputs.host[tensors.PAST_LENGTH].max())
        if past + fed > self.cache.rows:
            raise BackendError(
                f"a run would write rows {past} to {past + fed - 1} of a cache of {self.cache.rows}; the text is too "
                "close to the end of the context, shorten the prompt or build with a larger --max-seq-len"
            )
        width.launches[self.cache.rows]()
        self._stream.synchronize()
        self._made = fed
        return width.outputs.host

    def watch(self, around: Callable[[Enqueue], None]) -> None:
        """Gives every run to the stream through a function that is called with it, for measurements."""
        for width in self._widths.values():
            for cache, launch in width.launches.items():
                width.launches[cache] = functools.partial(around, launch)

    def close(self) -> None:
        """Gives everything back; what the library holds first, as it may still use the stream and our memory."""
        self._stream.synchronize()
        for captured in self._captured:
            captured.close()
        for width in self._widths.values():
            width.launches.clear()
        self._executor.close()
        for width in self._widths.values():
            width.inputs.close()
            width.outputs.close()
        self._memory.close()

    def _at(self, tokens: int, rows: int, drafts: int) -> _Width:
        tokens, rows, drafts = self._instead.get((tokens, rows, drafts), (tokens, rows, drafts))
        point = ShapePoint(1, tokens, self.cache.rows, rows, drafts)
        if point not in self._points:
            raise BackendError(f"shape point {point} was not built; this is a defect of specexport, please report it")
        return self._widths[tokens, rows, drafts]

    def _ready(self, point: ShapePoint) -> Enqueue:
        """Prepares a point and runs it once, so that libraries have set themselves up before anything is captured."""
        width = self._widths[_width(point)]
        enqueue = self.prepare(point, width.inputs.device | width.outputs.device)

        def run() -> None:
            width.inputs.upload(self._stream.handle)
            enqueue()
            width.outputs.download(self._stream.handle)

        run()
        self._stream.synchronize()
        width.launches[point.cache] = run
        return run

    def _capture(self, runs: Mapping[ShapePoint, Enqueue]) -> None:
        """Captures every point, or none where one cannot be."""
        try:
            for run in runs.values():
                self._captured.append(self._stream.capture(run))
        except BackendError as error:
            self.fallback = str(error)
            for captured in self._captured:
                captured.close()
            self._captured.clear()
            return
        for point, captured in zip(runs, self._captured, strict=True):
            self._widths[_width(point)].launches[point.cache] = captured.launch
        self.execution = "graph per engine"

    def prepare(self, point: ShapePoint, arrays: dict[str, Tensor]) -> Enqueue:
        """Makes a shape point ready to run over other inputs and outputs than the graph's own, and over its cache.

        Args:
            point: the shape.
            arrays: every input and output but the caches.
        """
        caches = self.cache.tensors(point.cache)
        if self._in_place:
            returned = {name.replace("past_", "present_", 1): cache for name, cache in caches.items()}
        else:
            returned = {name.replace("past_", "new_", 1): rows for name, rows in self.cache.new_rows(point.fed).items()}
        return self._executor.prepare(point, arrays | caches | returned, self._memory["workspace"])


def _width(point: ShapePoint) -> Width:
    return point.tokens, point.rows, point.drafts


def _wider_drafts(widths: Collection[Width]) -> dict[Width, Width]:
    """For each T that is drafted behind, but by no graph with K = 1: the graph with the least K."""
    found: dict[Width, Width] = {}
    for tokens, rows, drafts in sorted(widths):
        if drafts > 1 and tokens > CATCH_UP_TOKENS:
            found.setdefault((tokens, rows, 1), (tokens, rows, drafts))
    return {asked: instead for asked, instead in found.items() if asked not in widths}
