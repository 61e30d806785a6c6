"""Tool calls: the grammar an answer with tools is bound to, and how calls are read from its text."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specexport.contract.errors import RequestError
from specexport.server import parameters
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
    """How a model writes calls: each a head, which names the function, and its arguments, as JSON or one by one.

    Attributes:
        arguments: the key of the arguments, where a call is JSON.
        begin: the mark before the calls, and what comes behind it; empty where a call is the whole answer.
        end: what comes behind them.
        opening: what comes between the mark and the first call, a regular expression.
        between: what comes between two calls; None for the end, a line's end and the mark again.
        head: a call up to its arguments, a regular expression of ``NAME`` and ``ARGUMENTS``.
        tail: a call behind its arguments.
        one_by_one: whether arguments are written between marks of their own, up to the tail.
        id_length: letters and digits of a call's id, where the model's template knows no others.
    """

    arguments: str = "arguments"
    begin: str = ""
    end: str = ""
    opening: str = ""
    between: str | None = None
    head: str = r'\{"name": "NAME", "ARGUMENTS": '
    tail: str = "}"
    one_by_one: bool = False
    id_length: int | None = None

    @property
    def mark(self) -> str:
        """What ends a text and begins calls, whatever follows it."""
        return self.begin.rstrip()

    def head_of(self, name: str) -> str:
        """A regular expression of a call up to its arguments, for Lark and for Python."""
        marks = {"ARGUMENTS": self.arguments, "NAME": name}
        return re.sub("|".join(marks), lambda found: marks[found[0]], self.head)


_NAME = "(?P<name>[A-Za-z0-9_.-]{1,64})"
HERMES = CallFormat(begin="<tool_call>\n", end="\n</tool_call>")
QWEN_CODER = replace(HERMES, head=r"<function=NAME>\n", tail=parameters.END, one_by_one=True)
LLAMA = CallFormat("parameters")
MISTRAL = CallFormat(begin="[TOOL_CALLS]", opening=r" ?\[", between=", ", end="]", id_length=9)
MISTRAL_ARGS = CallFormat(begin="[TOOL_CALLS]", between="[TOOL_CALLS]", head=r"NAME\[ARGS\]", tail="", id_length=9)
MISTRAL_ID = replace(MISTRAL_ARGS, head=r"NAME\[CALL_ID\][a-zA-Z0-9]{9}\[ARGS\]")
HARMONY = CallFormat(
    begin="<|channel|>commentary to=functions.",
    head=r"(<\|channel\|>commentary to=functions\.NAME <\|constrain\|>| to=functions\.NAME<\|channel\|>commentary )json"
    r"<\|message\|>",
    tail="",
)
"""gpt-oss: an answer is messages in channels, of which a call is the last."""
_PLAIN = CallFormat("arguments")
"""For models that know no tools; an answer can be bound to it all the same."""
_PYTHON_TAG = "<|python_tag|>"
"""What Llama 3 may put before a call."""
_OBJECT = {
    "type": "object",
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
}
"""Arguments as models are trained to write them, if a tool's parameters do not say otherwise."""


def call_format(template: str) -> CallFormat | None:
    """The format that a chat template names; None where it names none that is known."""
    if "tools" not in template:
        return None
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ID if "[CALL_ID]" in template else MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template and "<arg_key>" not in template:  # which GLM-4.5 writes parameters in
        return HERMES if "<function=" not in template else QWEN_CODER if "<parameter=" in template else None
    return LLAMA if re.search(r"""["']parameters["']\s*:\s*dictionary""", template) else None


@dataclass(frozen=True)
class Calling:
    """How an answer may call tools.

    Attributes:
        format: how calls are written.
        tools: what may be called.
        forced: whether the answer is calls alone.
        parallel: whether there may be several.
        hidden: special tokens that the answer's text leaves out.
    """

    format: CallFormat
    tools: Sequence[Function]
    forced: bool
    parallel: bool
    hidden: re.Pattern[str] | None = None

    def bound(self) -> dict[str, Any]:
        """What binds the answer, as parameters of the engine. Special tokens may be marks, which the reader needs."""
        return {"grammar": self.grammar(), "skip_special_tokens": False}

    def grammar(self) -> str:
        """The answer's grammar, in llguidance's form of Lark."""
        form = self.format
        calls = ["call: " + " | ".join(f"call_{at}" for at in range(len(self.tools)))]
        for at, tool in enumerate(self.tools):
            head = _pattern(form.head_of(re.escape(tool.name)))
            arguments, more = f"%json {json.dumps(_OBJECT | tool.parameters)}", list[str]()
            if form.one_by_one:
                arguments, more = parameters.rules(f"call_{at}", tool, {"x-guidance": _OBJECT["x-guidance"]})
            calls += [f"call_{at}: {head} {arguments} {_literal(form.tail)}", *more]
        if form is HARMONY:
            lines = ["start: call"] if self.forced else _MESSAGES
        else:
            between = f"{form.end}\n{form.begin}" if form.between is None else form.between
            several = f"({_literal(between)} call)*" if form.begin and self.parallel else ""
            rest = (
                f"{_literal(form.begin[len(form.mark) :])} {_pattern(form.opening)} call {several} {_literal(form.end)}"
            )
            if self.forced:
                lines = [f"start: {_literal(form.mark)} {rest}"]
            elif form.begin:
                # The lazy part ends the text at the first mark, from which on there are calls alone.
                lines = [f"start: TEXT | marked {rest}", f"marked[lazy]: TEXT {quoted(form.mark)}", r"TEXT: /(.|\n)*/"]
            else:
                lines = [
                    f"start: TEXT | {quoted(_PYTHON_TAG)}? call",
                    r"TEXT: /([^{<](.|\n)*|<([^|](.|\n)*)?)?/",
                ]
        return "\n".join([*lines, *calls])


_MESSAGES = [
    "start: note* (final | call)",
    'note: ("<|channel|>analysis<|message|>" | "<|channel|>commentary<|message|>") said "<|start|>assistant"',
    'said[lazy]: TEXT "<|end|>"',
    'final: "<|channel|>final<|message|>" TEXT',
    r"TEXT: /(.|\n)*/",
]
"""Of an answer in channels that need not be a call."""


def _literal(text: str) -> str:
    return quoted(text) if text else ""


def _pattern(pattern: str) -> str:
    return f"/{pattern}/" if pattern else ""


def known_tools(tools: Sequence[Function]) -> list[dict[str, Any]]:
    """Tools as chat templates know them."""
    plain = (tool.model_dump(exclude_unset=True, exclude={"type", "strict"}) for tool in tools)
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
    """Splits an answer's text as it comes into text and pieces of calls.

    Attributes:
        calls: how many were begun.
    """

    def __init__(self, calling: Calling) -> None:
        self._format, self._hidden = calling.format, calling.hidden
        self._tools = {tool.name: tool for tool in calling.tools}
        self._parameters = parameters.ParameterReader(None)
        # Both ways to name a function in a head have a group of that name, so that one of them is enough.
        name, again = _NAME, _NAME.replace("name", "again", 1)
        pattern = calling.format.head_of(name)
        self._head_pattern = re.compile(again.join(pattern.rsplit(name, 1)) if pattern.count(name) > 1 else pattern)
        self._text, self._thoughts = "", ""
        harmony = calling.format is HARMONY
        self._reading: Callable[[bool], str | AssistantCall | None] = self._header if harmony else self._said
        self._may_call = True
        self._thinking = False
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
        return self._shown(said), pieces

    def thoughts(self) -> str:
        """What was said since the last time in a channel that is for the model alone."""
        thoughts, self._thoughts = self._shown(self._thoughts), ""
        return thoughts

    def _shown(self, text: str) -> str:
        return text if self._hidden is None else self._hidden.sub("", text)

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        return taken

    def _until(self, mark: str, last: bool) -> tuple[str, bool]:
        """Text up to a mark, without what may be the mark's beginning; and whether the mark is there."""
        at = self._text.find(mark)
        if at >= 0:
            return self._take(at), True
        held = 0 if last else next((n for n in range(len(mark) - 1, 0, -1) if self._text.endswith(mark[:n])), 0)
        return self._take(len(self._text) - held), False

    def _said(self, last: bool) -> str:
        if self._format.begin:
            said, found = self._until(self._format.mark, last)
            if found:
                self._reading = self._head
            return said
        if self._may_call and not last and _PYTHON_TAG.startswith(self._text):
            return ""
        if self._may_call and self._text.removeprefix(_PYTHON_TAG)[:1] in ("{", ""):
            self._reading = self._head
            return ""
        self._may_call = False
        return self._take(len(self._text))

    def _head(self, last: bool) -> AssistantCall | None:
        """The next call's; what is before it, behind marks and other calls, is part of the format."""
        return self._begun(found) if (found := self._head_pattern.search(self._text)) is not None else None

    def _begun(self, head: re.Match[str]) -> AssistantCall:
        self._take(head.end())
        name = next(filter(None, head.groupdict().values()))
        self._parameters = parameters.ParameterReader(self._tools.get(name))
        self._reading = self._one_by_one if self._format.one_by_one else self._arguments
        self.calls += 1
        function = FunctionCall(name=name, arguments="")
        id = (
            f"call_{uuid.uuid4().hex}" if self._format.id_length is None else uuid.uuid4().hex[: self._format.id_length]
        )
        return AssistantCall(index=self.calls - 1, id=id, type="function", function=function)

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
                    self._reading, end = self._head, at + 1
                    break
        return AssistantCall(index=self.calls - 1, function=FunctionCall(arguments=self._take(end)))

    def _one_by_one(self, last: bool) -> AssistantCall | None:
        said, self._text = self._parameters.push(self._text, last)
        if self._parameters.done:
            self._reading = self._head
        return AssistantCall(index=self.calls - 1, function=FunctionCall(arguments=said)) if said else None

    def _header(self, last: bool) -> AssistantCall | None:
        """What is before a message of a channel."""
        at = self._text.find("<|message|>")
        if at < 0:
            return None
        found = self._head_pattern.search(self._text)
        if found is not None and found.end() <= at + len("<|message|>"):
            return self._begun(found)
        self._thinking = "<|channel|>analysis" in self._take(at + len("<|message|>"))
        self._reading = self._message
        return None

    def _message(self, last: bool) -> str:
        said, ended = self._until("<|end|>", last)
        if ended:
            self._reading = self._header
        if self._thinking:
            self._thoughts += said
        return "" if self._thinking else said


def whole_calls(pieces: Sequence[AssistantCall]) -> list[AssistantCall]:
    """The calls that pieces make up, which have no index when they are whole."""
    calls: list[AssistantCall] = []
    for piece in pieces:
        if piece.id is not None:
            calls.append(AssistantCall(id=piece.id, type="function", function=piece.function))
        else:
            calls[-1].function.arguments += piece.function.arguments
    return calls
