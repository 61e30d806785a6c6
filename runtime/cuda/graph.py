"""A model's graph on the device, with its caches and staging: what the engine's loop runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specexport.contract import tensors
from specexport.contract.errors import BackendError
from specexport.contract.model import LoweredAs, Model
from specexport.contract.shapes import ShapePoint
from specexport.runtime.cuda.caches import DeviceCache, Made
from specexport.runtime.cuda.executor import Enqueue, Execution, Executor
from specexport.runtime.cuda.memory import BufferLayout, Device, MemoryPlan, Staged, Tensor
from specexport.runtime.cuda.repeat import PASTS, Repeated, call_arrays, call_of, note_pasts, repeated_points
from specexport.runtime.cuda.stream import Captured
from specexport.runtime.graph import FIRST, Array, Buffers, Graph

_Piece = tuple[Enqueue, Callable[[Enqueue], None]]
"""Work that can be captured, and what puts the captured graph's launch in its place."""
_Place = tuple[int, int]
"""Rows of the cache, and the first slot of the window: where a width runs."""


@dataclass
class Width:
    """What runs at one width share: inputs and outputs, on the host and on the device; what gives the graph to the
    stream; and what does a whole run, with the copies before and after it.
    """

    inputs: Staged
    outputs: Staged
    enqueues: dict[_Place, Enqueue] = field(default_factory=dict)
    launches: dict[_Place, Enqueue] = field(default_factory=dict)


class DeviceGraph(Graph):
    """A graph over device memory that is planned and taken when it is opened; see ``runtime.graph.Graph``.

    A run is: inputs to the device, the graph, outputs back, wait. The first three are one captured CUDA graph a shape
    point, captured when the model is opened. Nothing is allocated afterwards. A draft whose
    engine drafts one token a call is called for each (``runtime.cuda.repeat``); lowered portably its rows are copied
    into the cache between the calls, so that there each call is captured.

    With several slots every run takes all of them, which costs a GPU little beside reading the weights; prompts are
    read a slot at a time. An MLP speculator has no cache, so that nothing is committed, reserved or moved.

    Attributes:
        execution: how runs reach the device.
        fallback: why not by a captured graph, where they do not; empty otherwise.
        cache: the model's.
        in_place: whether the graph itself writes its rows into the cache.

    Raises:
        BackendError: it does not fit, or the library refuses it.
    """

    def __init__(
        self,
        device: Device,
        model: Model,
        lowering: LoweredAs,
        buffers: Buffers,
        executor: Executor,
        slots: int,
        role: str,
    ) -> None:
        built = {point for point in executor.points if point.batch == slots}
        if not built:
            raise BackendError(f"the {role} was not compiled for {slots} slots; compile it with that batch size")
        together = {_batched(point)[1:] for point in built}
        built |= {point for point in executor.points if point.batch == 1 and _batched(point)[1:] not in together}
        self._repeated = repeated_points(model.graph.points, built)
        # A width that no run has is one of further calls alone.
        narrowest = min((point.tokens for point in model.graph.points if point.drafts), default=0)
        self._follow_up = min((point.tokens for point in built if point.drafts), default=0)
        built = {point for point in built if not point.drafts or point.tokens >= narrowest}
        super().__init__(built | self._repeated, slots)
        self.sizes = (slots,)
        self.in_place = lowering == "native"
        self._device = device
        self._executor = executor
        fed = 0 if self.in_place else max(point.fed for point in built)
        self.cache = DeviceCache(device, model.cache, slots, executor.cache_dtype, self.cache_sizes, fed)
        self._made: Made | None = None
        self._captured: list[Captured] = []
        points = {_batched(point): point for point in self._points}
        layouts = {key: self._layouts(point, buffers) for key, point in points.items()}
        call = next((call_arrays(point, self._follow_up, buffers) for point in self._repeated), {})
        of_call = BufferLayout(call)

        plan = MemoryPlan()
        self.cache.plan(plan)
        plan.add("workspace", executor.workspace)
        plan.add("call", of_call.nbytes)
        for inputs, outputs in layouts.values():  # one width runs at a time
            plan.add("inputs", inputs.nbytes)
            plan.add("outputs", outputs.nbytes)
        self._memory = plan.allocate(device, f"the {role}'s cache and buffers")
        self.cache.place(self._memory)
        self._call = Staged(device, of_call, self._memory["call"])
        self._call.upload()
        self._widths = {
            key: Width(Staged(device, inputs, self._memory["inputs"]), Staged(device, outputs, self._memory["outputs"]))
            for key, (inputs, outputs) in layouts.items()
        }
        pieces = [piece for point in sorted(self._points) for piece in self._ready(point)]
        self.execution: Execution = "plain"
        self.fallback = ""
        self._capture(pieces)

    @property
    def self_contained(self) -> bool:
        """Whether a run needs nothing of the host once it is given to the stream.

        A draft lowered portably does: its rows are copied to where the host says.
        """
        return self.in_place or not self.cache.nbytes

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache at its present size."""
        return self.cache.nbytes

    def reserve(self, rows: int) -> None:
        # It takes no memory, as all of it was taken at first.
        if rows > self.cache.rows:
            self.cache.resize(self._cache_size(rows))

    def shrink_cache(self, rows: int) -> None:
        size = self._cache_size(min(rows, self.cache_sizes[-1]))
        if size < self.cache.rows:
            self._filled = [min(count, size) for count in self._filled]
            self.cache.resize(size)

    def copy(self, source: int, to: int, rows: int) -> None:
        if source != to:
            self.cache.copy(source, to, rows)
        self._filled[to] = rows

    def commit(self, slot: int, past: int, nodes: Sequence[int]) -> None:
        self._filled[slot] = past + len(nodes)
        self.cache.move(slot, past, nodes, self._made)

    def committed(self, slot: int, rows: int) -> None:
        """Records that a slot holds so many rows, which the device itself put in place."""
        self._filled[slot] = rows

    def inputs(self, tokens: int, rows: int = 0, drafts: int = 0, slots: range = FIRST) -> dict[str, Array]:
        return self.width(tokens, rows, drafts, len(slots)).inputs.host

    def protect_rows(self, tokens: int, rows: int = 0, drafts: int = 0, slots: range = FIRST) -> None:
        fed = self._point(tokens, rows, drafts, len(slots)).fed
        self._protect(self.inputs(tokens, rows, drafts, slots), slots, self.cache.rows - fed)

    def run(self, tokens: int, rows: int = 0, drafts: int = 0, slots: range = FIRST) -> dict[str, Array]:
        width = self.begin(tokens, rows, drafts, slots)
        width.launches[self.cache.rows, slots.start]()
        self._device.stream.synchronize()
        return width.outputs.host

    def begin(self, tokens: int, rows: int = 0, drafts: int = 0, slots: range = FIRST) -> Width:
        """What runs at a width over the inputs that are set, which is about to be given to the stream.

        Raises:
            BackendError: the cache has no room for the rows it would make.
        """
        point = self._require(self._point(tokens, rows, drafts, len(slots)))
        width = self._widths[_batched(point)]
        if tensors.PAST_LENGTH in width.inputs.host:
            past = int(width.inputs.host[tensors.PAST_LENGTH].max())
            if past + point.fed > self.cache.rows:
                raise BackendError(
                    f"a run would write rows {past} to {past + point.fed - 1} of a cache of {self.cache.rows}; the "
                    "text is too close to the end of the context; shorten it or build with a larger --max-seq-len"
                )
        repeated = point in self._repeated
        if repeated:
            note_pasts(width.inputs.host)
        self._made = None if self.in_place or repeated else Made(point.fed, slots)
        return width

    def watch(self, around: Callable[[Enqueue], None]) -> None:
        """Gives every run to the stream through a function that is called with it, for measurements."""
        for width in self._widths.values():
            for place, launch in width.launches.items():
                width.launches[place] = functools.partial(around, launch)

    def close(self) -> None:
        """Gives everything back; what the library holds first, as it may still use the stream and our memory."""
        self._device.stream.synchronize()
        for captured in self._captured:
            captured.close()
        for width in self._widths.values():
            width.launches.clear()
            width.enqueues.clear()
        self._executor.close()
        for width in self._widths.values():
            width.inputs.close()
            width.outputs.close()
        self._call.close()
        self._memory.close()

    def width(self, tokens: int, rows: int = 0, drafts: int = 0, batch: int = 1) -> Width:
        """The arrays and launches of a width.

        Raises:
            BackendError: there is none.
        """
        return self._widths[_batched(self._require(self._point(tokens, rows, drafts, batch)))]

    def _point(self, tokens: int, rows: int, drafts: int, batch: int) -> ShapePoint:
        """The shape that runs at a width, at the present cache size."""
        return ShapePoint(batch, tokens, self.cache.rows, rows, drafts)

    def _layouts(self, point: ShapePoint, buffers: Buffers) -> tuple[BufferLayout, BufferLayout]:
        inputs, outputs = buffers(point)
        pasts = {PASTS: np.zeros((point.drafts, point.batch), np.int64)} if point in self._repeated else {}
        return BufferLayout(inputs | pasts), BufferLayout(outputs)

    def _ready(self, point: ShapePoint) -> list[_Piece]:
        """Prepares a point and warms it up, so that libraries have set themselves up before anything is captured."""
        width = self._widths[_batched(point)]
        pieces: list[_Piece] = []
        for slots in (range(first, first + point.batch) for first in range(0, self._slots, point.batch)):
            calls: list[Enqueue] = []
            if point in self._repeated:
                enqueue, calls = self._repeat(point, slots, width)
            else:
                enqueue = self._prepare(point, slots, width.inputs.device | width.outputs.device)
            run = functools.partial(self._whole, width, enqueue)
            self._device.warm_up(run)
            place = (point.cache, slots.start)
            width.enqueues[place], width.launches[place] = enqueue, run
            if calls and not self.in_place:
                pieces += [(call, functools.partial(calls.__setitem__, at)) for at, call in enumerate(calls)]
            else:
                pieces.append((run, functools.partial(width.launches.__setitem__, place)))
        return pieces

    def _whole(self, width: Width, enqueue: Enqueue) -> None:
        width.inputs.upload()
        enqueue()
        width.outputs.download()

    def _repeat(self, point: ShapePoint, slots: range, width: Width) -> tuple[Enqueue, list[Enqueue]]:
        """What does a run of several calls, and the calls."""

        def prepare(tokens: int, arrays: dict[str, Tensor]) -> Enqueue:
            return self._prepare(call_of(point, tokens), slots, arrays)

        calls = Repeated(self._device, width.inputs.device, width.outputs.device, self._call.device, prepare).calls()

        def enqueue() -> None:
            for index, call in enumerate(calls):
                call()
                tokens = self._follow_up if index else point.tokens
                for slot in () if self.in_place else slots:
                    past = int(width.inputs.host[PASTS][index, slot - slots.start])
                    self.cache.move(slot, past, range(tokens), Made(tokens, slots))

        return enqueue, calls

    def _capture(self, pieces: Sequence[_Piece]) -> None:
        """Captures every piece, or none where one cannot be."""
        captured = self._device.stream.capture_all([enqueue for enqueue, _ in pieces])
        if isinstance(captured, BackendError):
            self.fallback = str(captured)
            self.watch(self._device.thread.run)
            return
        self._captured = captured
        for (_, replace), graph in zip(pieces, captured, strict=True):
            replace(graph.launch)
        self.execution = "graph per engine"

    def _prepare(self, point: ShapePoint, slots: range, arrays: dict[str, Tensor]) -> Enqueue:
        """Makes a shape point ready to run over inputs and outputs, which are all but the caches, and its cache."""
        caches = self.cache.tensors(point.cache, slots)
        if self.in_place:
            returned = {name.replace("past_", "present_", 1): cache for name, cache in caches.items()}
        else:
            made = self.cache.new_rows(point.fed, slots)
            returned = {name.replace("past_", "new_", 1): rows for name, rows in made.items()}
        return self._executor.prepare(point, arrays | caches | returned, self._memory["workspace"])


def _batched(point: ShapePoint) -> tuple[int, int, int, int]:
    return point.batch, point.tokens, point.rows, point.drafts
