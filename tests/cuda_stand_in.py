"""A recording stand-in for ``cuda.bindings.runtime``: no GPU, but the rules of one.

Device memory is host memory that only this module may touch while nothing is being captured. Work given to a stream is
done when something waits for the stream and not before, so that a missing wait, or a buffer that is written too early,
gives wrong results in a test. It checks that

* every address lies inside one live allocation, when work is given, when it is done, and whenever a graph is launched;
* memory is poisoned when it is taken and when it is given back;
* a capture allocates nothing, frees nothing and waits for nothing;
* everything is given back once.

The first argument of every answer is a status of the real package, whose enumerations and signatures are used: a test
compares the two.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from cuda.bindings import runtime as real

from specexport.runtime.backends.cuda import api

if TYPE_CHECKING:
    import pytest

FRESH, FREED = 0xA5, 0xDD
POISONED = 64 << 20
"""Bytes of an allocation that are poisoned; what is larger is taken only to fill the device."""
_SETTING_UP = frozenset(
    {"cudaMalloc", "cudaHostAlloc", "cudaFree", "cudaFreeHost", "cudaStreamBeginCapture", "cudaGraphInstantiate"}
)
Work = Callable[[], None]


@dataclass
class Allocation:
    base: int
    nbytes: int
    buffer: Any
    pinned: bool
    live: bool = True


@dataclass
class _Stream:
    pending: list[Work] = field(default_factory=list)
    recording: list[Work] | None = None
    broken: bool = False


@dataclass
class _Graph:
    work: list[Work]
    live: bool = True


class Names:
    """Enumerations and flags, which are the real package's."""

    cudaMemcpyKind = real.cudaMemcpyKind
    cudaStreamCaptureMode = real.cudaStreamCaptureMode
    cudaDeviceAttr = real.cudaDeviceAttr
    cudaError_t = real.cudaError_t
    cudaHostAllocDefault = real.cudaHostAllocDefault
    cudaStreamNonBlocking = real.cudaStreamNonBlocking
    cudaEventDefault = real.cudaEventDefault


class StandIn(Names):
    """One imaginary GPU of 1 GiB.

    Attributes:
        devices: how many the machine is said to have.
        calls: the names of all calls in order.
        allocations: all there ever were.
        launches: how often graphs were launched.
        refuse_capture: makes every capture fail, as an operation that cannot be captured would.
        most_captured: makes captures of more operations fail.
    """

    def __init__(self, total: int = 1 << 30, capability: tuple[int, int] = (8, 9)) -> None:
        self.calls: list[str] = []
        self.allocations: list[Allocation] = []
        self.launches = 0
        self.devices = 1
        self.refuse_capture = False
        self.most_captured = 1 << 30
        self._sealed = False
        self._total = total
        self._capability = capability
        self._streams: dict[int, _Stream] = {}
        self._graphs: dict[int, _Graph] = {}
        self._executables: dict[int, _Graph] = {}
        self._events: dict[int, float] = {}
        self._handles = iter(range(0x1000, 1 << 30, 16))

    # --- what tests ask ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def sealed(self) -> Iterator[None]:
        """Taking memory, giving it back and capturing are errors meanwhile, as in the loop of a loaded bundle."""
        self._sealed = True
        try:
            yield
        finally:
            self._sealed = False

    def used(self) -> int:
        return sum(a.nbytes for a in self.allocations if a.live and not a.pinned)

    @property
    def leaks(self) -> list[str]:
        kept = [f"{a.nbytes} bytes, pinned: {a.pinned}" for a in self.allocations if a.live]
        for kind in ("streams", "graphs", "executables", "events"):
            kept += [f"{len(held)} {kind}"] if (held := getattr(self, f"_{kind}")) else []
        return kept

    def array(self, address: int, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Device memory as an array; checks that it lies inside a live allocation."""
        count = int(np.prod(shape, dtype=np.int64))
        nbytes = np.dtype(dtype).itemsize * count
        self.check(address, nbytes)
        return np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=dtype, count=count).reshape(shape)

    def check(self, address: int, nbytes: int) -> None:
        inside = [a for a in self.allocations if a.base <= address and address + nbytes <= a.base + a.nbytes]
        assert inside, f"{nbytes} bytes at {address:#x} lie in no allocation"
        assert any(a.live for a in inside), f"{nbytes} bytes at {address:#x} lie in memory that was given back"

    def give(self, stream: int, work: Work, *spans: tuple[int, int]) -> None:
        """Gives work to a stream; it touches the spans (address, bytes)."""

        def checked() -> None:
            for address, nbytes in spans:
                self.check(address, nbytes)
            work()

        for address, nbytes in spans:
            self.check(address, nbytes)
        target = self._streams[int(stream)]
        (target.pending if target.recording is None else target.recording).append(checked)

    @property
    def capturing(self) -> bool:
        return any(stream.recording is not None for stream in self._streams.values())

    # --- the calls ----------------------------------------------------------------------------------------------------

    def __getattribute__(self, name: str) -> Any:
        attribute = object.__getattribute__(self, name)
        if name.startswith("cuda") and callable(attribute) and not isinstance(attribute, type):
            assert not (self._sealed and name in _SETTING_UP), f"{name} in a loop that may not call it"
            self.calls.append(name)
        return attribute

    def _forbidden(self) -> Any:
        """What a call that cannot be captured does to a capture."""
        for stream in self._streams.values():
            stream.broken |= stream.recording is not None
        return real.cudaError_t.cudaErrorStreamCaptureUnsupported if self.capturing else real.cudaError_t.cudaSuccess

    def cudaGetDeviceCount(self) -> Any:
        return real.cudaError_t.cudaSuccess, self.devices

    def cudaSetDevice(self, device: int) -> Any:
        return (real.cudaError_t.cudaSuccess,)

    def cudaDeviceGetAttribute(self, attr: Any, device: int) -> Any:
        major = attr == real.cudaDeviceAttr.cudaDevAttrComputeCapabilityMajor
        return real.cudaError_t.cudaSuccess, self._capability[0 if major else 1]

    def cudaGetDeviceProperties(self, device: int) -> Any:
        return real.cudaError_t.cudaSuccess, SimpleNamespace(name=b"Stand-in")

    def cudaMemGetInfo(self) -> Any:
        return real.cudaError_t.cudaSuccess, self._total - self.used(), self._total

    def cudaDriverGetVersion(self) -> Any:
        return real.cudaError_t.cudaSuccess, 13000

    def cudaRuntimeGetVersion(self) -> Any:
        return real.cudaError_t.cudaSuccess, 13000

    def cudaGetErrorString(self, error: Any) -> Any:
        return real.cudaGetErrorString(error)

    def cudaGetLastError(self) -> Any:
        return (real.cudaError_t.cudaSuccess,)

    def cudaMalloc(self, size: int) -> Any:
        if self.used() + size > self._total:
            return real.cudaError_t.cudaErrorMemoryAllocation, None
        return self._allocate(size, pinned=False)

    def cudaHostAlloc(self, size: int, flags: int) -> Any:
        return self._allocate(size, pinned=True)

    def _allocate(self, size: int, *, pinned: bool) -> Any:
        if status := int(self._forbidden()):
            return real.cudaError_t(status), None
        raw = mmap.mmap(-1, max(size, 1))  # whole pages, so aligned as device memory is
        base = ctypes.addressof(ctypes.c_char.from_buffer(raw))
        ctypes.memset(base, FRESH, min(size, POISONED))
        self.allocations.append(Allocation(base, size, raw, pinned))
        return real.cudaError_t.cudaSuccess, base

    def cudaFree(self, devPtr: int) -> Any:
        return self._free(devPtr, pinned=False)

    def cudaFreeHost(self, ptr: int) -> Any:
        return self._free(ptr, pinned=True)

    def _free(self, base: int, *, pinned: bool) -> Any:
        if status := int(self._forbidden()):
            return (real.cudaError_t(status),)
        freed = next((a for a in self.allocations if a.base == base and a.live and a.pinned == pinned), None)
        assert freed is not None, f"{base:#x} is no allocation that could be given back"
        for stream in list(self._streams):  # as the real calls do
            self.cudaStreamSynchronize(stream)
        freed.live = False
        ctypes.memset(base, FREED, min(freed.nbytes, POISONED))
        return (real.cudaError_t.cudaSuccess,)

    def cudaStreamCreateWithFlags(self, flags: int) -> Any:
        handle = next(self._handles)
        self._streams[handle] = _Stream()
        return real.cudaError_t.cudaSuccess, handle

    def cudaStreamDestroy(self, stream: int) -> Any:
        self.cudaStreamSynchronize(stream)
        del self._streams[int(stream)]
        return (real.cudaError_t.cudaSuccess,)

    def cudaStreamSynchronize(self, stream: int) -> Any:
        if status := int(self._forbidden()):
            return (real.cudaError_t(status),)
        pending = self._streams[int(stream)].pending
        while pending:
            pending.pop(0)()
        return (real.cudaError_t.cudaSuccess,)

    def cudaEventCreateWithFlags(self, flags: int) -> Any:
        handle = next(self._handles)
        self._events[handle] = 0.0
        return real.cudaError_t.cudaSuccess, handle

    def cudaEventRecord(self, event: int, stream: int) -> Any:
        def record() -> None:
            self._events[event] = float(len(self.calls))

        self.give(stream, record)
        return (real.cudaError_t.cudaSuccess,)

    def cudaEventSynchronize(self, event: int) -> Any:
        for stream in self._streams:
            self.cudaStreamSynchronize(stream)
        return (real.cudaError_t.cudaSuccess,)

    def cudaEventElapsedTime(self, start: int, end: int) -> Any:
        return real.cudaError_t.cudaSuccess, self._events[end] - self._events[start]

    def cudaEventDestroy(self, event: int) -> Any:
        del self._events[event]
        return (real.cudaError_t.cudaSuccess,)

    def cudaMemcpyAsync(self, dst: int, src: int, count: int, kind: Any, stream: int) -> Any:
        assert kind == real.cudaMemcpyKind.cudaMemcpyDefault
        self.give(stream, lambda: ctypes.memmove(dst, src, count), (dst, count), (src, count))
        return (real.cudaError_t.cudaSuccess,)

    def cudaMemcpy2DAsync(
        self, dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: Any, stream: int
    ) -> Any:
        assert kind == real.cudaMemcpyKind.cudaMemcpyDefault
        assert width <= dpitch and width <= spitch, "rows longer than their pitch"

        def copy() -> None:
            rows = [(ctypes.c_char * width).from_address(src + row * spitch).raw for row in range(height)]
            for row, data in enumerate(rows):
                target = dst + row * dpitch
                overlaps = any(abs(target - (src + other * spitch)) < width for other in range(height))
                assert not overlaps, "the two memory areas overlap"
                ctypes.memmove(target, data, width)

        spans = [(base, (height - 1) * pitch + width) for base, pitch in ((dst, dpitch), (src, spitch))]
        self.give(stream, copy, *spans)
        return (real.cudaError_t.cudaSuccess,)

    def cudaMemsetAsync(self, devPtr: int, value: int, count: int, stream: int) -> Any:
        self.give(stream, lambda: ctypes.memset(devPtr, value, count), (devPtr, count))
        return (real.cudaError_t.cudaSuccess,)

    def cudaStreamBeginCapture(self, stream: int, mode: Any) -> Any:
        assert mode == real.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        target = self._streams[int(stream)]
        assert target.recording is None, "this stream is being captured already"
        target.recording, target.broken = [], self.refuse_capture
        return (real.cudaError_t.cudaSuccess,)

    def cudaStreamEndCapture(self, stream: int) -> Any:
        target = self._streams[int(stream)]
        work, target.recording = target.recording, None
        assert work is not None, "this stream is not being captured"
        if target.broken or len(work) > self.most_captured:
            return real.cudaError_t.cudaErrorStreamCaptureInvalidated, None
        handle = next(self._handles)
        self._graphs[handle] = _Graph(work)
        return real.cudaError_t.cudaSuccess, handle

    def cudaGraphInstantiate(self, graph: int, flags: int) -> Any:
        handle = next(self._handles)
        self._executables[handle] = _Graph(self._graphs[graph].work)
        return real.cudaError_t.cudaSuccess, handle

    def cudaGraphDestroy(self, graph: int) -> Any:
        del self._graphs[graph]
        return (real.cudaError_t.cudaSuccess,)

    def cudaGraphLaunch(self, graphExec: int, stream: int) -> Any:
        assert not self.capturing, "a graph cannot be launched into a capture"
        self.launches += 1
        self._streams[int(stream)].pending += self._executables[graphExec].work
        return (real.cudaError_t.cudaSuccess,)

    def cudaGraphExecDestroy(self, graphExec: int) -> Any:
        del self._executables[graphExec]
        return (real.cudaError_t.cudaSuccess,)


@contextlib.contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Puts an imaginary GPU into the machine; nothing may be left on it."""
    cuda = StandIn()
    monkeypatch.setattr(api.Cuda, "load", lambda: api.Cuda(cuda))
    yield cuda
    gc.collect()
    assert cuda.leaks == []
