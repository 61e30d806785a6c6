"""Device memory, planned and then allocated as one block, and buffers that mirror it on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specexport.runtime.backend import Array
from specexport.runtime.backends.cuda.api import Cuda, CudaStream, DeviceThread, OutOfDeviceMemoryError

ALIGNMENT = 256
"""Alignment in bytes of every region and every array in it, as TensorRT requires."""
_GIB = 1 << 30


def align(nbytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class MemoryBudget:
    """The share of a device's memory that may be in use once a bundle is loaded."""

    def __init__(self, cuda: Cuda, utilization: float) -> None:
        self._utilization = utilization
        self._total = cuda.device.total
        self._before = cuda.memory()[0]
        self._cuda = cuda

    @property
    def available(self) -> int:
        """Bytes that may still be allocated; memory of other programs and of libraries counts as used."""
        return int(self._total * self._utilization) - (self._total - self._cuda.memory()[0])

    def require(self, nbytes: int, purpose: str) -> None:
        """Checks that an allocation fits."""
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
    """The resources that all graphs on a GPU share: its API, stream, memory budget and library thread."""

    cuda: Cuda
    stream: CudaStream
    budget: MemoryBudget
    thread: DeviceThread

    @classmethod
    def share(cls, cuda: Cuda, utilization: float) -> Device:
        """A device with a new stream and thread, and this share of its memory."""
        return cls(cuda, CudaStream(cuda), MemoryBudget(cuda, utilization), DeviceThread())

    def warm_up(self, run: Callable[[], None]) -> None:
        """Runs work twice before it is captured, as onnxruntime sizes its scratch memory in the first run."""
        for _ in range(2):
            run()
            self.stream.synchronize()


@dataclass(frozen=True)
class Region:
    """A piece of an allocation on the device."""

    address: int
    nbytes: int


class MemoryPlan:
    """Plans regions of memory, to allocate them together."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}

    def add(self, name: str, nbytes: int) -> None:
        """Plans a region; regions of the same name share memory of the largest size."""
        self._sizes[name] = max(nbytes, self._sizes.get(name, 0))

    def allocate(self, device: Device, purpose: str) -> Memory:
        """Allocates all regions as one block."""
        total = sum(map(align, self._sizes.values()))
        device.budget.require(total, purpose)
        base = address = device.cuda.allocate(max(total, ALIGNMENT))
        regions = {}
        for name, nbytes in self._sizes.items():
            regions[name] = Region(address, nbytes)
            address += align(nbytes)
        return Memory(device.cuda, base, regions)


class Memory:
    """One allocation and its regions by name; freed by :attr:`close` or with its last reference."""

    def __init__(self, cuda: Cuda, base: int, regions: Mapping[str, Region]) -> None:
        self._regions = dict(regions)
        self.close = cuda.finalizer(self, "cudaFree", base)

    def __getitem__(self, name: str) -> Region:
        return self._regions[name]


@dataclass(frozen=True)
class Tensor:
    """An array on the device."""

    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


def block_size(arrays: Mapping[str, Array]) -> int:
    """Bytes of a block that holds arrays, one after the other."""
    return sum(align(array.nbytes) for array in arrays.values())


def tensors_at(address: int, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    """The place of such arrays in a block on the device."""
    tensors = {}
    for name, array in arrays.items():
        tensors[name] = Tensor(address, array.dtype, array.shape)
        address += align(array.nbytes)
    return tensors


class StagingBuffers:
    """Arrays in pinned host memory and, with the same layout, in device memory, so that one copy moves all of them.

    ``arrays`` hold the initial values of the host's copy.
    """

    def __init__(self, device: Device, arrays: Mapping[str, Array], region: Region) -> None:
        self._nbytes = block_size(arrays)
        assert self._nbytes <= region.nbytes
        self._device = device
        self._region = region
        self._pinned = device.cuda.allocate_pinned(max(self._nbytes, ALIGNMENT))
        self._free = device.cuda.finalizer(self, "cudaFreeHost", self._pinned)
        everything: Array = np.ctypeslib.as_array((ctypes.c_uint8 * self._nbytes).from_address(self._pinned))
        everything[:] = 0
        self.host: dict[str, Array] = {}
        self.device = tensors_at(region.address, arrays)
        for name, array in arrays.items():
            offset = self.device[name].address - region.address
            self.host[name] = everything[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
            self.host[name][...] = array

    def upload(self) -> None:
        """Enqueues the copy from host to device."""
        if self._nbytes:
            self._device.stream.copy(self._region.address, self._pinned, self._nbytes)

    def download(self, name: str = "") -> None:
        """Enqueues the copy of all arrays, or of one, from device to host; wait for it before reading."""
        source, nbytes = self._region.address, self._nbytes
        if name:
            source, nbytes = self.device[name].address, self.device[name].nbytes
        if nbytes:
            self._device.stream.copy(self._pinned + source - self._region.address, source, nbytes)

    def close(self) -> None:
        """Frees the host's memory, whose arrays must not be used any more."""
        self.host.clear()
        self._free()
