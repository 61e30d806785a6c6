"""Opens the backend a bundle runs on: an entry point of the group ``specexport.backends``."""

from __future__ import annotations

from specexport.contract.errors import BackendError, RequestError
from specexport.contract.model import Model
from specexport.contract.plugins import load, offered
from specexport.runtime.backend import Backend, BackendOptions, Buffers, Graph
from specexport.runtime.bundle import Bundle

GROUP = "specexport.backends"
DEFAULT_UTILIZATION = 0.9
"""Share of a device's memory; drivers and libraries need some of the rest without telling."""


def open_backend(
    bundle: Bundle, name: str | None, threads: int | None, gpu_memory_utilization: float, keep: bool = False
) -> Backend:
    """Opens the backend that a bundle runs on.

    Args:
        bundle: the bundle.
        name: an entry point of :data:`GROUP`; None for the backend that the bundle was built for.
        threads: see :class:`~specexport.runtime.backend.BackendOptions`, as the rest.
        gpu_memory_utilization: see there.
        keep: see there.

    Raises:
        BackendError: there is no such backend, or it or its device is missing.
        RequestError: the part of the memory is out of range.
    """
    chosen = name or bundle.manifest.backend
    if chosen not in offered(GROUP):
        raise BackendError(f"there is no backend {chosen!r}; expected one of {', '.join(offered(GROUP))}")
    if not 0 < gpu_memory_utilization <= 1:
        raise RequestError(f"gpu_memory_utilization is {gpu_memory_utilization!r}; expected a number in (0, 1]")
    backend: Backend = load(GROUP, chosen)(bundle, BackendOptions(chosen, threads, gpu_memory_utilization, keep))
    return backend


def open_graph(bundle: Bundle, model: Model, slots: int, buffers: Buffers, threads: int | None) -> Graph:
    """Loads a model's graph on the CPU, whatever the bundle was built for.

    Raises:
        BackendError: the backend is not installed or refuses the graph.
    """
    return open_backend(bundle, "onnxruntime", threads, 1.0).open(model, slots, buffers)
