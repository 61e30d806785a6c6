"""Typed and checked wrappers of ``cuda.bindings.runtime``: a device, its stream and its thread."""

from __future__ import annotations

import functools
import importlib
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from specexport.contract.errors import BackendError

_NO_DEVICE = ("cudaErrorNoDevice", "cudaErrorInsufficientDriver", "cudaErrorStubLibrary", "cudaErrorInvalidDevice")
_GIB = 1 << 30
DEVICE = 0
"""CUDA's number for the device in use, the first of ``CUDA_VISIBLE_DEVICES``."""
T = TypeVar("T")


class OutOfDeviceMemoryError(BackendError):
    """The device has too little free memory."""


@dataclass(frozen=True)
class CudaDevice:
    """A GPU: its name, its compute capability, such as ``(8, 9)``, and its bytes of memory."""

    name: str
    capability: tuple[int, int]
    total: int

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


class Cuda:
    """The CUDA runtime on the first device, which becomes the calling thread's current one.

    Addresses and handles are plain integers. Every call raises on any status but success. ``bindings`` is the module
    ``cuda.bindings.runtime``.
    """

    def __init__(self, bindings: Any) -> None:
        self.bindings = bindings
        self.call("cudaGetDeviceCount")  # fails without a driver or a device
        self.call("cudaSetDevice", DEVICE)
        kinds = bindings.cudaDeviceAttr
        major = self.call("cudaDeviceGetAttribute", kinds.cudaDevAttrComputeCapabilityMajor, DEVICE)
        minor = self.call("cudaDeviceGetAttribute", kinds.cudaDevAttrComputeCapabilityMinor, DEVICE)
        name = self.call("cudaGetDeviceProperties", DEVICE).name
        text = name.decode() if isinstance(name, bytes) else str(name)
        self.device = CudaDevice(text, (major, minor), self.memory()[1])

    @classmethod
    def load(cls) -> Cuda:
        """Opens the device through the installed ``cuda-bindings``."""
        try:
            bindings = importlib.import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise BackendError(
                f"cuda-bindings is not installed ({error}), and GPU backends need it; install it with: "
                "pip install 'specexport[gpu]'"
            ) from error
        return cls(bindings)

    def memory(self) -> tuple[int, int]:
        """Bytes of device memory: free, total."""
        free, total = self.call("cudaMemGetInfo")
        return int(free), int(total)

    def allocate(self, nbytes: int) -> int:
        """Allocates device memory, aligned to at least 256 bytes, with undefined content; returns its address."""
        return int(self.call("cudaMalloc", nbytes, nbytes=nbytes))

    def allocate_pinned(self, nbytes: int) -> int:
        """Allocates page-locked host memory, which the device copies directly; returns its address."""
        return int(self.call("cudaHostAlloc", nbytes, self.bindings.cudaHostAllocDefault))

    def finalizer(self, owner: object, name: str, handle: int) -> Callable[[], object]:
        """A function that frees a handle by the call ``name``, at the latest with its owner; later calls do nothing."""
        finalizer = weakref.finalize(owner, self.call, name, handle)
        finalizer.atexit = False  # the driver frees everything when a process ends
        return finalizer

    def call(self, name: str, *arguments: Any, nbytes: int = 0) -> Any:
        """Calls a function of the CUDA runtime; ``nbytes`` is the size of an allocation, for errors."""
        status, *result = getattr(self.bindings, name)(*arguments)
        if int(status):
            raise self._error(name, status, nbytes)
        return result[0] if len(result) == 1 else tuple(result)

    def _error(self, call: str, status: Any, nbytes: int) -> BackendError:
        status_name = status.name
        if status_name in _NO_DEVICE:
            return self._no_device(status_name)
        self.bindings.cudaGetLastError()  # or the next call would report it again
        if status_name == "cudaErrorMemoryAllocation":
            _, free, total = self.bindings.cudaMemGetInfo()
            return OutOfDeviceMemoryError(
                f"the GPU has no room for {nbytes / _GIB:.2f} GiB: {free / _GIB:.2f} of {total / _GIB:.2f} GiB are "
                "free. End other programs on it (nvidia-smi lists them), or build with a shorter --max-seq-len or "
                "smaller weights (--precision)"
            )
        _, text = self.bindings.cudaGetErrorString(status)
        return BackendError(f"{call} failed with {status_name}: {text.decode() if isinstance(text, bytes) else text}")

    def _no_device(self, status_name: str) -> BackendError:
        _, driver = self.bindings.cudaDriverGetVersion()
        _, runtime = self.bindings.cudaRuntimeGetVersion()
        if not driver:
            return BackendError(
                "no NVIDIA driver was found, and this backend runs on a GPU; install the driver, or run the bundle on "
                "the CPU with --backend onnxruntime"
            )
        if status_name == "cudaErrorInsufficientDriver":
            return BackendError(
                f"the NVIDIA driver supports CUDA {_version(driver)}, but cuda-bindings is for {_version(runtime)}; "
                f"update the driver, or install cuda-bindings=={_version(driver).split('.')[0]}.*"
            )
        return BackendError(
            f"no GPU can be used ({status_name}); see nvidia-smi and CUDA_VISIBLE_DEVICES, or run the bundle on the "
            "CPU with --backend onnxruntime"
        )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


class CudaStream:
    """A queue of work that the device does in order, without waiting for the legacy default stream.

    It has no finalizer and must be closed, as libraries may use its handle in their destructors, and the order of
    garbage collection is undefined.

    Attributes:
        handle: for libraries.
        waits: number of waits for its work, for measurements.
        capturing: whether its work is being recorded.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._closed = False
        self._rt = cuda.bindings
        self.handle = int(cuda.call("cudaStreamCreateWithFlags", self._rt.cudaStreamNonBlocking))
        self.waits = 0
        self.capturing = False

    def synchronize(self) -> None:
        self._cuda.call("cudaStreamSynchronize", self.handle)
        self.waits += 1

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Enqueues a copy of bytes; CUDA tells by their addresses whether they are on the device or the host."""
        self._cuda.call("cudaMemcpyAsync", to, source, nbytes, self._rt.cudaMemcpyKind.cudaMemcpyDefault, self.handle)

    def copy_rows(self, to: int, to_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        """Enqueues a copy of ``rows`` rows of ``width`` bytes that start a pitch apart; they must not overlap."""
        kind = self._rt.cudaMemcpyKind.cudaMemcpyDefault
        self._cuda.call("cudaMemcpy2DAsync", to, to_pitch, source, source_pitch, width, rows, kind, self.handle)

    def fill(self, address: int, value: int, nbytes: int) -> None:
        self._cuda.call("cudaMemsetAsync", address, value, nbytes, self.handle)

    def capture(self, enqueue: Callable[[], None]) -> CudaGraph:
        """Records the work that a function enqueues instead of doing it.

        The function must not allocate or wait, and all its addresses must stay valid as long as the graph is launched.

        Raises:
            BackendError: some of the work cannot be captured; the stream stays usable.
        """
        self._begin_capture()
        self.capturing = True
        try:
            enqueue()
        except BaseException:
            self._abandon_capture()
            raise
        finally:
            self.capturing = False
        graph = self._cuda.call("cudaStreamEndCapture", self.handle)
        executable = int(self._cuda.call("cudaGraphInstantiate", graph, 0))
        self._cuda.call("cudaGraphDestroy", graph)
        return CudaGraph(self._cuda, self.handle, executable)

    def _begin_capture(self) -> None:
        """Begins to record the work of this stream and thread."""
        mode = self._rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._cuda.call("cudaStreamBeginCapture", self.handle, mode)

    def _abandon_capture(self) -> None:
        """Ends a failed capture, so that the stream can be used again."""
        status, graph = self._rt.cudaStreamEndCapture(self.handle)
        if not int(status) and int(graph):
            self._rt.cudaGraphDestroy(graph)
        self._rt.cudaGetLastError()

    def capture_all(self, work: Sequence[Launch]) -> BackendError | None:
        """Captures all pieces of work; returns the error, and captures none, if one of them cannot be captured."""
        captured: list[CudaGraph] = []
        try:
            for launch in work:
                captured.append(self.capture(launch.enqueue))  # noqa: PERF401  # those before a failure must be closed
        except BackendError as error:
            for graph in captured:
                graph.close()
            return error
        for launch, graph in zip(work, captured, strict=True):
            launch.run, launch.close = graph.launch, graph.close
        return None

    def close(self) -> None:
        """Destroys the stream once its work is done; later calls do nothing."""
        if not self._closed:
            self._closed = True
            self._cuda.call("cudaStreamDestroy", self.handle)


class CudaGraph:
    """A CUDA graph of work on one stream; :attr:`close` destroys it, and may be called again."""

    def __init__(self, cuda: Cuda, stream: int, executable: int) -> None:
        self._cuda = cuda
        self._stream = stream
        self._executable = executable
        self.close = cuda.finalizer(self, "cudaGraphExecDestroy", executable)

    def launch(self) -> None:
        self._cuda.call("cudaGraphLaunch", self._executable, self._stream)


class Launch:
    """Work for a stream, enqueued call by call until :meth:`CudaStream.capture_all` captures it.

    Attributes:
        enqueue: enqueues it call by call.
        run: enqueues it, or launches its graph.
        close: destroys its graph, if any.
    """

    def __init__(self, enqueue: Callable[[], None]) -> None:
        self.enqueue = self.run = enqueue
        self.close: Callable[[], object] = lambda: None

    def watch(self, around: Callable[[Callable[[], None]], None]) -> None:
        """Calls ``around`` with :attr:`run` instead of it from now on."""
        self.run = functools.partial(around, self.run)


class DeviceThread:
    """The thread that makes all calls of a device's library.

    onnxruntime keeps handles and scratch memory for every thread that runs a session, and frees them when the thread
    ends. Captured graphs use them, so the thread must live as long as the graphs. Any thread may launch these.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="specexport-device")
        self._ident = self._pool.submit(threading.get_ident).result()

    def run(self, work: Callable[[], T]) -> T:
        """Runs a function in the thread and waits for it; raises its exceptions."""
        if threading.get_ident() == self._ident:
            return work()
        return self._pool.submit(work).result()

    def close(self) -> None:
        self._pool.shutdown()
