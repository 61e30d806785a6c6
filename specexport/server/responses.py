"""``POST /v1/responses``, for text. Responses are not stored, so none can be retrieved or continued."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request, Response

from specexport.async_engine import AsyncStream
from specexport.contract.errors import RequestError
from specexport.runtime import SamplingParams
from specexport.server.chat import chat_tokens
from specexport.server.errors import api_error
from specexport.server.schema import (
    ANY_OBJECT,
    IncompleteDetails,
    InputDetails,
    OutputDetails,
    OutputMessage,
    OutputText,
    ResponseAnswer,
    ResponseRequest,
    ResponseUsage,
    SchemaFormat,
    plain_text,
)
from specexport.server.service import GONE, EventStream, Service, finished, merged, one_line, usage_of


async def answer_response(service: Service, request: Request, given: ResponseRequest) -> Response:
    """Answers an input."""
    if given.n != 1:
        raise RequestError(f"n is {given.n}; a response is one output", param="n")
    model = service.require_model(given.model)
    messages = [{"role": "system", "content": given.instructions}] if given.instructions is not None else []
    if isinstance(given.input, str):
        messages.append({"role": "user", "content": given.input})
    else:
        messages += [{"role": message.role, "content": plain_text(message.content)} for message in given.input]
    effort = None if given.reasoning is None else given.reasoning.effort
    variables = {} if effort is None else {"reasoning_effort": effort}
    prompt = await chat_tokens(service, messages, variables | given.chat_template_kwargs)
    form = None if given.text is None else given.text.format
    bound = {}
    if form is not None and form.type != "text":
        bound["json_schema"] = json.dumps(form.schema_) if isinstance(form, SchemaFormat) else ANY_OBJECT
    params = service.params(given, given.max_output_tokens, None, bound)
    (stream,) = await service.start([prompt], params, given)
    made = _Made(model, given, params, stream, len(prompt))
    if given.stream:
        return EventStream(_events(service, made))
    outputs = await finished(service, request, [stream])
    if outputs is None:
        return Response(status_code=GONE)
    return Response(
        made.answer(outputs[0].text, outputs[0].finish_reason).model_dump_json(), media_type="application/json"
    )


class _Made:
    """A response on its way."""

    def __init__(
        self, model: str, given: ResponseRequest, params: SamplingParams, stream: AsyncStream, prompt_tokens: int
    ) -> None:
        self.stream = stream
        self.item = f"msg_{uuid.uuid4().hex}"
        self._given, self._prompt_tokens = given, prompt_tokens
        form = None if given.text is None else given.text.format
        self._fields: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "created_at": int(time.time()),
            "model": model,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "metadata": given.metadata or {},
            "temperature": params.temperature,
            "top_p": params.top_p,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True)},
        }

    def message(self, text: str | None, status: Any) -> OutputMessage:
        """The message; None for one without a text yet."""
        return OutputMessage(id=self.item, status=status, content=[] if text is None else [OutputText(text=text)])

    def answer(self, text: str | None, reason: str | None) -> ResponseAnswer:
        """The response with a text and why it ended; None where it has not begun or ended."""
        if reason is None:
            return ResponseAnswer(status="in_progress", output=[], **self._fields)
        status: Any = "incomplete" if reason == "length" else "completed"
        stats, counted = self.stream.stats, usage_of(self._given, [self.stream], self._prompt_tokens)
        usage = ResponseUsage(
            input_tokens=counted.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=stats.cached_tokens),
            output_tokens=counted.completion_tokens,
            output_tokens_details=OutputDetails(),
            total_tokens=counted.total_tokens,
            speculation=counted.speculation,
        )
        details = IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None
        output = [self.message(text, status)]
        return ResponseAnswer(status=status, output=output, usage=usage, incomplete_details=details, **self._fields)


async def _events(service: Service, made: _Made) -> AsyncGenerator[str, None]:
    count = 0

    def event(kind: str, **fields: Any) -> str:
        nonlocal count
        told = {"type": kind, "sequence_number": count, **fields}
        count += 1
        return f"event: {kind}\ndata: {one_line(json.dumps(told, ensure_ascii=False))}\n\n"

    part = {"item_id": made.item, "output_index": 0, "content_index": 0}
    text, reason = "", None
    begun = made.answer(None, None).model_dump()
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    yield event("response.output_item.added", output_index=0, item=made.message(None, "in_progress").model_dump())
    yield event("response.content_part.added", **part, part=OutputText(text="").model_dump())
    try:
        async with contextlib.aclosing(merged(service, [made.stream])) as chunks:
            async for _, chunk in chunks:
                text += chunk.text
                reason = chunk.finish_reason
                if chunk.text:
                    yield event("response.output_text.delta", **part, delta=chunk.text, logprobs=[])
    except Exception as error:  # the answer has begun, so that its end has to say what went wrong
        wrong = api_error(error).body.error
        told = {"code": wrong.code or wrong.type, "message": wrong.message}
        yield event("response.failed", response={**begun, "status": "failed", "error": told})
        return
    answer = made.answer(text, reason)
    yield event("response.output_text.done", **part, text=text, logprobs=[])
    yield event("response.content_part.done", **part, part=OutputText(text=text).model_dump())
    yield event("response.output_item.done", output_index=0, item=answer.output[0].model_dump())
    yield event(f"response.{answer.status}", response=answer.model_dump())
