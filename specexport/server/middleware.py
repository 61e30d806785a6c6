"""What every request goes through before its route is looked for."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specexport.server.errors import ApiError, api_error
from specexport.server.metrics import Metrics


class Edge:
    """Refuses bodies that are too large, answers for every error, and counts those answers.

    Starlette's own handler of errors lets them through after its answer, which costs the client its connection.

    Args:
        app: what comes next.
        metrics: counts answers of 400 and above.
        max_body_bytes: most bytes of a request's body, by what it announces or by what comes.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, max_body_bytes: int) -> None:
        self._app, self._metrics, self._most = app, metrics, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, got = False, 0
        why = f"the body has more than {self._most} bytes, the most this server takes"
        too_large = ApiError(413, why, code="body_too_large")

        async def limited() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > self._most:
                raise too_large
            return message

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                if message["status"] >= 400:
                    self._metrics.refused(message["status"])
            await send(message)

        try:
            announced = Headers(scope=scope).get("content-length", "0")
            if announced.isdecimal() and int(announced) > self._most:
                raise too_large
            await self._app(scope, limited, counted)
        except Exception as error:
            if begun:
                raise
            await api_error(error).response()(scope, receive, counted)
