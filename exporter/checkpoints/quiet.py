"""Contexts around torch: without its messages, and without the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import warnings
from collections.abc import Iterator


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
