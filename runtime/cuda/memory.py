"""Device memory: planned first, taken in one piece, and given back in one piece; and what mirrors it on the host."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specexport.runtime.cuda.api import Cuda, OutOfDeviceMemoryError
from specexport.runtime.cuda.stream import CudaStream
from specexport.runtime.cuda.thread import DeviceThread
from specexport.runtime.graph import Array

ALIGNMENT = 256
"""Of every region and every array in one: what TensorRT asks of addresses."""
_GIB = 1 << 30


def aligned(nbytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class MemoryBudget:
    """What may be used of a device: a fraction of all its memory, shared by everything a bundle loads."""

    def __init__(self, cuda: Cuda, utilization: float) -> None:
        self._utilization = utilization
        self._total = cuda.device.total
        self._before = cuda.memory()[0]
        self._cuda = cuda

    @property
    def left(self) -> int:
        """Bytes that may still be taken. What others had taken before counts, what libraries took since does too."""
        return int(self._total * self._utilization) - (self._total - self._cuda.memory()[0])

    def require(self, nbytes: int, purpose: str) -> None:
        """Checks that something fits before it is allocated.

        Raises:
            OutOfDeviceMemoryError: it does not; says how much there is and what to change.
        """
        left = self.left
        if nbytes > left:
            raise OutOfDeviceMemoryError(
                f"{purpose} needs {nbytes / _GIB:.2f} GiB of GPU memory, but {max(0, left) / _GIB:.2f} GiB are left of "
                f"the {self._utilization:.0%} of {self._total / _GIB:.2f} GiB that may be used "
                f"({(self._total - self._before) / _GIB:.2f} GiB were taken by others). Raise "
                "--gpu-memory-utilization, end other programs on the GPU, or build with a shorter --max-seq-len or "
                "smaller weights (--precision)"
            )


@dataclass(frozen=True)
class Device:
    """What everything that a bundle loads on a GPU shares.

    Its calls, the stream that does all work, how much memory may be taken, and the thread that calls libraries.
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
        """Runs what will be captured, twice: onnxruntime learns in the first what scratch memory the second takes."""
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
    """What will be allocated; nothing is until :meth:`allocate`."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}

    def add(self, name: str, nbytes: int) -> None:
        """Plans a region. One that is planned twice is as large as the larger: it is shared."""
        self._sizes[name] = max(nbytes, self._sizes.get(name, 0))

    def allocate(self, device: Device, purpose: str) -> Memory:
        """Takes everything at once.

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
    """One allocation and its regions by name; given back by :meth:`close`, or when nothing refers to it any more."""

    def __init__(self, cuda: Cuda, base: int, regions: Mapping[str, Region]) -> None:
        self._regions = dict(regions)
        self._close = weakref.finalize(self, cuda.free, base)
        self._close.atexit = False  # the driver frees everything when a process ends

    def __getitem__(self, name: str) -> Region:
        return self._regions[name]

    def close(self) -> None:
        """Gives it back; then does nothing."""
        self._close()


@dataclass(frozen=True)
class Tensor:
    """An array on the device."""

    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


class BufferLayout:
    """Where arrays lie in one piece of memory, one after the other.

    Args:
        arrays: by name; their shapes and types count, and their content is what the host's copy starts with.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = dict(arrays)
        self.offsets: dict[str, int] = {}
        self.nbytes = 0
        for name, array in self.arrays.items():
            self.offsets[name] = self.nbytes
            self.nbytes += aligned(array.nbytes)

    def tensors(self, address: int) -> dict[str, Tensor]:
        """The arrays on the device, by name, if the piece of memory begins at this address."""
        return {
            name: Tensor(address + self.offsets[name], array.dtype, array.shape) for name, array in self.arrays.items()
        }


class Staged:
    """Arrays that are on the host, pinned, and at the same places on the device: one copy moves all of them."""

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
        """Gives the stream the copy from host to device."""
        if self._nbytes:
            self._device.copy(self._region.address, self._pinned, self._nbytes)

    def download(self, name: str = "") -> None:
        """Gives the stream the copy from device to host, of all or of one array; wait for it before reading."""
        source, nbytes = self._region.address, self._nbytes
        if name:
            source, nbytes = self.device[name].address, self.device[name].nbytes
        if nbytes:
            self._device.copy(self._pinned + source - self._region.address, source, nbytes)

    def close(self) -> None:
        """Gives the host's memory back; arrays over it must not be used any more."""
        self.host.clear()
        self._close()
