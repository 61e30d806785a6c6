"""What a chat template runs in: a process of its own, which ``ChatTemplate`` starts, feeds and may end at any time.

A line of JSON comes in for each conversation, and one goes out. Nothing of the package is imported, so it starts fast.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

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


def answer(template: jinja2.Template, given: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """A rendered conversation, or why there is none.

    Args:
        template: says how.
        given: variables that are set.
        others: further ones, which may not take the names of those or of the template's functions.
    """
    taken = next((name for name in others if name in given or name in template.environment.globals), None)
    if taken is not None:
        return {"taken": taken}
    text = template.render({**others, **given})
    text.encode()  # half a character, which JSON can say and a request may name, is no text
    return {"text": text} if len(text) <= LONGEST else {"failed": f"it makes a text of {len(text)} characters"}


def main() -> None:
    """Answers until its input ends; the first line is the template."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system has limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    _say({"ready": True})
    source: str = json.loads(sys.stdin.buffer.readline())
    template = None
    for line in sys.stdin.buffer:
        try:
            template = template or compiled(source)
            said = answer(template, *json.loads(line))
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
