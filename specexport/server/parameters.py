"""Arguments that a model writes one by one between marks, ``<parameter=name>``, as Qwen3-Coder does; and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from specexport.contract.errors import RequestError
from specexport.server.schema import Function, quoted

END = "</function>"
_BEGIN = re.compile(r"<parameter=([^>\n]+)>\n")
_BEHIND = "\n</parameter>\n"
_KEY = re.compile(r"[^>\n]+")
_STATED = {"type", "enum", "const", "title", "description", "default", "examples"}
_WHOLE = ("$defs", "definitions")
"""What a schema's parts refer to."""
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "dependentSchemas")


def is_text(schema: Any) -> bool:
    """Whether a parameter's value is written as it is: any text, or some of a list; others are JSON."""
    if not isinstance(schema, dict) or not schema.keys() <= _STATED:
        return False
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    texts = isinstance(values, list) and all(isinstance(one, str) and _BEHIND not in one for one in values)
    return schema.get("type", "string" if values else None) == "string" and texts


def rules(name: str, tool: Function, options: dict[str, Any]) -> tuple[str, list[str]]:
    """A tool's parameters in llguidance's form of Lark: an expression, and the rules that it names.

    Args:
        name: what the names of rules begin with.
        tool: whose parameters.
        options: of JSON.

    Raises:
        RequestError: they cannot be written one by one.
    """
    schema = tool.parameters
    properties, required = schema.get("properties", {}), schema.get("required", [])
    wrong = next((key for key in _COMBINED if key in schema), None)
    keys = [*properties] if isinstance(properties, dict) else []
    if wrong is None and isinstance(required, list):
        wrong = next((key for key in [*keys, *required] if key not in keys or not _KEY.fullmatch(key)), None)
    if wrong is not None:
        raise RequestError(
            f"tools: the parameters of {tool.name} have {wrong!r}, and the model writes parameters one by one by their "
            "names; expected properties of an object with names of one line, without '>'",
            param="tools",
        )
    parts, made = [], []
    for at, (key, value) in enumerate(properties.items()):
        rule = f"{name}_{at}"
        optional = "" if key in required else "?"
        parts.append(f"{rule}{optional}")
        begin = quoted(f"<parameter={key}>\n")
        if not is_text(value):
            whole = options | {kind: schema[kind] for kind in _WHOLE if kind in schema}
            stated = json.dumps(whole | value if isinstance(value, dict) else value)
            made.append(f"{rule}: {begin} %json {stated} {quoted(_BEHIND)}")
        elif values := value.get("enum", [value["const"]] if "const" in value else []):
            made.append(f"{rule}: {begin} ({' | '.join(map(quoted, values))}) {quoted(_BEHIND)}")
        else:
            made += [f"{rule}: {begin} {rule}_text", f"{rule}_text[lazy]: /(.|\\n)*/ {quoted(_BEHIND)}"]
    return " ".join(parts), made


class ParameterReader:
    """Makes a JSON object of parameters as their text comes.

    Args:
        tool: whose they are; None of one that is not known, whose values are taken for texts.
    """

    def __init__(self, tool: Function | None) -> None:
        self._properties = {} if tool is None else tool.parameters.get("properties", {})
        self._reading: Callable[[str, bool], tuple[str, int]] = self._between
        self._plain, self._first = False, True
        self.done = False

    def push(self, text: str, last: bool) -> tuple[str, str]:
        """What a text adds to the object, and the end of the text that more is needed of."""
        said = ""
        while text and not self.done:
            added, taken = self._reading(text, last)
            said, text = said + added, text[taken:]
            if not taken:
                break
        return said, text

    def _between(self, text: str, last: bool) -> tuple[str, int]:
        if text.startswith(END):
            self.done = True
            return "{}" if self._first else "}", len(END)
        begin = _BEGIN.match(text)
        if begin is None:
            return "", 0
        key = begin[1]
        self._plain = is_text(self._properties.get(key, {"type": "string"}))
        before, self._first = ("{" if self._first else ", "), False
        self._reading = self._value
        return f"{before}{json.dumps(key, ensure_ascii=False)}: " + ('"' if self._plain else ""), begin.end()

    def _value(self, text: str, last: bool) -> tuple[str, int]:
        at = text.find(_BEHIND)
        end = at
        if at < 0:
            held = next((n for n in range(len(_BEHIND) - 1, 0, -1) if text.endswith(_BEHIND[:n])), 0)
            end = len(text) - (0 if last else held)
        said = json.dumps(text[:end], ensure_ascii=False)[1:-1] if self._plain else text[:end]
        if at < 0:
            return said, end
        self._reading = self._between
        return said + ('"' if self._plain else ""), at + len(_BEHIND)
