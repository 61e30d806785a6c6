"""Around torch: silence, as its exporter says much about its own insides, and no collector."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences what torch and its exporter say about their own insides; errors still raise."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(previous)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Keeps Python's collector away: imports and traces make objects by the million, hardly any of them garbage, and
    walking them over and over is up to a quarter of their time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
