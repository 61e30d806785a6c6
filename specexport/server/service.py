"""What the server serves: an engine, its name, its limits; and how a request becomes streams and an answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Send

from specexport.async_engine import AsyncEngine, AsyncStream
from specexport.frontend import Choice
from specexport.runtime import Chunk, SamplingParams, Stats, Stream
from specexport.server.errors import ApiError, api_error
from specexport.server.metrics import Metrics
from specexport.server.schema import (
    ChatRequest,
    CompletionTokensDetails,
    Generation,
    SpeculationUsage,
    Usage,
)

_GONE = 499
"""Nginx's status for a client that hung up; nobody reads it."""


@dataclass
class Service:
    """A served engine.

    Attributes:
        engine: runs requests.
        names: the model's; the first is what answers say.
        timeout: seconds a request may take, waiting included; None for no limit.
        created: when the server started, in seconds since 1970.
    """

    engine: AsyncEngine
    names: tuple[str, ...]
    timeout: float | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.engine, self.names[0])

    def require_model(self, name: str | None) -> str:
        """The name to answer with.

        Raises:
            ApiError: another model is asked for.
        """
        if name is not None and name not in self.names:
            served = ", ".join(map(repr, self.names))
            raise ApiError(404, f"model {name!r} is not served; there is {served}"[:300], "not_found_error", "model")
        return name or self.names[0]

    async def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """A prompt's tokens. Long texts take long, so other requests go on meanwhile."""
        return await asyncio.to_thread(self.engine.frontend.engine.encode, prompt)

    def params(
        self, given: Generation, max_tokens: int | None, logprobs: int | None, json_schema: str | None = None
    ) -> SamplingParams:
        """How a request samples; what it does not say is the model's own."""
        frontend = self.engine.frontend
        chosen = {
            name: getattr(given, name)
            for name in ("temperature", "top_p", "top_k", "min_p")
            if getattr(given, name) is not None
        }
        return frontend.engine.defaults().replace(
            max_tokens=frontend.max_model_len if max_tokens is None else max_tokens,
            stop=given.stop or (),
            stop_token_ids=tuple(given.stop_token_ids),
            n=given.n,
            seed=given.seed,
            ignore_eos=given.ignore_eos,
            logprobs=logprobs,
            json_schema=json_schema,
            **chosen,
        )

    async def start(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        given: Generation,
        prediction: str | None = None,
    ) -> list[AsyncStream]:
        """Streams of all prompts' outputs, those of the first prompt first."""
        chosen = self._choice(given, prediction)
        frontend = self.engine.frontend
        limits = [limit for limit in (self.timeout, given.timeout) if limit is not None]

        def made() -> list[Stream]:
            return [stream for prompt in prompts for stream in frontend.streams(prompt, params, chosen)]

        # A schema or a prediction takes its time, so other requests go on meanwhile.
        return self.engine.start(await asyncio.to_thread(made), min(limits, default=None))

    def _choice(self, given: Generation, prediction: str | None) -> Choice:
        own, asked = self.engine.frontend.choice, given.speculative
        method, tokens = (asked.method, asked.num_speculative_tokens) if asked is not None else (None, None)
        for name, value in (("speculative.method", method), ("prediction", prediction)):
            if tokens == 0 and value is not None:
                raise ApiError(400, f"{name}: given with speculative.num_speculative_tokens 0", param=name)
        if tokens == 0:
            return Choice(speculation=False)
        if prediction is not None:
            return Choice(True, method, tokens, prediction)
        if method is not None or tokens is not None:
            return Choice(True, method or own.method, tokens)
        return own


class Format(Protocol):
    """How one of the endpoints words what the streams say."""

    def opening(self, index: int) -> BaseModel | None:
        """What a streamed output begins with, before the model has said anything."""

    def piece(self, index: int, chunk: Chunk) -> BaseModel:
        """A chunk as a choice of a streamed part."""

    def whole(self, index: int, chunks: Sequence[Chunk]) -> BaseModel:
        """A finished output as a choice."""

    def part(self, id: str, choices: list[BaseModel], usage: Usage | None) -> BaseModel:
        """One event of a streamed answer."""

    def answer(self, id: str, choices: list[BaseModel], usage: Usage) -> BaseModel:
        """The answer as a whole."""


async def respond(
    service: Service, request: Request, given: Generation, streams: list[AsyncStream], form: Format, prompt_tokens: int
) -> Response:
    """Runs started streams to an answer, streamed or whole. A client that goes away takes its streams with it."""
    name = f"{uuid.uuid4().hex}"
    if given.stream:
        with_usage = given.stream_options is not None and given.stream_options.include_usage
        return EventStream(_events(service, given, streams, form, name, prompt_tokens, with_usage))
    work = asyncio.ensure_future(_collected(service, streams))
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=_GONE)
        chunks = work.result()
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)
    choices = [form.whole(index, of_one) for index, of_one in enumerate(chunks)]
    made = form.answer(name, choices, _usage(given, streams, prompt_tokens))
    return Response(made.model_dump_json(exclude_unset=True), media_type="application/json")


class EventStream(StreamingResponse):
    """Server-sent events, whose generator is closed as soon as the client is gone."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def stream_response(self, send: Send) -> None:
        async with contextlib.aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().stream_response(send)


async def _events(
    service: Service,
    given: Generation,
    streams: list[AsyncStream],
    form: Format,
    name: str,
    prompt_tokens: int,
    with_usage: bool,
) -> AsyncGenerator[str, None]:
    try:
        for index in range(len(streams)):
            opening = form.opening(index)
            if opening is not None:
                yield _event(form.part(name, [opening], None))
        async with contextlib.aclosing(_merged(service, streams)) as chunks:
            async for index, chunk in chunks:
                if chunk.text or chunk.logprobs or chunk.finish_reason is not None:
                    yield _event(form.part(name, [form.piece(index, chunk)], None))
        if with_usage:
            yield _event(form.part(name, [], _usage(given, streams, prompt_tokens)))
    except Exception as error:  # the answer has begun, so that its end has to say what went wrong
        yield _event(api_error(error).body)
    yield "data: [DONE]\n\n"


def _event(model: BaseModel) -> str:
    return f"data: {model.model_dump_json(exclude_unset=True)}\n\n"


async def _collected(service: Service, streams: list[AsyncStream]) -> list[list[Chunk]]:
    chunks: list[list[Chunk]] = [[] for _ in streams]
    async with contextlib.aclosing(_merged(service, streams)) as merged:
        async for index, chunk in merged:
            chunks[index].append(chunk)
    return chunks


async def _merged(service: Service, streams: list[AsyncStream]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Chunks of several streams as they come, with the stream's place; the first error ends them all."""
    items: asyncio.Queue[tuple[int, Chunk] | Exception | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncStream) -> None:
        try:
            async with contextlib.aclosing(service.metrics.watched(stream)) as chunks:
                async for chunk in chunks:
                    items.put_nowait((index, chunk))
            items.put_nowait(None)
        except Exception as error:  # goes on to whoever reads the queue
            items.put_nowait(error)

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    left = len(pumps)
    try:
        while left:
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _usage(given: Generation, streams: list[AsyncStream], prompt_tokens: int) -> Usage:
    """Tokens of a request; a prompt counts once, however many outputs it has."""
    made = sum(stream.stats.output_tokens for stream in streams)
    usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=made, total_tokens=prompt_tokens + made)
    if given.include_speculation:
        usage.speculation = _speculation([stream.stats for stream in streams])
    if isinstance(given, ChatRequest) and given.prediction is not None:
        drafted, accepted = (sum(getattr(one.stats, name) for one in streams) for name in ("drafted", "accepted"))
        usage.completion_tokens_details = CompletionTokensDetails(
            accepted_prediction_tokens=accepted, rejected_prediction_tokens=drafted - accepted
        )
    return usage


def _speculation(stats: list[Stats]) -> SpeculationUsage:
    steps, accepted = sum(one.steps for one in stats), sum(one.accepted for one in stats)
    depth = max((len(one.accepted_at) for one in stats), default=0)
    return SpeculationUsage(
        num_drafts=sum(one.steps_with_draft for one in stats),
        num_draft_tokens=sum(one.drafted for one in stats),
        num_accepted_tokens=accepted,
        num_accepted_tokens_per_pos=[
            sum(one.accepted_at[at] for one in stats if at < len(one.accepted_at)) for at in range(depth)
        ],
        acceptance_length=(accepted + steps) / steps if steps else 0.0,
    )
