"""What the engine asks of an inference backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from specexport.contract.model import Model
from specexport.runtime.graph import Buffers, Graph
from specexport.runtime.program import Speculation, StepProgram


class Backend(Protocol):
    """A library that runs a bundle's graphs on one device, and what all of them share there."""

    @property
    def execution(self) -> str:
        """How work reaches the device; see ``Stats.execution``."""

    @property
    def fallback(self) -> str:
        """Why not in a better way, if there is one; else empty."""

    @property
    def default_slots(self) -> int:
        """The default number of slots, one of the bundle's batch sizes."""

    @property
    def device(self) -> str:
        """What it runs on, by library and name, on the CPU with the number of threads: where a measurement holds."""

    @property
    def kernels(self) -> str:
        """Which kernels compute, where a choice of them may be missing; else empty."""

    def inexact(self, target: Graph) -> str:
        """Why texts may part from plain decoding's where two tokens are about equally likely; empty where none do."""

    def open(self, model: Model, slots: int, buffers: Buffers) -> Graph:
        """Loads a model's graph, with a cache of ``slots`` slots, one of the bundle's batch sizes.

        Raises:
            BackendError: the graph is refused, or does not fit.
        """

    def program(self, target: Graph, speculations: Mapping[str, Speculation]) -> StepProgram:
        """What runs the steps of the graphs that were opened.

        Raises:
            BackendError: a graph of it is refused, or does not fit.
        """

    def close(self) -> None:
        """Frees everything that was opened; then does nothing."""
