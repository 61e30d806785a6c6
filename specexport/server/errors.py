"""Errors in OpenAI's shape. Messages are ours: no stack trace and no path of this machine goes out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from specexport.contract.errors import ClosedError, DeadlineError, QueueFullError, RequestError
from specexport.server.schema import ErrorDetail, ErrorResponse

_LOG = logging.getLogger("uvicorn.error")
_LONG = "the prompt has "
_PARAMS = {
    _LONG: "prompt",
    "the prompt holds ": "prompt",
    "the JSON schema ": "response_format",
    "a hypothesis was given": "prediction",
    "method is ": "speculative.method",
    "num_speculative_tokens is ": "speculative.num_speculative_tokens",
}
"""What the engine's messages are about, in the words of the API."""
_LATER = {"Retry-After": "5"}
_SHOWN = 300
"""Most characters of a validation message: a request's own text is not sent back whole."""


class ApiError(Exception):
    """An error with its status.

    Args:
        status: of HTTP.
        message: for the caller.
        kind: OpenAI's ``type``.
        param: the field it is about.
        code: a word that programs can tell it by.
        headers: to send with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorResponse(error=ErrorDetail(message=message, type=kind, param=param, code=code))
        self.headers = dict(headers or {})

    def response(self) -> JSONResponse:
        """As an answer."""
        return JSONResponse(self.body.model_dump(), self.status, self.headers)


def api_error(error: BaseException) -> ApiError:
    """What a caller is told of an error; one that was not foreseen is logged, and told without its text."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        retry = {"Retry-After": str(error.retry_after)}
        return ApiError(429, str(error), "rate_limit_error", code="queue_full", headers=retry)
    if isinstance(error, DeadlineError):
        return ApiError(504, str(error), "timeout_error", code="deadline_exceeded")
    if isinstance(error, ClosedError):
        return ApiError(
            503, str(error), "service_unavailable_error", code="shutting_down", headers={"Retry-After": "5"}
        )
    if isinstance(error, RequestError):
        text = str(error)
        param = next((param for start, param in _PARAMS.items() if text.startswith(start)), None)
        if param is None:
            name = text.partition(" is ")[0].partition(":")[0]
            param = name if name.isidentifier() else None
        return ApiError(400, text, param=param, code="context_length_exceeded" if text.startswith(_LONG) else None)
    _LOG.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says why", "server_error", code="internal_error")


def install(app: FastAPI) -> None:
    """Makes an application answer every error that was foreseen in this shape; others are for ``LastResort``."""

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return validation_error(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def plain(_: Request, error: HTTPException) -> JSONResponse:
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        return ApiError(error.status_code, str(error.detail), kind, headers=error.headers).response()

    async def known(_: Request, error: Exception) -> JSONResponse:
        return api_error(error).response()

    for kind in (ApiError, QueueFullError, DeadlineError, ClosedError, RequestError):
        app.add_exception_handler(kind, known)


def validation_error(errors: Any) -> ApiError:
    """Of several things that are wrong the first is named; of a choice of types, the one that came furthest."""
    first = max(errors, key=lambda error: len(error["loc"]))
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}", code="invalid_json")
    # Among the parts of a place are the names of types that a field may have; those of fields are identifiers.
    where = [str(part) for part in first["loc"][1:] if isinstance(part, int) or (part.isidentifier() and part != "str")]
    if not where:
        return ApiError(400, "the body is missing or not a JSON object", code="invalid_json")
    field = ".".join(where)
    message = "not known; leave it out" if first["type"] == "extra_forbidden" else str(first["msg"])
    message = message.removeprefix("Value error, ")
    return ApiError(400, f"{field}: {message}"[:_SHOWN], param=field, code=str(first["type"]))
