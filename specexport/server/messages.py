"""Parts of requests: messages, tools and constraints of the output."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from specexport.server.fields import Only, RequestModel, Text, ToolName, Unsupported


class TextPart(RequestModel):
    """A part of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: Text
    annotations: Unsupported = None
    logprobs: Unsupported = None


Content = Text | Annotated[list[TextPart], Field(max_length=256, fail_fast=True)]


def plain_text(content: Content | None) -> str:
    """The text of a message, whose parts are joined."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class CalledFunction(RequestModel):
    """The called function, with its arguments as JSON."""

    name: ToolName
    arguments: Text


class ToolCall(RequestModel):
    """A call by the assistant."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class Function(RequestModel):
    """A function that may be called; its arguments always match its schema, so strict changes nothing."""

    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] = Field({}, description="A JSON schema of an object.")
    strict: bool | None = None


class Tool(RequestModel):
    """A tool."""

    type: Literal["function"]
    function: Function


class FunctionName(RequestModel):
    """A function's name."""

    name: ToolName


class ChosenTool(RequestModel):
    """The tool to call."""

    type: Literal["function"]
    function: FunctionName


class ChatMessage(RequestModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = Field(None, max_length=256)
    tool_call_id: str | None = Field(None, max_length=256)
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] = []  # noqa: RUF012
    reasoning_content: Text | None = Field(None, description="A variable of the model's chat template.")
    refusal: Unsupported = None
    annotations: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=4096, fail_fast=True)]


class StructuredOutputs(RequestModel):
    """vLLM's ways to constrain an output: one of them, or none."""

    json_: dict[str, Any] | Text | None = Field(None, alias="json", description="A JSON schema.")
    json_object: bool = Field(False, description="Any JSON object.")
    choice: Annotated[list[Text], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    regex: Text | None = None
    grammar: Text | None = Field(None, description="llguidance's form of Lark.")
    disable_fallback: Annotated[Any, Only((False,))] = None
    disable_any_whitespace: Annotated[Any, Only((False,))] = None
    disable_additional_properties: Annotated[Any, Only((False,))] = None

    @model_validator(mode="after")
    def _at_most_one(self) -> StructuredOutputs:
        if len(self.bounds()) > 1:
            raise ValueError("give one of json, json_object, choice, regex and grammar")
        return self

    def bounds(self) -> list[dict[str, str]]:
        """As parameters of the engine."""
        bounds: list[dict[str, str]] = []
        if self.json_ is not None:
            bounds.append({"json_schema": self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)})
        if self.json_object:
            bounds.append({"json_schema": ANY_OBJECT})
        if self.choice is not None:
            bounds.append({"grammar": "start: " + " | ".join(map(quoted, self.choice))})
        if self.regex is not None:
            bounds.append({"grammar": f"start: {_lark_regex(self.regex)}"})
        if self.grammar is not None:
            bounds.append({"grammar": self.grammar})
        return bounds


ANY_OBJECT = '{"type": "object"}'


_CONTROLS = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\v": r"\v", "\f": r"\f"}


def _lark_regex(regex: str) -> str:
    """A regular expression in Lark's syntax; it matches the whole output, so anchors at its ends are removed."""
    regex = re.sub(r"^\^|(?<!\\)((?:\\\\)*)\$$", lambda match: match[1] or "", regex)

    def escape(match: re.Match[str]) -> str:
        """Escapes slashes and line breaks, which end it in Lark; ``re.escape`` puts a backslash before either."""
        letter = match[1] or match[0]
        return r"\/" if letter == "/" else _CONTROLS.get(letter, match[0])

    safe = re.sub(r"(?s)\\(.)|[/\n\r\t\v\f]", escape, regex)
    return f"/(?:{safe})/"


def quoted(text: str) -> str:
    """A string literal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")
