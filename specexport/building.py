"""What commands and engines share that build: extras that may be missing, and progress on a terminal."""

from __future__ import annotations

import atexit
import gc
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from specexport.checkpoints.quiet import uncollected
from specexport.contract.errors import BuildError


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


class _Bytes(DownloadColumn):
    """How many bytes are done, and how long the rest takes, of steps whose count can only be one of bytes."""

    def render(self, task: Task) -> Text:
        if (task.total or 0) < 1 << 20:
            return Text()
        left = "" if task.finished or task.time_remaining is None else f", {_clock(task.time_remaining)} left"
        return super().render(task).append(left)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Gives a function that shows progress on standard error: a step's name, how much is done, how much there is."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        _Bytes(table_column=Column(no_wrap=True)),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def report(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total)
            progress.update(tasks[name], completed=done, total=total)

        yield report
