"""Runs the server: until a signal comes, and then as long as its requests need."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from specexport.async_engine import AsyncEngine

_MARGIN = 5
"""Seconds for the last answers to be sent."""
_TICK = 0.1
"""Seconds after which a second Ctrl-C is noticed."""


class Server(uvicorn.Server):
    """Lets requests finish at shutdown, and ends those that take too long with an error.

    Args:
        app: the application.
        engine: the served engine.
        drain_timeout: seconds that requests may take to finish.
        config: further settings of uvicorn, such as ``host`` and ``port``.
    """

    def __init__(self, app: FastAPI, engine: AsyncEngine, *, drain_timeout: float, **config: Any) -> None:
        super().__init__(uvicorn.Config(app, server_header=False, **config))
        self._engine, self._drain_timeout = engine, drain_timeout

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As in uvicorn, but after a clean shutdown the process ends with 0: uvicorn would raise the signal again."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if kernels := self._engine.frontend.engine.backend.kernels:
            logging.getLogger("uvicorn.error").info("Kernels: %s", kernels)
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Keeps the port open until the last request has finished: new requests and ``/ready`` get a 503."""
        until = time.monotonic() + self._drain_timeout
        draining = asyncio.create_task(self._engine.drain(self._drain_timeout))
        while not draining.done() and not self.force_exit:
            await asyncio.wait({draining}, timeout=_TICK)
        self.config.timeout_graceful_shutdown = math.ceil(max(0.0, until - time.monotonic())) + _MARGIN
        await super().shutdown(sockets)
        draining.cancel()  # after a second Ctrl-C it may still run
        await self._engine.aclose()
