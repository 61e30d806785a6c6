"""The interfaces of inference backends and of the graphs that they load, and the opening of a backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from specexport.contract import tensors
from specexport.contract.errors import BackendError, RequestError
from specexport.contract.model import CacheLayer, Model
from specexport.contract.plugins import installed, load
from specexport.contract.shapes import ShapePoint
from specexport.contract.signature import caches
from specexport.runtime.bundle import Bundle
from specexport.runtime.params import SamplingParams

if TYPE_CHECKING:
    from specexport.runtime.backends.ranks import Followers
    from specexport.runtime.proposal import Proposer
    from specexport.runtime.step import StepProgram

Array = tensors.Array
Buffers = Callable[[ShapePoint], tuple[dict[str, Array], dict[str, Array]]]
"""Creates the arrays for a run at a shape point; see :meth:`GraphSignature.buffers`."""
FIRST = range(1)
"""The window of a single request: the first slot."""
TILE = 16
"""Tokens of a tile: the last part of a prompt is read in whole tiles, so that there are few shapes."""
GROUP = "specexport.backends"
"""The group of backends' entry points."""
DEFAULT_UTILIZATION = 0.9
"""Default share of a device's memory; drivers and libraries use some of the rest unreported."""


class RunShape(NamedTuple):
    """The shape of a run at the present cache size, and its window of neighbouring slots.

    Attributes:
        tokens: T, query tokens of each slot.
        rows: R, rows of logits of a step graph.
        drafts: K, draft tokens of a propose graph.
        slots: the window, whose length is one of the batch sizes.
    """

    tokens: int
    rows: int = 0
    drafts: int = 0
    slots: range = FIRST

    def point(self, cache: int) -> ShapePoint:
        """The shape point with a cache of this many rows."""
        return ShapePoint(len(self.slots), self.tokens, cache, self.rows, self.drafts)


class Graph(ABC):
    """A loaded graph with its static buffers and a cache of several slots.

    Callers write inputs into the arrays that :meth:`inputs` returns, and read results from those that :meth:`run`
    returns; their first dimension is the window. All calls return the same memory: copy what must outlive the next run.

    Attributes:
        sizes: the possible lengths of a window, ascending; the last is the number of slots.
        cache_sizes: the possible numbers of rows in a slot's cache, ascending.
        any_width: whether a draft's runs may have any T, as dimensions are free.
        followers: the other ranks of a split target, which mirror its cache changes and runs; None if it is not split.
    """

    sizes: tuple[int, ...]
    any_width: bool = False
    followers: Followers | None = None

    def __init__(self, points: Collection[ShapePoint], slots: int) -> None:
        self._points = frozenset(points)
        self._slots = slots
        self._filled = [0] * slots
        self.cache_sizes = tuple(sorted({point.cache for point in points}))

    @property
    @abstractmethod
    def cache_rows(self) -> int:
        """Number of rows in a slot's cache at present."""

    def widths(self, slots: int) -> tuple[int, ...]:
        """T of the steps of ``slots`` slots that compute the logits of every token, ascending."""
        return tuple(sorted({p.tokens for p in self._points if p.batch == slots and p.rows == p.tokens}))

    def step_width(self, slots: int, nodes: int) -> int:
        """T of a step of ``slots`` slots whose largest tree has ``nodes`` nodes."""
        return next(width for width in self.widths(slots) if width >= nodes)

    def drafts(self, slots: int) -> tuple[tuple[int, int], ...]:
        """K and T of a propose graph's runs of ``slots`` slots, ascending."""
        return tuple(sorted({(p.drafts, p.tokens) for p in self._points if p.batch == slots and p.drafts}))

    def filled(self, slot: int) -> int:
        """The number of committed rows in a slot's cache."""
        return self._filled[slot]

    def reusable(self, slot: int, rows: int) -> int:
        """The number of a slot's first ``rows`` rows that another text may reuse.

        Layers without attention can only go back a few tokens; with them it is 0 for shorter prefixes.
        """
        return min(rows, self._filled[slot])

    def reserve(self, rows: int) -> None:
        """Grows every slot's cache to at least ``rows`` rows, and keeps its content.

        Raises:
            BackendError: the bundle has no such large cache.
        """
        if self.cache_rows < rows and self.cache_sizes[-1]:
            self._resize(self._cache_size(rows))
        self._mirror("reserve", rows)

    def shrink_cache(self, rows: int) -> None:
        """Shrinks every slot's cache to the smallest size with ``rows`` rows; rows beyond the new size are lost."""
        size = self._cache_size(min(rows, self.cache_sizes[-1]))
        if size < self.cache_rows:
            self._filled = [min(count, size) for count in self._filled]
            self._resize(size)
        self._mirror("shrink_cache", rows)

    @abstractmethod
    def _resize(self, rows: int) -> None:
        """Resizes every slot's cache to one of :attr:`cache_sizes`; keeps the rows that fit."""

    def copy(self, source: int, to: int, rows: int) -> None:
        """Copies the first ``rows`` rows of a slot's cache, as far as they are :meth:`reusable`, to another slot."""
        rows = self.reusable(source, rows)
        if source != to:
            self._copy(source, to, rows)
        self._filled[to] = rows
        self._mirror("copy", source, to, rows)

    @abstractmethod
    def _copy(self, source: int, to: int, rows: int) -> None:
        """Implements :meth:`copy` between two slots."""

    def commit(self, slot: int, past: int, nodes: Sequence[int]) -> None:
        """Commits the rows of some of the last run's tokens to the cache, in order.

        Call it after every run whose rows are used. Rows that are in place are not copied.

        ``past`` is the slot's ``past_length`` in the run; ``nodes`` are the indices of the tokens to keep, ascending.
        """
        self._filled[slot] = past + len(nodes)
        self._commit(slot, past, nodes)
        self._mirror("commit", slot, past, nodes)

    @abstractmethod
    def _commit(self, slot: int, past: int, nodes: Sequence[int]) -> None:
        """Implements :meth:`commit`."""

    @abstractmethod
    def inputs(self, shape: RunShape) -> dict[str, Array]:
        """The input arrays of a run, by name."""

    def prepare(self, shape: RunShape, rows: int = 0) -> dict[str, Array]:
        """Reserves ``rows`` rows for the next run, and protects committed rows; returns the run's :meth:`inputs`.

        The run writes rows into every slot of its window, from ``past_length`` on: after the committed rows, unless the
        caller sets it for a slot that takes part. A slot that is too full for further rows loses its last ones.
        """
        self.reserve(rows)
        inputs, limit = self.inputs(shape), self.cache_rows - shape.point(self.cache_rows).fed
        if tensors.PAST_LENGTH in inputs:  # absent without a cache
            for at, slot in enumerate(shape.slots):
                inputs[tensors.PAST_LENGTH][at] = self._filled[slot] = self.reusable(slot, limit)
        return inputs

    def run(self, shape: RunShape) -> dict[str, Array]:
        """Runs the graph; returns all outputs but the caches, by name.

        Raises:
            BackendError: the library fails, or a follower is lost.
        """
        if self.followers is None:
            return self._run(shape)
        return self.followers.run_with(self._run, shape, self.inputs(shape))

    @abstractmethod
    def _run(self, shape: RunShape) -> dict[str, Array]:
        """Implements :meth:`run` in this process."""

    def _mirror(self, name: str, *arguments: Any) -> None:
        """Has the followers change their caches in the same way."""
        if self.followers is not None:
            self.followers.mirror(name, *arguments)

    def chunk(self, size: int, tokens: int, alone: bool = False) -> int:
        """T of a run that reads ``tokens`` tokens of a prompt; by default ``size``, the length of a prefill chunk.

        ``alone`` says that no request waits for the run to end.
        """
        return size

    def _cache_size(self, rows: int) -> int:
        """The smallest cache of at least ``rows`` rows."""
        size = next((size for size in self.cache_sizes if size >= rows), None)
        if size is None:
            raise BackendError(f"{rows} cache rows needed, but the bundle's largest cache has {self.cache_sizes[-1]}")
        return size

    def _require(self, point: ShapePoint) -> ShapePoint:
        if point not in self._points:
            raise BackendError(f"shape point {point} was not built; this is a defect of specexport, please report it")
        return point


@dataclass(frozen=True)
class BackendOptions:
    """Options of opening a backend; each backend uses those that apply to its device.

    Attributes:
        name: an entry point of :data:`GROUP`; None for the backend that the bundle was built for. A backend receives
            its name, as a class may serve several.
        threads: number of threads, for CPUs; None for one for each core that this process may use.
        gpu_memory_utilization: for GPUs, the share of the device's memory that may be in use, also by other programs.
        keep: whether to cache graphs as a library optimizes them, so that the next opening is faster.
    """

    name: str | None = None
    threads: int | None = None
    gpu_memory_utilization: float = DEFAULT_UTILIZATION
    keep: bool = False


class Backend(Protocol):
    """A library that runs a bundle's graphs on one device, with the resources that they share."""

    @property
    def execution(self) -> str:
        """The way in which work reaches the device; see ``Stats.execution``."""

    @property
    def fallback(self) -> str:
        """The reason why work does not reach the device in a faster way; empty if there is no faster way."""

    @property
    def default_slots(self) -> int:
        """The default number of slots, one of the bundle's batch sizes."""

    @property
    def device(self) -> str:
        """The library, the device and, on CPUs, the number of threads: measurements hold for this combination."""

    @property
    def kernels(self) -> str:
        """A description of the kernels in use, if some may be missing on the device; otherwise empty."""

    @property
    def kernels_build(self) -> str:
        """An identifier of the build of our kernels, for which measurements hold; empty if they are not used."""

    def inexact(self, target: Graph) -> str:
        """The reason why texts may differ from plain decoding's at nearly equally likely tokens; empty if exact."""

    def open(self, model: Model, slots: int, buffers: Buffers) -> Graph:
        """Loads a model's graph, with a cache of ``slots`` slots, one of the bundle's batch sizes.

        Raises:
            BackendError: the graph is refused, or does not fit.
        """

    def program(self, target: Graph, proposers: Mapping[str, Proposer]) -> StepProgram:
        """The program that takes steps with the opened graphs.

        Raises:
            BackendError: one of its graphs is refused, or does not fit.
        """

    def close(self) -> None:
        """Frees all graphs; later calls do nothing."""


def caches_by_shape(layers: Sequence[CacheLayer]) -> dict[tuple[int, int], list[str]]:
    """The names of the layers' cache inputs, by number of heads and width of a row."""
    names: dict[tuple[int, int], list[str]] = {}
    for cache in caches(layers):
        _, heads, _, size = cache.dims
        names.setdefault((int(heads), int(size)), []).append(str(cache))
    return names


def write_sampling(inputs: Mapping[str, Array], at: int, params: SamplingParams) -> None:
    """Writes a slot's sampling parameters into a graph's inputs; greedy decoding is top-k of 1."""
    inputs[tensors.TEMPERATURE][at] = 1.0 if params.greedy else params.temperature
    inputs[tensors.TOP_K][at] = 1 if params.greedy else min(max(params.top_k, 0), 2**31)
    inputs[tensors.TOP_P][at] = 1.0 if params.greedy else params.top_p
    inputs[tensors.MIN_P][at] = params.min_p


def open_backend(bundle: Bundle, options: BackendOptions) -> Backend:
    """Opens a backend for a bundle.

    Raises:
        BackendError: there is no such backend, or its library or device is missing.
        RequestError: ``gpu_memory_utilization`` is out of range.
    """
    name, share = options.name or bundle.manifest.backend, options.gpu_memory_utilization
    if name not in installed(GROUP):
        known, own = ", ".join(installed(GROUP)), options.name is None
        raise BackendError(
            f"the bundle was built for the backend {name!r}, which is not installed; there are {known}"
            if own
            else f"backend is {name!r}; expected one of {known}",
            param=None if own else "backend",
        )
    if not 0 < share <= 1:
        raise RequestError(
            f"gpu_memory_utilization is {share!r}; expected a number in (0, 1]", param="gpu_memory_utilization"
        )
    backend: Backend = load(GROUP, name)(bundle, replace(options, name=name))
    return backend


def open_target(bundle: Bundle, slots: int = 1, threads: int | None = None) -> Graph:
    """Loads the target's graph on the CPU, whatever the bundle was built for."""
    target, signature = bundle.manifest.target, bundle.manifest.target_signature
    return open_backend(bundle, BackendOptions("onnxruntime", threads)).open(target, slots, signature.buffers)
