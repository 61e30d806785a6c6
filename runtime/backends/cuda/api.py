"""Typed and checked wrappers of the CUDA runtime calls that are used, over ``cuda.bindings.runtime``."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from specexport.contract.errors import BackendError

_NO_DEVICE = ("cudaErrorNoDevice", "cudaErrorInsufficientDriver", "cudaErrorStubLibrary", "cudaErrorInvalidDevice")
_GIB = 1 << 30


class OutOfDeviceMemoryError(BackendError):
    """The device has too little free memory."""


@dataclass(frozen=True)
class CudaDevice:
    """A GPU: its number and name, compute capability, such as ``(8, 9)``, and bytes of memory."""

    index: int
    name: str
    capability: tuple[int, int]
    total: int

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


class Cuda:
    """The CUDA runtime on one device, which becomes the calling thread's current one.

    Addresses and handles are plain integers. Every call raises on any status but success.

    Raises:
        BackendError: there is no driver or no such device; says what to do.
    """

    def __init__(self, bindings: Any, index: int = 0) -> None:
        self._rt = bindings
        count = self.call("cudaGetDeviceCount")
        if index >= count:
            raise BackendError(f"there is no GPU {index}; CUDA sees {count}. See nvidia-smi and CUDA_VISIBLE_DEVICES")
        self.call("cudaSetDevice", index)
        kinds = bindings.cudaDeviceAttr
        major = self.call("cudaDeviceGetAttribute", kinds.cudaDevAttrComputeCapabilityMajor, index)
        minor = self.call("cudaDeviceGetAttribute", kinds.cudaDevAttrComputeCapabilityMinor, index)
        name = self.call("cudaGetDeviceProperties", index).name
        self.device = CudaDevice(
            index, name.decode() if isinstance(name, bytes) else str(name), (major, minor), self.memory()[1]
        )

    @classmethod
    def load(cls, index: int = 0) -> Cuda:
        """Opens a device through the installed ``cuda-bindings``.

        Raises:
            BackendError: the package, a driver or the device is missing.
        """
        try:
            bindings = importlib.import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise BackendError(
                f"cuda-bindings is not installed ({error}), and GPU backends need it; install it with: "
                "pip install 'specexport[gpu]'"
            ) from error
        return cls(bindings, index)

    def memory(self) -> tuple[int, int]:
        """Bytes of device memory: free, total."""
        free, total = self.call("cudaMemGetInfo")
        return int(free), int(total)

    def allocate(self, nbytes: int) -> int:
        """Device memory, aligned to 256 bytes at least; its content is undefined.

        Raises:
            OutOfDeviceMemoryError: there is too little.
        """
        return int(self.call("cudaMalloc", nbytes, nbytes=nbytes))

    def free(self, address: int) -> None:
        self.call("cudaFree", address)

    def allocate_pinned(self, nbytes: int) -> int:
        """Page-locked host memory, which the device copies directly."""
        return int(self.call("cudaHostAlloc", nbytes, self._rt.cudaHostAllocDefault))

    def free_pinned(self, address: int) -> None:
        self.call("cudaFreeHost", address)

    def create_stream(self) -> int:
        """A stream that does not wait for the legacy default stream."""
        return int(self.call("cudaStreamCreateWithFlags", self._rt.cudaStreamNonBlocking))

    def destroy_stream(self, stream: int) -> None:
        self.call("cudaStreamDestroy", stream)

    def synchronize(self, stream: int) -> None:
        """Waits until a stream has done all its work."""
        self.call("cudaStreamSynchronize", stream)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copies bytes; the direction follows from the addresses."""
        self.call("cudaMemcpyAsync", to, source, nbytes, self._rt.cudaMemcpyKind.cudaMemcpyDefault, stream)

    def copy_rows(
        self, to: int, to_pitch: int, source: int, source_pitch: int, width: int, rows: int, stream: int
    ) -> None:
        """Copies ``rows`` rows of ``width`` bytes that begin a pitch apart; they may not overlap."""
        kind = self._rt.cudaMemcpyKind.cudaMemcpyDefault
        self.call("cudaMemcpy2DAsync", to, to_pitch, source, source_pitch, width, rows, kind, stream)

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        self.call("cudaMemsetAsync", address, value, nbytes, stream)

    def begin_capture(self, stream: int) -> None:
        """Begins to record work instead of doing it, for this stream and thread."""
        mode = self._rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.call("cudaStreamBeginCapture", stream, mode)

    def end_capture(self, stream: int) -> int:
        return int(self.call("cudaStreamEndCapture", stream))

    def abandon_capture(self, stream: int) -> None:
        """Ends a capture in which something failed, so that the stream can be used again."""
        status, graph = self._rt.cudaStreamEndCapture(stream)
        if not int(status) and int(graph):
            self.call("cudaGraphDestroy", graph)
        self._rt.cudaGetLastError()

    def instantiate(self, graph: int) -> int:
        """An executable of a captured graph, which is destroyed."""
        executable = int(self.call("cudaGraphInstantiate", graph, 0))
        self.call("cudaGraphDestroy", graph)
        return executable

    def launch(self, executable: int, stream: int) -> None:
        self.call("cudaGraphLaunch", executable, stream)

    def destroy_executable(self, executable: int) -> None:
        self.call("cudaGraphExecDestroy", executable)

    def call(self, name: str, *arguments: Any, nbytes: int = 0) -> Any:
        """Calls a function of the CUDA runtime; ``nbytes`` is the size of an allocation, for errors."""
        status, *result = getattr(self._rt, name)(*arguments)
        if int(status):
            raise self._error(name, status, nbytes)
        return result[0] if len(result) == 1 else tuple(result)

    def _error(self, call: str, status: Any, nbytes: int) -> BackendError:
        status_name = status.name
        if status_name in _NO_DEVICE:
            return self._no_device(status_name)
        self._rt.cudaGetLastError()  # or the next call would report it again
        if status_name == "cudaErrorMemoryAllocation":
            _, free, total = self._rt.cudaMemGetInfo()
            return OutOfDeviceMemoryError(
                f"the GPU has no room for {nbytes / _GIB:.2f} GiB: {free / _GIB:.2f} of {total / _GIB:.2f} GiB are "
                "free. End other programs on it (nvidia-smi lists them), or build with a shorter --max-seq-len or "
                "smaller weights (--precision)"
            )
        _, text = self._rt.cudaGetErrorString(status)
        return BackendError(f"{call} failed with {status_name}: {text.decode() if isinstance(text, bytes) else text}")

    def _no_device(self, status_name: str) -> BackendError:
        _, driver = self._rt.cudaDriverGetVersion()
        _, runtime = self._rt.cudaRuntimeGetVersion()
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
