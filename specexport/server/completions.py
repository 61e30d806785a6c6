"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from fastapi import Request, Response
from pydantic import BaseModel

from specexport.async_engine import AsyncStream
from specexport.frontend import Frontend
from specexport.runtime import Chunk, TokenLogprobs
from specexport.server.errors import ApiError
from specexport.server.schema import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    Usage,
)
from specexport.server.service import Service, respond

LEAST_LOGPROB = -9999.0
"""What JSON has for minus infinity, as OpenAI has it."""


async def complete(service: Service, request: Request, given: CompletionRequest) -> Response:
    """Continues one prompt or several."""
    model = service.require_model(given.model)
    if given.stream_options is not None and not given.stream:
        raise ApiError(400, "stream_options: given without stream", param="stream_options")
    prompts = [await service.encode(prompt) for prompt in _prompts(given.prompt)]
    params = service.params(given, given.max_tokens, given.logprobs)
    if given.echo:
        params = params.replace(prompt_logprobs=given.logprobs)
    streams = await service.start(prompts, params, given)
    frontend = service.engine.frontend
    echoed = [""] * len(streams)
    if given.echo:
        texts = (
            prompt if isinstance(prompt, str) else frontend.engine.tokenizer.decode(list(prompt))
            for prompt in _prompts(given.prompt)
        )
        echoed = [text for text in texts for _ in range(given.n)]
    form = _Format(service, model, echoed, streams if params.prompt_logprobs is not None else [])
    return await respond(service, request, given, streams, form, sum(map(len, prompts)))


def _prompts(given: Any) -> list[str | list[int]]:
    """A prompt is text, or a list of tokens; a list of either is several."""
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]
    return list(given)


class _Format:
    """Text completions.

    Args:
        service: serves them.
        model: its name in the answers.
        echoed: what each output begins with.
        scored: their streams, where that comes with log-probabilities.
    """

    def __init__(self, service: Service, model: str, echoed: list[str], scored: Sequence[AsyncStream]) -> None:
        self._frontend = service.engine.frontend
        self._scored = dict(enumerate(scored))
        self._echoed = echoed
        self._said = [0] * len(echoed)
        self._head: dict[str, Any] = {"object": "text_completion", "created": service.created, "model": model}

    def opening(self, index: int) -> BaseModel | None:
        if not self._echoed[index] or index in self._scored:  # log-probabilities come when the prompt is read
            return None
        return CompletionChoice(index=index, text=self._echoed[index], logprobs=None, finish_reason=None)

    def piece(self, index: int, chunk: Chunk) -> BaseModel:
        stream, text = self._scored.pop(index, None), chunk.text
        first = None
        if stream is not None:
            first, text = stream.prompt_tokens[0], self._echoed[index] + text
        entries = [*(stream.prompt_logprobs if stream is not None else ()), *chunk.logprobs]
        logprobs, self._said[index] = completion_logprobs(self._frontend, entries, self._said[index], first)
        reason = cast(Any, chunk.finish_reason)
        return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason)

    def whole(self, index: int, chunks: Sequence[Chunk]) -> BaseModel:
        text = self._echoed[index] + "".join(chunk.text for chunk in chunks)
        stream = self._scored.get(index)
        entries = [entry for chunk in chunks for entry in chunk.logprobs]
        first = None
        if stream is not None:
            first, entries = stream.prompt_tokens[0], [*stream.prompt_logprobs, *entries]
        logprobs, _ = completion_logprobs(self._frontend, entries, 0, first)
        reason = cast(Any, chunks[-1].finish_reason)
        return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason)

    def part(self, id: str, choices: list[BaseModel], usage: Usage | None) -> BaseModel:
        part = CompletionResponse(id=f"cmpl-{id}", choices=cast(Any, choices), **self._head)
        if usage is not None:
            part.usage = usage
        return part

    def answer(self, id: str, choices: list[BaseModel], usage: Usage) -> BaseModel:
        return self.part(id, choices, usage)


def completion_logprobs(
    frontend: Frontend, entries: Sequence[TokenLogprobs], offset: int, first: int | None = None
) -> tuple[CompletionLogprobs | None, int]:
    """Log-probabilities in the form of completions, and the characters said after them.

    Args:
        frontend: knows the tokens' texts.
        entries: of the tokens.
        offset: characters said before them.
        first: a token before them that has none, as the first of a prompt.
    """
    if not entries and first is None:
        return None, offset
    tokens: list[str] = []
    offsets: list[int] = []
    top: list[dict[str, float] | None] = []
    own: list[float | None] = []
    if first is not None:
        tokens, offsets, top, own = [frontend.token_text(first)], [offset], [None], [None]
        offset += len(tokens[0])
    for entry in entries:
        text = frontend.token_text(entry.token)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        # Different tokens may read alike; the most probable one stands for them.
        known = {frontend.token_text(token): logprob for token, logprob in reversed(entry.top)}
        best = {name: max(logprob, LEAST_LOGPROB) for name, logprob in reversed(known.items())}
        top.append(best if text in best else best | {text: entry.logprob})
    own += [max(entry.logprob, LEAST_LOGPROB) for entry in entries]
    return CompletionLogprobs(tokens=tokens, token_logprobs=own, top_logprobs=top, text_offset=offsets), offset
