"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from fastapi import Request, Response
from pydantic import BaseModel

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
    if given.echo and given.logprobs is not None:
        raise ApiError(400, "logprobs: those of the prompt are not supported; leave out echo", param="logprobs")
    prompts = [await service.encode(prompt) for prompt in _prompts(given.prompt)]
    params = service.params(given, given.max_tokens, given.logprobs)
    streams = await service.start(prompts, params, given)
    frontend = service.engine.frontend
    echoed = [""] * len(streams)
    if given.echo:
        texts = (
            prompt if isinstance(prompt, str) else frontend.engine.tokenizer.decode(list(prompt))
            for prompt in _prompts(given.prompt)
        )
        echoed = [text for text in texts for _ in range(given.n)]
    form = _Format(service, model, echoed)
    return await respond(service, request, given, streams, form, sum(map(len, prompts)))


def _prompts(given: Any) -> list[str | list[int]]:
    """A prompt is text, or a list of tokens; a list of either is several."""
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]
    return list(given)


class _Format:
    """Text completions."""

    def __init__(self, service: Service, model: str, echoed: list[str]) -> None:
        self._frontend = service.engine.frontend
        self._echoed = echoed
        self._said = [0] * len(echoed)
        self._head: dict[str, Any] = {"object": "text_completion", "created": service.created, "model": model}

    def opening(self, index: int) -> BaseModel | None:
        if not self._echoed[index]:
            return None
        return CompletionChoice(index=index, text=self._echoed[index], logprobs=None, finish_reason=None)

    def piece(self, index: int, chunk: Chunk) -> BaseModel:
        logprobs, self._said[index] = completion_logprobs(self._frontend, chunk.logprobs, self._said[index])
        reason = cast(Any, chunk.finish_reason)
        return CompletionChoice(index=index, text=chunk.text, logprobs=logprobs, finish_reason=reason)

    def whole(self, index: int, chunks: Sequence[Chunk]) -> BaseModel:
        text = self._echoed[index] + "".join(chunk.text for chunk in chunks)
        logprobs, _ = completion_logprobs(self._frontend, [entry for chunk in chunks for entry in chunk.logprobs], 0)
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
    frontend: Frontend, entries: Sequence[TokenLogprobs], offset: int
) -> tuple[CompletionLogprobs | None, int]:
    """Log-probabilities in the form of completions, and the characters said after them.

    Args:
        frontend: knows the tokens' texts.
        entries: of the tokens.
        offset: characters said before them.
    """
    if not entries:
        return None, offset
    tokens, offsets, top = [], [], []
    for entry in entries:
        text = frontend.token_text(entry.token)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        # Different tokens may read alike; the most probable one stands for them.
        known = {frontend.token_text(token): logprob for token, logprob in reversed(entry.top)}
        best = {name: max(logprob, LEAST_LOGPROB) for name, logprob in reversed(known.items())}
        top.append(best if text in best else best | {text: entry.logprob})
    own = [max(entry.logprob, LEAST_LOGPROB) for entry in entries]
    return CompletionLogprobs(tokens=tokens, token_logprobs=own, top_logprobs=top, text_offset=offsets), offset
