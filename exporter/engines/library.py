"""TensorRT or TensorRT-RTX through polygraphy, which drives both alike; imported when an engine is compiled."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from specexport.contract.engines import EngineRuntime
from specexport.contract.errors import BuildError

_MODULES: dict[EngineRuntime, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


class Library(NamedTuple):
    """An imported library.

    Attributes:
        polygraphy: ``polygraphy.backend.trt``, set to that module.
    """

    runtime: EngineRuntime
    trt: Any
    polygraphy: Any

    @property
    def version(self) -> str:
        return str(self.trt.__version__)


def load_library(runtime: EngineRuntime) -> Library:
    """Imports a library, and polygraphy for it.

    Raises:
        BuildError: it is not installed, or this process uses the other one.
    """
    name = _MODULES[runtime]
    try:
        trt = importlib.import_module(name)
        config: Any = importlib.import_module("polygraphy.config")
    except ImportError as error:
        raise BuildError(
            f"compiling for {runtime} needs the [{runtime}] and [compile] extras ({error}); install them with: "
            f"pip install 'specexport[{runtime},compile]'"
        ) from error
    if "polygraphy.backend.trt" not in sys.modules:
        # polygraphy asks this once, when its loaders are imported.
        config.USE_TENSORRT_RTX = runtime == "tensorrt-rtx"
    elif (runtime == "tensorrt-rtx") != config.USE_TENSORRT_RTX:
        raise BuildError(
            f"this process compiles for {next(one for one in _MODULES if one != runtime)} already, and cannot for "
            f"{runtime} too; use another process"
        )
    with messages():
        polygraphy = importlib.import_module("polygraphy.backend.trt")
    return Library(runtime, trt, polygraphy)


@contextlib.contextmanager
def messages() -> Iterator[list[str]]:
    """Collects the errors that the library and polygraphy would print; they print nothing meanwhile."""
    from polygraphy.logger import G_LOGGER

    said: list[str] = []

    def collect(message: Any, severity: int, *_: Any, **__: Any) -> None:
        if severity >= G_LOGGER.ERROR:
            said.append(str(message() if callable(message) else message))

    previous, G_LOGGER.log = G_LOGGER.log, collect
    try:
        yield said
    finally:
        G_LOGGER.log = previous


def reason(said: list[str]) -> str:
    """The first error among a library's messages, in one line."""
    # Without a driver some messages only say that there is none; compiling needs none.
    telling = [message for message in said if "cudaError 35" not in message]
    return " ".join(telling[0].split()) if telling else "it gave no reason"
