"""NCCL, through which the GPUs of a split target meet: the few calls of ``libnccl.so.2`` that are needed."""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from pathlib import Path
from typing import Any

from specexport.contract.errors import BackendError

_NAME = "libnccl.so.2"
_CAPSULE = b"ncclComm_t"
"""A capsule keeps the address of its name."""
_NEW_CAPSULE = ctypes.pythonapi.PyCapsule_New
_NEW_CAPSULE.restype = ctypes.py_object
_NEW_CAPSULE.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_ubyte * 128),)


class Nccl:
    """The library, of the package ``nvidia-nccl-cu13`` or of the system.

    TensorRT looks for it by its name, and finds the one that is loaded here.

    Raises:
        BackendError: it is not there.
    """

    def __init__(self) -> None:
        package = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
        folders = list(package.submodule_search_locations or ()) if package is not None else []
        packed = [path for folder in folders if (path := Path(folder) / "lib" / _NAME).is_file()]
        try:
            self._library = ctypes.CDLL(str(packed[0]) if packed else _NAME)
        except OSError as error:
            raise BackendError(
                f"{_NAME} cannot be loaded ({error}), and the ranks of a split target meet through NCCL; install it "
                "with: pip install nvidia-nccl-cu13 (nvidia-nccl-cu12 for CUDA 12)"
            ) from error
        self._library.ncclGetErrorString.restype = ctypes.c_char_p

    def unique_id(self) -> bytes:
        """What all ranks of a new communicator are to be given, 128 bytes."""
        made = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def join(self, unique_id: bytes, rank: int, ranks: int) -> Communicator:
        """Waits until all ranks join the communicator, each on its thread's current device.

        Raises:
            BackendError: NCCL cannot connect them; says why.
        """
        handle = ctypes.c_void_p()
        self._call("ncclCommInitRank", ctypes.byref(handle), ranks, _UniqueId.from_buffer_copy(unique_id), rank)
        return Communicator(self._library, handle)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            said = self._library.ncclGetErrorString(status).decode()
            raise BackendError(f"{name} failed with status {status}: {said}; NCCL_DEBUG=INFO makes NCCL say more")


class Communicator:
    """One rank's end.

    Attributes:
        capsule: what TensorRT takes for it.
    """

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self.capsule = _NEW_CAPSULE(handle, _CAPSULE, None)
        self._library = library
        self._handle: ctypes.c_void_p | None = handle
        self._closing = threading.Lock()

    def close(self) -> None:
        """Gives it back, from any thread; what still waits for other ranks is aborted. Then does nothing."""
        with self._closing:
            handle, self._handle = self._handle, None
        if handle is not None:
            self._library.ncclCommAbort(handle)
