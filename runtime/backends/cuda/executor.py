"""The interface of onnxruntime and TensorRT for running graphs on a device; called by one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, get_args

import numpy as np

from specexport.contract.engines import ComputedIn
from specexport.contract.shapes import ShapePoint
from specexport.runtime.backends.cuda.memory import Region, Tensor

Execution = Literal["host", "plain", "graph per engine", "graph per step"]
"""How work reaches the device: there is none; call by call; a captured graph an engine; a captured graph a step."""
_WORST_FIRST: tuple[Execution, ...] = get_args(Execution)
CACHE_TYPES: dict[ComputedIn, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),  # only the size matters here
}
"""The element type of the KV cache."""
Enqueue = Callable[[], None]
"""Enqueues one run of a graph on the stream, with the addresses it was prepared with."""


def worst(executions: Iterable[Execution]) -> Execution:
    """The slowest of several ways of execution."""
    return min(executions, key=_WORST_FIRST.index, default="plain")


class Executor(Protocol):
    """Runs one compiled graph at its shape points, in memory of the caller."""

    @property
    def points(self) -> frozenset[ShapePoint]:
        """The shapes it runs at."""

    @property
    def cache_dtype(self) -> np.dtype[Any]:
        """The element type of the KV cache; two-byte integers if NumPy lacks the type."""

    @property
    def workspace(self) -> int:
        """Bytes of scratch memory that it needs; 0 if its library allocates its own."""

    def prepare(self, point: ShapePoint, tensors: Mapping[str, Tensor], workspace: Region) -> Enqueue:
        """Prepares a shape point.

        Args:
            point: the shape.
            tensors: every input and output by name; their addresses must not change.
            workspace: scratch memory of at least :attr:`workspace` bytes, shared by all its points.

        Raises:
            BackendError: the library refuses the graph, the shape or an address.
        """

    def close(self) -> None:
        """Frees what the library holds."""
