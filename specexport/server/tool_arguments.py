"""Tool arguments as separate parameters, such as ``<parameter=name>``, in Qwen3-Coder's and GLM's formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specexport.contract.errors import RequestError
from specexport.runtime.text import overlap
from specexport.server.request_parts import Function, quote

_KEY = "[^>\n]+"
_STATED = {"type", "enum", "const", "title", "description", "default", "examples"}
DEFINITIONS = ("$defs", "definitions")
"""Keys of definitions to which parts of a schema may refer."""
COMBINED = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "dependentSchemas")


@dataclass(frozen=True)
class Marks:
    """The texts around a parameter.

    Attributes:
        begin: before its value; KEY stands for its name.
        after: after its value.
        end: after all parameters.
    """

    begin: str
    after: str
    end: str

    @cached_property
    def beginning(self) -> re.Pattern[str]:
        """Matches the text before a value, with the name as its first group."""
        return re.compile(re.escape(self.begin).replace("KEY", f"({_KEY})"))

    def head(self, begin: str, pattern: str) -> str:
        """The regular expression of a call up to its arguments, from the one that names the function."""
        return rf"{re.escape(begin)}{pattern}(?=<)"  # where parameters or the call's end begin

    def rules(self, name: str, tool: Function, options: dict[str, Any]) -> tuple[str, list[str]]:
        """The parameters of a tool in llguidance's dialect of Lark: an expression and the rules that it uses.

        ``name`` is the prefix of the names of rules; ``options`` are llguidance's options for JSON.
        """
        schema = tool.parameters
        properties, required = schema.get("properties", {}), schema.get("required", [])
        wrong = next((key for key in COMBINED if key in schema), None)
        keys = [*properties] if isinstance(properties, dict) else []
        if wrong is None and isinstance(required, list):
            wrong = next((key for key in [*keys, *required] if key not in keys or not re.fullmatch(_KEY, key)), None)
        if wrong is not None:
            raise RequestError(
                f"tools: the parameters of {tool.name} have {wrong!r}, and the model writes parameters one by one by "
                "their names; expected properties of an object with names of one line, without '>'",
                param="tools",
            )
        parts, grammar = [], []
        for at, (key, value) in enumerate(properties.items()):
            rule = f"{name}_{at}"
            optional = "" if key in required else "?"
            parts.append(f"{rule}{optional}")
            begin = quote(self.begin.replace("KEY", key))
            text, nullable = without_null(value)
            if not is_text(text, self.after):
                whole = options | {kind: schema[kind] for kind in DEFINITIONS if kind in schema}
                stated = json.dumps(whole | value if isinstance(value, dict) else value)
                grammar.append(f"{rule}: {begin} %json {stated} {quote(self.after)}")
            elif values := text.get("enum", [text["const"]] if "const" in text else []):
                values = [*values, "null"] if nullable else values
                grammar.append(f"{rule}: {begin} ({' | '.join(map(quote, values))}) {quote(self.after)}")
            else:
                grammar += [f"{rule}: {begin} {rule}_text", f"{rule}_text[lazy]: /(.|\\n)*/ {quote(self.after)}"]
        return " ".join(parts), grammar

    def reader(self, tool: Function | None) -> ParameterReader:
        """A reader of a call's arguments."""
        return ParameterReader(tool, self)


QWEN_CODER = Marks("<parameter=KEY>\n", "\n</parameter>\n", "</function>")
GLM = Marks("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>")
GLM_COMPACT = Marks("<arg_key>KEY</arg_key><arg_value>", "</arg_value>", "</tool_call>")


def is_text(schema: Any, after: str) -> bool:
    """Whether a parameter's value is written literally, as free text or an item of a list, instead of as JSON."""
    if not isinstance(schema, dict) or not schema.keys() <= _STATED:
        return False
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    texts = isinstance(values, list) and all(isinstance(value, str) and after not in value for value in values)
    return schema.get("type", "string" if values else None) == "string" and texts


def without_null(schema: Any) -> tuple[Any, bool]:
    """A schema without the alternative null, and whether it had one, as optional texts have."""
    if not isinstance(schema, dict):
        return schema, False
    kind, values = schema.get("type"), schema.get("enum")
    parts = schema.get("anyOf")
    if isinstance(parts, list) and len(parts) == 2 and {"type": "null"} in parts:
        part = parts[parts[0] == {"type": "null"}]
        rest = {key: value for key, value in schema.items() if key != "anyOf"}
        narrowed = rest | part if isinstance(part, dict) else schema
    elif isinstance(kind, list) and len(kind) == 2 and "null" in kind:
        narrowed = schema | {"type": kind[kind[0] == "null"]}
        if isinstance(values, list):
            narrowed["enum"] = [value for value in values if value is not None]
    else:
        return schema, False
    values = narrowed.get("enum", [narrowed.get("const")])
    readable = isinstance(values, list) and "null" not in values  # as null and "null" are written alike
    return (narrowed, True) if readable else (schema, False)


class ParameterReader:
    """Converts streamed parameters to a JSON object.

    Args:
        tool: the called tool; None for an unknown tool, whose values are read as texts.
        marks: the texts around parameters.
    """

    def __init__(self, tool: Function | None, marks: Marks) -> None:
        self._marks = marks
        self._properties = {} if tool is None else tool.parameters.get("properties", {})
        self._reading: Callable[[str, bool], tuple[str, int]] = self._between
        self._plain, self._nullable, self._first = False, False, True
        self.finished = False

    def push(self, text: str, last: bool) -> tuple[str, str]:
        """Reads text; returns its part of the object, and the incomplete end of the text."""
        output = ""
        while text and not self.finished:
            added, length = self._reading(text, last)
            output, text = output + added, text[length:]
            if not length:
                break
        return output, text

    def _between(self, text: str, last: bool) -> tuple[str, int]:
        if text.startswith(self._marks.end):
            self.finished = True
            return "{}" if self._first else "}", len(self._marks.end)
        begin = self._marks.beginning.match(text)
        if begin is None:
            return "", 0
        key = begin[1]
        schema, nullable = without_null(self._properties.get(key, {"type": "string"}))
        self._plain = is_text(schema, self._marks.after)
        self._nullable = nullable and self._plain
        before, self._first = ("{" if self._first else ", "), False
        self._reading = self._value
        opening = '"' if self._plain and not self._nullable else ""
        return f"{before}{json.dumps(key, ensure_ascii=False)}: {opening}", begin.end()

    def _value(self, text: str, last: bool) -> tuple[str, int]:
        begin, after = "", self._marks.after
        if self._nullable:
            null = f"null{after}"
            if not last and len(text) < len(null) and null.startswith(text):
                return "", 0
            self._nullable, self._plain = False, not text.startswith(null)
            begin = '"' if self._plain else ""
        at = text.find(after)
        end = at
        if at < 0:
            end = len(text) - (0 if last else overlap(text, after))
        content = json.dumps(text[:end], ensure_ascii=False)[1:-1] if self._plain else text[:end]
        if at < 0:
            return begin + content, end
        self._reading = self._between
        return begin + content + ('"' if self._plain else ""), at + len(after)
