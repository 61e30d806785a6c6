"""Runs the server: until a signal comes, and then as long as its requests need."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from specexport.async_engine import AsyncEngine

_MARGIN = 5
"""Seconds for answers that were ended to get out."""


class Server(uvicorn.Server):
    """Lets requests finish when it is told to stop, and ends those that take too long with an error of their own.

    Args:
        app: what answers.
        engine: what is served.
        patience: seconds that requests may take to finish.
        config: further settings of uvicorn, such as ``host`` and ``port``.
    """

    def __init__(self, app: FastAPI, engine: AsyncEngine, *, patience: float, **config: Any) -> None:
        wait = int(patience) + _MARGIN
        super().__init__(uvicorn.Config(app, server_header=False, timeout_graceful_shutdown=wait, **config))
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
        draining = asyncio.create_task(self._engine.drain(self._patience))
        await super().shutdown(sockets)
        await draining
        await self._engine.aclose()
