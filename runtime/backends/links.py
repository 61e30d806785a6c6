"""Opens graphs whose weights are symbolic links, as in the Hugging Face cache, or hard links, as by ``cp -l``.

For graphs with loops onnxruntime runs onnx's checker, which refuses links; their targets were checked when the bundle
was opened.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_STORED = re.compile(rb"\n\x08location\x12.(.+?)j.\n\x06offset\x12.(\d+)j.\n\x06length\x12.(\d+)", re.DOTALL)
"""The file, offset and size of a stored tensor in a serialized graph."""


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


def open_linked(path: Path, open_graph: Callable[[Path], Any]) -> Any:
    """Opens a session of a graph whose weights may be links.

    Where the checker refuses them, the session reads a copy of the tensors that the graph refers to, a draft's. Files
    that onnxruntime is given in memory it does not use within loops.
    """
    weights = sorted(path.parent.glob("*.bin"))
    try:
        return open_graph(path)
    except Exception:
        if not any(map(_is_link, weights)):
            raise
    with without_links(path, weights) as plain:
        for name, offset, length in _STORED.findall(plain.read_bytes()):
            tensor = np.memmap(path.parent / name.decode(), np.uint8, "r", int(offset), int(length))
            with (plain.parent / name.decode()).open("r+b") as file:
                file.seek(int(offset))
                tensor.tofile(file)
        return open_graph(plain)
