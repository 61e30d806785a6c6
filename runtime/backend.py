"""The interface of inference backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from specexport.contract.model import Model
from specexport.runtime.graph import Buffers, Graph
from specexport.runtime.step_program import LoadedMethod, StepProgram


class Backend(Protocol):
    """A library that runs a bundle's graphs on one device, with the resources that they share."""

    @property
    def execution(self) -> str:
        """How work reaches the device; see ``Stats.execution``."""

    @property
    def fallback(self) -> str:
        """Why a faster way of execution is not used, if there is one; else empty."""

    @property
    def default_slots(self) -> int:
        """The default number of slots, one of the bundle's batch sizes."""

    @property
    def device(self) -> str:
        """The library, the device, and on CPUs the number of threads: measurements hold for this combination."""

    @property
    def kernels(self) -> str:
        """Which kernels are used, on a device where some may be missing; else empty."""

    def inexact(self, target: Graph) -> str:
        """Why texts may differ from plain decoding's where two tokens are about equally likely; empty if exact."""

    def open(self, model: Model, slots: int, buffers: Buffers) -> Graph:
        """Loads a model's graph, with a cache of ``slots`` slots, one of the bundle's batch sizes.

        Raises:
            BackendError: the graph is refused, or does not fit.
        """

    def program(self, target: Graph, loaded_methods: Mapping[str, LoadedMethod]) -> StepProgram:
        """The program that takes steps with the opened graphs.

        Raises:
            BackendError: one of its graphs is refused, or does not fit.
        """

    def close(self) -> None:
        """Frees everything that was opened; later calls do nothing."""
