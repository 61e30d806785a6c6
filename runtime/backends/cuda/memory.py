"""Device memory, planned first and allocated as one block, and buffers that mirror it on the host."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specexport.runtime.backend import Array
from specexport.runtime.backends.cuda.api import Cuda, OutOfDeviceMemoryError
from specexport.runtime.backends.cuda.stream import CudaStream
from specexport.runtime.backends.cuda.thread import DeviceThread

ALIGNMENT = 256
"""Bytes; of every region and every array in it, as TensorRT requires."""
_GIB = 1 << 30


def aligned(nbytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class MemoryBudget:
    """The memory of a device that may be used: a share of all of it, for everything that a bundle loads."""

    def __init__(self, cuda: Cuda, utilization: float) -> None:
        self._utilization = utilization
        self._total = cuda.device.total
        self._before = cuda.memory()[0]
        self._cuda = cuda

    @property
    def available(self) -> int:
        """Bytes that may still be allocated. Memory of other programs and of libraries counts as used."""
        return int(self._total * self._utilization) - (self._total - self._cuda.memory()[0])

    def require(self, nbytes: int, purpose: str) -> None:
        """Checks that an allocation fits.

        Raises:
            OutOfDeviceMemoryError: it does not; says how much is available and what to change.
        """
        available = self.available
        if nbytes > available:
            raise OutOfDeviceMemoryError(
                f"{purpose} needs {nbytes / _GIB:.2f} GiB of GPU memory, but {max(0, available) / _GIB:.2f} GiB are "
                f"left of the {self._utilization:.0%} of {self._total / _GIB:.2f} GiB that may be used "
                f"({(self._total - self._before) / _GIB:.2f} GiB were taken by others). Raise "
                "--gpu-memory-utilization, end other programs on the GPU, or build with a shorter --max-seq-len or "
                "smaller weights (--precision)"
            )


@dataclass(frozen=True)
class Device:
    """The resources that everything on a GPU shares: its API, the stream of all work, the memory budget, and the thread
    that calls libraries.
    """

    cuda: Cuda
    stream: CudaStream
    budget: MemoryBudget
    thread: DeviceThread

    @classmethod
    def share(cls, cuda: Cuda, utilization: float) -> Device:
        """A device with a new stream and thread, and this part of all its memory."""
        return cls(cuda, CudaStream(cuda), MemoryBudget(cuda, utilization), DeviceThread())

    def warm_up(self, run: Callable[[], None]) -> None:
        """Runs work twice before it is captured: onnxruntime sizes its scratch memory in the first run."""
        for _ in range(2):
            run()
            self.stream.synchronize()

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """As :meth:`Cuda.copy`, in the stream's order."""
        self.cuda.copy(to, source, nbytes, self.stream.handle)

    def copy_rows(self, to: int, to_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        """As :meth:`Cuda.copy_rows`, in the stream's order."""
        self.cuda.copy_rows(to, to_pitch, source, source_pitch, width, rows, self.stream.handle)


@dataclass(frozen=True)
class Region:
    """A piece of an allocation on the device."""

    address: int
    nbytes: int


class MemoryPlan:
    """Regions to allocate together by :meth:`allocate`."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}

    def add(self, name: str, nbytes: int) -> None:
        """Plans a region. Regions of one name share memory, of the largest size."""
        self._sizes[name] = max(nbytes, self._sizes.get(name, 0))

    def allocate(self, device: Device, purpose: str) -> Memory:
        """Allocates all regions at once.

        Raises:
            OutOfDeviceMemoryError: it does not fit.
        """
        total = sum(map(aligned, self._sizes.values()))
        device.budget.require(total, purpose)
        base = address = device.cuda.allocate(max(total, ALIGNMENT))
        regions = {}
        for name, nbytes in self._sizes.items():
            regions[name] = Region(address, nbytes)
            address += aligned(nbytes)
        return Memory(device.cuda, base, regions)


class Memory:
    """One allocation and its regions by name; freed by :meth:`close` or with its last reference."""

    def __init__(self, cuda: Cuda, base: int, regions: Mapping[str, Region]) -> None:
        self._regions = dict(regions)
        self._close = weakref.finalize(self, cuda.free, base)
        self._close.atexit = False  # the driver frees everything when a process ends

    def __getitem__(self, name: str) -> Region:
        return self._regions[name]

    def close(self) -> None:
        """Frees it; later calls do nothing."""
        self._close()


@dataclass(frozen=True)
class Tensor:
    """An array on the device."""

    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


class BufferLayout:
    """The layout of arrays in one block of memory, one after the other.

    Args:
        arrays: by name; their content is the initial content of the host's copy.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = dict(arrays)
        self.offsets: dict[str, int] = {}
        self.nbytes = 0
        for name, array in self.arrays.items():
            self.offsets[name] = self.nbytes
            self.nbytes += aligned(array.nbytes)

    def tensors(self, address: int) -> dict[str, Tensor]:
        """The arrays on the device, by name, in a block at this address."""
        return {
            name: Tensor(address + self.offsets[name], array.dtype, array.shape) for name, array in self.arrays.items()
        }


class Staged:
    """Arrays in pinned host memory and in device memory with the same layout: one copy moves all of them."""

    def __init__(self, device: Device, layout: BufferLayout, region: Region) -> None:
        assert layout.nbytes <= region.nbytes
        self._device = device
        self._region = region
        self._nbytes = layout.nbytes
        self._pinned = device.cuda.allocate_pinned(max(layout.nbytes, ALIGNMENT))
        self._close = weakref.finalize(self, device.cuda.free_pinned, self._pinned)
        self._close.atexit = False
        everything: Array = np.ctypeslib.as_array((ctypes.c_uint8 * layout.nbytes).from_address(self._pinned))
        everything[:] = 0
        self.host: dict[str, Array] = {}
        self.device = layout.tensors(region.address)
        for name, array in layout.arrays.items():
            offset = layout.offsets[name]
            self.host[name] = everything[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
            self.host[name][...] = array

    def upload(self) -> None:
        """Enqueues the copy from host to device."""
        if self._nbytes:
            self._device.copy(self._region.address, self._pinned, self._nbytes)

    def download(self, name: str = "") -> None:
        """Enqueues the copy from device to host, of all or of one array; wait for it before reading."""
        source, nbytes = self._region.address, self._nbytes
        if name:
            source, nbytes = self.device[name].address, self.device[name].nbytes
        if nbytes:
            self._device.copy(self._pinned + source - self._region.address, source, nbytes)

    def close(self) -> None:
        """Frees the host's memory; its arrays must not be used any more."""
        self.host.clear()
        self._close()
