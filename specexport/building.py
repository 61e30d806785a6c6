"""What commands and engines share that build: extras that may be missing, and progress on a terminal."""

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

from specexport.checkpoints.quiet import uncollected
from specexport.contract.errors import BuildError
from specexport.contract.manifest import Manifest

_BYTES = 1 << 20
"""Steps with as many parts count bytes."""
_BAR = "{desc:36} {percentage:3.0f}% {elapsed} {bar}"
_DONE = _BAR + " {n_fmt}B of {total_fmt}B"
_LEFT = _DONE + ", {remaining} left"


@contextmanager
def needs_extra(doing: str, extra: str) -> Iterator[None]:
    """Imports under it may fail with the name of the extra that is not installed.

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
    """The exporter.

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
    # As it ends, Python would look through millions of objects for garbage, for more than a second.
    atexit.register(gc.freeze)
    return build


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Gives a function that shows progress on standard error: a step's name, how much is done, how much there is.

    A terminal shows a bar for each step; anywhere else there is a line for each that is done.
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
                bar_format=_LEFT if total >= _BYTES else _BAR,
                file=sys.stderr if terminal else io.StringIO(),
                ncols=min(80, size.columns),
                nrows=size.lines,
            )
        if bar.disable:  # it was done before
            return
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            bar.bar_format = _DONE if total >= _BYTES else _BAR
            if not terminal:
                print(bar, file=sys.stderr)
            bar.close()

    try:
        yield report
    finally:
        for bar in bars.values():
            bar.close()


def warn_of_settings(manifest: Manifest) -> None:
    """Names on standard error where a bundle's texts are not those of transformers."""
    for note in manifest.notes:
        print(f"warning: {note}", file=sys.stderr)
