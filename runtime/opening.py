"""Opens the backend a bundle runs on."""

from __future__ import annotations

from specexport.contract.engines import BACKENDS
from specexport.contract.errors import BackendError, RequestError
from specexport.contract.model import Model
from specexport.runtime.backend import Backend
from specexport.runtime.bundle import Bundle
from specexport.runtime.graph import Buffers, Graph

DEFAULT_UTILIZATION = 0.9
"""Share of a device's memory; drivers and libraries need some of the rest without telling."""


def open_backend(
    bundle: Bundle, name: str | None, threads: int | None, gpu_memory_utilization: float, keep: bool = False
) -> Backend:
    """Opens the backend that a bundle runs on.

    Args:
        bundle: the bundle.
        name: one of :data:`~specexport.contract.engines.BACKENDS`; None for the one it was built for.
        threads: for CPU backends; None for every core this process may use.
        gpu_memory_utilization: for GPU backends, the part of the device's memory that may be used, other programs'
            included.
        keep: cache graphs as a library optimizes them, so that the next opening is faster.

    Raises:
        BackendError: there is no such backend, or it or its device is missing.
        RequestError: the part of the memory is out of range.
    """
    requested = name or bundle.manifest.backend
    chosen = next((backend for backend in BACKENDS if backend == requested), None)
    if chosen is None:
        raise BackendError(f"there is no backend {name!r}; expected one of {', '.join(BACKENDS)}")
    if chosen != "onnxruntime" and bundle.manifest.has_states:
        raise BackendError(f"{chosen} does not run layers without attention yet, which a model of this bundle has")
    if not 0 < gpu_memory_utilization <= 1:
        raise RequestError(f"gpu_memory_utilization is {gpu_memory_utilization!r}; expected a number in (0, 1]")
    # Imported here: each backend has dependencies that the others' users need not install.
    if chosen == "onnxruntime":
        from specexport.runtime.ort_backend import OnnxRuntimeBackend

        return OnnxRuntimeBackend(bundle, threads, keep)
    from specexport.runtime.cuda.backend import CudaBackend

    return CudaBackend(bundle, chosen, gpu_memory_utilization)


def open_graph(bundle: Bundle, model: Model, slots: int, buffers: Buffers, threads: int | None) -> Graph:
    """Loads a model's graph on the CPU, whatever the bundle was built for.

    Raises:
        BackendError: the backend is not installed or refuses the graph.
    """
    return open_backend(bundle, "onnxruntime", threads, 1.0).open(model, slots, buffers)
