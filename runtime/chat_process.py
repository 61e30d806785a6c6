"""The process that renders chat templates, which ``ChatTemplate`` starts and may kill at any time.

It reads and writes a line of JSON for each conversation. It imports nothing from the package, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules are not top-level modules

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 1 << 30
"""Bytes that the process may use, if the system can enforce a limit."""
LONGEST = 1 << 24
"""Most characters of a rendered conversation."""
_SHOWN = 300
"""Most characters of an error's message."""


class GenerationTag(Extension):
    """``{% generation %}`` marks the model's words for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Parses the block without its tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> jinja2.Template:
    """Compiles a template as transformers does, in Jinja's sandbox, which keeps it from Python's internals."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment.from_string(source)


class Forms(NamedTuple):
    """The forms of content that a template reads: whether text, and how many parts, where 2 stands for any number."""

    text: bool
    parts: int


_FIRST, _SECOND, _KIND = "qzvfirst", "qzvsecond", "qzvkind"
"""Words in probes: the texts of two parts, and a key that shows that a part was printed as a whole."""
_UNKNOWN = Forms(True, 0)
_CALL = {"id": "call00000", "type": "function", "function": {"name": "qzv", "arguments": {}}}
_USER = {"role": "user", "content": "qzv"}
_CALLING = {"role": "assistant", "content": ""}
_INSTRUCTING = ("system", "developer")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the model's reasoning; templates read the first, gpt-oss's the second."""


class Templates:
    """A model's templates by name, compiled on use, and the forms of content that they read."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources
        self._compiled: dict[str, jinja2.Template] = {}
        self._forms: dict[tuple[str, str], Forms] = {}
        self._text_arguments: dict[str, bool] = {}

    def answer(self, name: str, reserved: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
        """Renders a conversation; returns its text, or the reason of a failure.

        A request's variables, ``extra``, must not have the names of ``reserved`` ones, such as the messages, or of the
        template's functions.
        """
        template = self._compiled[name] = self._compiled.get(name) or compile_template(self._sources[name])
        name_in_use = next((name for name in extra if name in reserved or name in template.environment.globals), None)
        if name_in_use is not None:
            return {"taken": name_in_use}
        variables = {"tools": None, "documents": None, **extra, **reserved}
        text = self._conversation(name, reserved["messages"], variables)
        if dropped := self._dropped_instructions(name, reserved["messages"], text, variables):
            text = self._conversation(name, _joined(reserved["messages"], dropped), variables)
        text.encode()  # fails on lone surrogates, which JSON allows
        return {"text": text} if len(text) <= LONGEST else {"failed": f"it makes a text of {len(text)} characters"}

    def _conversation(self, name: str, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        readable = [self._readable(name, message, variables) for message in messages]
        return _render(self._compiled[name], {**variables, "messages": readable})

    def _dropped_instructions(
        self, name: str, messages: Sequence[dict[str, Any]], text: str, variables: Mapping[str, Any]
    ) -> list[int]:
        """The indices of later system messages that a template leaves out, as gpt-oss' does."""

        def shown(at: int) -> bool:
            probe = [*messages[:at], {**messages[at], "content": _FIRST}, *messages[at + 1 :]]
            return _FIRST in self._conversation(name, probe, variables).casefold()

        later = [at for at, message in enumerate(messages) if at and message.get("role") in _INSTRUCTING]
        return [at for at in later if _plain(messages[at]).strip() not in text and not shown(at)]

    def _readable(self, name: str, message: dict[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        """Converts a message's role and content to a form that the template reads, if they are not in one."""
        if message.get("role") == "developer" and self._read(name, message, variables) is _UNKNOWN:
            message = {**message, "role": "system"}  # OpenAI's newer name, which most templates drop or refuse
        reasoning = next((message[key] for key in _REASONING if key in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        if message.get("tool_calls") and self._wants_text(name, variables):
            message = {**message, "tool_calls": list(map(_with_text_arguments, message["tool_calls"]))}
        content = message.get("content")
        if isinstance(content, str):
            if not self._read(name, message, variables).text:
                content = [_part(content)]
        elif isinstance(content, list):
            forms = self._read(name, message, variables)
            if not (forms.parts == 2 or len(content) == forms.parts == 1):
                content = "\n".join(part["text"] for part in content)
                content = content if forms.text else [_part(content)]
        return message if "content" not in message else {**message, "content": content}

    def _read(self, name: str, message: Mapping[str, Any], variables: Mapping[str, Any]) -> Forms:
        """The forms that a template reads in messages of a role, determined by rendering probes; cached."""
        role = str(message.get("role"))
        if (name, role) in self._forms:
            return self._forms[name, role]
        user: dict[str, Any] = dict(_USER)
        if role != "user" and not self._read(name, user, variables).text:
            user["content"] = [_part("qzv")]
        call = {**_CALLING, "tool_calls": [_CALL]}
        # Templates may refuse a role if it comes alone, first or last.
        for before, after in (([], []), ([], [user]), ([user], [user]), ([user], []), ([user, call], [])):
            text, parts = (
                self._count_parts(name, {**variables, "messages": [*before, {**message, "content": content}, *after]})
                for content in (_FIRST, [_part(_FIRST, qzv=_KIND), _part(_SECOND, qzv=_KIND)])
            )
            if text or parts:
                return self._forms.setdefault((name, role), Forms(text > 0, parts))
        return _UNKNOWN

    def _wants_text(self, name: str, variables: Mapping[str, Any]) -> bool:
        """Whether a template writes arguments of calls well only if they are JSON, as DeepSeek's does; cached."""
        if name not in self._text_arguments:
            call = {**_CALL, "function": {"name": "qzv", "arguments": {_FIRST: _SECOND}}}
            objects, text = (
                self._probe(name, {**variables, "messages": [_USER, {**_CALLING, "tool_calls": [form]}]})
                for form in (call, _with_text_arguments(call))
            )
            # Templates may write objects in a form of their own, but none in Python's.
            well = _FIRST in objects and _SECOND in objects and f"'{_FIRST}': " not in objects
            self._text_arguments[name] = not well and f'"{_FIRST}":' in text
        return self._text_arguments[name]

    def _count_parts(self, name: str, variables: Mapping[str, Any]) -> int:
        """Number of a probe's parts that a template writes; 0 if it fails."""
        text = self._probe(name, variables)
        return 0 if _KIND in text else (_FIRST in text) * (1 + (_SECOND in text))

    def _probe(self, name: str, variables: Mapping[str, Any]) -> str:
        """A rendered probe in lower case; empty if the template fails."""
        try:
            return self._compiled[name].render(variables).casefold()
        except Exception:  # rendering the conversation itself reports errors
            return ""


def _plain(message: Mapping[str, Any]) -> str:
    """A message's content as text."""
    content = message.get("content", "")
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _joined(messages: Sequence[dict[str, Any]], later: Sequence[int]) -> list[dict[str, Any]]:
    """Messages with the content of later ones in a system message at the beginning, as DeepSeek's template joins it."""
    begins = messages[0].get("role") in _INSTRUCTING
    first, rest = (messages[0], 1) if begins else ({"role": "system"}, 0)
    content = "\n\n".join(filter(None, map(_plain, [first, *(messages[at] for at in later)])))
    others = (message for at, message in enumerate(messages[rest:], rest) if at not in later)
    return [{**first, "content": content}, *others]


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments as JSON."""
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments", ""), str):
        return call
    return {**call, "function": {**function, "arguments": _to_json(function["arguments"])}}


def _part(text: str, **fields: str) -> dict[str, str]:
    return {"type": "text", "text": text, **fields}


def _render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Renders messages without content without that key, as transformers does; if that fails, with empty content."""
    messages: Sequence[Mapping[str, Any]] = variables["messages"]
    try:
        return template.render(variables)
    except Exception:
        if all("content" in message for message in messages):
            raise
    return template.render({**variables, "messages": [{"content": "", **message} for message in messages]})


def main() -> None:
    """Answers until its input ends; the first line has the templates by name."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system has limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    _write({"ready": True})
    templates = Templates(json.loads(sys.stdin.buffer.readline()))
    for line in sys.stdin.buffer:
        try:
            reply = templates.answer(*json.loads(line))
        except jinja2.TemplateSyntaxError as error:
            reply = {"invalid": f"line {error.lineno}: {_one_line(error)}"}
        except jinja2.TemplateError as error:
            reply = {"refused": _one_line(error)}
        except MemoryError:
            reply = {"failed": f"it takes more than {MEMORY >> 20} MiB of memory"}
        except Exception as error:  # a template may raise anything
            reply = {"failed": f"{type(error).__name__}: {_one_line(error)}"}
        _write(reply)


def _one_line(error: Exception) -> str:
    """The beginning of an error's message, on one line."""
    return " ".join(str(error)[:_SHOWN].split())


def _write(reply: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's filter it does not escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


if __name__ == "__main__":
    main()
