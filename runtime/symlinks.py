"""Opens graphs whose weights are symbolic links, as in the Hugging Face cache.

For graphs with loops onnxruntime runs onnx's checker, which refuses links. Their targets were checked when the bundle
was opened.
"""

from __future__ import annotations

import contextlib
import mmap
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def without_links(path: Path, weights: Sequence[Path]) -> Iterator[Path]:
    """A graph for onnx's checker, which reads no weights: with links, a copy beside sparse files.

    Args:
        path: the graph.
        weights: its weight files, in the same folder.
    """
    if not any(file.is_symlink() for file in (path, *weights)):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        for file in weights:
            with Path(folder, file.name).open("wb") as sparse:
                sparse.truncate(file.stat().st_size)
        yield Path(shutil.copy(path, folder))


def open_linked(path: Path, options: Any, open_graph: Callable[[Path], Any]) -> Any:
    """Opens a session, whether the graph's weights are links or not.

    Args:
        path: the graph.
        options: those that ``open_graph`` uses, an ``onnxruntime.SessionOptions``; modified.
        open_graph: opens a session.
    """
    try:
        return open_graph(path)
    except Exception:
        links = [file for file in path.parent.glob("*.bin") if file.is_symlink() and file.stat().st_size]
        if not links:
            raise
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(without_links(path, links))
        files = [stack.enter_context(file.open("rb")) for file in links]
        contents = [stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) for file in files]
        options.add_external_initializers_from_files_in_memory(
            [file.name for file in links], contents, list(map(len, contents))
        )
        return open_graph(plain)
