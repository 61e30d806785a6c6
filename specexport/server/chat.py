"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response
from pydantic import BaseModel

from specexport.contract.errors import RequestError
from specexport.runtime import Chunk, TokenLogprobs
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
    JsonSchema,
    TopLogprob,
    Usage,
    plain_text,
)
from specexport.server.service import Service, least, respond


async def chat(service: Service, request: Request, given: ChatRequest) -> Response:
    """Answers a conversation."""
    head = service.head(given, "chatcmpl")
    if given.top_logprobs is not None and not given.logprobs:
        raise RequestError("top_logprobs: given without logprobs", param="top_logprobs")
    if given.max_tokens is not None and given.max_completion_tokens is not None:
        raise RequestError("max_tokens: given beside max_completion_tokens; give one of them", param="max_tokens")
    prompt = await chat_tokens(service, given.messages, given.chat_template_kwargs)
    most = given.max_completion_tokens if given.max_tokens is None else given.max_tokens
    schema = None
    if isinstance(given.response_format, JsonSchema):
        schema = json.dumps(given.response_format.json_schema.schema_)
    elif given.response_format is not None and given.response_format.type == "json_object":
        schema = '{"type": "object"}'
    params = service.params(given, most, (given.top_logprobs or 0) if given.logprobs else None, schema)
    streams = await service.start([prompt], params, given)
    return await respond(service, request, given, streams, _Format(service, head), len(prompt))


async def chat_tokens(service: Service, messages: Sequence[ChatMessage], variables: dict[str, Any]) -> list[int]:
    """The prompt of a conversation."""
    known = [
        {"role": message.role, "content": plain_text(message.content)}
        | {name: value for name in ("name", "tool_call_id") if (value := getattr(message, name))}
        for message in messages
    ]
    return await asyncio.to_thread(service.engine.frontend.chat_tokens, known, variables)


class _Format:
    """Chat completions, whose first piece says that it is the assistant's."""

    def __init__(self, service: Service, head: dict[str, Any]) -> None:
        self._token_text = service.engine.frontend.token_text
        self._head = head
        self._begun: set[int] = set()

    def choice(self, index: int, chunk: Chunk, streamed: bool) -> BaseModel:
        said = AssistantMessage(content=chunk.text)
        if index not in self._begun:
            self._begun.add(index)
            said.role = "assistant"
        logprobs = ChatLogprobs(content=list(map(self._logprob, chunk.logprobs))) if chunk.logprobs else None
        fields: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": chunk.finish_reason}
        return ChatChunkChoice(delta=said, **fields) if streamed else ChatChoice(message=said, **fields)

    def answer(self, choices: list[Any], usage: Usage | None, streamed: bool) -> BaseModel:
        fields = self._head | {"choices": choices} | ({} if usage is None else {"usage": usage})
        if streamed:
            return ChatChunk(object="chat.completion.chunk", **fields)
        return ChatResponse(object="chat.completion", **fields)

    def _logprob(self, entry: TokenLogprobs) -> ChatLogprob:
        def worded(token: int, logprob: float) -> dict[str, Any]:
            text = self._token_text(token)
            # A token may be a part of a character, which no text stands for.
            known = list(text.encode()) if "\ufffd" not in text else None
            return {"token": text, "logprob": least(logprob), "bytes": known}

        top = [TopLogprob(**worded(*pair)) for pair in entry.top]
        return ChatLogprob(**worded(entry.token, entry.logprob), top_logprobs=top)
