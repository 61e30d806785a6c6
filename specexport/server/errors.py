"""Errors in OpenAI's format, without stack traces or local paths."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from specexport.contract.errors import ClosedError, ContextLengthError, DeadlineError, QueueFullError, RequestError
from specexport.contract.values import counted, shown
from specexport.server.answers import ErrorDetail, ErrorResponse

_LOG = logging.getLogger("uvicorn.error")
PRESENT_REQUEST: ContextVar[str] = ContextVar("request_id", default="without an id")
"""The id of the present request, for the log."""
_PARAMS = {
    "json_schema": "response_format",
    "hypothesis": "prediction",
    "method": "speculative.method",
    "num_speculative_tokens": "speculative.num_speculative_tokens",
}
"""The API's names of engine parameters that have other names there."""
_EXPECTED = "Input should be "
"""The beginning of pydantic's message for a wrong type."""
_IN_WORDS = {
    "match pattern": "text of the pattern",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "more than",
    "a valid dictionary or object to extract fields from": "an object",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid list": "a list",
    "a valid string": "a text",
    "a valid boolean": "true or false",
}
"""Our wordings for pydantic's."""
_SHOULD = re.compile(r"(?:List|Tuple|Dictionary|String) should (?:have )?(.*?)(?:, not \d+)?")
"""Pydantic's message for a wrong length or pattern."""
_SHOWN = 300
"""Maximum number of characters of a validation message, so that a request's text is not sent back whole."""


class ApiError(HTTPException):
    """An error with a status; ``kind`` is OpenAI's ``type``, ``param`` the wrong field, ``code`` for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.body = ErrorResponse(error=ErrorDetail(message=message, type=kind, param=param, code=code))

    def response(self) -> JSONResponse:
        return JSONResponse(self.body.model_dump(), self.status_code, self.headers)


def api_error(error: BaseException) -> ApiError:
    """The error to send to a client; unexpected errors are logged, and their texts are not sent."""
    match error:
        case ApiError():
            return error
        case HTTPException(status_code=400, __cause__=RecursionError()):  # FastAPI's, as json raised it
            return ApiError(400, "the body has lists or objects that are nested too deeply", code="invalid_json")
        case HTTPException(status_code=400, __cause__=ValueError()):
            return ApiError(400, "the body has a number of too many digits", code="invalid_json")
        case HTTPException(status_code=status):
            kind = "invalid_request_error" if status < 500 else "server_error"
            return ApiError(status, str(error.detail), kind, headers=error.headers)
        case RequestValidationError():
            return _validation_error(error.errors(), error.body)
        case QueueFullError(retry_after=seconds):
            later = {"Retry-After": str(seconds)}
            return ApiError(429, str(error), "rate_limit_error", code="queue_full", headers=later)
        case DeadlineError():
            return ApiError(504, str(error), "timeout_error", code="deadline_exceeded")
        case ClosedError():
            later = {"Retry-After": "5"}
            return ApiError(503, str(error), "service_unavailable_error", code="shutting_down", headers=later)
        case RequestError(param=param):
            code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
            return ApiError(400, str(error), param=_PARAMS.get(param or "", param), code=code)
    _LOG.error("request %s failed", PRESENT_REQUEST.get(), exc_info=error)
    return ApiError(500, "the server failed on this request; its log says why", "server_error", code="internal_error")


def _validation_error(errors: Sequence[Any], body: Any) -> ApiError:
    """Reports one of several errors: the most deeply nested, preferably not a wrong type.

    The alternatives for a wrong type are listed together.
    """
    first = max(errors, key=lambda error: (len(error["loc"]), not error["type"].endswith("_type")))
    if first["type"] == "json_invalid":
        reason, place = str(first["ctx"]["error"]).removesuffix(" at"), counted(first["loc"][1], "character")
        why = f"the body is not JSON: {reason}, after {place}"
        return ApiError(400, why, code="invalid_json")
    field = _field(first, body)
    if not field:
        why = "the body is missing or not a JSON object"
        return ApiError(400, why, code="invalid_json")
    message = str(first["msg"]).removeprefix("Value error, ").replace(" after validation", "")
    if first["type"] == "extra_forbidden":
        message = "not known; leave it out"
    elif first["type"] == "string_unicode":
        message = "holds half a character, which is no text"
    elif first["type"].endswith("_type"):
        peers = (error for error in errors if len(error["loc"]) == len(first["loc"]) and _field(error, body) == field)
        message = _EXPECTED + " or ".join(dict.fromkeys(str(error["msg"]).removeprefix(_EXPECTED) for error in peers))
    elif first["type"].startswith("union_tag_"):
        about = first["ctx"]
        field = ".".join((field, about["discriminator"].strip("'")))
        message = (
            f"is {shown(about['tag'])}; expected one of {about['expected_tags']}" if "tag" in about else "is missing"
        )
    elif first["type"] == "missing":
        message = "is missing"
    elif wrong := _SHOULD.fullmatch(message):
        message = f"{_EXPECTED}{wrong[1]}"
    if message.startswith(_EXPECTED):
        for words, better in _IN_WORDS.items():
            message = message.replace(words, better)
        message = f"is {shown(first['input'])}; expected {message.removeprefix(_EXPECTED)}"
    colon = "" if message.startswith("is ") else ":"
    return ApiError(400, f"{field}{colon} {message}"[:_SHOWN], param=field, code=str(first["type"]))


def _field(error: Any, body: Any) -> str:
    """The path of the field with an error; leaves out the types in pydantic's locations.

    They are no identifiers, or between the keys of the body.
    """
    *path, last = error["loc"][1:] or ("",)
    parts: list[object] = []
    for part in path:
        if isinstance(part, int) if isinstance(body, list) else isinstance(body, dict) and part in body:
            parts.append(part)
            body = body[part]
    named = isinstance(last, int) or (last.isidentifier() and last != "str")
    return ".".join(map(str, [*parts, last] if named else parts))
