"""Tool calls: the grammar an answer with tools is bound to, and how calls are read from its text."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specexport.contract.errors import RequestError
from specexport.server.schema import (
    AssistantCall,
    ChatRequest,
    Function,
    FunctionCall,
    FunctionName,
    ResponseRequest,
    quoted,
)


@dataclass(frozen=True)
class CallFormat:
    """How a model writes a call: JSON of its name and its arguments, perhaps between marks.

    Attributes:
        arguments: the key of the arguments.
        begin: the mark before a call; empty where a call is the whole answer.
        end: the mark after it.
    """

    arguments: str
    begin: str = ""
    end: str = ""


HERMES = CallFormat("arguments", "<tool_call>\n", "\n</tool_call>")
LLAMA = CallFormat("parameters")
_PLAIN = CallFormat("arguments")
"""For models that know no tools; an answer can be bound to it all the same."""
_OBJECT = {
    "type": "object",
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
}
"""Arguments as models are trained to write them, if a tool's parameters do not say otherwise."""
_HEAD = re.compile(r'\{"name": "([^"]*)", "(?:arguments|parameters)": ')


def call_format(template: str) -> CallFormat | None:
    """The format that a chat template names; None where it names none that is known."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    return LLAMA if re.search(r"""["']parameters["']\s*:\s*dictionary""", template) else None


@dataclass(frozen=True)
class Calling:
    """How an answer may call tools.

    Attributes:
        format: how calls are written.
        tools: what may be called.
        forced: whether the answer is calls alone.
        parallel: whether there may be several.
    """

    format: CallFormat
    tools: Sequence[Function]
    forced: bool
    parallel: bool

    def grammar(self) -> str:
        """The answer's grammar, in llguidance's form of Lark."""
        begin, end = self.format.begin, self.format.end
        more = f"({quoted(chr(10) + begin)} call {quoted(end)})*" if begin and self.parallel else ""
        bodies = [
            f"{quoted(self._head(tool.name))} %json {json.dumps(_OBJECT | tool.parameters)} " + quoted("}")
            for tool in self.tools
        ]
        if self.forced:
            lines = [f"start: {quoted(begin) if begin else ''} call {quoted(end) if end else ''} {more}"]
        elif begin:
            # The lazy part ends the text at the first mark, from which on there are calls alone.
            lines = [
                f"start: TEXT | marked call {quoted(end)} {more}",
                f"marked[lazy]: TEXT {quoted(begin)}",
                r"TEXT: /(.|\n)*/",
            ]
        else:
            lines = ["start: TEXT | call", r"TEXT: /([^{](.|\n)*)?/"]
        return "\n".join([*lines, "call: " + " | ".join(bodies)])

    def _head(self, name: str) -> str:
        return f'{{"name": "{name}", "{self.format.arguments}": '


def known_tools(tools: Sequence[Function]) -> list[dict[str, Any]]:
    """Tools as chat templates know them."""
    plain = (tool.model_dump(exclude_unset=True, exclude={"type"}) for tool in tools)
    return [{"type": "function", "function": tool} for tool in plain]


def calling(given: ChatRequest | ResponseRequest, template: str) -> Calling | None:
    """How a request's answer may call tools; None where it may not.

    Raises:
        RequestError: a tool is chosen that there is not, a tool's parameters are no object's, or the model is to choose
            by itself and how it calls tools is not known.
    """
    tools: Sequence[Function] = given.offered
    choice = given.choice or "auto"
    if choice == "none" or (choice == "auto" and not tools):
        return None
    if len({tool.name for tool in tools}) < len(tools):
        raise RequestError("tools: two have the same name", param="tools")
    wrong = next((tool.name for tool in tools if tool.parameters.get("type", "object") != "object"), None)
    if wrong is not None:
        raise RequestError(f"tools: the parameters of {wrong} are not those of an object", param="tools")
    if isinstance(choice, FunctionName):
        tools = [tool for tool in tools if tool.name == choice.name]
    if not tools:
        raise RequestError("tool_choice: there is no such tool in tools", param="tool_choice")
    form = call_format(template)
    if form is None and choice == "auto":
        raise RequestError(
            "tools: the model's chat template names no way of calling tools that is known; set tool_choice to required "
            "or to one of the tools, or to none",
            param="tools",
        )
    several = given.parallel_tool_calls and not isinstance(choice, FunctionName)
    return Calling(form or _PLAIN, tools, choice != "auto", several)


class CallReader:
    """Splits an answer's text as it comes into text and pieces of calls."""

    def __init__(self, calling: Calling) -> None:
        self._begin, self._end = calling.format.begin, calling.format.end
        self._text = ""
        self._reading: Callable[[bool], str | AssistantCall | None] = self._said
        self._may_call = True
        self._depth, self._quoted, self._escaped = 0, False, False
        self.calls = 0

    def push(self, text: str, last: bool) -> tuple[str, list[AssistantCall]]:
        """What new text adds to the answer and to the calls; ``last`` marks the end."""
        self._text += text
        said, pieces = "", list[AssistantCall]()
        before = None
        while self._text and before != (self._text, self._reading):
            before = (self._text, self._reading)
            made = self._reading(last)
            if isinstance(made, str):
                said += made
            elif made is not None:
                pieces.append(made)
        return said, pieces

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        return taken

    def _said(self, last: bool) -> str:
        mark = self._begin or "{"
        at = self._text.find(mark)
        if at >= 0 and self._may_call and (self._begin or at == 0):
            self._reading = self._head
            said = self._take(at)
            self._take(len(self._begin))
            return "" if self.calls else said
        self._may_call = self._may_call and bool(self._begin)
        held = 0 if last else next((n for n in range(len(mark), 0, -1) if self._text.endswith(mark[:n])), 0)
        said = self._take(len(self._text) - held * self._may_call)
        return "" if self.calls else said  # between calls there is a line's end

    def _head(self, last: bool) -> AssistantCall | None:
        if (found := _HEAD.match(self._text)) is None:
            return None
        self._take(found.end())
        self._reading = self._arguments
        self.calls += 1
        function = FunctionCall(name=found[1], arguments="")
        return AssistantCall(index=self.calls - 1, id=f"call_{uuid.uuid4().hex}", type="function", function=function)

    def _arguments(self, last: bool) -> AssistantCall:
        end = len(self._text)
        for at, letter in enumerate(self._text):
            if self._quoted:
                self._quoted = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._reading, end = self._rest, at + 1
                    break
        return AssistantCall(index=self.calls - 1, function=FunctionCall(arguments=self._take(end)))

    def _rest(self, last: bool) -> None:
        """Behind the arguments the call itself ends, and the mark after it."""
        whole = "}" + self._end
        if len(self._text) >= len(whole):
            self._take(len(whole))
            self._reading = self._said


def whole_calls(pieces: Sequence[AssistantCall]) -> list[AssistantCall]:
    """The calls that pieces make up, which have no index when they are whole."""
    calls: list[AssistantCall] = []
    for piece in pieces:
        if piece.id is not None:
            calls.append(AssistantCall(id=piece.id, type="function", function=piece.function))
        else:
            calls[-1].function.arguments += piece.function.arguments
    return calls
