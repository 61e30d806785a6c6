"""onnxruntime's sessions on the CPU, and the cache of quantized graphs as it optimizes them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specexport.contract.errors import BackendError
from specexport.contract.model import LoweredAs, Model, StoredAs
from specexport.runtime.backend import BackendOptions
from specexport.runtime.backends.links import open_linked
from specexport.runtime.backends.onnxruntime.kernels import PackedWeights, add_kernels
from specexport.runtime.bundle import Bundle
from specexport.runtime.machine import available_cores, cache_folder, disable_telemetry, machine_key, remove_unused

OpenGraph = Callable[[Path], Any]
OpenCached = Callable[[Path, OpenGraph, Any], Any]
"""Opens a session of a graph through a cache, given how to open one, and its options."""
_GRAPH, _WEIGHTS = "graph.onnx", "weights.bin"
_FORM = "2"
"""Part of the key of cached graphs: earlier versions cached drafts without the weights that links led to."""
_FREE_SPACE = 4
"""Free disk space that caching a graph requires, as a multiple of its size."""
_OUT_OF_MEMORY = ("bad_alloc", "Cannot allocate memory", "Resource temporarily unavailable")
_SESSIONS: weakref.WeakSet[Any] = weakref.WeakSet()
"""All sessions of this process."""

_MINIMUM: dict[LoweredAs, tuple[int, int]] = {"native": (1, 28), "portable": (1, 23)}
"""Releases before 1.28 compute TensorScatter, and Attention with fully masked rows, wrongly; releases before 1.23 were
not tested."""


def import_onnxruntime(lowering: LoweredAs) -> Any:
    """Imports onnxruntime for graphs of a lowering."""
    disable_telemetry()
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise BackendError(
            "onnxruntime is not installed, and this bundle runs on it; install it with: pip install 'specexport[cpu]'"
        ) from error
    except ImportError as error:  # such as too little memory, or a C library that is too old
        raise BackendError(f"onnxruntime is installed, but could not be loaded: {error}") from error
    version = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
    minimum = _MINIMUM[lowering]
    if version < minimum:
        instead = "; there is none for Python 3.10, where bundles built with --lowering portable run"
        raise BackendError(
            f"onnxruntime {onnxruntime.__version__} is too old for a bundle of the {lowering} lowering; expected "
            f"{minimum[0]}.{minimum[1]} or newer. Upgrade with: pip install -U 'specexport[cpu]'"
            + (instead if version >= _MINIMUM["portable"] else "")
        )
    return onnxruntime


def open_session(
    path: Path,
    threads: int,
    lowering: LoweredAs,
    weights: StoredAs,
    cache: OpenCached | None = None,
    packed: PackedWeights | None = None,
) -> Any:
    """Opens an ``onnxruntime.InferenceSession`` of a master graph on the CPU, with the options that the engine uses.

    Nodes that :mod:`~specexport.runtime.backends.onnxruntime.kernels` claims run on our kernels, if they are used.
    Packed weights are kept only in memory without a cache: ``packed`` for our kernels, ``cache`` for onnxruntime's.
    """
    onnxruntime = import_onnxruntime(lowering)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # The threads of one model must not spin while another model runs.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Quantized weights are multiplied as integers.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "4")
    dequantized = lowering == "portable" or weights == "fp8"
    if dequantized:
        # No kernel takes one scale a column: dequantize once rather than in every step.
        options.add_session_config_entry("session.disable_quant_qdq", "1")

    # onnxruntime adds its provider to ours, and then accepts no list.
    added = add_kernels(options, threads, packed)
    providers = None if added else ["CPUExecutionProvider"]
    # The kernels read weights as stored; folding would widen or duplicate them. They know MatMul, not Gemm.
    disabled = ["ConstantFolding", "MatMulAddFusion"] if added and not dequantized else None

    # The fallback would print an error that is raised here too, and try again without our provider.
    settings = {"providers": providers, "disabled_optimizers": disabled, "enable_fallback": 0}

    def open_graph(graph: Path) -> Any:
        return open_linked(graph, lambda file: onnxruntime.InferenceSession(str(file), options, **settings))

    try:
        opened = open_graph(path) if cache is None or added else cache(path, open_graph, options)
    except Exception as error:  # onnxruntime's exceptions share no public base
        short = any(sign in str(error) for sign in _OUT_OF_MEMORY)
        hint = "; there is too little memory, or too few threads are allowed" if short else ""
        raise BackendError(f"{path}: onnxruntime refused the graph: {error}{hint}") from error
    _SESSIONS.add(opened)
    return opened


def _never_free_sessions() -> None:
    """Keeps sessions alive in a forked process, as freeing one waits for its threads, which only the parent has."""
    for session in _SESSIONS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_never_free_sessions)


def open_cached(bundle: Bundle, model: Model, name: str, options: BackendOptions) -> Any:
    """Opens a session of a bundle's graph with this machine's caches, see :func:`open_session`.

    With ``options.keep`` missing entries are written: graphs for onnxruntime's kernels, packed weights for ours.
    """
    lowering, weights, cache, files = bundle.manifest.lowering, model.precision.weights, None, bundle.files_hash
    if lowering == "native" and weights in ("int8", "int4", "stored"):
        about = files, name, import_onnxruntime(lowering).__version__, _FORM
        cache = partial(_open_optimized, about=about, keep=options.keep)
    packed, threads = PackedWeights.of(files, options.keep), options.threads or available_cores()
    return open_session(bundle.file(name), threads, lowering, weights, cache, packed)


def _open_optimized(path: Path, open_graph: OpenGraph, options: Any, about: Sequence[str], keep: bool) -> Any:
    """Opens a session of a quantized graph as onnxruntime runs it, with fused products and packed weights.

    Optimizing the standard operators takes most of the time and memory of opening a bundle. The cached graph is the
    optimized one, so results are equal bit for bit. A graph that cannot be cached or read is optimized again.

    Args:
        path: the bundle's graph.
        open_graph: opens a session of a graph.
        options: the ``onnxruntime.SessionOptions`` that it uses; modified.
        about: all that the cached graph depends on, apart from this machine.
        keep: whether to cache it if it is missing.
    """
    cache = cache_folder()
    root = (cache or Path(os.devnull)) / "graphs"  # a path that cannot exist
    folder = root / machine_key(about)
    with contextlib.suppress(Exception):  # whatever is wrong with the entry, the bundle's graph works
        os.utime(folder / _GRAPH)
        levels = type(options.graph_optimization_level)
        before, options.graph_optimization_level = options.graph_optimization_level, levels.ORT_DISABLE_ALL
        try:
            return open_graph(folder / _GRAPH)
        finally:
            options.graph_optimization_level = before
    if keep and cache is not None:
        with contextlib.suppress(Exception):
            return _open_and_save(path, open_graph, options, folder)
        options.optimized_model_filepath = ""
    return open_graph(path)


def _open_and_save(path: Path, open_graph: OpenGraph, options: Any, folder: Path) -> Any:
    root = folder.parent
    root.mkdir(parents=True, exist_ok=True)
    remove_unused(root.iterdir(), _GRAPH)  # and the leftovers of killed processes
    model = path.name.partition(".")[0]
    size = sum(file.stat().st_size for file in path.parent.glob(f"{model}.*"))
    if shutil.disk_usage(root).free < _FREE_SPACE * size:
        return open_graph(path)
    with tempfile.TemporaryDirectory(dir=root) as part:
        optimized = Path(part) / "optimized"
        optimized.mkdir()
        options.optimized_model_filepath = str(optimized / _GRAPH)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", _WEIGHTS)
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
        session = open_graph(path)
        with contextlib.suppress(OSError):  # another process was first
            shutil.rmtree(folder, ignore_errors=True)
            optimized.rename(folder)
    return session
