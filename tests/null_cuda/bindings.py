"""``cuda.bindings.runtime`` over the null libcudart, which the real package cannot be given: it brings its own.

Functions have its signatures, which a test compares, and are those
that ``runtime/backends/cuda/api.py`` and ``benchmarks/gpu`` call.
"""

import ctypes
import inspect
from types import SimpleNamespace
from typing import Any, TypeVar

from cuda.bindings import runtime as real

from specexport.contract import tensors
from specexport.runtime.backends.cuda.api import Cuda
from specexport.runtime.backends.cuda.device_program import DeviceProgram
from specexport.runtime.speculation.policy import SpeculationPolicy
from tests.cuda_stand_in import Names

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_INT, _UNSIGNED, _LONG = ctypes.c_int, ctypes.c_uint, ctypes.c_ulonglong
_STREAM = {"stream": _POINTER}
_ROWS = {"dst": _POINTER, "dpitch": _SIZE, "src": _POINTER, "spitch": _SIZE, "width": _SIZE, "height": _SIZE}
_FUNCTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "cudaSetDevice": (None, {"device": _INT}),
    "cudaDeviceGetAttribute": (_INT, {"attr": _INT, "device": _INT}),
    "cudaDriverGetVersion": (_INT, {}),
    "cudaRuntimeGetVersion": (_INT, {}),
    "cudaGetLastError": (None, {}),
    "cudaMalloc": (_POINTER, {"size": _SIZE}),
    "cudaFree": (None, {"devPtr": _POINTER}),
    "cudaHostAlloc": (_POINTER, {"size": _SIZE, "flags": _UNSIGNED}),
    "cudaFreeHost": (None, {"ptr": _POINTER}),
    "cudaStreamCreateWithFlags": (_POINTER, {"flags": _UNSIGNED}),
    "cudaStreamDestroy": (None, _STREAM),
    "cudaStreamSynchronize": (None, _STREAM),
    "cudaEventCreateWithFlags": (_POINTER, {"flags": _UNSIGNED}),
    "cudaEventRecord": (None, {"event": _POINTER, "stream": _POINTER}),
    "cudaEventSynchronize": (None, {"event": _POINTER}),
    "cudaEventElapsedTime": (ctypes.c_float, {"start": _POINTER, "end": _POINTER}),
    "cudaEventDestroy": (None, {"event": _POINTER}),
    "cudaStreamWaitEvent": (None, {"stream": _POINTER, "event": _POINTER, "flags": _UNSIGNED}),
    "cudaMemcpyAsync": (None, {"dst": _POINTER, "src": _POINTER, "count": _SIZE, "kind": _INT, "stream": _POINTER}),
    "cudaMemcpy2DAsync": (None, {**_ROWS, "kind": _INT, "stream": _POINTER}),
    "cudaMemsetAsync": (None, {"devPtr": _POINTER, "value": _INT, "count": _SIZE, "stream": _POINTER}),
    "cudaStreamBeginCapture": (None, {"stream": _POINTER, "mode": _INT}),
    "cudaGraphInstantiate": (_POINTER, {"graph": _POINTER, "flags": _LONG}),
    "cudaGraphDestroy": (None, {"graph": _POINTER}),
    "cudaGraphLaunch": (None, {"graphExec": _POINTER, "stream": _POINTER}),
    "cudaGraphExecDestroy": (None, {"graphExec": _POINTER}),
}
"""By function: the type of its result, whose place is its first argument in C, and those of its other arguments."""


class NullRuntime(Names):
    """The module's functions; every answer begins with a status.

    Args:
        library: the null libcudart; by its name alone that of ``LD_LIBRARY_PATH``.

    Raises:
        OSError: there is none.
    """

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

    def cudaGetDeviceCount(self) -> Any:
        return real.cudaError_t.cudaSuccess, 2  # a rank of a split target is shown one of them, and does not count

    def cudaGetDeviceProperties(self, device: int) -> Any:
        return real.cudaError_t.cudaSuccess, SimpleNamespace(name=b"Null GPU")

    def cudaMemGetInfo(self) -> Any:
        free, total = _SIZE(), _SIZE()
        status = self.call("cudaMemGetInfo", (_POINTER,) * 2, ctypes.addressof(free), ctypes.addressof(total))
        return status, free.value, total.value

    def cudaGetErrorString(self, error: Any) -> Any:
        return real.cudaGetErrorString(error)

    def cudaStreamEndCapture(self, stream: int) -> Any:
        graph = _POINTER()
        status = self.call("cudaStreamEndCapture", (_POINTER, _POINTER), stream, ctypes.addressof(graph))
        return status, graph.value or 0


def _function(name: str, result: Any, types: dict[str, Any]) -> Any:
    def function(self: NullRuntime, *arguments: Any) -> Any:
        given = [int(value) for value in arguments]
        if result is None:
            return (self.call(name, tuple(types.values()), *given),)
        place = result()
        status = self.call(name, (_POINTER, *types.values()), ctypes.addressof(place), *given)
        return status, place.value or 0

    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(key, positional) for key in ("self", *types)]
    function.__signature__ = inspect.Signature(parameters)
    return function


for _name, (_result, _types) in _FUNCTIONS.items():
    setattr(NullRuntime, _name, _function(_name, _result, _types))

Runtime = TypeVar("Runtime", bound=NullRuntime)


def install(runtime: Runtime) -> Runtime:
    """Lets the backend's :meth:`Cuda.load` open the null device, in this process from here on.

    What null kernels leave where the number of accepted tokens belongs is any number: it is read as none.
    """
    Cuda.load = classmethod(lambda cls: cls(runtime))
    read = DeviceProgram._read_outcome

    def nothing_accepted(self: Any, variant: Any, *arguments: Any) -> Any:
        variant.outputs.host[tensors.NUM_ACCEPTED][:] = 0
        return read(self, variant, *arguments)

    DeviceProgram._read_outcome = nothing_accepted
    return runtime


def speculate_always() -> None:
    """Gives every request the tree it asks for from here on: in a full batch few would draft anything otherwise."""
    SpeculationPolicy._share = lambda self, request, others: request.tree
