"""``POST /v1/responses``. Responses are not stored, so they cannot be retrieved or continued."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from fastapi import Request, Response

from specexport.async_engine import AsyncStream
from specexport.contract.errors import RequestError
from specexport.runtime import SamplingParams
from specexport.server import answers
from specexport.server.chat import chat_tokens
from specexport.server.errors import api_error
from specexport.server.request_parts import CalledFunction, ChatMessage, Content, ToolCall
from specexport.server.requests import InputCall, InputItem, InputMessage, ResponseRequest
from specexport.server.service import EventStream, Service, collect, merge, one_line, usage_of
from specexport.server.tools import Calling, CallReader


async def answer_response(service: Service, request: Request, body: ResponseRequest) -> Response:
    """Answers a request."""
    if body.n != 1:
        raise RequestError(f"n is {body.n}; a response is one output", param="n")
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        raise RequestError("stream_options: a response's usage comes with its last event", param="stream_options")
    model = service.require_model(body.model)
    messages = [] if body.instructions is None else [_message("system", body.instructions)]
    if isinstance(body.input, str):
        messages.append(_message("user", body.input))
    else:
        for item in body.input:
            _add(messages, item)
    effort = None if body.reasoning is None else body.reasoning.effort
    calls = service.calling(body)
    prompt = await chat_tokens(service, body, messages, () if calls is None else body.offered, effort)
    params = service.params(body, body.max_output_tokens, None, calls)
    (stream,) = await service.start([prompt], params, body)
    response = _Response(model, body, params, stream, Output(calls))
    if body.stream:
        return EventStream(_events(service, response))
    (output,) = await collect(service, request, [stream])
    for _ in response.output.push(output.text, output.finish_reason):
        pass
    return Response(response.answer(output.finish_reason).model_dump_json(), media_type="application/json")


def _add(messages: list[ChatMessage], item: InputItem) -> None:
    """Adds an item of the input to a conversation; calls become part of the assistant's message before them."""
    if isinstance(item, InputMessage):
        messages.append(_message(item.role, item.content))
    elif isinstance(item, InputCall):
        message = messages.pop() if messages and messages[-1].role == "assistant" else _message("assistant", None)
        call = ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
        messages.append(message.model_copy(update={"tool_calls": [*message.tool_calls, call]}))
    else:
        messages.append(_message("tool", item.output, tool_call_id=item.call_id))


def _message(role: str, content: Content | None, **fields: Any) -> ChatMessage:
    return ChatMessage.model_validate({"role": role, "content": content, **fields})


class Output:
    """The output of a response, item by item, and the events of its stream."""

    def __init__(self, calls: Calling | None) -> None:
        self.items: list[answers.OutputMessage | answers.OutputCall] = []
        self._reader = None if calls is None else CallReader(calls)

    def push(self, text: str, reason: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Adds text, with the finish reason at its end; yields the names and fields of events."""
        message, pieces = (text, []) if self._reader is None else self._reader.push(text, reason is not None)
        ended = reason is not None
        if message or (ended and not pieces and not self.items):
            yield from self._add_text(message)
        for piece in pieces:
            yield from self._call(piece)
        if ended:
            yield from self._close("incomplete" if reason == "length" else "completed")

    def _add_text(self, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self.items or not isinstance(self.items[-1], answers.OutputMessage):
            message = answers.OutputMessage(id=f"msg_{uuid.uuid4().hex}", status="in_progress", content=[])
            yield from self._open(message)
            message.content.append(answers.OutputText(text=""))
            yield "response.content_part.added", {**self._part(), "part": message.content[0].model_dump()}
        item = self.items[-1]
        assert isinstance(item, answers.OutputMessage)
        item.content[0].text += text
        if text:
            yield "response.output_text.delta", {**self._part(), "delta": text, "logprobs": []}

    def _call(self, piece: answers.AssistantCall) -> Iterator[tuple[str, dict[str, Any]]]:
        if piece.id is not None:
            name = piece.function.name or ""
            call = answers.OutputCall(id=f"fc_{uuid.uuid4().hex}", call_id=piece.id, name=name, status="in_progress")
            yield from self._open(call)
        item = self.items[-1]
        assert isinstance(item, answers.OutputCall)
        item.arguments += piece.function.arguments
        if piece.function.arguments:
            yield "response.function_call_arguments.delta", {**self._place(), "delta": piece.function.arguments}

    def _open(self, item: answers.OutputMessage | answers.OutputCall) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from self._close("completed")
        self.items.append(item)
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": item.model_dump()}

    def _close(self, status: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self.items:
            return
        item = self.items[-1]
        item.status = status
        if isinstance(item, answers.OutputMessage):
            part = item.content[0]
            yield "response.output_text.done", {**self._part(), "text": part.text, "logprobs": []}
            yield "response.content_part.done", {**self._part(), "part": part.model_dump()}
        else:
            function = {"name": item.name, "arguments": item.arguments}
            yield "response.function_call_arguments.done", {**self._place(), **function}
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": item.model_dump()}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}

    def _part(self) -> dict[str, Any]:
        return {**self._place(), "content_index": 0}


class _Response:
    """A response in progress."""

    def __init__(
        self, model: str, body: ResponseRequest, params: SamplingParams, stream: AsyncStream, output: Output
    ) -> None:
        self.stream, self.output = stream, output
        self._body = body
        form = None if body.text is None else body.text.format
        self._fields: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "temperature": params.temperature,
            "top_p": params.top_p,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True)},
            "parallel_tool_calls": body.parallel_tool_calls,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools,
        }

    def answer(self, reason: str | None) -> answers.ResponseAnswer:
        """The response so far, with its finish reason, which is None while it is in progress."""
        if reason is None:
            return answers.ResponseAnswer(status="in_progress", output=[], **self._fields)
        status: Any = "incomplete" if reason == "length" else "completed"
        counted = usage_of(self._body, [self.stream])
        usage = answers.ResponseUsage(
            input_tokens=counted.prompt_tokens,
            input_tokens_details=counted.prompt_tokens_details,
            output_tokens=counted.completion_tokens,
            output_tokens_details=answers.OutputDetails(),
            total_tokens=counted.total_tokens,
            speculation=counted.speculation,
        )
        details = answers.IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None
        return answers.ResponseAnswer(
            status=status, output=self.output.items, usage=usage, incomplete_details=details, **self._fields
        )


async def _events(service: Service, response: _Response) -> AsyncGenerator[str, None]:
    count = 0

    def event(kind: str, **fields: Any) -> str:
        nonlocal count
        content = {"type": kind, "sequence_number": count, **fields}
        count += 1
        return f"event: {kind}\ndata: {one_line(json.dumps(content, ensure_ascii=False))}\n\n"

    reason = None
    begun = response.answer(None).model_dump()
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    try:
        async with contextlib.aclosing(merge(service, [response.stream])) as chunks:
            async for _, chunk in chunks:
                reason = chunk.finish_reason
                for kind, fields in response.output.push(chunk.text, reason):
                    yield event(kind, **fields)
    except Exception as error:  # the answer has begun, so an event reports the error
        detail = api_error(error).body.error
        failure = {"code": detail.code or detail.type, "message": detail.message}
        yield event("response.failed", response={**begun, "status": "failed", "error": failure})
        return
    answer = response.answer(reason)
    yield event(f"response.{answer.status}", response=answer.model_dump())
