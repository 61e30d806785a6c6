"""NCCL, through which the GPUs of a split target combine their parts: wrappers of calls of ``libnccl.so.2``."""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from pathlib import Path
from typing import Any

from specexport.contract.errors import BackendError
from specexport.runtime.backends.cuda.memory import Tensor

_NAME = "libnccl.so.2"
_CAPSULE = b"ncclComm_t"
"""The name of a communicator's capsule; a constant, as a capsule stores only its address."""
_SUM = 0
_KINDS = {"float16": 6, "float32": 7, "uint16": 9}
"""NCCL's numbers for types; two-byte integers stand for bfloat16, which NumPy lacks."""
_LAST_CALL = 1.0
"""Seconds that a call gets to end by itself before it is aborted."""
_NEW_CAPSULE = ctypes.pythonapi.PyCapsule_New
_NEW_CAPSULE.restype = ctypes.py_object
_NEW_CAPSULE.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_ubyte * 128),)


class Nccl:
    """The library, from the package ``nvidia-nccl-cu13`` or the system.

    TensorRT looks it up by name, and finds the library that is loaded here.
    """

    def __init__(self) -> None:
        package = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
        folders = list(package.submodule_search_locations or ()) if package is not None else []
        packed = [path for folder in folders if (path := Path(folder) / "lib" / _NAME).is_file()]
        try:
            self._library = ctypes.CDLL(str(packed[0]) if packed else _NAME)
        except OSError as error:
            raise BackendError(
                f"{_NAME} cannot be loaded ({error}), and the ranks of a split target communicate through NCCL; "
                "install it with: pip install nvidia-nccl-cu13 (nvidia-nccl-cu12 for CUDA 12)"
            ) from error
        self._library.ncclGetErrorString.restype = ctypes.c_char_p

    def unique_id(self) -> bytes:
        """A new communicator's id of 128 bytes, which all its ranks need."""
        unique_id = _UniqueId()
        _call(self._library, "ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id)

    def join(self, unique_id: bytes, rank: int, ranks: int) -> Communicator:
        """Joins a communicator on the thread's current device, and waits for all ranks."""
        handle = ctypes.c_void_p()
        rank_id = _UniqueId.from_buffer_copy(unique_id)
        _call(self._library, "ncclCommInitRank", ctypes.byref(handle), ranks, rank_id, rank)
        return Communicator(self._library, handle)


def _call(library: Any, name: str, *arguments: Any) -> None:
    if status := getattr(library, name)(*arguments):
        message = library.ncclGetErrorString(status).decode()
        raise BackendError(f"{name} failed with status {status}: {message}; NCCL_DEBUG=INFO makes NCCL log more")


class Communicator:
    """One rank's handle of a communicator.

    Attributes:
        capsule: the handle in TensorRT's form.
    """

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self.capsule = _NEW_CAPSULE(handle, _CAPSULE, None)
        self._library = library
        self._handle: ctypes.c_void_p | None = handle
        self._closing, self._calling = threading.Lock(), threading.Lock()

    def all_reduce(self, part: Tensor, stream: int) -> None:
        """Enqueues the sum of all ranks' parts, which replaces ``part``."""
        self._enqueue("ncclAllReduce", part, part, (_SUM,), stream)

    def all_gather(self, part: Tensor, whole: Tensor, stream: int) -> None:
        """Enqueues the copy of all ranks' parts into ``whole``, in the order of ranks; see :meth:`all_reduce`."""
        self._enqueue("ncclAllGather", part, whole, (), stream)

    def _enqueue(self, name: str, part: Tensor, to: Tensor, operation: tuple[int, ...], stream: int) -> None:
        count, kind = part.nbytes // part.dtype.itemsize, _KINDS[part.dtype.name]
        with self._calling:
            if self._handle is None:
                raise BackendError(f"{name}: a rank ended, and with it the ranks' communicator")
            pointers = ctypes.c_void_p(part.address), ctypes.c_void_p(to.address)
            settings = ctypes.c_size_t(count), kind, *operation, self._handle, ctypes.c_void_p(stream)
            _call(self._library, name, *pointers, *settings)

    def close(self) -> None:
        """Closes the communicator from any thread, and aborts calls that wait for other ranks; may be called again."""
        with self._closing:
            handle, self._handle = self._handle, None
        if handle is not None:
            ended = self._calling.acquire(timeout=_LAST_CALL)  # else a call waits for a rank, and aborting ends it
            self._library.ncclCommAbort(handle)
            if ended:
                self._calling.release()
