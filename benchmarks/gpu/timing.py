"""Times on a GPU: copies, launches and the gaps between them."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from specexport.contract.errors import BackendError
from specexport.runtime import Engine
from specexport.runtime.backends.cuda.api import Cuda, CudaStream
from specexport.runtime.backends.cuda.backend import CudaBackend
from specexport.runtime.backends.cuda.library import Enqueue, Execution
from specexport.runtime.backends.cuda.memory import Device, MemoryBudget, MemoryPlan
from specexport.runtime.backends.cuda.steps import Steps

COPIED = 1 << 30


def on_device(engine: Engine) -> CudaBackend:
    """The backend of an engine that runs on a GPU."""
    assert isinstance(engine.backend, CudaBackend)
    return engine.backend


def create_event(cuda: Cuda) -> int:
    """A CUDA event with timing."""
    return int(cuda.call("cudaEventCreateWithFlags", 0))


def copy_bandwidth(cuda: Cuda, rounds: int = 10) -> float:
    """The bandwidth of copies within the device's memory, reads plus writes, in bytes a second."""
    device, needs = Device.share(cuda, 1.0), MemoryPlan()
    nbytes = min(COPIED, MemoryBudget(cuda, 0.5).available // 4)
    needs.add("from", nbytes)
    needs.add("to", nbytes)
    memory, stream = needs.allocate(device, "the bandwidth test"), device.stream
    start, end = create_event(cuda), create_event(cuda)
    times = []
    for _ in range(rounds):
        cuda.call("cudaEventRecord", start, stream.handle)
        stream.copy(memory["to"].address, memory["from"].address, nbytes)
        cuda.call("cudaEventRecord", end, stream.handle)
        cuda.call("cudaEventSynchronize", end)
        times.append(float(cuda.call("cudaEventElapsedTime", start, end)))
    for event in (start, end):
        cuda.call("cudaEventDestroy", event)
    memory.close()
    stream.close()
    return 2e3 * nbytes / min(times)


@dataclass(frozen=True)
class Gaps:
    """Microseconds between the end of each launch's work and the start of the next.

    Attributes:
        after_wait: gaps in which the host waited, read results and submitted new work.
        queued: gaps between launches submitted without waiting, as in a step that is not a single CUDA graph.
    """

    after_wait: list[float]
    queued: list[float]

    def per_step(self, steps: int) -> float:
        """The GPU's idle time per step: the median of each kind of gap, times its number per step."""
        return sum(statistics.median(kind) * len(kind) for kind in (self.after_wait, self.queued) if kind) / steps


class LaunchTimer:
    """Events around all launches, to measure the gaps between them.

    Args:
        backend: an open backend.
        most: maximum number of recorded launches.
    """

    def __init__(self, backend: CudaBackend, most: int = 4096) -> None:
        self._cuda, self._stream = backend.cuda, backend.stream
        self._events = [(create_event(self._cuda), create_event(self._cuda)) for _ in range(most)]
        self._waits: list[int] = []
        self._launched: list[Enqueue] = []
        backend.watch(self._around)

    def _around(self, launch: Enqueue) -> None:
        if not self._events:  # no events left
            launch()
            return
        start, end = self._events[len(self._waits) % len(self._events)]
        self._waits.append(self._stream.waits)
        self._launched.append(launch)
        self._cuda.call("cudaEventRecord", start, self._stream.handle)
        launch()
        self._cuda.call("cudaEventRecord", end, self._stream.handle)

    def gaps(self) -> Gaps:
        """Returns the gaps between the recorded launches, and clears the record."""
        self._stream.synchronize()
        gaps = Gaps([], [])
        for ((_, end), (start, _)), (before, after) in zip(
            itertools.pairwise(self._events), itertools.pairwise(self._waits), strict=False
        ):
            kind = gaps.queued if before == after else gaps.after_wait
            kind.append(1e3 * float(self._cuda.call("cudaEventElapsedTime", end, start)))
        self._destroy()
        return gaps

    def milliseconds(self) -> list[list[float]]:
        """Returns the times of each of the most frequent launches, in order, and clears the record.

        All launches of a step are equally frequent, and those of prompts and of the warm-up less frequent.
        """
        self._stream.synchronize()
        taken: dict[Enqueue, list[float]] = {}
        for launch, (start, end) in zip(self._launched, self._events, strict=False):
            taken.setdefault(launch, []).append(float(self._cuda.call("cudaEventElapsedTime", start, end)))
        self._destroy()
        most = max(map(len, taken.values()))
        return [times for times in taken.values() if len(times) == most]

    def _destroy(self) -> None:
        for pair in self._events:
            for event in pair:
                self._cuda.call("cudaEventDestroy", event)
        self._events = []


@contextlib.contextmanager
def graph_per_engine() -> Iterator[None]:
    """Context in which engines capture the parts of a step separately, so that each can be timed."""
    capture = Steps._capture

    def parts(self: Steps, execution: Execution) -> bool:
        return execution != "graph per step" and capture(self, execution)

    with _replaced(Steps, "_capture", parts):
        yield


@contextlib.contextmanager
def uncaptured() -> Iterator[None]:
    """Context in which engines capture nothing and run every graph through the library."""
    with _replaced(CudaStream, "capture_all", lambda *_: BackendError("not captured, for comparison")):
        yield


@contextlib.contextmanager
def _replaced(owner: type, name: str, by: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        setattr(owner, name, before)
