"""What a chat template runs in: a process of its own, which ``ChatTemplate`` starts, feeds and may end at any time.

A line of JSON comes in for each conversation, and one goes out. Nothing of the package is imported, so it starts fast.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules are no top-level ones

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 1 << 30
"""Bytes the process may take, where the system can hold it to that."""
LONGEST = 1 << 24
"""Most characters of a rendered conversation."""
_SHOWN = 300
"""Most characters of what an error says."""


class GenerationTag(Extension):
    """``{% generation %}`` marks the model's own words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Reads the block as if its marks were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compiled(source: str) -> jinja2.Template:
    """A template as transformers has it, in Jinja's sandbox, which keeps it from Python's internals."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment.from_string(source)


class Forms(NamedTuple):
    """What a template reads as the content of a message: a text, and how many parts, 2 standing for any number."""

    text: bool
    parts: int


_FIRST, _SECOND, _KIND = "qzvfirst", "qzvsecond", "qzvkind"
"""Words of probes: of two parts, and of a key that shows where a part is written as a whole, which is no reading."""
_UNKNOWN = Forms(True, 0)
_CALL = {"id": "call00000", "type": "function", "function": {"name": "qzv", "arguments": {}}}
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of what the model thought; templates know the first, gpt-oss's the second."""


class Templates:
    """A model's templates by name, compiled when they are used, and what they were seen to read."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources
        self._compiled: dict[str, jinja2.Template] = {}
        self._forms: dict[tuple[str, str], Forms] = {}

    def answer(self, name: str, given: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
        """A rendered conversation, or why there is none.

        Args:
            name: of the template.
            given: variables that are set, the messages among them.
            others: further ones, which may not take the names of those or of the template's functions.
        """
        template = self._compiled[name] = self._compiled.get(name) or compiled(self._sources[name])
        taken = next((name for name in others if name in given or name in template.environment.globals), None)
        if taken is not None:
            return {"taken": taken}
        variables = {"tools": None, "documents": None, **others, **given}
        variables["messages"] = [self._readable(name, message, variables) for message in given["messages"]]
        text = _rendered(template, variables)
        text.encode()  # half a character, which JSON can say and a request may name, is no text
        return {"text": text} if len(text) <= LONGEST else {"failed": f"it makes a text of {len(text)} characters"}

    def _readable(self, name: str, message: dict[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        """A message whose content is in a form that the template reads: its own, if the template does."""
        thought = next((message[key] for key in _REASONING if key in message), None)
        if thought is not None:
            message = {"thinking": thought, **message, "reasoning_content": thought}
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
        """The forms that a template reads in messages of a role, by what it writes of some; kept once it is known."""
        role = str(message.get("role"))
        if (name, role) in self._forms:
            return self._forms[name, role]
        user: dict[str, Any] = {"role": "user", "content": "qzv"}
        if role != "user" and not self._read(name, user, variables).text:
            user["content"] = [_part("qzv")]
        call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        # Templates may refuse some roles alone, first or last.
        for before, after in (([], []), ([], [user]), ([user], [user]), ([user], []), ([user, call], [])):
            text, parts = (
                self._seen(name, {**variables, "messages": [*before, {**message, "content": content}, *after]})
                for content in (_FIRST, [_part(_FIRST, qzv=_KIND), _part(_SECOND, qzv=_KIND)])
            )
            if text or parts:
                return self._forms.setdefault((name, role), Forms(text > 0, parts))
        return _UNKNOWN

    def _seen(self, name: str, variables: Mapping[str, Any]) -> int:
        """How many parts of a probe a template writes; 0 where it fails."""
        try:
            text = self._compiled[name].render(variables).casefold()
        except Exception:  # whatever it is, the conversation itself is rendered next
            return 0
        return 0 if _KIND in text else (_FIRST in text) * (1 + (_SECOND in text))


def _part(text: str, **more: str) -> dict[str, str]:
    return {"type": "text", "text": text, **more}


def _rendered(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Messages without content have no such key, as transformers has it; where that fails their content is empty."""
    messages: Sequence[Mapping[str, Any]] = variables["messages"]
    try:
        return template.render(variables)
    except Exception:
        if all("content" in message for message in messages):
            raise
    return template.render({**variables, "messages": [{"content": "", **message} for message in messages]})


def main() -> None:
    """Answers until its input ends; the first line are the templates by name."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system has limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    _say({"ready": True})
    templates = Templates(json.loads(sys.stdin.buffer.readline()))
    for line in sys.stdin.buffer:
        try:
            said = templates.answer(*json.loads(line))
        except jinja2.TemplateSyntaxError as error:
            said = {"invalid": f"line {error.lineno}: {_worded(error)}"}
        except jinja2.TemplateError as error:
            said = {"refused": _worded(error)}
        except MemoryError:
            said = {"failed": f"it takes more than {MEMORY >> 20} MiB of memory"}
        except Exception as error:  # whatever a template does is its own fault
            said = {"failed": f"{type(error).__name__}: {_worded(error)}"}
        _say(said)


def _worded(error: Exception) -> str:
    """What an error says, in a line."""
    return " ".join(str(error)[:_SHOWN].split())


def _say(what: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter it does not escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


if __name__ == "__main__":
    main()
