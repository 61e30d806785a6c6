"""Graphs in the form that onnxruntime gives them as it opens them, kept on this machine."""

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
_ROOM = 4
"""Times its size that a graph's disk must have free for it to be kept."""


class KeptGraph:
    """A quantized graph as onnxruntime runs it, with its products fused and its weights in the order they are read.

    Making that of the standard operators is most of what opening a bundle takes, in time and in memory. What is opened
    later is the very same graph, and says the same bit for bit. One that cannot be kept or read is made anew.

    Args:
        about: all that it depends on beside this machine.
        keep: whether to keep it, where it is not yet.
    """

    def __init__(self, about: Sequence[str], keep: bool) -> None:
        cache = cache_folder()
        self._root = (cache or Path(os.devnull)) / "graphs"  # below which nothing is
        self._folder = self._root / machine_key(about)
        self._keep = keep and cache is not None

    def session(self, path: Path, open_graph: Callable[[Path], Any], options: Any) -> Any:
        """The session over a graph.

        Args:
            path: the graph as it is in the bundle.
            open_graph: makes a session of a graph.
            options: those that ``open_graph`` takes, an ``onnxruntime.SessionOptions``; changed.
        """
        with contextlib.suppress(Exception):  # whatever is wrong with it, the bundle's own is still there
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
            return self._kept(path, open_graph, options)
        options.optimized_model_filepath = ""
        return open_graph(path)

    def _kept(self, path: Path, open_graph: Callable[[Path], Any], options: Any) -> Any:
        self._root.mkdir(parents=True, exist_ok=True)
        remove_unused(self._root, _GRAPH)  # and what a killed process left
        size = sum(file.stat().st_size for file in path.parent.iterdir())
        if shutil.disk_usage(self._root).free < _ROOM * size:
            return open_graph(path)
        with tempfile.TemporaryDirectory(dir=self._root) as part:
            options.optimized_model_filepath = str(Path(part) / "made" / _GRAPH)
            options.add_session_config_entry("session.optimized_model_external_initializers_file_name", _WEIGHTS)
            options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
            (Path(part) / "made").mkdir()
            session = open_graph(path)
            with contextlib.suppress(OSError):  # another process was first
                shutil.rmtree(self._folder, ignore_errors=True)
                (Path(part) / "made").rename(self._folder)
        return session
