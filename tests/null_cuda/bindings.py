"""``cuda.bindings.runtime`` over the null libcudart, which the real package cannot be given: it brings its own.

Enumerations and statuses are the real package's. Functions have its signatures, which a test compares, and are those
that ``runtime/cuda/api.py`` and ``benchmarks/gpu`` call.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from cuda.bindings import runtime as real

from specexport.runtime.cuda.api import Cuda

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_INT, _UNSIGNED, _LONG = ctypes.c_int, ctypes.c_uint, ctypes.c_ulonglong


class NullRuntime:
    """The module's functions; every answer begins with a status.

    Raises:
        OSError: ``libcudart.so.13`` is not on ``LD_LIBRARY_PATH``.
    """

    cudaMemcpyKind = real.cudaMemcpyKind
    cudaStreamCaptureMode = real.cudaStreamCaptureMode
    cudaDeviceAttr = real.cudaDeviceAttr
    cudaError_t = real.cudaError_t
    cudaHostAllocDefault = real.cudaHostAllocDefault
    cudaStreamNonBlocking = real.cudaStreamNonBlocking
    cudaEventDefault = real.cudaEventDefault

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcudart.so.13")
        self._functions: dict[str, Any] = {}

    def mark(self, text: str) -> None:
        """Writes a line into the log."""
        self._library.null_cuda_mark(text.encode())

    def _call(self, name: str, types: tuple[Any, ...], *arguments: Any) -> Any:
        """Calls a function; gives its status."""
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = getattr(self._library, name)
            function.argtypes = types
        return real.cudaError_t(function(*arguments))

    def _made(self, name: str, result: Any, types: tuple[Any, ...], *arguments: Any) -> Any:
        """Calls a function whose first argument is where its result goes; gives its status and the result."""
        made = result()
        status = self._call(name, (_POINTER, *types), ctypes.addressof(made), *arguments)
        return status, made.value or 0

    def cudaGetDeviceCount(self) -> Any:
        return self._made("cudaGetDeviceCount", _INT, ())

    def cudaSetDevice(self, device: int) -> Any:
        return (self._call("cudaSetDevice", (_INT,), device),)

    def cudaDeviceGetAttribute(self, attr: Any, device: int) -> Any:
        return self._made("cudaDeviceGetAttribute", _INT, (_INT, _INT), int(attr), device)

    def cudaGetDeviceProperties(self, device: int) -> Any:
        return real.cudaError_t.cudaSuccess, SimpleNamespace(name=b"Null GPU")

    def cudaMemGetInfo(self) -> Any:
        free, total = _SIZE(), _SIZE()
        types = (_POINTER, _POINTER)
        status = self._call("cudaMemGetInfo", types, ctypes.addressof(free), ctypes.addressof(total))
        return status, free.value, total.value

    def cudaDriverGetVersion(self) -> Any:
        return self._made("cudaDriverGetVersion", _INT, ())

    def cudaRuntimeGetVersion(self) -> Any:
        return self._made("cudaRuntimeGetVersion", _INT, ())

    def cudaGetErrorString(self, error: Any) -> Any:
        return real.cudaGetErrorString(error)

    def cudaGetLastError(self) -> Any:
        return (self._call("cudaGetLastError", ()),)

    def cudaMalloc(self, size: int) -> Any:
        return self._made("cudaMalloc", _POINTER, (_SIZE,), size)

    def cudaFree(self, devPtr: int) -> Any:
        return (self._call("cudaFree", (_POINTER,), devPtr),)

    def cudaHostAlloc(self, size: int, flags: int) -> Any:
        return self._made("cudaHostAlloc", _POINTER, (_SIZE, _UNSIGNED), size, flags)

    def cudaFreeHost(self, ptr: int) -> Any:
        return (self._call("cudaFreeHost", (_POINTER,), ptr),)

    def cudaStreamCreateWithFlags(self, flags: int) -> Any:
        return self._made("cudaStreamCreateWithFlags", _POINTER, (_UNSIGNED,), flags)

    def cudaStreamDestroy(self, stream: int) -> Any:
        return (self._call("cudaStreamDestroy", (_POINTER,), stream),)

    def cudaStreamSynchronize(self, stream: int) -> Any:
        return (self._call("cudaStreamSynchronize", (_POINTER,), stream),)

    def cudaEventCreateWithFlags(self, flags: int) -> Any:
        return self._made("cudaEventCreateWithFlags", _POINTER, (_UNSIGNED,), flags)

    def cudaEventRecord(self, event: int, stream: int) -> Any:
        return (self._call("cudaEventRecord", (_POINTER, _POINTER), event, stream),)

    def cudaEventSynchronize(self, event: int) -> Any:
        return (self._call("cudaEventSynchronize", (_POINTER,), event),)

    def cudaEventElapsedTime(self, start: int, end: int) -> Any:
        return self._made("cudaEventElapsedTime", ctypes.c_float, (_POINTER, _POINTER), start, end)

    def cudaEventDestroy(self, event: int) -> Any:
        return (self._call("cudaEventDestroy", (_POINTER,), event),)

    def cudaMemcpyAsync(self, dst: int, src: int, count: int, kind: Any, stream: int) -> Any:
        types = (_POINTER, _POINTER, _SIZE, _INT, _POINTER)
        return (self._call("cudaMemcpyAsync", types, dst, src, count, int(kind), stream),)

    def cudaMemcpy2DAsync(
        self, dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: Any, stream: int
    ) -> Any:
        types = (_POINTER, _SIZE, _POINTER, _SIZE, _SIZE, _SIZE, _INT, _POINTER)
        given = (dst, dpitch, src, spitch, width, height, int(kind), stream)
        return (self._call("cudaMemcpy2DAsync", types, *given),)

    def cudaMemsetAsync(self, devPtr: int, value: int, count: int, stream: int) -> Any:
        return (self._call("cudaMemsetAsync", (_POINTER, _INT, _SIZE, _POINTER), devPtr, value, count, stream),)

    def cudaStreamBeginCapture(self, stream: int, mode: Any) -> Any:
        return (self._call("cudaStreamBeginCapture", (_POINTER, _INT), stream, int(mode)),)

    def cudaStreamEndCapture(self, stream: int) -> Any:
        graph = _POINTER()
        status = self._call("cudaStreamEndCapture", (_POINTER, _POINTER), stream, ctypes.addressof(graph))
        return status, graph.value or 0

    def cudaGraphInstantiate(self, graph: int, flags: int) -> Any:
        return self._made("cudaGraphInstantiate", _POINTER, (_POINTER, _LONG), graph, flags)

    def cudaGraphDestroy(self, graph: int) -> Any:
        return (self._call("cudaGraphDestroy", (_POINTER,), graph),)

    def cudaGraphLaunch(self, graphExec: int, stream: int) -> Any:
        return (self._call("cudaGraphLaunch", (_POINTER, _POINTER), graphExec, stream),)

    def cudaGraphExecDestroy(self, graphExec: int) -> Any:
        return (self._call("cudaGraphExecDestroy", (_POINTER,), graphExec),)


def install() -> NullRuntime:
    """Lets the backend's :meth:`Cuda.load` open the null device, in this process from here on."""
    runtime = NullRuntime()
    Cuda.load = classmethod(lambda cls, index=0: cls(runtime, index))  # type: ignore[method-assign, assignment]
    return runtime
