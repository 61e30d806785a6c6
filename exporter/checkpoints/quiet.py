"""Contexts around libraries: with our errors, without their messages, and without the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import warnings
from collections.abc import Callable, Iterator

from specexport.contract.errors import BuildError, SpecExportError


@contextlib.contextmanager
def failing_as(describe: Callable[[Exception], str], kind: type[SpecExportError] = BuildError) -> Iterator[None]:
    """Turns what libraries raise in its block, which may be exceptions of any kind, into an error with a description.

    Errors of this package stay as they are.
    """
    try:
        yield
    except SpecExportError:
        raise
    except Exception as error:
        raise kind(describe(error)) from error


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences log messages and warnings of torch and its exporter; errors are still raised."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(previous)


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses the garbage collector: imports and traces create millions of objects, hardly any of them garbage.

    Collections would take up to a quarter of their time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
