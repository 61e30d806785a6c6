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
"""Seconds for answers that were ended to get out."""
_TICK = 0.1
"""Seconds after which a second Ctrl-C is noticed."""


class Server(uvicorn.Server):
    """Lets requests finish when it is told to stop, and ends those that take too long with an error of their own.

    Args:
        app: what answers.
        engine: what is served.
        patience: seconds that requests may take to finish.
        config: further settings of uvicorn, such as ``host`` and ``port``.
    """

    def __init__(self, app: FastAPI, engine: AsyncEngine, *, patience: float, **config: Any) -> None:
        super().__init__(uvicorn.Config(app, server_header=False, **config))
        self._engine, self._patience = engine, patience

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn does, but a process that did as a signal told it ends with 0: uvicorn would raise it again."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if kernels := self._engine.frontend.engine.backend.kernels:
            logging.getLogger("uvicorn.error").info("Kernels: %s", kernels)
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Keeps the port open until the last request is done: who comes meanwhile, or asks ``/ready``, gets a 503."""
        until = time.monotonic() + self._patience
        draining = asyncio.create_task(self._engine.drain(self._patience))
        while not draining.done() and not self.force_exit:
            await asyncio.wait({draining}, timeout=_TICK)
        self.config.timeout_graceful_shutdown = math.ceil(max(0.0, until - time.monotonic())) + _MARGIN
        await super().shutdown(sockets)
        draining.cancel()  # a second Ctrl-C waits for nothing
        await self._engine.aclose()
