"""Tool arguments in notations like JSON: Gemma 4's, with a mark around texts and bare keys, and LFM2's Python."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specexport.contract.errors import RequestError
from specexport.server.request_parts import Function, quote
from specexport.server.tool_arguments import COMBINED, DEFINITIONS, without_null

_KEY = r"[^\W\d][\w-]*"
_UNCONSTRAINED = {"title", "description", "default", "examples"}
"""Keys of a schema that constrain nothing."""
_JSON = {"True": "true", "False": "false", "None": "null", "(": "{", ")": "}", "=": ": ", ":": ": ", ",": ", "}


@dataclass(frozen=True)
class Notation:
    """How a model writes arguments.

    Attributes:
        brackets: around all of them.
        pairs: texts between a key and its value: of arguments, and in objects inside of values.
        separator: between arguments, items and members.
        mark: around texts, and nowhere in them; empty if texts and keys of objects are quoted as in Python.
        words: true, false and null.
        alphabetical: whether arguments and members are in alphabetical order, as in the model's template.
    """

    brackets: str
    pairs: tuple[str, str]
    separator: str
    mark: str
    words: tuple[str, str, str]
    alphabetical: bool = False

    def head(self, begin: str, pattern: str) -> str:
        """The regular expression of a call up to its arguments, from the one that names the function."""
        return f"{pattern}(?={re.escape(self.brackets[0])})"

    def rules(self, name: str, tool: Function, options: dict[str, Any]) -> tuple[str, list[str]]:
        """See :meth:`Marks.rules`."""
        grammar = _Grammar(self, name, tool, options)
        return grammar.arguments(), grammar.rules

    def reader(self, tool: Function | None) -> NotationReader:
        """A reader of a call's arguments."""
        return NotationReader(self)

    def literal(self, value: Any) -> str:
        """A value in this notation."""
        if value is None or isinstance(value, bool):
            return self.words[2 if value is None else 1 - value]
        if isinstance(value, list):
            return f"[{self.separator.join(map(self.literal, value))}]"
        if isinstance(value, dict):
            members = (f"{self.key(key)}{self.pairs[1]}{self.literal(item)}" for key, item in value.items())
            return f"{{{self.separator.join(members)}}}"
        if isinstance(value, str) and self.mark:
            return f"{self.mark}{value}{self.mark}"
        return json.dumps(value, ensure_ascii=False)

    def arguments(self, values: Mapping[str, Any]) -> str:
        """All arguments of a call."""
        members = (f"{key}{self.pairs[0]}{self.literal(value)}" for key, value in values.items())
        return f"{self.brackets[0]}{self.separator.join(members)}{self.brackets[1]}"

    def key(self, key: str) -> str:
        """A key of an object inside of a value."""
        return key if self.mark else json.dumps(key, ensure_ascii=False)


GEMMA = Notation("{}", (":", ":"), ",", '<|"|>', ("true", "false", "null"), alphabetical=True)
PYTHON = Notation("()", ("=", ": "), ", ", "", ("True", "False", "None"))


class _Grammar:
    """The grammar of a tool's arguments; values with schemas that the notation cannot express are written as JSON."""

    def __init__(self, notation: Notation, name: str, tool: Function, options: dict[str, Any]) -> None:
        self._notation, self._name, self._tool = notation, name, tool
        definitions = {kind: tool.parameters[kind] for kind in DEFINITIONS if kind in tool.parameters}
        self._options = options | definitions
        self._parts = {f"#/{kind}/{key}": part for kind, parts in definitions.items() for key, part in parts.items()}
        self._references: dict[str, str] = {}
        self._text = f"(/'([^'\\\\\\n]|\\\\['\"\\\\nrt])*'/ | %json {json.dumps({'type': 'string'})})"
        self.rules: list[str] = []
        if notation.mark:
            self._text = f"{quote(notation.mark)} {name}_text"
            self.rules = [f"{name}_text[lazy]: /(.|\\n)*/ {quote(notation.mark)}"]

    def arguments(self) -> str:
        """The expression of all arguments."""
        schema = self._tool.parameters
        properties, required = schema.get("properties", {}), schema.get("required", [])
        wrong = next((key for key in COMBINED if key in schema), None)
        if wrong is None and not self._named(properties, required):
            wrong = next((key for key in [*properties, *required] if key not in properties or not _bare(key)), None)
        if wrong is not None:
            raise RequestError(
                f"tools: the parameters of {self._tool.name} have {wrong!r}, and the model writes parameters by their "
                "names; expected properties of an object with names of letters, digits, '_' and '-'",
                param="tools",
            )
        keys = {key: key for key in properties}
        return self._members(keys, properties, required, self._notation.brackets, self._notation.pairs[0])

    def _named(self, properties: Any, required: Any) -> bool:
        known = isinstance(properties, dict) and isinstance(required, list) and properties.keys() >= {*required}
        return known and all(map(_bare, properties))

    def _members(
        self, keys: dict[str, str], properties: dict[str, Any], required: Sequence[str], brackets: str, pair: str
    ) -> str:
        """The members of an object in order, by their keys as they are written."""
        first = rest = ""
        order = sorted(properties, key=str.lower) if self._notation.alphabetical else [*properties]
        for name in reversed(order):
            member = self._rule(f"{quote(keys[name] + pair)} {self._value(properties[name])}")
            needed = name in required
            first = f"{member} {rest}" if needed else f"({member} {rest} | {first})" if first else f"({member} {rest})?"
            rest = self._rule(f"({quote(self._notation.separator)} {member}){'' if needed else '?'} {rest}")
        return f"{quote(brackets[0])} {first} {quote(brackets[1])}"

    def _rule(self, body: str) -> str:
        name = f"{self._name}_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _value(self, schema: Any) -> str:
        narrowed, nullable = without_null(schema)
        body = self._plain(narrowed)
        return f"({body} | {quote(self._notation.words[2])})" if nullable else body

    def _plain(self, schema: Any) -> str:
        notation = self._notation
        keys = schema.keys() - _UNCONSTRAINED if isinstance(schema, dict) else {""}
        kind = schema.get("type") if "type" in keys else None
        values = schema.get("enum", [schema.get("const")]) if keys & {"enum", "const"} else None
        if keys <= {"type", "enum", "const"} and isinstance(values, list) and values:
            written = list(map(notation.literal, values))
            if not notation.mark or all(text.count(notation.mark) in (0, 2) for text in written):
                return f"({' | '.join(map(quote, written))})"
        if keys == {"type"} and kind == "string":
            return self._text
        if keys == {"type"} and kind == "boolean":
            return f"({quote(notation.words[0])} | {quote(notation.words[1])})"
        if keys == {"type", "items"} and kind == "array":
            item = self._rule(self._value(schema["items"]))
            return f'"[" ({item} ({quote(notation.separator)} {item})*)? "]"'
        if kind == "object" and {"properties"} < keys <= {"type", "properties", "required", "additionalProperties"}:
            properties, required = schema["properties"], schema.get("required", [])
            if self._named(properties, required):
                written_keys = {key: notation.key(key) for key in properties}
                return self._members(written_keys, properties, required, "{}", notation.pairs[1])
        if keys == {"$ref"} and schema["$ref"] in self._parts:
            reference = schema["$ref"]
            if reference not in self._references:
                self._references[reference] = f"{self._name}_part_{len(self._references)}"
                self.rules.append(f"{self._references[reference]}: {self._value(self._parts[reference])}")
            return self._references[reference]
        return f"%json {json.dumps(self._options | schema if isinstance(schema, dict) else schema)}"


def _bare(key: str) -> bool:
    return re.fullmatch(_KEY, key) is not None


class NotationReader:
    """Converts streamed arguments to a JSON object; a text is converted when it is complete."""

    def __init__(self, notation: Notation) -> None:
        self._mark = notation.mark
        mark = rf"{re.escape(self._mark)}(?P<text>(?:.|\n)*?){re.escape(self._mark)}|" if self._mark else ""
        quoted = r"""(?P<quoted>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
        self._part = re.compile(rf"{mark}{quoted}|(?P<key>{_KEY})(?=[:=])|(?P<word>[\w.+-]+)|[][{{}}():=,]|\s+")
        self._depth = 0
        self.finished = False

    def push(self, text: str, last: bool) -> tuple[str, str]:
        """Reads text; returns its part of the object, and the incomplete end of the text."""
        output = ""
        while not self.finished and (part := self._part.match(text)) is not None:
            if part["word"] is not None and part.end() == len(text) and not last:
                break
            output, text = output + self._json(part), text[part.end() :]
            self._depth += (part[0] in tuple("({[")) - (part[0] in tuple(")}]"))
            self.finished = self._depth == 0
        if last and not self.finished and text:  # the beginning of a text
            begun = text.removeprefix(self._mark) if self._mark and text.startswith(self._mark) else None
            output, text = output + (text if begun is None else json.dumps(begun, ensure_ascii=False)[:-1]), ""
        return output, text

    def _json(self, part: re.Match[str]) -> str:
        groups, whole = part.groupdict(), part[0]
        if groups.get("text") is not None:
            return json.dumps(part["text"], ensure_ascii=False)
        if groups["key"] is not None:
            return json.dumps(whole, ensure_ascii=False)
        if groups["quoted"] is not None:
            return json.dumps(ast.literal_eval(whole), ensure_ascii=False) if whole[0] == "'" else whole
        return _JSON.get(whole, whole.strip())
