"""The application: its routes, who may use them, and its OpenAPI document (``/openapi.json``)."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from specexport import __version__
from specexport.server import errors
from specexport.server.chat import chat, chat_tokens
from specexport.server.completions import complete
from specexport.server.errors import ApiError
from specexport.server.middleware import BodyLimit, CountRefusals, LastResort
from specexport.server.schema import (
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    ErrorResponse,
    ModelCard,
    ModelList,
    Status,
    TokenizeRequest,
    TokenizeResponse,
)
from specexport.server.service import Service

DEFAULT_MAX_BODY_BYTES = 8 << 20
_BEARER = HTTPBearer(auto_error=False, description="An API key.")

_WHY = {
    400: "The request is wrong; the message names the field.",
    401: "No API key, or a wrong one.",
    404: "No such model or path.",
    413: "The body is too large.",
    429: "Too many requests wait; Retry-After says when to come again.",
    500: "The server failed.",
    503: "The server is shutting down.",
    504: "The request was not done in time.",
}


def _answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorResponse, "description": _WHY[status]} for status in statuses}


def _generated(model: type[Any]) -> dict[int | str, dict[str, Any]]:
    event = {
        "type": "object",
        "properties": {"data": {"type": "string", "description": "A chunk or an error as JSON; at last [DONE]."}},
        "required": ["data"],
    }
    streamed = {"text/event-stream": {"schema": event}}
    return {200: {"model": model, "content": streamed}, **_answers(*_WHY)}


def create_app(
    service: Service, *, api_keys: Sequence[str] = (), max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
) -> FastAPI:
    """Makes the application.

    Args:
        service: what is served.
        api_keys: one of them has to be sent as a bearer token with ``/v1`` and ``/tokenize``; none lets anyone in.
        max_body_bytes: most bytes of a request's body.
    """
    app = FastAPI(
        title="specexport",
        version=__version__,
        summary="Speculative decoding behind OpenAI's API.",
        docs_url=None,
        redoc_url=None,
    )
    errors.install(app)
    app.add_middleware(LastResort)
    app.add_middleware(BodyLimit, most=max_body_bytes)
    app.add_middleware(CountRefusals, metrics=service.metrics)
    allowed = [Depends(_key_check(api_keys))] if api_keys else []

    @app.get("/v1/models", responses=_answers(401), dependencies=allowed)
    async def list_models() -> ModelList:
        return ModelList(data=[_card(service, name) for name in service.names])

    @app.get("/v1/models/{model:path}", responses=_answers(401, 404), dependencies=allowed)
    async def show_model(model: str) -> ModelCard:
        return _card(service, service.require_model(model))

    @app.post(
        "/v1/completions", responses=_generated(CompletionResponse), dependencies=allowed, response_class=Response
    )
    async def completions(request: Request, given: CompletionRequest) -> Response:
        return await complete(service, request, given)

    @app.post("/v1/chat/completions", responses=_generated(ChatResponse), dependencies=allowed, response_class=Response)
    async def chat_completions(request: Request, given: ChatRequest) -> Response:
        return await chat(service, request, given)

    @app.post("/tokenize", responses=_answers(400, 401, 404, 413), dependencies=allowed)
    async def tokenize(given: TokenizeRequest) -> TokenizeResponse:
        return await _tokenized(service, given)

    @app.get("/health")
    async def health() -> Status:
        """Whether the server answers."""
        return Status(status="ok")

    @app.get("/ready", responses=_answers(503))
    async def ready() -> Status:
        """Whether it takes requests."""
        if service.engine.closed:
            raise ApiError(503, "the server is shutting down", "service_unavailable_error", code="shutting_down")
        return Status(status="ready")

    @app.get("/metrics", response_class=Response, responses={200: {"content": {CONTENT_TYPE_LATEST: {}}}})
    async def metrics() -> Response:
        """What Prometheus asks for."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    _without_422(app)
    return app


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(id=name, created=service.created, max_model_len=service.engine.frontend.max_model_len)


async def _tokenized(service: Service, given: TokenizeRequest) -> TokenizeResponse:
    service.require_model(given.model)
    frontend = service.engine.frontend
    if (given.prompt is None) == (given.messages is None):
        raise ApiError(400, "prompt: give either prompt or messages", param="prompt")
    if given.messages is not None:
        tokens = await chat_tokens(service, given.messages, {})
    else:
        assert given.prompt is not None
        encoded = frontend.engine.tokenizer.encode(given.prompt, add_special_tokens=given.add_special_tokens)
        tokens = list(encoded.ids)
    return TokenizeResponse(count=len(tokens), max_model_len=frontend.max_model_len, tokens=tokens)


def _key_check(keys: Sequence[str]) -> Any:
    """A dependency that lets in who has one of the keys, in a time that says nothing about them."""
    known = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def check(sent: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]) -> None:
        # Headers are read as latin-1, which any byte is.
        digest = hashlib.sha256((sent.credentials if sent else "").encode("latin-1")).digest()
        matches = [hmac.compare_digest(digest, key) for key in known]
        if not any(matches):
            raise ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                "authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    return check


def _without_422(app: FastAPI) -> None:
    """FastAPI documents its own validation errors, which are answered as 400 here."""
    document = app.openapi()
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
