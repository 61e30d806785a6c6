"""Device memory, planned and then allocated as one block; buffers that mirror it on the host; and the KV cache."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specexport.contract.model import CacheLayer
from specexport.runtime.backend import Array, caches_by_shape
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
        """Checks that an allocation fits.

        Raises:
            OutOfDeviceMemoryError: it does not; says how much is available, and the remedy.
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
        """Allocates all regions as one block.

        Raises:
            OutOfDeviceMemoryError: it does not fit.
        """
        total = sum(map(align, self._sizes.values()))
        device.budget.require(total, purpose)
        base = address = device.cuda.allocate(max(total, ALIGNMENT))
        regions = {}
        for name, nbytes in self._sizes.items():
            regions[name] = Region(address, nbytes)
            address += align(nbytes)
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
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


class BufferLayout:
    """The layout of arrays in one block of memory, one after the other.

    The arrays hold the initial values of the host's copy.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = dict(arrays)
        self.offsets: dict[str, int] = {}
        self.nbytes = 0
        for name, array in self.arrays.items():
            self.offsets[name] = self.nbytes
            self.nbytes += align(array.nbytes)

    def tensors(self, address: int) -> dict[str, Tensor]:
        """The arrays by name, in a block of device memory at this address."""
        return {
            name: Tensor(address + self.offsets[name], array.dtype, array.shape) for name, array in self.arrays.items()
        }


class StagingBuffers:
    """Arrays in pinned host memory and, with the same layout, in device memory, so that one copy moves all of them.

    Attributes:
        host: the arrays on the host, by name.
        device: the arrays on the device, by name.
    """

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
        self._close()


@dataclass(frozen=True)
class NewRows:
    """A run's new rows that lie outside the cache: ``fed`` rows for each of some slots."""

    fed: int
    slots: range


class DeviceCache:
    """The keys and values of all layers: a block ``[L,B,Hkv,S,D]`` for each shape of a layer's rows.

    Blocks have the size of the largest cache from the start, and smaller caches use their front, so that growing takes
    no memory.

    Args:
        batch: B, the number of slots.
        dtype: the type of keys and values.
        sizes: the possible numbers of rows of a slot, ascending.
        fed: the greatest number of new rows of a run, if the graph returns them instead of writing them into the cache;
            else 0.

    Attributes:
        rows: S, the present number of rows of a slot.
    """

    def __init__(
        self,
        device: Device,
        layers: Sequence[CacheLayer],
        batch: int,
        dtype: np.dtype[Any],
        sizes: Sequence[int],
        fed: int,
    ) -> None:
        self._device = device
        self._batch = batch
        self._dtype = dtype
        self._sizes = tuple(sizes)
        self._fed = fed
        self._members = caches_by_shape(layers)
        self.rows = self._sizes[0]
        self._memory: Memory | None = None

    def plan(self, plan: MemoryPlan) -> None:
        """Adds its regions to a plan."""
        widest = 0
        for (heads, width), members in self._members.items():
            plan.add(f"cache.{heads}x{width}", len(members) * self._stride(heads, width, self._sizes[-1]))
            if self._fed:
                plan.add(f"cache.new.{heads}x{width}", len(members) * self._stride(heads, width, self._fed))
            widest = max(widest, width * self._dtype.itemsize)
        if len(self._sizes) > 1:
            plan.add("cache.plane", self._sizes[-2] * widest)

    def place(self, memory: Memory) -> None:
        """Takes its regions and fills them with zeros."""
        self._memory = memory
        for heads, width in self._members:
            region = memory[f"cache.{heads}x{width}"]
            self._device.stream.fill(region.address, 0, region.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache at its present size."""
        return sum(
            len(members) * self._batch * heads * self.rows * width * self._dtype.itemsize
            for (heads, width), members in self._members.items()
        )

    def tensors(self, rows: int, slots: range) -> dict[str, Tensor]:
        """The layers' caches for neighbouring slots, ``[B,Hkv,rows,D]``, by input name."""
        return self._parts("", rows, slots)

    def new_rows(self, fed: int, slots: range) -> dict[str, Tensor]:
        """The memory for a run's new rows, ``[B,Hkv,fed,D]``, by the cache's input name; all windows share it."""
        return self._parts("new.", fed, range(len(slots)))

    def _parts(self, kind: str, rows: int, slots: range) -> dict[str, Tensor]:
        parts = {}
        for (heads, width), members in self._members.items():
            base, stride = self._base(f"{kind}{heads}x{width}"), self._stride(heads, width, rows)
            first = slots.start * heads * rows * width * self._dtype.itemsize
            for index, member in enumerate(members):
                parts[member] = Tensor(base + index * stride + first, self._dtype, (len(slots), heads, rows, width))
        return parts

    def _stride(self, heads: int, width: int, rows: int) -> int:
        """Bytes from a layer's part of a block to the next layer's; parts are aligned, as libraries require."""
        return align(self._batch * heads * rows * width * self._dtype.itemsize)

    def _base(self, name: str) -> int:
        assert self._memory is not None
        return self._memory[f"cache.{name}"].address

    def resize(self, rows: int) -> None:
        """Moves the rows apart for a larger size, or together for a smaller one, in place.

        Each plane is copied via a spare one, as its old and new places may overlap. Growing begins with the last plane,
        and shrinking with the first, so that no plane is overwritten before it is moved.
        """
        old, self.rows = self.rows, rows
        for (heads, width), members in self._members.items():
            base, spare = self._base(f"{heads}x{width}"), self._base("plane")
            before, after = self._stride(heads, width, old), self._stride(heads, width, rows)
            row = width * self._dtype.itemsize
            planes = list(itertools.product(range(len(members)), range(self._batch * heads)))[1:]  # the first stays
            for layer, plane in reversed(planes) if rows > old else planes:
                nbytes = min(old, rows) * row
                self._device.stream.copy(spare, base + layer * before + plane * old * row, nbytes)
                self._device.stream.copy(base + layer * after + plane * rows * row, spare, nbytes)

    def copy(self, source: int, to: int, rows: int) -> None:
        for (heads, width), members in self._members.items():
            pitch = self.rows * width * self._dtype.itemsize
            base, stride = self._base(f"{heads}x{width}"), self._stride(heads, width, self.rows)
            for layer in range(len(members)):
                at, nbytes = base + layer * stride, rows * width * self._dtype.itemsize
                to_slot, from_slot = (at + slot * heads * pitch for slot in (to, source))
                self._device.stream.copy_rows(to_slot, pitch, from_slot, pitch, nbytes, heads)

    def move(self, slot: int, past: int, nodes: Sequence[int], new: NewRows | None) -> None:
        """Moves the rows of a run's tokens ``nodes`` to the place after a slot's first ``past`` rows.

        ``new`` describes the run's rows if they lie outside the cache; None if they are in it, from ``past`` on.
        """
        for (heads, width), members in self._members.items():
            row = width * self._dtype.itemsize
            to, to_pitch = self._base(f"{heads}x{width}"), self.rows * row
            to_stride = self._stride(heads, width, self.rows)
            source, pitch, stride = to + past * row, to_pitch, to_stride
            at = slot
            if new is not None:
                pitch, stride = new.fed * row, self._stride(heads, width, new.fed)
                source, at = self._base(f"new.{heads}x{width}"), slot - new.slots.start
            # A layer's planes are equally spaced; with one slot, those of all layers may be.
            uniform = self._batch == 1 and to_stride == heads * to_pitch and stride == heads * pitch
            layers, planes = (1, len(members) * heads) if uniform else (len(members), heads)
            for first, node, count in _runs(nodes, skip=new is None):
                for layer in range(layers):
                    to_row = to + layer * to_stride + slot * heads * to_pitch + (past + first) * row
                    from_row = source + layer * stride + at * heads * pitch + node * row
                    self._device.stream.copy_rows(to_row, to_pitch, from_row, pitch, count * row, planes)


def _runs(nodes: Sequence[int], *, skip: bool) -> list[tuple[int, int, int]]:
    """Groups rows that one copy can move: their new place, their first node, and their number.

    ``skip`` leaves out rows that are in place.
    """
    runs: list[tuple[int, int, int]] = []
    for to, node in enumerate(nodes):
        if skip and to == node:
            continue
        if not skip and runs and runs[-1][1] + runs[-1][2] == node:
            first, start, count = runs[-1]
            runs[-1] = (first, start, count + 1)
        else:
            runs.append((to, node, 1))
    return runs
