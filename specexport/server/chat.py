"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response
from pydantic import BaseModel

from specexport.async_engine import AsyncStream
from specexport.contract.errors import RequestError
from specexport.runtime import Chunk, TokenLogprobs
from specexport.runtime.chat import Message
from specexport.runtime.text import token_bytes
from specexport.server import answers
from specexport.server.request_parts import ChatMessage, Function
from specexport.server.requests import ChatRequest, TemplateOptions, TokenizeRequest
from specexport.server.service import Service, finite_logprob, prompt_logprobs, respond
from specexport.server.tool_notation import PYTHON
from specexport.server.tools import LFM2, LFM2_TOOLS, Calling, CallReader, template_tools, whole_calls


async def chat(service: Service, request: Request, body: ChatRequest) -> Response:
    """Answers a conversation."""
    head = service.head(body, "chatcmpl")
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs: given without logprobs", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise RequestError("max_tokens: given with max_completion_tokens; give one of them", param="max_tokens")
    calls = service.calling(body)
    tools = () if calls is None else body.offered
    prompt = await chat_tokens(service, body, body.messages, tools, body.reasoning_effort, **ending(body))
    limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    params = service.params(body, limit, (body.top_logprobs or 0) if body.logprobs else None, calls)
    streams = await service.start([prompt], params.replace(prompt_logprobs=body.prompt_logprobs), body)
    form = _Format(service, head, body, calls, streams[0])
    return await respond(service, request, body, streams, form)


async def chat_tokens(
    service: Service,
    body: TemplateOptions,
    messages: Sequence[ChatMessage],
    tools: Sequence[Function],
    effort: str | None,
    **ending: bool,
) -> list[int]:
    """The prompt of a conversation; the template gets the tools and the effort besides the request's variables."""
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if tools:
        variables["tools"] = template_tools(tools)
    template = service.frontend.require_chat_template().source(body.chat_template, tools=bool(tools))
    return await asyncio.to_thread(
        service.frontend.chat_tokens,
        [with_calls(template_message(message), template) for message in messages],
        variables | body.variables,
        name=body.chat_template,
        **ending,
    )


def ending(body: ChatRequest | TokenizeRequest) -> dict[str, bool]:
    """How the prompt of a conversation ends.

    Raises:
        RequestError: the last message is to be continued and answered.
    """
    names = ("add_generation_prompt", "continue_final_message")
    if body.continue_final_message and "add_generation_prompt" in body.model_fields_set and body.add_generation_prompt:
        raise RequestError(
            "add_generation_prompt: given with continue_final_message; give one of them", param="add_generation_prompt"
        )
    return {name: getattr(body, name) for name in names}


def template_message(message: ChatMessage) -> Message:
    """A message in the form that chat templates expect, where the arguments of a call are an object."""
    fields = {name: value for name, value in message.model_dump(exclude_none=True).items() if value}
    fields["content"] = message.content
    if isinstance(message.content, list):
        fields["content"] = [{"type": "text", "text": part.text} for part in message.content]
    for call in fields.get("tool_calls", ()):
        with contextlib.suppress(ValueError, RecursionError):
            # Clients send nothing or null for a call without arguments.
            call["function"]["arguments"] = json.loads(call["function"]["arguments"].strip() or "null") or {}
    return fields


class _Format:
    """Chat completions; ``stream`` is any of the answer's streams, for the log-probabilities of the prompt."""

    def __init__(
        self, service: Service, head: dict[str, Any], body: ChatRequest, calls: Calling | None, stream: AsyncStream
    ) -> None:
        self._frontend = service.frontend
        self._head, self._body, self._calls, self._stream = head, body, calls, stream
        self._readers: dict[int, CallReader | None] = {}

    def choice(self, index: int, chunk: Chunk) -> answers.Choice | None:
        streamed = self._body.stream
        message = answers.AssistantMessage(content=chunk.text)
        reason: Any = chunk.finish_reason
        begins = index not in self._readers
        if begins:
            self._readers[index] = None if self._calls is None else CallReader(self._calls)
        if (reader := self._readers[index]) is not None:
            text, pieces = reader.push(chunk.text, reason is not None)
            message = answers.AssistantMessage()
            if text or (begins and streamed):
                message.content = text
            if thoughts := reader.thoughts():
                message.reasoning_content = thoughts
            if pieces:
                message.tool_calls = pieces if streamed else whole_calls(pieces)
            elif streamed and not (text or thoughts or begins or chunk.logprobs or reason or self._body.include_steps):
                return None
            if not streamed and not text:
                message.content = None
            if reader.calls and reason == "stop":
                reason = "tool_calls"
        if begins:
            message.role = "assistant"
        logprobs = answers.ChatLogprobs(content=list(map(self._logprob, chunk.logprobs))) if chunk.logprobs else None
        fields: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": reason}
        if streamed:
            return answers.ChatChunkChoice(delta=message, **fields)
        return answers.ChatChoice(message=message, **fields)

    def answer(self, choices: list[Any], usage: answers.Usage | None) -> BaseModel:
        fields = self._head | {"choices": choices} | ({} if usage is None else {"usage": usage})
        if self._body.stream:
            return answers.ChatChunk(object="chat.completion.chunk", **fields)
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self._stream, self._frontend)
        return answers.ChatResponse(object="chat.completion", **fields)

    def _logprob(self, entry: TokenLogprobs) -> answers.ChatLogprob:
        def describe(token: int, logprob: float) -> dict[str, Any]:
            text = self._frontend.token_text(token)
            partial = "\ufffd" in text  # perhaps a part of a character, which has no text
            content = token_bytes(self._frontend.engine.tokenizer, token) if partial else text.encode()
            return {"token": text, "logprob": finite_logprob(logprob), "bytes": None if content is None else [*content]}

        top = [answers.TopLogprob(**describe(*pair)) for pair in entry.top]
        return answers.ChatLogprob(**describe(entry.token, entry.logprob), top_logprobs=top)


def with_calls(message: Message, template: str) -> Message:
    """A message whose text ends with its calls, as the model wrote them, if its template leaves calls out."""
    if LFM2_TOOLS not in template or LFM2.begin in template or not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        name, arguments = call["function"]["name"], call["function"].get("arguments", {})
        calls.append(name + (PYTHON.arguments(arguments) if isinstance(arguments, dict) else f"({arguments})"))
    written, content = f"{LFM2.begin}[{', '.join(calls)}{LFM2.end}", message.get("content") or ""
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": written}]}
    return {**message, "content": content + written}
