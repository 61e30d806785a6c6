"""A model's graph on the device, with its caches and staging buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from specexport.contract import tensors
from specexport.contract.errors import BackendError
from specexport.contract.model import LoweredAs, Model
from specexport.contract.shapes import ShapePoint
from specexport.runtime.backend import Array, Buffers, Graph, RunShape
from specexport.runtime.backends.cuda.api import Launch
from specexport.runtime.backends.cuda.cache import DeviceCache, NewRows
from specexport.runtime.backends.cuda.library import Enqueue, Execution, Executor
from specexport.runtime.backends.cuda.memory import Device, MemoryPlan, StagingBuffers, Tensor, block_size
from specexport.runtime.backends.cuda.repeat import (
    PASTS,
    call_arrays,
    call_of,
    repeated_calls,
    repeated_points,
    write_pasts,
)

_Place = tuple[int, int]
"""The cache's rows, and the window's first slot."""


@dataclass
class RunBuffers:
    """The buffers of runs of one shape at any cache size, on host and device, and the runs at each place.

    Attributes:
        enqueues: run the graph.
        launches: also copy inputs and outputs.
    """

    inputs: StagingBuffers
    outputs: StagingBuffers
    enqueues: dict[_Place, Enqueue] = field(default_factory=dict)
    launches: dict[_Place, Launch] = field(default_factory=dict)


class DeviceGraph(Graph):
    """A graph on the device; see :class:`~specexport.runtime.backend.Graph`.

    All memory is allocated when the graph is opened. A run copies inputs to the device, runs the graph, copies outputs
    back, and waits. The first three are one CUDA graph for each shape point, captured when the graph is opened. An
    engine that drafts one token a call is called once for each token (``repeat.py``); lowered portably, its rows are
    copied into the cache between the calls, so each call is captured separately.

    Every run takes all slots, which costs a GPU little compared with reading the weights; but prompts are read a slot
    at a time. An MLP speculator has no cache, so nothing is committed, reserved or moved.

    Attributes:
        execution: how runs reach the device.
        fallback: why runs are not captured; empty if they are.
        in_place: whether the graph writes its rows into the cache.
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
        built = _runnable(executor.points, slots, role)
        self._repeated = repeated_points(model.graph.points, built)
        # A narrower width than any run's is that of the follow-up calls.
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
        self._new_rows: NewRows | None = None
        points = {_uncached(point): point for point in self._points}
        arrays = {key: buffers(point) for key, point in points.items()}
        for point in self._repeated:
            arrays[_uncached(point)][0][PASTS] = np.zeros((point.drafts, point.batch), np.int64)
        of_call = next((call_arrays(point, self._follow_up, buffers) for point in self._repeated), {})

        plan = MemoryPlan()
        self.cache.plan(plan)
        plan.add("workspace", executor.workspace)
        plan.add("call", block_size(of_call))
        for inputs, outputs in arrays.values():  # only one of them runs at a time
            plan.add("inputs", block_size(inputs))
            plan.add("outputs", block_size(outputs))
        self._memory = plan.allocate(device, f"the {role}'s cache and buffers")
        self.cache.place(self._memory)
        self._call = StagingBuffers(device, of_call, self._memory["call"])
        self._call.upload()
        self._buffers = {
            key: RunBuffers(
                StagingBuffers(device, inputs, self._memory["inputs"]),
                StagingBuffers(device, outputs, self._memory["outputs"]),
            )
            for key, (inputs, outputs) in arrays.items()
        }
        self._pieces = [piece for point in sorted(self._points) for piece in self._prepare_runs(point)]
        # Again, as other points have changed the memory that onnxruntime divides among nodes.
        for piece in self._pieces:
            device.warm_up(piece.run)
        error = device.stream.capture_all(self._pieces)
        self.execution: Execution = "graph per engine" if error is None else "plain"
        self.fallback = "" if error is None else str(error)
        if error is not None:
            self.watch(device.thread.run)

    @property
    def self_contained(self) -> bool:
        """Whether an enqueued run can end without the host.

        A portably lowered draft cannot: the host says where to copy its rows.
        """
        return self.in_place or not self.cache.nbytes

    @property
    def cache_rows(self) -> int:
        return self.cache.rows

    def _resize(self, rows: int) -> None:
        self.cache.resize(rows)  # needs no memory: the largest cache was allocated

    def _copy(self, source: int, to: int, rows: int) -> None:
        self.cache.copy(source, to, rows)

    def _commit(self, slot: int, past: int, nodes: Sequence[int]) -> None:
        self.cache.move(slot, past, nodes, self._new_rows)

    def set_filled(self, slot: int, rows: int) -> None:
        """Records the number of a slot's rows after the device has committed some."""
        self._filled[slot] = rows

    def inputs(self, shape: RunShape) -> dict[str, Array]:
        return self.buffers(shape).inputs.host

    def _run(self, shape: RunShape) -> dict[str, Array]:
        buffers = self.begin(shape)
        buffers.launches[self.cache.rows, shape.slots.start].run()
        self._device.stream.synchronize()
        return buffers.outputs.host

    def begin(self, shape: RunShape) -> RunBuffers:
        """Checks the inputs of a run that is about to be enqueued; returns its buffers."""
        buffers, point = self.buffers(shape), shape.point(self.cache.rows)
        if tensors.PAST_LENGTH in buffers.inputs.host:
            past = int(buffers.inputs.host[tensors.PAST_LENGTH].max())
            if past + point.fed > self.cache.rows:
                raise BackendError(
                    f"a run would write rows {past} to {past + point.fed - 1} of a cache of {self.cache.rows}; the "
                    "text is too close to the end of the context; shorten it or build with a larger --max-seq-len"
                )
        repeated = point in self._repeated
        if repeated:
            write_pasts(buffers.inputs.host)
        self._new_rows = None if self.in_place or repeated else NewRows(point.fed, shape.slots)
        return buffers

    def watch(self, around: Callable[[Enqueue], None]) -> None:
        for buffers in self._buffers.values():
            for launch in buffers.launches.values():
                launch.watch(around)

    def close(self) -> None:
        """Frees everything; first the library's part, which may still use the stream and our memory."""
        self._device.stream.synchronize()
        for piece in self._pieces:
            piece.close()
        self._pieces.clear()
        for buffers in self._buffers.values():
            buffers.launches.clear()
            buffers.enqueues.clear()
        self._executor.close()
        for buffers in self._buffers.values():
            buffers.inputs.close()
            buffers.outputs.close()
        self._call.close()
        self._memory.close()

    def buffers(self, shape: RunShape) -> RunBuffers:
        """The buffers and launches for a run."""
        self._require(shape.point(self.cache.rows))
        return self._buffers[shape.point(0)]

    def _prepare_runs(self, point: ShapePoint) -> list[Launch]:
        """Prepares a point's runs and warms them up, so that libraries initialize; returns the work to capture."""
        buffers = self._buffers[_uncached(point)]
        pieces: list[Launch] = []
        for slots in (range(first, first + point.batch) for first in range(0, self._slots, point.batch)):
            if point in self._repeated:
                enqueue, calls = self._repeat(point, slots, buffers)
            else:
                enqueue, calls = self._prepare(point, slots, buffers.inputs.device | buffers.outputs.device), []
            launch = Launch(functools.partial(_run_with_copies, buffers, enqueue))
            self._device.warm_up(launch.run)
            place = (point.cache, slots.start)
            buffers.enqueues[place], buffers.launches[place] = enqueue, launch
            pieces += calls if calls and not self.in_place else [launch]
        return pieces

    def _repeat(self, point: ShapePoint, slots: range, buffers: RunBuffers) -> tuple[Enqueue, list[Launch]]:
        """A run of several calls of the engine, and these calls."""

        def prepare(tokens: int, arrays: dict[str, Tensor]) -> Enqueue:
            return self._prepare(call_of(point, tokens), slots, arrays)

        inputs, outputs = buffers.inputs.device, buffers.outputs.device
        calls = list(map(Launch, repeated_calls(self._device, inputs, outputs, self._call.device, prepare)))

        def enqueue() -> None:
            for index, call in enumerate(calls):
                call.run()
                tokens = self._follow_up if index else point.tokens
                for slot in () if self.in_place else slots:
                    past = int(buffers.inputs.host[PASTS][index, slot - slots.start])
                    self.cache.move(slot, past, range(tokens), NewRows(tokens, slots))

        return enqueue, calls

    def _prepare(self, point: ShapePoint, slots: range, arrays: dict[str, Tensor]) -> Enqueue:
        """Prepares a run at a shape point; ``arrays`` are all inputs and outputs but the caches."""
        caches = self.cache.tensors(point.cache, slots)
        if self.in_place:
            returned = {name.replace("past_", "present_", 1): cache for name, cache in caches.items()}
        else:
            new_rows = self.cache.new_rows(point.fed, slots)
            returned = {name.replace("past_", "new_", 1): rows for name, rows in new_rows.items()}
        return self._executor.prepare(point, arrays | caches | returned, self._memory["workspace"])


def _run_with_copies(buffers: RunBuffers, enqueue: Enqueue) -> None:
    buffers.inputs.upload()
    enqueue()
    buffers.outputs.download()


def _runnable(points: Collection[ShapePoint], slots: int, role: str) -> set[ShapePoint]:
    """The shape points with all slots, and the points with one slot whose shape does not exist with all."""
    together = {point for point in points if point.batch == slots}
    if not together:
        raise BackendError(f"the {role} was not compiled for {slots} slots; compile it with that batch size")
    shapes = {(point.tokens, point.rows, point.drafts) for point in together}
    alone = {point for point in points if point.batch == 1}
    return together | {point for point in alone if (point.tokens, point.rows, point.drafts) not in shapes}


def _uncached(point: ShapePoint) -> ShapePoint:
    """A shape point with cache 0, as buffers are the same for all cache sizes."""
    return msgspec.structs.replace(point, cache=0)
