"""The served engine: starts the streams of requests, and turns them into answers."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Send

from specexport.async_engine import AsyncEngine, AsyncStream
from specexport.contract.errors import RequestError
from specexport.frontend import Frontend
from specexport.runtime import Chunk, SamplingParams, Stats, Stream
from specexport.runtime.request import join_chunks
from specexport.runtime.text import special_tokens
from specexport.server import answers
from specexport.server.errors import ApiError, api_error
from specexport.server.metrics import Metrics
from specexport.server.requests import SAMPLING, ConversationRequest, GenerationRequest, StreamOptions
from specexport.server.tools import Calling, calling

LENGTHS = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
"""Names of the maximum number of tokens; a request without any of them has the model's own limit, if there is one."""
_GONE = 499
"""Nginx's status for a client that disconnected."""
_STUCK = 300.0
"""Seconds after which a turn of the scheduler, a chunk of a prompt and a step, counts as stuck."""
_MIN_LOGPROB = -9999.0
_LINES = {ord(letter): f"\\u{ord(letter):04x}" for letter in "\x85\u2028\u2029"}
"""Escapes of characters that some clients take for line breaks and JSON does not escape."""
_NO_CHOICES = '"choices":[]'
"""The empty list of outputs in an answer; within texts its quotes would be escaped."""


def finite_logprob(logprob: float) -> float:
    """A log-probability for JSON, with OpenAI's -9999 for minus infinity."""
    return max(logprob, _MIN_LOGPROB)


def one_line(text: str) -> str:
    """JSON on one line, for an event."""
    return text.translate(_LINES)


def speculation(body: GenerationRequest) -> dict[str, Any]:
    """The settings of a request's speculation."""
    keys = {} if body.speculative is None else body.speculative.model_dump(exclude_none=True)
    return keys if body.hypothesis is None else {**keys, "hypothesis": body.hypothesis}


@dataclass
class Service:
    """The served engine, its names and limits. Prepares the tokenizer for grammars in the background.

    Attributes:
        names: the model's names; answers have the first.
        timeout: maximum number of seconds per request, waiting included; None for no limit.
        created: time at which the server started, in seconds since 1970.
    """

    engine: AsyncEngine
    names: tuple[str, ...]
    timeout: float | None = None

    def __post_init__(self) -> None:
        self.frontend = self.engine.frontend
        self.created = int(time.time())
        self.metrics = Metrics(self.engine, self.names[0])
        threading.Thread(target=self.frontend.engine.prepare_grammars, daemon=True).start()

    def require_model(self, name: str | None) -> str:
        """Returns the model's name for the answer to a request for ``name``; refuses other models."""
        if name is not None and name not in self.names:
            served = ", ".join(map(repr, self.names))
            message = f"model {name!r} is not served; there is {served}"[:300]
            raise ApiError(404, message, "not_found_error", "model", "model_not_found")
        return name or self.names[0]

    def require_progress(self) -> None:
        """Raises if the engine makes no progress, so that it should be started again."""
        if reason := self.frontend.engine.stall_reason(_STUCK):
            raise ApiError(503, reason, "server_error", code="engine_stalled")

    def head(self, body: GenerationRequest, kind: str) -> dict[str, Any]:
        """The first fields of each part of an answer."""
        model = self.require_model(body.model)
        return {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def calling(self, body: ConversationRequest) -> Calling | None:
        """The calls that a request's answer may make; see :func:`~specexport.server.tools.calling`."""
        template = self.frontend.require_chat_template()
        result = calling(body, template.source(body.chat_template, tools=bool(body.offered)))
        if result is None or not body.skip_special_tokens or result.schema is not None:  # JSON may hold their names
            return result
        return replace(result, hidden=self._special_tokens)

    @cached_property
    def _special_tokens(self) -> re.Pattern[str] | None:
        """A pattern of the names of special tokens; None if there are none."""
        names = sorted(special_tokens(self.frontend.engine.tokenizer).values(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names))) if names else None

    def params(
        self,
        body: GenerationRequest,
        max_tokens: int | None,
        logprobs: int | None,
        calls: Calling | None = None,
    ) -> SamplingParams:
        """The sampling parameters of a request, by default the model's, with the constraints of calls or a format."""
        structured = [] if body.structured_outputs is None else body.structured_outputs.bounds()
        bounds: dict[str, Any] = {"structured_outputs": structured[0]} if structured else {}
        if calls is not None:
            bounds["tools"] = calls.bound()
        elif body.schema_of_text is not None:
            bounds[body.format_field] = {"json_schema": body.schema_of_text}
        if len(bounds) > 1:
            name, other, *_ = bounds
            raise RequestError(f"{name}: given with {other}; give one of them", param=name)
        overrides: dict[str, Any] = body.model_dump(include=set(SAMPLING), exclude_none=True)
        if body.model_fields_set & LENGTHS:
            overrides["max_tokens"] = max_tokens
        if body.stop is not None:
            overrides["stop"] = body.stop
        return self.frontend.engine.params(
            max_tokens,
            stop_token_ids=tuple(body.stop_token_ids),
            n=body.n,
            seed=None if body.seed == -1 else body.seed,
            logit_bias={int(token): bias for token, bias in body.logit_bias.items()},
            logprobs=logprobs,
            **{**overrides, **next(iter(bounds.values()), {})},
        )

    async def start(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, body: GenerationRequest
    ) -> list[AsyncStream]:
        """Starts the streams of all outputs, in the order of the prompts."""
        for name in ("stream_options", "include_steps"):
            if getattr(body, name) and not body.stream:
                raise RequestError(f"{name}: given without stream", param=name)
        if body.prompt_logprobs is not None and body.stream:
            raise RequestError(
                "prompt_logprobs: given with stream; they come with whole answers", param="prompt_logprobs"
            )
        self.engine.require_place(0, len(prompts) * body.n)  # before any work on the prompts
        frontend = self.frontend
        chosen = frontend.speculation(speculation(body))
        limits = [limit for limit in (self.timeout, body.timeout) if limit is not None]

        def create() -> list[Stream]:
            try:
                return [stream for prompt in prompts for stream in frontend.streams(prompt, params, chosen)]
            except RequestError as error:
                if error.param not in ("grammar", "json_schema"):
                    raise
                field = "tools" if error.param == "grammar" else body.format_field
                if body.structured_outputs is not None and body.structured_outputs.bounds():
                    field = "structured_outputs"
                raise RequestError(f"{field}: {error}", param=field) from error

        # In a thread, as a schema or a prediction may take long.
        return self.engine.start(await asyncio.to_thread(create), min(limits, default=None))


class Format(Protocol):
    """The format of an endpoint's answers, whole or streamed in parts."""

    def choice(self, index: int, chunk: Chunk) -> answers.Choice | None:
        """The whole output or its next part; None if there is nothing to send yet."""

    def answer(self, choices: list[Any], usage: answers.Usage | None) -> BaseModel:
        """The whole answer or a part of it."""


async def respond(
    service: Service,
    request: Request,
    body: GenerationRequest,
    streams: list[AsyncStream],
    form: Format,
) -> Response:
    """Turns started streams into an answer, whole or streamed; cancels them if the client disconnects."""
    if body.stream:
        return EventStream(_events(service, body, streams, form))
    outputs = await collect(service, request, streams)
    usage = usage_of(body, streams)

    def serialize() -> str:
        # Output by output: each is serialized under Python's lock, and may be long with log-probabilities.
        before, empty, after = form.answer([], usage).model_dump_json(exclude_unset=True).partition(_NO_CHOICES)
        choices = [form.choice(index, chunk) for index, chunk in enumerate(outputs)]
        parts = (choice.model_dump_json(exclude_unset=True) for choice in choices if choice is not None)
        return f"{before}{empty[:-1]}{','.join(parts)}]{after}"

    long = any(chunk.logprobs for chunk in outputs) or body.prompt_logprobs is not None
    text = await asyncio.to_thread(serialize) if long else serialize()
    return Response(text, media_type="application/json")


async def collect(service: Service, request: Request, streams: list[AsyncStream]) -> list[Chunk]:
    """The output of each stream as a single chunk.

    Raises:
        ApiError: the client disconnected.
    """
    work = asyncio.ensure_future(_collect_chunks(service, streams))
    disconnected = asyncio.ensure_future(_wait_for_disconnect(request))
    disconnected.add_done_callback(lambda _: work.cancel())
    try:
        return await work
    except asyncio.CancelledError:
        if disconnected.done():
            raise ApiError(_GONE, "the client disconnected") from None
        raise
    finally:
        disconnected.cancel()


class EventStream(StreamingResponse):
    """Server-sent events whose generator is closed as soon as the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def stream_response(self, send: Send) -> None:
        async with contextlib.aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().stream_response(send)


async def _events(
    service: Service, body: GenerationRequest, streams: list[AsyncStream], form: Format
) -> AsyncGenerator[str, None]:
    options = body.stream_options or StreamOptions.model_validate({})

    def event(model: BaseModel) -> str:
        return f"data: {one_line(model.model_dump_json(exclude_unset=True))}\n\n"

    def piece(index: int, chunk: Chunk) -> str:
        choice = form.choice(index, chunk)
        if choice is not None and body.include_steps:
            choice.step = step_of(chunk, service.frontend.token_text, streams[index].arrived)
        usage = usage_of(body, streams) if options.continuous_usage_stats else None
        return "" if choice is None else event(form.answer([choice], usage))

    try:
        async with contextlib.aclosing(merge(service, streams)) as chunks:
            async for index, chunk in chunks:
                if chunk.text or chunk.logprobs or body.include_steps or chunk.finish_reason is not None:
                    # Log-probabilities of a prompt arrive all at once, and trees have many tokens.
                    long = chunk.logprobs or body.include_steps
                    yield await asyncio.to_thread(piece, index, chunk) if long else piece(index, chunk)
        if options.include_usage:
            yield event(form.answer([], usage_of(body, streams)))
    except Exception as error:  # the answer has begun, so an event reports the error
        yield event(api_error(error).body)
    yield "data: [DONE]\n\n"


def prompt_logprobs(stream: AsyncStream, frontend: Frontend) -> answers.PromptLogprobs:
    """The log-probabilities at each token of a stream's prompt, by token."""
    return [None] + [
        {
            token: replace(score, logprob=finite_logprob(score.logprob))
            for token, score in frontend.by_token(entry).items()
        }
        for entry in stream.prompt_logprobs
    ]


def step_of(chunk: Chunk, token_text: Callable[[int], str], arrived: float) -> answers.Step:
    """The step of a chunk, with the texts of its tokens; the request arrived at ``arrived``."""
    seconds = chunk.created - arrived
    if chunk.verified is None:
        plain = [(text, 0) for text in chunk.pieces]
        return answers.Step(tokens=plain, parents=[-1], drafted=[], path=[], seconds=seconds)
    step = chunk.verified
    return answers.Step(
        tokens=[(text, at if at <= len(step.path) else 0) for at, text in enumerate(chunk.pieces, 1)],
        parents=list(step.tree.parents),
        drafted=list(map(token_text, step.drafted)),
        path=list(step.path),
        seconds=seconds,
    )


async def _collect_chunks(service: Service, streams: list[AsyncStream]) -> list[Chunk]:
    chunks: list[list[Chunk]] = [[] for _ in streams]
    async with contextlib.aclosing(merge(service, streams)) as items:
        async for index, chunk in items:
            chunks[index].append(chunk)
    return list(map(join_chunks, chunks))


async def merge(service: Service, streams: list[AsyncStream]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yields the chunks of several streams as they arrive, after the stream's index; the first error ends all."""
    items: asyncio.Queue[tuple[int, Chunk] | asyncio.Future[None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncStream) -> None:
        async with contextlib.aclosing(service.metrics.watch(stream)) as chunks:
            async for chunk in chunks:
                items.put_nowait((index, chunk))

    pumps = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(streams)]
    for task in pumps:
        task.add_done_callback(items.put_nowait)
    try:
        running = len(pumps)
        while running:
            item = await items.get()
            if isinstance(item, tuple):
                yield item
            else:
                item.result()
                running -= 1
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def usage_of(body: GenerationRequest, streams: list[AsyncStream]) -> answers.Usage:
    """The tokens of a request; a prompt with several outputs counts once."""
    stats = [stream.stats for stream in streams]
    total = sum(stats, Stats())
    # The outputs of a prompt follow each other.
    prompt_tokens = sum(s.prompt_tokens for s in stats[:: body.n])
    # Rows that an output shares with another output of its prompt were not cached before.
    cached = sum(min(s.cached_tokens for s in stats[at : at + body.n]) for at in range(0, len(stats), body.n))
    usage = answers.Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=total.output_tokens,
        total_tokens=prompt_tokens + total.output_tokens,
        prompt_tokens_details=answers.PromptTokensDetails(cached_tokens=cached),
    )
    if body.include_speculation:
        usage.speculation = answers.SpeculationUsage(
            num_drafts=total.steps_with_draft,
            num_draft_tokens=total.drafted,
            num_accepted_tokens=total.accepted,
            num_accepted_tokens_per_pos=total.accepted_at,
            acceptance_length=total.acceptance_length,
        )
    if body.hypothesis is not None:
        # Every step adds its accepted tokens and one more, but the output may end within the last step.
        used = sum(min(s.accepted, s.output_tokens - s.steps + 1) for s in stats)
        usage.completion_tokens_details = answers.CompletionTokensDetails(
            accepted_prediction_tokens=used, rejected_prediction_tokens=total.drafted - used
        )
    return usage
