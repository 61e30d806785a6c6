"""Progress of a build."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Progress = Callable[[str, int, int], None]
"""Called with a step's name, how much of it is done, and how much there is in all."""


@contextlib.contextmanager
def during(progress: Progress, title: str) -> Iterator[None]:
    """Reports the begin and the end of a step."""
    progress(title, 0, 1)
    yield
    progress(title, 1, 1)
