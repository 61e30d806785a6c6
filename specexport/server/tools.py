"""Tool calls: the grammar of answers with tools, and the parser of calls in answers."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specexport.contract.errors import RequestError
from specexport.runtime.text import overlap
from specexport.server import tool_arguments
from specexport.server.answers import AssistantCall, FunctionCall
from specexport.server.request_parts import Function, FunctionName, quote
from specexport.server.requests import ConversationRequest
from specexport.server.tool_notation import GEMMA as GEMMA_NOTATION
from specexport.server.tool_notation import PYTHON, Notation


@dataclass(frozen=True)
class CallFormat:
    """The format of a model's calls: a head with the function's name, then the arguments, as JSON or separately.

    Attributes:
        arguments: key of the arguments, if a call is JSON.
        begin: mark before the calls, and the text after it; empty if calls are the whole answer.
        end: text after the calls.
        opening: regular expression between the mark and the first call.
        between: text between two calls; None for the end, a line break and the mark again.
        head: regular expression of a call up to its arguments, with ``NAME`` and ``ARGUMENTS``.
        tail: text of a call after its arguments.
        marks: how arguments are written if they are not JSON.
        id_length: number of letters and digits of a call's id, if the model's template requires it.
    """

    arguments: str = "arguments"
    begin: str = ""
    end: str = ""
    opening: str = ""
    between: str | None = None
    head: str = r'\{"name": "NAME", "ARGUMENTS": '
    tail: str = "}"
    marks: tool_arguments.Marks | Notation | None = None
    id_length: int | None = None

    @property
    def mark(self) -> str:
        """The mark that ends the text and begins calls."""
        return self.begin.rstrip()

    def head_of(self, name: str) -> str:
        """The regular expression of a call up to its arguments, for Lark and Python."""
        marks = {"ARGUMENTS": self.arguments, "NAME": name}
        return re.sub("|".join(marks), lambda match: marks[match[0]], self.head)


_NAME = "(?P<name>[A-Za-z0-9_.-]{1,64})"
HERMES = CallFormat(begin="<tool_call>\n", end="\n</tool_call>")
QWEN_CODER = replace(HERMES, head=r"<function=NAME>\n", tail="</function>", marks=tool_arguments.QWEN_CODER)
GLM = CallFormat(begin="<tool_call>", head=r"NAME\n", tail="</tool_call>", marks=tool_arguments.GLM)
GLM_COMPACT = replace(GLM, between="<tool_call>", head="NAME", marks=tool_arguments.GLM_COMPACT)
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
"""gpt-oss: an answer consists of messages in channels, of which the last may be a call."""
GEMMA = CallFormat(
    begin="<|tool_call>",
    end="<tool_call|>",
    between="<tool_call|><|tool_call>",
    head="call:NAME",
    tail="",
    marks=GEMMA_NOTATION,
)
LFM2 = CallFormat(
    begin="<|tool_call_start|>",
    end="]<|tool_call_end|>",
    opening=r"\[",
    between=", ",
    head="NAME",
    tail="",
    marks=PYTHON,
)
LFM2_TOOLS = "<|tool_list_start|>"
"""Mark before the tools in LFM2's templates before 2.5, which leave earlier calls out."""
_FINAL = "<|channel|>final<|message|>"
_PLAIN = CallFormat("arguments")
"""For models without tools, whose answers can still be constrained to calls."""
_PYTHON_TAG = "<|python_tag|>"
"""Text that Llama 3 may write before a call."""
_OBJECT = {
    "type": "object",
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
}
"""The form in which models are trained to write arguments, unless a tool's parameters say otherwise."""


def call_format(template: str) -> CallFormat | None:
    """The format of calls that a chat template uses; None if it is unknown."""
    if "tools" not in template:
        return None
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ID if "[CALL_ID]" in template else MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<|tool_call>call:" in template:
        return GEMMA
    if LFM2.begin in template or LFM2_TOOLS in template:
        return LFM2
    if match := re.search(r"<tool_call>\{function-name\}(\n?)<arg_key>", template):
        return GLM if match[1] else GLM_COMPACT  # to 4.6, and from 4.7
    # Others write <arg_key> in other ways, MiniMax-M3 calls in <invoke>, Apriel all calls as a list in <tool_calls>.
    if "<tool_call>" in template and not re.search("<arg_key>|<invoke|<tool_calls>", template):
        return HERMES if "<function=" not in template else QWEN_CODER if "<parameter=" in template else None
    return LLAMA if re.search(r"""["']parameters["']\s*:\s*dictionary""", template) else None


@dataclass(frozen=True)
class Calling:
    """The calls that an answer may make.

    Attributes:
        forced: whether the answer consists of nothing but calls.
        parallel: whether there may be several calls.
        schema: JSON schema of an answer without calls, as JSON; None for any text.
        hidden: special tokens to leave out of the answer's text.
    """

    format: CallFormat
    tools: Sequence[Function]
    forced: bool
    parallel: bool
    schema: str | None = None
    hidden: re.Pattern[str] | None = None

    def bound(self) -> dict[str, Any]:
        """The sampling parameters that constrain the answer and keep special tokens, which may be marks of calls."""
        # Stop texts are of the answer, not of the model's thoughts.
        stop_after = _FINAL if self.format is HARMONY else ""
        return {"grammar": self.grammar(), "skip_special_tokens": False, "stop_after": stop_after}

    def grammar(self) -> str:
        """The grammar of the answer, in llguidance's dialect of Lark."""
        form = self.format
        calls = ["call: " + " | ".join(f"call_{at}" for at in range(len(self.tools)))]
        for at, tool in enumerate(self.tools):
            head = _pattern(form.head_of(re.escape(tool.name)))
            arguments, rules = f"%json {json.dumps(_OBJECT | tool.parameters)}", list[str]()
            if form.marks is not None:
                arguments, rules = form.marks.rules(f"call_{at}", tool, {"x-guidance": _OBJECT["x-guidance"]})
            calls += [f"call_{at}: {head} {arguments} {_literal(form.tail)}", *rules]
        text = r"TEXT: /(.|\n)*/"
        if self.schema is not None:
            calls.append(f"answer: %json {self.schema}")
        if form is HARMONY:
            said = "TEXT" if self.schema is None else "answer"
            lines = ["start: call"] if self.forced else [*_MESSAGES, f'final: "{_FINAL}" {said}', text]
        else:
            between = f"{form.end}\n{form.begin}" if form.between is None else form.between
            several = f"({_literal(between)} call)*" if form.begin and self.parallel else ""
            tail = (
                f"{_literal(form.begin[len(form.mark) :])} {_pattern(form.opening)} call {several} {_literal(form.end)}"
            )
            if self.forced:
                lines = [f"start: {_literal(form.mark)} {tail}"]
            elif self.schema is not None:
                lines = [f"start: answer | {_literal(form.mark)} {tail}"]
            elif form.begin:
                # The lazy part ends the text at the first mark, after which only calls follow.
                lines = [f"start: TEXT | marked {tail}", f"marked[lazy]: TEXT {quote(form.mark)}", text]
            else:
                lines = [
                    f"start: TEXT | {quote(_PYTHON_TAG)}? call",
                    r"TEXT: /([^{<](.|\n)*|<([^|](.|\n)*)?)?/",
                ]
        return "\n".join([*lines, *calls])


_MESSAGES = [
    "start: note* (final | call)",
    'note: ("<|channel|>analysis<|message|>" | "<|channel|>commentary<|message|>") said "<|start|>assistant"',
    'said[lazy]: TEXT "<|end|>"',
]
"""The rules of an answer in channels that may be something else than a call."""


def _literal(text: str) -> str:
    return quote(text) if text else ""


def _pattern(pattern: str) -> str:
    return f"/{pattern}/" if pattern else ""


def template_tools(tools: Sequence[Function]) -> list[dict[str, Any]]:
    """Tools in the form that chat templates expect."""
    plain = (tool.model_dump(exclude_unset=True, exclude={"type", "strict"}) for tool in tools)
    return [{"type": "function", "function": tool} for tool in plain]


def calling(request: ConversationRequest, template: str) -> Calling | None:
    """The calls that a request's answer may make; None if it may make none."""
    tools: Sequence[Function] = request.offered
    choice = request.choice or "auto"
    if choice == "none" or (choice == "auto" and not tools):
        return None
    if len({tool.name for tool in tools}) < len(tools):
        raise RequestError("tools: two have the same name", param="tools")
    wrong = next((tool.name for tool in tools if tool.parameters.get("type", "object") != "object"), None)
    if wrong is not None:
        raise RequestError(f"tools: the parameters of {wrong} are not those of an object", param="tools")
    if not tools:
        raise RequestError("tool_choice: given without tools, which it chooses from", param="tool_choice")
    if isinstance(choice, FunctionName):
        names = ", ".join(tool.name for tool in tools)
        tools = [tool for tool in tools if tool.name == choice.name]
        if not tools:
            raise RequestError(
                f"tool_choice: there is no tool {choice.name!r}; expected one of {names}"[:1000], param="tool_choice"
            )
    form = call_format(template)
    if form is None and choice == "auto":
        raise RequestError(
            "tools: the model's chat template names no way of calling tools that is known; set tool_choice to required "
            "or to one of the tools, or to none",
            param="tools",
        )
    schema = request.schema_of_text
    if schema is not None and choice == "auto" and form is LLAMA:
        raise RequestError(
            f"{request.format_field}: given with tools, whose calls are JSON too with this model; give one of them, or "
            "set tool_choice to required, to one of the tools or to none",
            param=request.format_field,
        )
    several = request.parallel_tool_calls and not isinstance(choice, FunctionName)
    return Calling(form or _PLAIN, tools, choice != "auto", several, schema)


class CallReader:
    """Splits the streamed text of an answer into text and pieces of calls.

    Attributes:
        calls: number of calls so far.
    """

    def __init__(self, calling: Calling) -> None:
        self._format, self._hidden = calling.format, calling.hidden
        self._anywhere = bool(self._format.mark) and calling.schema is None  # or a call is the whole answer
        self._tools = {tool.name: tool for tool in calling.tools}
        # Two groups for a head with two alternative places of the name.
        name, again = _NAME, _NAME.replace("name", "again", 1)
        pattern = calling.format.head_of(name)
        if calling.format.marks is not None:
            pattern = calling.format.marks.head(calling.format.begin, pattern)
        self._head_pattern = re.compile(again.join(pattern.rsplit(name, 1)) if pattern.count(name) > 1 else pattern)
        self._text, self._thoughts = "", ""
        harmony = calling.format is HARMONY
        self._reading: Callable[[bool], str | AssistantCall | None] = self._header if harmony else self._read_text
        self._may_call = True
        self._thinking = False
        self._depth, self._quoted, self._escaped = 0, False, False
        self.calls = 0

    def push(self, text: str, last: bool) -> tuple[str, list[AssistantCall]]:
        """Reads text, the answer's last if ``last``; returns text of the answer and pieces of calls."""
        self._text += text
        answer, pieces = "", list[AssistantCall]()
        before = None
        while self._text and before != (self._text, self._reading):
            before = (self._text, self._reading)
            part = self._reading(last)
            if isinstance(part, str):
                answer += part
            elif part is not None:
                pieces.append(part)
        return self._visible(answer), pieces

    def thoughts(self) -> str:
        """The text of the model's analysis channel since the last call of this method."""
        thoughts, self._thoughts = self._visible(self._thoughts), ""
        return thoughts

    def _visible(self, text: str) -> str:
        return text if self._hidden is None else self._hidden.sub("", text)

    def _take(self, count: int) -> str:
        text, self._text = self._text[:count], self._text[count:]
        return text

    def _until(self, mark: str, last: bool) -> tuple[str, bool]:
        """The text up to a mark, or to what may be its beginning; and whether the mark was found."""
        at = self._text.find(mark)
        if at >= 0:
            return self._take(at), True
        return self._take(len(self._text) - (0 if last else overlap(self._text, mark))), False

    def _read_text(self, last: bool) -> str:
        mark = self._format.mark
        if self._anywhere:
            text, complete = self._until(mark, last)
            if complete:
                self._reading = self._head
            return text
        if self._may_call and not last and (mark or _PYTHON_TAG).startswith(self._text):
            return ""
        calls = self._text.startswith(mark) if mark else self._text.removeprefix(_PYTHON_TAG)[:1] in ("{", "")
        if self._may_call and calls:
            self._reading = self._head
            return ""
        self._may_call = False
        return self._take(len(self._text))

    def _head(self, last: bool) -> AssistantCall | None:
        """Reads the head of the next call; drops marks and separators before it."""
        return self._begun(head) if (head := self._head_pattern.search(self._text)) is not None else None

    def _begun(self, head: re.Match[str]) -> AssistantCall:
        self._take(head.end())
        name = next(filter(None, head.groupdict().values()))
        self._reading = self._arguments
        if self._format.marks is not None:
            self._parameters = self._format.marks.reader(self._tools.get(name))
            self._reading = self._separate_arguments
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

    def _separate_arguments(self, last: bool) -> AssistantCall | None:
        arguments, self._text = self._parameters.push(self._text, last)
        if self._parameters.finished:
            self._reading = self._head
        return AssistantCall(index=self.calls - 1, function=FunctionCall(arguments=arguments)) if arguments else None

    def _header(self, last: bool) -> AssistantCall | None:
        """Reads the header of a message, up to its text."""
        at = self._text.find("<|message|>")
        if at < 0:
            return None
        head = self._head_pattern.search(self._text)
        if head is not None and head.end() <= at + len("<|message|>"):
            return self._begun(head)
        self._thinking = "<|channel|>analysis" in self._take(at + len("<|message|>"))
        self._reading = self._message
        return None

    def _message(self, last: bool) -> str:
        text, ended = self._until("<|end|>", last)
        if ended:
            self._reading = self._header
        if self._thinking:
            self._thoughts += text
        return "" if self._thinking else text


def whole_calls(pieces: Sequence[AssistantCall]) -> list[AssistantCall]:
    """Joins pieces into calls, which have no index."""
    calls: list[AssistantCall] = []
    for piece in pieces:
        if piece.id is not None:
            calls.append(AssistantCall(id=piece.id, type="function", function=piece.function))
        else:
            calls[-1].function.arguments += piece.function.arguments
    return calls
