"""What the server serves: an engine, its name, its limits; and how a request becomes streams and an answer."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Send

from specexport.async_engine import AsyncEngine, AsyncStream
from specexport.contract.errors import RequestError
from specexport.outputs import by_token
from specexport.runtime import Chunk, SamplingParams, Stream
from specexport.server.errors import ApiError, api_error
from specexport.server.metrics import Metrics
from specexport.server.schema import (
    ChatRequest,
    Choice,
    CompletionTokensDetails,
    GenerationRequest,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    ResponseRequest,
    SpeculationUsage,
    Step,
    StreamOptions,
    Usage,
)
from specexport.server.tools import Calling, calling

SAMPLING = {
    *("temperature", "top_p", "top_k", "min_p", "ignore_eos", "min_tokens", "skip_special_tokens"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
}
"""Fields that the engine has under the same names."""
LENGTHS = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
"""What requests call the most tokens of an output; one that names none of them takes the model's own, if it has one."""
GONE = 499
"""Nginx's status for a client that disconnected."""
_LEAST_LOGPROB = -9999.0
_LINES = {ord(letter): f"\\u{ord(letter):04x}" for letter in "\x85\u2028\u2029"}
"""What some clients take for the end of a line, and JSON leaves as it is in a text: escaped in events."""
_NO_CHOICES = '"choices":[]'
"""How an answer without outputs says so; a name that a caller chose would have its quotes escaped."""


def least(logprob: float) -> float:
    """A log-probability as JSON can say it: OpenAI has -9999 for minus infinity."""
    return max(logprob, _LEAST_LOGPROB)


def one_line(text: str) -> str:
    """JSON as an event may hold it."""
    return text.translate(_LINES)


def speculation(given: GenerationRequest) -> dict[str, Any]:
    """What a request says of how it speculates."""
    keys = {} if given.speculative is None else given.speculative.model_dump(exclude_none=True)
    return keys if given.hypothesis is None else {**keys, "hypothesis": given.hypothesis}


@dataclass
class Service:
    """A served engine, which reads its tokenizer for grammars meanwhile.

    Attributes:
        engine: runs requests.
        names: the model's; the first is what answers say.
        timeout: seconds a request may take, waiting included; None for no limit.
        created: when the server started, in seconds since 1970.
        metrics: what it counts.
    """

    engine: AsyncEngine
    names: tuple[str, ...]
    timeout: float | None = None

    def __post_init__(self) -> None:
        self.created = int(time.time())
        self.metrics = Metrics(self.engine, self.names[0])
        threading.Thread(target=self.engine.frontend.engine.prepare_grammars, daemon=True).start()

    def require_model(self, name: str | None) -> str:
        """The name to answer with.

        Raises:
            ApiError: another model was requested.
        """
        if name is not None and name not in self.names:
            served = ", ".join(map(repr, self.names))
            raise ApiError(404, f"model {name!r} is not served; there is {served}"[:300], "not_found_error", "model")
        return name or self.names[0]

    def head(self, given: GenerationRequest, kind: str) -> dict[str, Any]:
        """What every part of a request's answer begins with.

        Raises:
            ApiError: another model was requested.
        """
        model = self.require_model(given.model)
        return {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def calling(self, given: ChatRequest | ResponseRequest) -> Calling | None:
        """How a request's answer may call tools; see :func:`~specexport.server.tools.calling`."""
        template = self.engine.frontend.engine.chat_template
        source = "" if template is None else template.source(given.chat_template, tools=bool(given.offered))
        found = calling(given, source)
        if found is None or not given.skip_special_tokens:
            return found
        return replace(found, hidden=self._special_tokens)

    @cached_property
    def _special_tokens(self) -> re.Pattern[str] | None:
        """The names of special tokens."""
        added = self.engine.frontend.engine.tokenizer.get_added_tokens_decoder().values()
        names = sorted((token.content for token in added if token.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names))) if names else None

    def params(
        self,
        given: GenerationRequest,
        max_tokens: int | None,
        logprobs: int | None,
        bound: Mapping[str, Any] | None = None,
    ) -> SamplingParams:
        """How a request samples; what it does not say is the model's own. ``bound`` is what constrains the output.

        Raises:
            RequestError: it is constrained in two ways.
        """
        frontend = self.engine.frontend
        bounds = [] if given.structured_outputs is None else given.structured_outputs.bounds()
        if bounds and bound:
            raise RequestError(
                "structured_outputs: given beside tools or a response_format; give one of them",
                param="structured_outputs",
            )
        own: dict[str, Any] = given.model_dump(include=SAMPLING, exclude_none=True)
        if given.model_fields_set & LENGTHS:
            own["max_tokens"] = max_tokens
        if given.stop is not None:
            own["stop"] = given.stop
        return frontend.params(
            max_tokens,
            stop_token_ids=tuple(given.stop_token_ids),
            n=given.n,
            seed=None if given.seed == -1 else given.seed,
            logit_bias={int(token): bias for token, bias in given.logit_bias.items()},
            logprobs=logprobs,
            **{**own, **(bounds[0] if bounds else bound or {})},
        )

    async def start(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, given: GenerationRequest
    ) -> list[AsyncStream]:
        """Streams of all prompts' outputs, those of the first prompt first."""
        for name in ("stream_options", "include_steps"):
            if getattr(given, name) and not given.stream:
                raise RequestError(f"{name}: given without stream", param=name)
        if given.prompt_logprobs is not None and given.stream:
            raise RequestError(
                "prompt_logprobs: given with stream; they come with whole answers", param="prompt_logprobs"
            )
        frontend = self.engine.frontend
        chosen = frontend.speculation(speculation(given))
        limits = [limit for limit in (self.timeout, given.timeout) if limit is not None]

        def made() -> list[Stream]:
            try:
                return [stream for prompt in prompts for stream in frontend.streams(prompt, params, chosen)]
            except RequestError as error:
                if error.param not in ("grammar", "json_schema"):
                    raise
                raise RequestError(f"{given.bound_by}: {error}", param=given.bound_by) from error

        # A schema or a prediction takes its time, so other requests go on meanwhile.
        return self.engine.start(await asyncio.to_thread(made), min(limits, default=None))


class Format(Protocol):
    """How an endpoint words what the streams say, streamed in parts or as a whole."""

    def choice(self, index: int, chunk: Chunk, streamed: bool) -> Choice | None:
        """What an output says next, or all of it; None for nothing yet."""

    def answer(self, choices: list[Any], usage: Usage | None, streamed: bool) -> BaseModel:
        """One part of the answer, or all of it."""


async def respond(
    service: Service,
    request: Request,
    given: GenerationRequest,
    streams: list[AsyncStream],
    form: Format,
    prompt_tokens: int,
) -> Response:
    """Runs started streams to an answer, streamed or whole. A client that goes away takes its streams with it."""
    if given.stream:
        return EventStream(_events(service, given, streams, form, prompt_tokens))
    outputs = await finished(service, request, streams)
    if outputs is None:
        return Response(status_code=GONE)
    usage = usage_of(given, streams, prompt_tokens)

    def written() -> str:
        # Output by output: with log-probabilities they are long, and each is written under Python's lock.
        before, empty, after = form.answer([], usage, False).model_dump_json(exclude_unset=True).partition(_NO_CHOICES)
        made = [form.choice(index, chunk, False) for index, chunk in enumerate(outputs)]
        parts = (one.model_dump_json(exclude_unset=True) for one in made if one is not None)
        return f"{before}{empty[:-1]}{','.join(parts)}]{after}"

    long = any(chunk.logprobs for chunk in outputs) or given.prompt_logprobs is not None
    text = await asyncio.to_thread(written) if long else written()
    return Response(text, media_type="application/json")


async def finished(service: Service, request: Request, streams: list[AsyncStream]) -> list[Chunk] | None:
    """Every stream's output as one chunk; None if the client went away."""
    work = asyncio.ensure_future(_collected(service, streams))
    gone = asyncio.ensure_future(_disconnected(request))
    gone.add_done_callback(lambda _: work.cancel())
    try:
        return await work
    except asyncio.CancelledError:
        if gone.done():
            return None
        raise
    finally:
        gone.cancel()


class EventStream(StreamingResponse):
    """Server-sent events whose generator is closed as soon as the client is gone."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def stream_response(self, send: Send) -> None:
        async with contextlib.aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().stream_response(send)


async def _events(
    service: Service, given: GenerationRequest, streams: list[AsyncStream], form: Format, prompt_tokens: int
) -> AsyncGenerator[str, None]:
    options = given.stream_options or StreamOptions.model_validate({})

    def event(model: BaseModel) -> str:
        return f"data: {one_line(model.model_dump_json(exclude_unset=True))}\n\n"

    def piece(index: int, chunk: Chunk) -> str:
        said = form.choice(index, chunk, True)
        if said is not None and given.include_steps:
            said.step = step_of(chunk, service.engine.frontend.token_text, streams[index].arrived)
        usage = usage_of(given, streams, prompt_tokens) if options.continuous_usage_stats else None
        return "" if said is None else event(form.answer([said], usage, True))

    try:
        async with contextlib.aclosing(merged(service, streams)) as chunks:
            async for index, chunk in chunks:
                if chunk.text or chunk.logprobs or given.include_steps or chunk.finish_reason is not None:
                    # Log-probabilities of a prompt come all at once, and trees have many tokens.
                    long = chunk.logprobs or given.include_steps
                    yield await asyncio.to_thread(piece, index, chunk) if long else piece(index, chunk)
        if options.include_usage:
            yield event(form.answer([], usage_of(given, streams, prompt_tokens), True))
    except Exception as error:  # the answer has begun, so that its end has to say what went wrong
        yield event(api_error(error).body)
    yield "data: [DONE]\n\n"


def prompt_logprobs(stream: AsyncStream, token_text: Callable[[int], str]) -> PromptLogprobs:
    """Those of a stream's prompt, by token."""
    return [None] + [
        {
            token: PromptLogprob(logprob=least(one.logprob), rank=one.rank, decoded_token=one.decoded_token)
            for token, one in by_token(entry, token_text).items()
        }
        for entry in stream.prompt_logprobs
    ]


def step_of(chunk: Chunk, token_text: Callable[[int], str], arrived: float) -> Step:
    """The step that made a chunk of a request that came at ``arrived``, in texts."""
    seconds = chunk.made - arrived
    if chunk.verified is None:
        plain = [(text, 0) for text in chunk.pieces]
        return Step(tokens=plain, parents=[-1], drafted=[], path=[], seconds=seconds)
    step = chunk.verified
    return Step(
        tokens=[(text, at if at <= len(step.path) else 0) for at, text in enumerate(chunk.pieces, 1)],
        parents=list(step.tree.parents),
        drafted=list(map(token_text, step.drafted)),
        path=list(step.path),
        seconds=seconds,
    )


async def _collected(service: Service, streams: list[AsyncStream]) -> list[Chunk]:
    """Every stream's output as one chunk."""
    chunks: list[list[Chunk]] = [[] for _ in streams]
    async with contextlib.aclosing(merged(service, streams)) as found:
        async for index, chunk in found:
            chunks[index].append(chunk)
    return [
        Chunk(
            "".join(chunk.text for chunk in of_one),
            tuple(token for chunk in of_one for token in chunk.token_ids),
            of_one[-1].finish_reason,
            tuple(entry for chunk in of_one for entry in chunk.logprobs),
        )
        for of_one in chunks
    ]


async def merged(service: Service, streams: list[AsyncStream]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Chunks of several streams as they come, with the stream's place; the first error ends them all."""
    items: asyncio.Queue[tuple[int, Chunk] | asyncio.Future[None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncStream) -> None:
        async with contextlib.aclosing(service.metrics.watched(stream)) as chunks:
            async for chunk in chunks:
                items.put_nowait((index, chunk))

    pumps = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(streams)]
    for task in pumps:
        task.add_done_callback(items.put_nowait)
    try:
        left = len(pumps)
        while left:
            item = await items.get()
            if isinstance(item, tuple):
                yield item
            else:
                item.result()
                left -= 1
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def usage_of(given: GenerationRequest, streams: list[AsyncStream], prompt_tokens: int) -> Usage:
    """Tokens of a request; a prompt counts once, however many outputs it has."""
    stats = [stream.stats for stream in streams]

    def total(name: str) -> int:
        return sum(getattr(one, name) for one in stats)

    made, steps, drafted, accepted = map(total, ("output_tokens", "steps", "drafted", "accepted"))
    # The outputs of a prompt stand together; what an output's prompt shares with those before it was not there before.
    cached = sum(min(one.cached_tokens for one in stats[at : at + given.n]) for at in range(0, len(stats), given.n))
    usage = Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=made,
        total_tokens=prompt_tokens + made,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )
    if given.include_speculation:
        usage.speculation = SpeculationUsage(
            num_drafts=total("steps_with_draft"),
            num_draft_tokens=drafted,
            num_accepted_tokens=accepted,
            num_accepted_tokens_per_pos=[
                sum(counts) for counts in zip_longest(*(one.accepted_at for one in stats), fillvalue=0)
            ],
            acceptance_length=(accepted + steps) / steps if steps else 0.0,
        )
    if given.hypothesis is not None:
        usage.completion_tokens_details = CompletionTokensDetails(
            accepted_prediction_tokens=accepted, rejected_prediction_tokens=drafted - accepted
        )
    return usage
