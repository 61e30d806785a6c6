"""Caches quantized graphs as onnxruntime optimizes them, on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specexport.runtime.machine import cache_folder, machine_key, remove_unused

_GRAPH, _WEIGHTS = "graph.onnx", "weights.bin"
_FREE_SPACE = 4
"""Free disk space that caching a graph requires, as a multiple of its size."""


class GraphCache:
    """The cache entry of a quantized graph as onnxruntime runs it, with fused products and packed weights.

    Optimizing the standard operators takes most of the time and memory of opening a bundle. The cached graph is the
    optimized one, so results are equal bit for bit. A graph that cannot be cached or read is optimized again.

    Args:
        about: everything that the entry depends on, apart from this machine.
        keep: whether to write a missing entry.
    """

    def __init__(self, about: Sequence[str], keep: bool) -> None:
        cache = cache_folder()
        self._root = (cache or Path(os.devnull)) / "graphs"  # a path that cannot exist
        self._folder = self._root / machine_key(about)
        self._keep = keep and cache is not None

    def session(self, path: Path, open_graph: Callable[[Path], Any], options: Any) -> Any:
        """Opens a session of a graph.

        ``options`` are the ``onnxruntime.SessionOptions`` that ``open_graph`` uses; modified.
        """
        with contextlib.suppress(Exception):  # whatever is wrong with the entry, the bundle's graph works
            os.utime(self._folder / _GRAPH)
            levels = type(options.graph_optimization_level)
            before, options.graph_optimization_level = options.graph_optimization_level, levels.ORT_DISABLE_ALL
            try:
                return open_graph(self._folder / _GRAPH)
            finally:
                options.graph_optimization_level = before
        if not self._keep:
            return open_graph(path)
        with contextlib.suppress(Exception):
            return self._open_and_save(path, open_graph, options)
        options.optimized_model_filepath = ""
        return open_graph(path)

    def _open_and_save(self, path: Path, open_graph: Callable[[Path], Any], options: Any) -> Any:
        self._root.mkdir(parents=True, exist_ok=True)
        remove_unused(self._root.iterdir(), _GRAPH)  # and the leftovers of killed processes
        size = sum(file.stat().st_size for file in path.parent.iterdir())
        if shutil.disk_usage(self._root).free < _FREE_SPACE * size:
            return open_graph(path)
        with tempfile.TemporaryDirectory(dir=self._root) as part:
            options.optimized_model_filepath = str(Path(part) / "optimized" / _GRAPH)
            options.add_session_config_entry("session.optimized_model_external_initializers_file_name", _WEIGHTS)
            options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
            (Path(part) / "optimized").mkdir()
            session = open_graph(path)
            with contextlib.suppress(OSError):  # another process was first
                shutil.rmtree(self._folder, ignore_errors=True)
                (Path(part) / "optimized").rename(self._folder)
        return session
