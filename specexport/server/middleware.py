"""Checks that every request passes before routing."""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specexport.contract.values import shown
from specexport.server.errors import PRESENT_REQUEST, ApiError, api_error

REQUEST_ID = "x-request-id"
"""The header with the id of a request, which the answer repeats; without it, the answer has a new id."""
_VALID_ID = re.compile(r"[\x21-\x7e]{1,200}")
_BUFFERED = 32 << 20
"""Maximum total bytes of bodies being read, or of a single larger body: parsing takes several times that memory."""
_READING = 60.0
"""Seconds within which a body must arrive."""
_SIMPLE = 1 << 18
"""Maximum number of values in a body; parsing and validating more would block the event loop for too long."""
_MEMBER = 24
"""Number of values as which a member of an object counts, by the time to parse it."""
_JSON = json.JSONDecoder(strict=False)
_SMALL = 1 << 16
"""Maximum bytes of a body that is not checked, as it cannot hold that many values."""


class Admission:
    """Refuses requests that are not admitted or too large; answers and counts all errors.

    It reads bodies after all other checks, so that refusing a request costs next to nothing. Starlette's error handler
    would raise an error again after its answer, which closes the client's connection.

    Args:
        refused: called with the status of each answer of 400 or above.
        max_body_bytes: maximum size of a request body in bytes, announced or received.
        admit: raises to refuse a request; called with its scope and the number of bodies being read.
    """

    def __init__(
        self,
        app: ASGIApp,
        refused: Callable[[int], None],
        max_body_bytes: int,
        admit: Callable[[Scope, int], None],
    ) -> None:
        self._app, self._refused, self._most, self._admit = app, refused, max_body_bytes, admit
        self._requests = self._bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False
        header = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = header if _VALID_ID.fullmatch(header) else uuid.uuid4().hex
        PRESENT_REQUEST.set(request_id)

        async def count_and_send(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                if message["status"] >= 400:
                    self._refused(message["status"])
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            self._admit(scope, self._requests)
            if scope["method"] == "POST":
                await self._with_body(scope, receive, count_and_send)
            else:
                await self._app(scope, receive, count_and_send)
        except Exception as error:
            if begun:
                raise
            await api_error(error).response()(scope, receive, count_and_send)

    async def _with_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reads the body, checks its complexity, and calls the application."""
        headers = Headers(scope=scope)
        if (coding := headers.get("content-encoding", "identity")).lower() != "identity":
            why = f"the body's Content-Encoding is {shown(coding)}; send it as it is, without compression"
            raise ApiError(415, why, code="body_encoded")
        announced = headers.get("content-length", "0")
        self._require_size(int(announced) if announced.isdecimal() else 0)
        parts: list[bytes] = []
        received = 0

        async def read() -> None:
            nonlocal received
            async for part in Request(scope, receive).stream():
                self._require_size(received + len(part), received)
                received += len(part)
                self._bytes += len(part)
                parts.append(part)

        async def replay() -> Message:
            return {"type": "http.request", "body": parts.pop(), "more_body": False} if parts else await receive()

        self._requests += 1
        reading, until = asyncio.ensure_future(read()), time.monotonic() + _READING
        try:
            while not (await asyncio.wait({reading}, timeout=min(_READING, 1)))[0]:
                self._admit(scope, 0)  # the server may shut down meanwhile
                if time.monotonic() > until:
                    why = f"the body did not come within {_READING:g} seconds; send it again"
                    raise ApiError(408, why, code="body_too_slow")
            try:
                reading.result()
            except ClientDisconnect:
                return
            parts[:] = [b"".join(parts)]
            if received > _SMALL:
                await asyncio.to_thread(_require_simple, parts[0])
            else:
                _text(parts[0])
            await self._app(scope, replay, send)
        finally:
            reading.cancel()
            self._requests -= 1
            self._bytes -= received

    def _require_size(self, size: int, received: int = 0) -> None:
        """Refuses a body of too many bytes; ``received`` of its ``size`` bytes are counted already."""
        if size > self._most:
            why = f"the body has more than {self._most} bytes, the most this server takes"
            raise ApiError(413, why, code="body_too_large")
        if size > _SMALL and self._bytes + size - received > max(_BUFFERED, self._most):
            why = "too many large requests are being answered; try again in 1 second"
            raise ApiError(429, why, "rate_limit_error", code="queue_full", headers={"Retry-After": "1"})


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        why = f"the body is not UTF-8: {error.reason} at byte {error.start}"
        raise ApiError(400, why, code="invalid_json") from error


def _require_simple(body: bytes) -> None:
    """Refuses JSON with too many values to read quickly; a text of any length is one value.

    It counts separators outside strings, and stops at the limit, so that its time is bounded.
    """
    try:
        text, count, at = _text(body), 0, 0
        while count <= _SIMPLE and at < len(text):
            quote = text.find('"', at)
            end = len(text) if quote < 0 else quote
            count += sum(text.count(mark, at, end) for mark in ",[{") + _MEMBER * text.count(":", at, end)
            at = end if quote < 0 else _JSON.raw_decode(text, quote)[1]
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:100]}", code="invalid_json") from error
    if count > _SIMPLE:
        why = f"the body has more than {_SIMPLE} values (a member of an object counts as {_MEMBER}); send fewer at once"
        raise ApiError(400, why, code="body_too_complex")
