"""Helpers of commands and engines that build: optional extras, and progress bars."""

from __future__ import annotations

import atexit
import gc
import io
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from tqdm import tqdm

from specexport.contract.errors import BuildError
from specexport.contract.manifest import Manifest
from specexport.exporter.checkpoints.quiet import uncollected

_BYTES = 1 << 20
"""Progress with larger totals counts bytes."""
_BAR = "{desc:36} {percentage:3.0f}% {elapsed} {bar}"
_FINISHED_BAR = _BAR + " {n_fmt}B of {total_fmt}B"
_RUNNING_BAR = _FINISHED_BAR + ", {remaining} left"


@contextmanager
def needs_extra(doing: str, extra: str) -> Iterator[None]:
    """Turns failed imports in its block into an error that names the missing extra.

    Raises:
        BuildError: an import failed.
    """
    try:
        yield
    except ImportError as error:
        raise BuildError(
            f"{doing} needs the [{extra}] extra ({error}); install it with: pip install 'specexport[{extra}]'"
        ) from error


def exporter() -> types.ModuleType:
    """Imports the exporter.

    Raises:
        BuildError: the ``[export]`` extra is not installed, or Python is older than 3.11.
    """
    if sys.version_info < (3, 11):
        raise BuildError(
            f"building needs Python 3.11 or newer; this is {sys.version_info.major}.{sys.version_info.minor}. "
            "Bundles run on 3.10, so build elsewhere and copy the folder"
        )
    with needs_extra("building", "export"), uncollected():
        from specexport.exporter import build
    # At exit, Python's garbage collection of millions of objects would take more than a second.
    atexit.register(gc.freeze)
    return build


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function that shows progress on standard error, from a step's name, the amount done, and the total.

    A terminal shows a bar for each step; otherwise each finished step is a line.
    """
    terminal, size = sys.stderr.isatty(), shutil.get_terminal_size()
    bars: dict[str, tqdm[NoReturn]] = {}

    def report(name: str, done: int, total: int) -> None:
        bar = bars.get(name)
        if bar is None or (bar.disable and done < total):
            bar = bars[name] = tqdm(
                desc=name,
                total=total,
                unit_scale=True,
                unit_divisor=1024,
                bar_format=_RUNNING_BAR if total >= _BYTES else _BAR,
                file=sys.stderr if terminal else io.StringIO(),
                ncols=min(80, size.columns),
                nrows=size.lines,
            )
        if bar.disable:  # it finished earlier
            return
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            bar.bar_format = _FINISHED_BAR if total >= _BYTES else _BAR
            if not terminal:
                print(bar, file=sys.stderr)
            bar.close()

    try:
        yield report
    finally:
        for bar in bars.values():
            bar.close()


def warn_of_settings(manifest: Manifest) -> None:
    """Warns on standard error where a bundle's texts differ from those of transformers."""
    for note in manifest.notes:
        print(f"warning: {note}", file=sys.stderr)
