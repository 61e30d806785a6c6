"""What every request goes through before its route is looked for."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specexport.server.errors import ApiError, api_error
from specexport.server.metrics import Metrics


class BodyLimit:
    """Refuses bodies that are too large: by the length they announce, or as soon as they turn out to be.

    Args:
        app: what comes next.
        most: bytes of a body.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        why = f"the body has more than {self._most} bytes, the most this server takes"
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._most:
            await ApiError(413, why, code="body_too_large").response()(scope, receive, send)
            return
        got = 0

        async def counted() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > self._most:
                raise HTTPException(413, why)
            return message

        await self._app(scope, counted, send)


class CountRefusals:
    """Counts answers of 400 and above by their status.

    Args:
        app: what comes next.
        metrics: the server's.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._metrics.refused(message["status"])
            await send(message)

        await self._app(scope, receive, counted)


class LastResort:
    """Answers for what failed in a way that was not foreseen, as long as no answer has begun.

    Starlette's own handler does so too, but then lets the error through, which costs the client its connection.

    Args:
        app: what comes next.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            await api_error(error).response()(scope, receive, send)
