"""Runs the server: until a signal comes, and then as long as its requests need."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from fastapi import FastAPI

from specexport.async_engine import AsyncEngine

_MARGIN = 5
"""Seconds for answers that were ended to get out."""


class Server(uvicorn.Server):
    """Lets requests finish when it is told to stop, and ends those that take too long with an error of their own.

    Args:
        config: uvicorn's.
        engine: what is served.
        patience: seconds that requests may take to finish.
    """

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, patience: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._patience = patience

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(self._engine.drain(self._patience))
        await super().shutdown(sockets)
        await draining
        await self._engine.aclose()


def make_server(
    app: FastAPI, engine: AsyncEngine, *, host: str, port: int, patience: float, log_level: str = "info"
) -> Server:
    """The server of an application, not started yet."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level=log_level,
        server_header=False,
        timeout_graceful_shutdown=int(patience) + _MARGIN,
    )
    return Server(config, engine, patience)
