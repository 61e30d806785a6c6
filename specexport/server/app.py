"""The server: routes, access, the OpenAPI document (``/openapi.json``), the page, and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from specexport import __version__
from specexport.async_engine import AsyncEngine
from specexport.contract.errors import ClosedError, RequestError
from specexport.contract.options import options
from specexport.contract.values import counted, shown
from specexport.options import ServerOptions
from specexport.server import answers
from specexport.server.chat import chat, chat_tokens, ending
from specexport.server.completions import complete
from specexport.server.errors import ApiError, api_error
from specexport.server.middleware import REQUEST_ID, Admission
from specexport.server.requests import ChatRequest, CompletionRequest, ResponseRequest, TokenizeRequest
from specexport.server.responses import answer_response
from specexport.server.service import Service

_ASSETS = Path(__file__).parent / "assets"
_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript") for name in ("markdown", "tree", "pane", "page")},
}
"""The page's files by path; they need no API key, as the page asks its user for it."""
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_OPEN = ("/health", "/ready", "/metrics", "/openapi.json")
"""Paths that need no API key."""
_BEARER = HTTPBearer(auto_error=False, description="An API key.")
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "model": answers.ErrorResponse,
        "description": "400: the request is wrong; param names the field. 401: no API key, or a wrong one. "
        "404: no such model or path. 405: no such method. 408: the body does not arrive. 413: it is too large. "
        "415: it is compressed. 429: too many requests wait; Retry-After says when to try again.",
    },
    "5XX": {
        "model": answers.ErrorResponse,
        "description": "500: the server failed. 503: it shuts down or is stalled. 504: the request took too long.",
    },
}
_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A chunk or an error as JSON, or [DONE] at the end."}},
    "required": ["data"],
}
_KEEP_ALIVE = 120
"""Seconds that an idle connection stays open: longer than clients and proxies keep theirs for a next request, which
would be lost while the server closes the connection."""
_MARGIN = 5
"""Seconds to send the last answers."""
_TICK = 0.1
"""Seconds after which a second Ctrl-C is noticed."""
_WATCHED_EVERY = 0.02
"""Seconds between two looks at whether a client is still there."""


def create_app(
    service: Service,
    *,
    api_keys: Sequence[str] = (),
    max_body_bytes: int = options(ServerOptions)["max_body_bytes"].default,
    cors: Sequence[str] = (),
    page: bool = True,
) -> FastAPI:
    """Creates the application.

    Args:
        api_keys: keys of which clients must send one as a bearer token, except to status routes; empty for no keys.
        cors: origins of web pages that may call the server, ``*`` for any.
    """
    unlocked = (*_OPEN, *_FILES) if page else _OPEN

    async def explain(request: Request, error: Exception) -> Response:
        if type(error) is HTTPException and error.status_code in (404, 405):
            route = f"{request.method} {request.url.path}"[:100]
            message = f"there is no {route}; there are {', '.join(endpoints)}"
            error = ApiError(error.status_code, message, code="unknown_url", headers=error.headers)
        kind = request.headers.get("content-type", "")
        if isinstance(error, RequestValidationError) and "json" not in kind.lower():
            why = f"the body's Content-Type is {shown(kind)}; send application/json"
            error = ApiError(400, why, code="invalid_json")
        return api_error(error).response()

    app = FastAPI(
        title="specexport",
        version=__version__,
        summary="Speculative decoding behind OpenAI's API.",
        docs_url=None,
        redoc_url=None,
        responses=_ERRORS,
        exception_handlers={HTTPException: explain, RequestValidationError: explain},
    )
    require_key = _key_check(api_keys)

    def admit(scope: Scope, arriving: int) -> None:
        """Refuses requests without a key, and requests for a full queue, before their bodies are read."""
        if scope["path"] not in unlocked:
            require_key(scope)
        if scope["method"] == "POST":
            service.engine.require_place(arriving)

    app.add_middleware(Admission, refused=service.metrics.count_refusal, max_body_bytes=max_body_bytes, admit=admit)
    if cors:  # the outermost layer, as browsers send preflights without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, "Retry-After"],
        )
    allowed = [Depends(_BEARER)] if api_keys else []  # documentation only: ``admit`` checks keys

    def settings(model: type[Any]) -> dict[str, Any]:
        """The settings of a route whose answer may be streamed."""
        answer = {"model": model, "content": {"text/event-stream": {"schema": _EVENT}}}
        return {"responses": {200: answer}, "dependencies": allowed, "response_class": Response}

    @app.get("/v1/models", dependencies=allowed)
    async def list_models() -> answers.ModelList:
        return answers.ModelList(data=[_card(service, name) for name in service.names])

    @app.get("/v1/models/{model:path}", dependencies=allowed)
    async def show_model(model: str) -> answers.ModelCard:
        return _card(service, service.require_model(model))

    @app.post("/v1/completions", **settings(answers.CompletionResponse))
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await complete(service, request, body)

    @app.post("/v1/chat/completions", **settings(answers.ChatResponse))
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await chat(service, request, body)

    @app.post("/v1/responses", **settings(answers.ResponseAnswer))
    async def responses(request: Request, body: ResponseRequest) -> Response:
        return await answer_response(service, request, body)

    @app.post("/tokenize", dependencies=allowed)
    async def tokenize(body: TokenizeRequest) -> answers.TokenizeResponse:
        return await _tokenize(service, body)

    @app.get("/health")
    async def health() -> answers.Status:
        """Whether the server answers, and its engine makes progress."""
        service.require_progress()
        return answers.Status(status="ok")

    @app.get("/ready")
    async def ready() -> answers.Status:
        """Whether the server takes requests."""
        if service.engine.closed:
            raise ClosedError("the server is shutting down")
        return answers.Status(status="ready")

    @app.get("/metrics", response_class=Response, responses={200: {"content": {CONTENT_TYPE_LATEST: {}}}})
    async def metrics() -> Response:
        """The metrics, for Prometheus."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    for path, (name, kind) in _FILES.items() if page else ():
        answer = Response((_ASSETS / name).read_bytes(), headers=_PAGE_HEADERS, media_type=kind)
        app.add_api_route(path, lambda answer=answer: answer, include_in_schema=False)
    endpoints = [f"{verb.upper()} {path}" for path, verbs in app.openapi()["paths"].items() for verb in verbs]
    for route in app.routes:  # the document, which is complete now, leaves HEAD out
        if isinstance(route, Route) and route.methods is not None and "GET" in route.methods:
            route.methods.add("HEAD")
    return app


def _card(service: Service, name: str) -> answers.ModelCard:
    """The entry of a model in the list of models."""
    engine = service.frontend.engine
    return answers.ModelCard(
        id=name,
        created=service.created,
        max_model_len=engine.max_model_len,
        methods=[
            answers.MethodCard(name=name, num_speculative_tokens=sorted(len(tree) - 1 for tree in method.token_trees()))
            for name, method in engine.methods.items()
            if not method.takes_hypothesis
        ],
        chat=engine.chat_template is not None,
        predictions=any(method.takes_hypothesis for method in engine.methods.values()),
    )


async def _tokenize(service: Service, body: TokenizeRequest) -> answers.TokenizeResponse:
    """The tokens of a prompt or a conversation."""
    service.require_model(body.model)
    frontend = service.frontend
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt: give either prompt or messages", param="prompt")
    if unused := body.model_fields_set & body.without_effect:
        raise RequestError(f"{min(unused)}: has no effect here; leave it out", param=min(unused))
    if body.messages is not None:
        tools = [tool.function for tool in body.tools]
        tokens = await chat_tokens(service, body, body.messages, tools, None, **ending(body))
    else:
        encode = partial(frontend.encode, add_special_tokens=body.add_special_tokens)
        tokens = await asyncio.to_thread(encode, body.prompt)
    return answers.TokenizeResponse(count=len(tokens), max_model_len=frontend.engine.max_model_len, tokens=tokens)


def _key_check(keys: Sequence[str]) -> Callable[[Scope], None]:
    """A check that a request has one of the keys, in constant time; without keys, all requests pass."""
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(scope: Scope) -> None:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # Headers are read as latin-1, which can represent any byte.
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        matches = [hmac.compare_digest(digest, expected) for expected in digests]
        if digests and not (any(matches) and scheme.lower() == "bearer"):
            raise ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                "authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    return check


class Connection(HttpToolsProtocol):
    """Answers a client that has ended its side; uvicorn would close the connection, which cancels the request.

    A client that is gone looks the same until its system refuses what is sent to it. Until an answer begins, the
    interim response 100 may be sent, but not to HTTP/1.0: such a client, and one that ends its side during its answer,
    counts as gone.
    """

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open, until it is answered."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_started or cycle.scope["http_version"] == "1.0":
            return False
        cycle.keep_alive = False
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._watch()
        return True

    def _watch(self) -> None:
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(_WATCHED_EVERY, self._watch)


class Server(uvicorn.Server):
    """A server that lets requests finish at shutdown; requests that take too long end with an error.

    Args:
        shutdown_timeout: seconds that requests may take to finish.
        config: further settings of uvicorn, such as ``host`` and ``port``.
    """

    def __init__(self, app: FastAPI, engine: AsyncEngine, *, shutdown_timeout: float, **config: Any) -> None:
        fixed: dict[str, Any] = {"server_header": False, "lifespan": "off", "timeout_keep_alive": _KEEP_ALIVE}
        super().__init__(uvicorn.Config(app, http=Connection, **fixed, **config))
        self._engine, self._shutdown_timeout = engine, shutdown_timeout

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ends the process with status 0 after a clean shutdown; uvicorn would raise the signal again."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if kernels := self._engine.frontend.engine.backend.kernels:
            logging.getLogger("uvicorn.error").info("Kernels: %s", kernels)
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Keeps the port open until the last request has finished; new requests and ``/ready`` get a 503 meanwhile."""
        until = time.monotonic() + self._shutdown_timeout
        if present := self._engine.running + self._engine.waiting:
            waiting = "Waiting at most %g seconds for %s to finish (press CTRL+C again to end at once)"
            logging.getLogger("uvicorn.error").info(waiting, self._shutdown_timeout, counted(present, "request"))
        draining = asyncio.create_task(self._engine.drain(self._shutdown_timeout))
        while not draining.done() and not self.force_exit:
            await asyncio.wait({draining}, timeout=_TICK)
        self.config.timeout_graceful_shutdown = math.ceil(max(0.0, until - time.monotonic())) + _MARGIN
        await super().shutdown(sockets)
        draining.cancel()  # after a second Ctrl-C it may still run
        await self._engine.aclose()
