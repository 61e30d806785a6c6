"""What runs graphs on a device, asked of onnxruntime and TensorRT alike, always by one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, get_args

import numpy as np

from specexport.contract.engines import ComputedIn
from specexport.contract.shapes import ShapePoint
from specexport.runtime.cuda.memory import Region, Tensor

Execution = Literal["host", "plain", "graph per engine", "graph per step"]
"""How work reaches the device: there is none; call by call; one captured graph an engine; one captured graph a step."""
_WORST_FIRST: tuple[Execution, ...] = get_args(Execution)
CACHE_TYPES: dict[ComputedIn, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),  # two bytes, which nobody here looks into
}
"""What an element of the KV cache is."""
Enqueue = Callable[[], None]
"""Gives one run of a graph to the stream, over the addresses it was prepared with."""


def worst(executions: Iterable[Execution]) -> Execution:
    """How work reaches the device that is made of several parts."""
    return min(executions, key=_WORST_FIRST.index, default="plain")


class Executor(Protocol):
    """Runs one compiled graph at its shape points, over memory it is given."""

    @property
    def points(self) -> frozenset[ShapePoint]:
        """The shapes it runs at."""

    @property
    def cache_dtype(self) -> np.dtype[Any]:
        """What an element of the KV cache is; two-byte integers where NumPy has no such type."""

    @property
    def workspace(self) -> int:
        """Bytes of scratch memory it wants to be given; 0 where its library takes its own."""

    def prepare(self, point: ShapePoint, tensors: Mapping[str, Tensor], workspace: Region) -> Enqueue:
        """Makes a shape point ready to run.

        Args:
            point: the shape.
            tensors: every input and output by name; addresses stay as they are.
            workspace: scratch memory of at least :attr:`workspace` bytes, shared by all its points.

        Raises:
            BackendError: the library refuses the graph, the shape or an address.
        """

    def close(self) -> None:
        """Frees what the library holds."""
