"""``cuda.bindings.runtime`` over the null libcudart, which the real package cannot be given: it brings its own.

Enumerations and statuses are the real package's. Functions have its signatures, which a test compares, and are those
that ``runtime/backends/cuda/api.py`` and ``benchmarks/gpu`` call.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, TypeVar

from cuda.bindings import runtime as real

from specexport.contract import tensors
from specexport.runtime.backends.cuda.api import Cuda
from specexport.runtime.backends.cuda.device_program import DeviceProgram
from specexport.runtime.policy import SpeculationPolicy

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_INT, _UNSIGNED, _LONG = ctypes.c_int, ctypes.c_uint, ctypes.c_ulonglong


class NullRuntime:
    """The module's functions; every answer begins with a status.

    Args:
        library: the null libcudart; by its name alone that of ``LD_LIBRARY_PATH``.

    Raises:
        OSError: there is none.
    """

    cudaMemcpyKind = real.cudaMemcpyKind
    cudaStreamCaptureMode = real.cudaStreamCaptureMode
    cudaDeviceAttr = real.cudaDeviceAttr
    cudaError_t = real.cudaError_t
    cudaHostAllocDefault = real.cudaHostAllocDefault
    cudaStreamNonBlocking = real.cudaStreamNonBlocking
    cudaEventDefault = real.cudaEventDefault

    def __init__(self, library: str = "libcudart.so.13") -> None:
        self._library = ctypes.CDLL(library)
        self._functions: dict[str, Any] = {}

    def mark(self, text: str) -> None:
        """Writes a line into the log."""
        self._library.null_cuda_mark(text.encode())

    def call(self, name: str, types: tuple[Any, ...], *arguments: Any) -> Any:
        """Calls a function; gives its status."""
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = getattr(self._library, name)
            function.argtypes = types
        status = function(*arguments)
        return real.cudaError_t(status) if status else real.cudaError_t.cudaSuccess

    def _made(self, name: str, result: Any, types: tuple[Any, ...], *arguments: Any) -> Any:
        """Calls a function whose first argument is where its result goes; gives its status and the result."""
        built = result()
        status = self.call(name, (_POINTER, *types), ctypes.addressof(built), *arguments)
        return status, built.value or 0

    def cudaGetDeviceCount(self) -> Any:
        return real.cudaError_t.cudaSuccess, 2  # a rank of a split target is shown one of them, and does not count

    def cudaSetDevice(self, device: int) -> Any:
        return (self.call("cudaSetDevice", (_INT,), device),)

    def cudaDeviceGetAttribute(self, attr: Any, device: int) -> Any:
        return self._made("cudaDeviceGetAttribute", _INT, (_INT, _INT), int(attr), device)

    def cudaGetDeviceProperties(self, device: int) -> Any:
        return real.cudaError_t.cudaSuccess, SimpleNamespace(name=b"Null GPU")

    def cudaMemGetInfo(self) -> Any:
        free, total = _SIZE(), _SIZE()
        types = (_POINTER, _POINTER)
        status = self.call("cudaMemGetInfo", types, ctypes.addressof(free), ctypes.addressof(total))
        return status, free.value, total.value

    def cudaDriverGetVersion(self) -> Any:
        return self._made("cudaDriverGetVersion", _INT, ())

    def cudaRuntimeGetVersion(self) -> Any:
        return self._made("cudaRuntimeGetVersion", _INT, ())

    def cudaGetErrorString(self, error: Any) -> Any:
        return real.cudaGetErrorString(error)

    def cudaGetLastError(self) -> Any:
        return (self.call("cudaGetLastError", ()),)

    def cudaMalloc(self, size: int) -> Any:
        return self._made("cudaMalloc", _POINTER, (_SIZE,), size)

    def cudaFree(self, devPtr: int) -> Any:
        return (self.call("cudaFree", (_POINTER,), devPtr),)

    def cudaHostAlloc(self, size: int, flags: int) -> Any:
        return self._made("cudaHostAlloc", _POINTER, (_SIZE, _UNSIGNED), size, flags)

    def cudaFreeHost(self, ptr: int) -> Any:
        return (self.call("cudaFreeHost", (_POINTER,), ptr),)

    def cudaStreamCreateWithFlags(self, flags: int) -> Any:
        return self._made("cudaStreamCreateWithFlags", _POINTER, (_UNSIGNED,), flags)

    def cudaStreamDestroy(self, stream: int) -> Any:
        return (self.call("cudaStreamDestroy", (_POINTER,), stream),)

    def cudaStreamSynchronize(self, stream: int) -> Any:
        return (self.call("cudaStreamSynchronize", (_POINTER,), stream),)

    def cudaEventCreateWithFlags(self, flags: int) -> Any:
        return self._made("cudaEventCreateWithFlags", _POINTER, (_UNSIGNED,), flags)

    def cudaEventRecord(self, event: int, stream: int) -> Any:
        return (self.call("cudaEventRecord", (_POINTER, _POINTER), event, stream),)

    def cudaEventSynchronize(self, event: int) -> Any:
        return (self.call("cudaEventSynchronize", (_POINTER,), event),)

    def cudaEventElapsedTime(self, start: int, end: int) -> Any:
        return self._made("cudaEventElapsedTime", ctypes.c_float, (_POINTER, _POINTER), start, end)

    def cudaEventDestroy(self, event: int) -> Any:
        return (self.call("cudaEventDestroy", (_POINTER,), event),)

    def cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> Any:
        return (self.call("cudaStreamWaitEvent", (_POINTER, _POINTER, _UNSIGNED), stream, event, flags),)

    def cudaMemcpyAsync(self, dst: int, src: int, count: int, kind: Any, stream: int) -> Any:
        types = (_POINTER, _POINTER, _SIZE, _INT, _POINTER)
        return (self.call("cudaMemcpyAsync", types, dst, src, count, int(kind), stream),)

    def cudaMemcpy2DAsync(
        self, dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: Any, stream: int
    ) -> Any:
        types = (_POINTER, _SIZE, _POINTER, _SIZE, _SIZE, _SIZE, _INT, _POINTER)
        inputs = (dst, dpitch, src, spitch, width, height, int(kind), stream)
        return (self.call("cudaMemcpy2DAsync", types, *inputs),)

    def cudaMemsetAsync(self, devPtr: int, value: int, count: int, stream: int) -> Any:
        return (self.call("cudaMemsetAsync", (_POINTER, _INT, _SIZE, _POINTER), devPtr, value, count, stream),)

    def cudaStreamBeginCapture(self, stream: int, mode: Any) -> Any:
        return (self.call("cudaStreamBeginCapture", (_POINTER, _INT), stream, int(mode)),)

    def cudaStreamEndCapture(self, stream: int) -> Any:
        graph = _POINTER()
        status = self.call("cudaStreamEndCapture", (_POINTER, _POINTER), stream, ctypes.addressof(graph))
        return status, graph.value or 0

    def cudaGraphInstantiate(self, graph: int, flags: int) -> Any:
        return self._made("cudaGraphInstantiate", _POINTER, (_POINTER, _LONG), graph, flags)

    def cudaGraphDestroy(self, graph: int) -> Any:
        return (self.call("cudaGraphDestroy", (_POINTER,), graph),)

    def cudaGraphLaunch(self, graphExec: int, stream: int) -> Any:
        return (self.call("cudaGraphLaunch", (_POINTER, _POINTER), graphExec, stream),)

    def cudaGraphExecDestroy(self, graphExec: int) -> Any:
        return (self.call("cudaGraphExecDestroy", (_POINTER,), graphExec),)


Runtime = TypeVar("Runtime", bound=NullRuntime)


def install(runtime: Runtime) -> Runtime:
    """Lets the backend's :meth:`Cuda.load` open the null device, in this process from here on.

    What null kernels leave where the number of accepted tokens belongs is any number: it is read as none.
    """
    Cuda.load = classmethod(lambda cls, index=0: cls(runtime, index))  # type: ignore[method-assign, assignment]
    read = DeviceProgram._read

    def nothing_accepted(self: Any, variant: Any, part: Any) -> Any:
        self._steps[variant].outputs.host[tensors.NUM_ACCEPTED][:] = 0
        return read(self, variant, part)

    DeviceProgram._read = nothing_accepted  # type: ignore[method-assign]
    return runtime


def speculate_always() -> None:
    """Gives every request the tree it asks for from here on: in a full batch few would draft anything otherwise."""
    SpeculationPolicy._share = lambda self, request, others: request.tree  # type: ignore[method-assign]
