"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from fastapi import Request, Response
from pydantic import BaseModel

from specexport.frontend import Frontend
from specexport.runtime import Chunk, TokenLogprobs
from specexport.server.completions import LEAST_LOGPROB
from specexport.server.errors import ApiError
from specexport.server.schema import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    JsonObject,
    JsonSchema,
    TextPart,
    TopLogprob,
    Usage,
)
from specexport.server.service import Service, respond


async def chat(service: Service, request: Request, given: ChatRequest) -> Response:
    """Answers a conversation."""
    model = service.require_model(given.model)
    if given.stream_options is not None and not given.stream:
        raise ApiError(400, "stream_options: given without stream", param="stream_options")
    if given.top_logprobs is not None and not given.logprobs:
        raise ApiError(400, "top_logprobs: given without logprobs", param="top_logprobs")
    if given.max_tokens is not None and given.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens: given beside max_completion_tokens; give one of them", param="max_tokens")
    prompt = await chat_tokens(service, given.messages, given.chat_template_kwargs)
    most = given.max_completion_tokens if given.max_tokens is None else given.max_tokens
    params = service.params(given, most, (given.top_logprobs or 0) if given.logprobs else None, _bound(given))
    expected = _text(given.prediction.content) if given.prediction is not None else None
    streams = await service.start([prompt], params, given, expected)
    return await respond(service, request, given, streams, _Format(service, model), len(prompt))


async def chat_tokens(service: Service, messages: Sequence[ChatMessage], variables: dict[str, Any]) -> list[int]:
    """The prompt of a conversation."""
    for taken in ("messages", "add_generation_prompt"):
        if taken in variables:
            raise ApiError(400, f"chat_template_kwargs: {taken} is the server's", param="chat_template_kwargs")
    plain = [_plain(message) for message in messages]
    return await asyncio.to_thread(partial(service.engine.frontend.chat_tokens, plain, **variables))


def _plain(message: ChatMessage) -> dict[str, str]:
    """A message as chat templates know it: its content is one text."""
    text = _text(message.content or "")
    named = {name: getattr(message, name) for name in ("name", "tool_call_id")}
    return {"role": message.role, "content": text, **{name: value for name, value in named.items() if value}}


def _text(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _bound(given: ChatRequest) -> str | None:
    """The schema an answer is bound to, as JSON."""
    if isinstance(given.response_format, JsonObject):
        return '{"type": "object"}'
    if isinstance(given.response_format, JsonSchema):
        return json.dumps(given.response_format.json_schema.schema_)
    return None


class _Format:
    """Chat completions."""

    def __init__(self, service: Service, model: str) -> None:
        self._frontend = service.engine.frontend
        self._head: dict[str, Any] = {"created": service.created, "model": model}

    def opening(self, index: int) -> BaseModel:
        delta = AssistantMessage(role="assistant", content="")
        return ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)

    def piece(self, index: int, chunk: Chunk) -> BaseModel:
        return ChatChunkChoice(
            index=index,
            delta=AssistantMessage(content=chunk.text) if chunk.text else AssistantMessage(),
            logprobs=chat_logprobs(self._frontend, chunk.logprobs),
            finish_reason=cast(Any, chunk.finish_reason),
        )

    def whole(self, index: int, chunks: Sequence[Chunk]) -> BaseModel:
        return ChatChoice(
            index=index,
            message=AssistantMessage(role="assistant", content="".join(chunk.text for chunk in chunks)),
            logprobs=chat_logprobs(self._frontend, [entry for chunk in chunks for entry in chunk.logprobs]),
            finish_reason=cast(Any, chunks[-1].finish_reason),
        )

    def part(self, id: str, choices: list[BaseModel], usage: Usage | None) -> BaseModel:
        part = ChatChunk(id=f"chatcmpl-{id}", object="chat.completion.chunk", choices=cast(Any, choices), **self._head)
        if usage is not None:
            part.usage = usage
        return part

    def answer(self, id: str, choices: list[BaseModel], usage: Usage) -> BaseModel:
        return ChatResponse(
            id=f"chatcmpl-{id}", object="chat.completion", choices=cast(Any, choices), usage=usage, **self._head
        )


def chat_logprobs(frontend: Frontend, entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
    """Log-probabilities in the form of chats."""
    if not entries:
        return None

    def worded(token: int, logprob: float) -> dict[str, Any]:
        text = frontend.token_text(token)
        # A token may be a part of a character, which no text stands for.
        known = list(text.encode()) if "\ufffd" not in text else None
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": known}

    return ChatLogprobs(
        content=[
            ChatLogprob(
                **worded(entry.token, entry.logprob), top_logprobs=[TopLogprob(**worded(*pair)) for pair in entry.top]
            )
            for entry in entries
        ]
    )
