"""Opens graphs whose weights are symbolic links, as in the Hugging Face cache, or hard links, as by ``cp -l``.

For graphs with loops onnxruntime runs onnx's checker, which refuses links; their targets were checked when the bundle
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


def _is_link(file: Path) -> bool:
    return file.is_symlink() or file.stat().st_nlink > 1


@contextlib.contextmanager
def without_links(path: Path, weights: Sequence[Path]) -> Iterator[Path]:
    """Yields a graph without links for onnx's checker: the graph, or a copy beside sparse files.

    The checker does not read the weights, so sparse files of their names and sizes will do. ``weights`` are in the
    graph's folder.
    """
    if not any(map(_is_link, (path, *weights))):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        for file in weights:
            with Path(folder, file.name).open("wb") as sparse:
                sparse.truncate(file.stat().st_size)
        yield Path(shutil.copy(path, folder))


def open_linked(path: Path, options: Any, open_graph: Callable[[Path], Any]) -> Any:
    """Opens a session of a graph whose weights may be links.

    ``options`` are the ``onnxruntime.SessionOptions`` that ``open_graph`` uses; modified.
    """
    try:
        return open_graph(path)
    except Exception:
        links = [file for file in path.parent.glob("*.bin") if _is_link(file) and file.stat().st_size]
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
