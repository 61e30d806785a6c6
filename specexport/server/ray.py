"""The server on Ray Serve: replicas of a bundle on a machine or a cluster, behind a front that takes all requests.

The front reads a request and passes it to a replica, which answers like ``specexport serve``. The front can thus route
by the beginning of a prompt, and answer the clients of a replica that died. Needs the ``[ray]`` extra.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import ray
from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specexport.async_engine import AsyncEngine
from specexport.contract.errors import BuildError, QueueFullError
from specexport.contract.options import options
from specexport.contract.reading import read_manifest
from specexport.exporter.options import BuildSettings
from specexport.options import ServerOptions, ServiceOptions
from specexport.server.app import create_app
from specexport.server.errors import ApiError, api_error
from specexport.server.middleware import Admission
from specexport.server.request_parts import model_of
from specexport.server.service import Service

API_KEY = "SPECEXPORT_API_KEY"
_FRONT_REQUESTS = 1000
"""Maximum number of requests that a front holds; each is little more than a socket."""
_BACKOFF = 0.05
"""Maximum seconds between attempts to find a free replica, which may be idle meanwhile."""
_KEYED = 512
"""Number of characters at the beginning of a prompt that determine its replica."""
_OWN = {
    *options(BuildSettings),
    *("model", "bundle", "threads", "tensor_parallel_size", "api_key", "host", "port", "log_level", "ray"),
}
"""Options that replicas lack or take in another form."""
_FIELDS = [name for name in options(ServerOptions) if name not in _OWN]
_ENGINE = [name for name in options(ServiceOptions) if name not in _OWN]

if TYPE_CHECKING:
    _Fields: Any
else:
    _Fields = model_of(BaseModel, ServerOptions, _FIELDS)


class Settings(_Fields):  # type: ignore[misc]
    """Arguments of :func:`app`, given by ``serve run`` or the ``args`` of a config file.

    Further fields are those of :class:`~specexport.options.ServerOptions`.

    Attributes:
        bundle: the bundle's folder, with the same path on every machine.
        threads: CPU cores per replica.
        gpus: GPUs per replica; None for one if the bundle runs on a GPU.
        api_keys: keys of which clients must send one; by default ``$SPECEXPORT_API_KEY``, if set.
    """

    model_config = ConfigDict(extra="forbid")

    bundle: str
    threads: PositiveInt = 1
    gpus: float | None = Field(None, ge=0)
    api_keys: tuple[str, ...] = Field(default_factory=lambda: tuple(filter(None, [os.environ.get(API_KEY)])))

    def actor(self, backend: str) -> dict[str, float]:
        """Ray's resources for a replica, whose bundle was built for ``backend``."""
        device = 0.0 if (self.backend or backend) == "onnxruntime" else 1.0
        return {"num_cpus": self.threads, "num_gpus": device if self.gpus is None else self.gpus}


class ForwardedRequest(BaseModel):
    """A request for a replica: the serializable part of ASGI's scope, the body, and a key for routing."""

    scope: dict[str, Any]
    body: bytes
    key: str | None


class EngineReplica:
    """A replica: an engine behind the server's application."""

    def __init__(self, settings: Settings) -> None:
        self.engine = AsyncEngine.open(
            **settings.model_dump(include={"bundle", "threads", *_ENGINE}, exclude_none=True)
        )
        if kernels := self.engine.frontend.engine.backend.kernels:
            logging.getLogger("ray.serve").info("Kernels: %s", kernels)
        names = settings.served_model_name or (settings.bundle,)
        self._service = Service(self.engine, names, settings.timeout or None)
        self._app: ASGIApp = create_app(
            self._service,
            api_keys=settings.api_keys,
            max_body_bytes=settings.max_body_bytes,
            cors=settings.cors,
            page=settings.page,
        )

    async def answer(self, call: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        """Yields the application's ASGI messages, all that are available at a time."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        body = [call.body]

        async def receive() -> Message:
            if not body:
                await asyncio.Event().wait()  # clients that disconnect cancel the call
            return {"type": "http.request", "body": body.pop(), "more_body": False}

        work = asyncio.ensure_future(self._app(call.scope, receive, messages.put))
        work.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                ready = [message]
                while not messages.empty() and (message := messages.get_nowait()) is not None:
                    ready.append(message)
                yield ready
                if message is None:
                    break
            await work
        finally:
            work.cancel()

    async def metrics(self) -> tuple[str, str]:
        """The replica's name and its metrics."""
        name = serve.get_replica_context().replica_id.unique_id
        return name, generate_latest(self._service.metrics.registry).decode()

    async def check_health(self) -> None:
        """Called by Ray every few seconds; Ray replaces a replica that raises.

        Raises:
            ApiError: the engine makes no progress.
        """
        self._service.require_progress()

    async def __del__(self) -> None:
        if hasattr(self, "engine"):
            await self.engine.aclose()


class Front:
    """The public endpoint, which passes requests to replicas and their answers back."""

    def __init__(self, model: DeploymentHandle, max_body_bytes: int) -> None:
        self._model = model
        self._answers = model.options(method_name="answer", stream=True)
        self._most = max_body_bytes

    def __serve_build_asgi_app__(self) -> ASGIApp:
        edge = Middleware(
            Admission, refused=lambda status: None, max_body_bytes=self._most, admit=lambda scope, arriving: None
        )
        return Starlette(routes=[Route("/metrics", self._metrics), Mount("/", app=self._pass_on)], middleware=[edge])

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive()).get("body", b"")
        plain = {name: value for name, value in scope.items() if name in _SENT}
        answers = self._answers.remote(ForwardedRequest(scope=plain, body=body, key=prompt_key(body)))
        begun = events = False
        try:
            async for messages in answers:
                for message in messages:
                    if message["type"] == "http.response.start":
                        begun = True
                        kind = Headers(raw=message["headers"]).get("content-type", "")
                        events = kind.startswith("text/event-stream")
                    await send(message)
        except (RayActorError, BackPressureError, DeploymentUnavailableError) as error:
            client_error = _client_error(error)
            if not begun:
                await client_error.response()(scope, receive, send)
            elif events:
                last = f"data: {client_error.body.model_dump_json()}\n\ndata: [DONE]\n\n"
                await send({"type": "http.response.body", "body": last.encode(), "more_body": False})
            else:  # only a broken connection can tell that the answer is incomplete
                raise
        finally:
            answers.cancel()

    async def _metrics(self, _: Request) -> Response:
        """The metrics of all replicas, labelled with their names."""
        families: dict[str, Metric] = {}
        for name, text in await self._model.broadcast("metrics").results_async():
            for family in text_string_to_metric_families(text):
                whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    whole.add_sample(sample.name, {**sample.labels, "replica": name}, sample.value)
        registry: Any = SimpleNamespace(collect=families.values)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


_SENT = {
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers"),
    *("client", "server"),
}


def _client_error(error: Exception) -> ApiError:
    """The error for a client whose request Ray has given up."""
    if isinstance(error, BackPressureError):
        return api_error(QueueFullError("too many requests wait for a replica; try again in 1 second", 1))
    if isinstance(error, RayActorError):
        why, code = "the replica that had this request died; send the request again", "replica_died"
    else:
        why, code = "there is no replica to answer; send the request again later", "no_replica"
    return ApiError(503, why, "service_unavailable_error", code=code, headers={"Retry-After": "1"})


def prompt_key(body: bytes) -> str | None:
    """The beginning of a request's prompt; None without a prompt.

    For a chat, it consists of the messages up to the user's first, which stay the same as the chat goes on.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    begin = document.get("prompt") or document.get("input") or document.get("messages")
    if isinstance(begin, list):
        roles = [part.get("role") if isinstance(part, dict) else None for part in begin]
        begin = begin[: roles.index("user") + 1] if "user" in roles else begin
        begin = json.dumps(begin[:_KEYED])
    return begin[:_KEYED] if begin and isinstance(begin, str) else None


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Routes prompts with the same beginning to the same replica, whose cache holds it, if that has a free slot.

    Rendezvous hashing (Thaler and Ravishankar, 1998) chooses the replica: fronts agree without communication, and
    adding or removing a replica moves no prompts of others. Other prompts go to the replica with the fewest requests.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        call = next(iter(pending_request.args), None) if pending_request is not None else None
        if not isinstance(call, ForwardedRequest) or call.key is None:
            return [candidate_replicas]
        key = call.key.encode(errors="surrogatepass")

        def weight(replica: RunningReplica) -> bytes:
            return hashlib.blake2b(key, key=replica.replica_id.unique_id.encode()[:64]).digest()

        first, *fallback = sorted(candidate_replicas, key=weight)
        return [[first], fallback]


def app(settings: Settings) -> serve.Application:
    """Creates the application: ``serve run specexport.server.ray:app bundle=BUNDLE replicas=2``.

    The ``deployments`` of a config file may set further options of Ray for ``Model`` and ``Front``.
    """
    manifest = read_manifest(Path(settings.bundle))
    slots = max(manifest.batch_sizes)
    replicas = settings.max_replicas or settings.replicas
    if replicas < settings.replicas:
        raise BuildError(f"max_replicas is {replicas}; expected at least replicas, {settings.replicas}")
    scale = {"min_replicas": settings.replicas, "max_replicas": replicas, "target_ongoing_requests": slots}
    count: dict[str, Any] = {"autoscaling_config": scale} if settings.max_replicas else {"num_replicas": replicas}
    replaced: dict[str, Any] = {"max_surge_percent": 100, "graceful_shutdown_timeout_s": settings.shutdown_timeout}
    model = serve.deployment(
        EngineReplica,
        name="Model",
        max_ongoing_requests=slots,  # further requests wait at the front for the first free replica
        max_queued_requests=settings.max_queue,
        request_router_config=RequestRouterConfig(
            request_router_class="specexport.server.ray:PrefixRouter", max_backoff_s=_BACKOFF
        ),
        ray_actor_options=settings.actor(manifest.backend),
        **replaced,
        **count,
    )
    front = serve.deployment(
        serve.ingress()(Front),
        name="Front",
        max_ongoing_requests=_FRONT_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        **replaced,
    )
    return front.bind(model.bind(settings), settings.max_body_bytes)


app.__annotations__["settings"] = Settings  # Ray needs the type itself to validate arguments


def run(settings: Settings, host: str, port: int, log_level: str) -> None:
    """Serves until a signal arrives, on the cluster of ``$RAY_ADDRESS`` or ``ray start``, else on a new local one."""
    served = app(settings)
    ray.init(
        include_dashboard=False,
        logging_level=getattr(logging, log_level.upper()),
        log_to_driver=log_level in ("debug", "info"),
    )
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(served, name=_NAME)
        ended.wait()
        serve.delete(_NAME)  # lets requests finish, like replaced replicas
    finally:
        ray.shutdown()


_NAME = "specexport"
