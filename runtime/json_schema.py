"""JSON schemas in a form that llguidance follows exactly.

llguidance reads all numbers as doubles, ends the process at some of them, and knows neither look-ahead nor some
keywords.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from specexport.contract.values import shown

MAX_MULTIPLE = 100_000
"""Largest ``multipleOf``, but for powers of ten: preparing a mask takes time in proportion."""
WHITESPACE = r"[ ]|\n[ \t]{0,16}"
"""White space between JSON's tokens, unless the schema's ``x-guidance`` sets it; unbounded, it might never end."""
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,), "propertyNames": (True, {}, {"type": "string"}), "minContains": (0,),
    "dependencies": ({},), "dependentRequired": ({},), "dependentSchemas": ({},), "unevaluatedProperties": (True,),
    "unevaluatedItems": (True,),
}  # fmt: skip
"""Values of a schema's keywords that allow everything, which generators write and llguidance refuses."""
_FORMATS = frozenset({
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex",
    "unknown",
})  # fmt: skip
"""The formats of JSON Schema, and llguidance's; others, such as OpenAPI's ``password``, are notes to readers."""
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"const", "enum", "default", "examples", "required", "x-guidance"})
"""Keywords whose values are schemas by name, or no schemas."""
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_INT64 = 2**63 - 1
_LIMIT = 2**63 - 1024
"""The largest double below 2^63; llguidance takes no bounds beyond it."""
_DOUBLED = re.compile(r"\.\*(?P<letter>\\\W|\w)(?P=letter)")
_LETTER = re.compile(r"\\\W|\w|\[\^?[^\[\]\\]+\]")


def prepared(schema: Any) -> Any:
    """A schema without keywords that constrain nothing, numbers that doubles do not hold, and look-ahead.

    Raises:
        ValueError: it has a number that llguidance would change, or that takes it too long.
    """
    if isinstance(schema, list):
        return list(map(prepared, schema))
    if not isinstance(schema, dict):
        return schema
    if schema.get("not") == {}:  # zod's way to leave a value out
        return False
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if value in _WITHOUT_EFFECT.get(key, ()):
            continue
        if key == "format" and isinstance(value, str) and value not in _FORMATS:
            continue
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            value = {name: prepared(part) for name, part in value.items()}
        elif key in _BOUNDS:
            value = _bound(key, value)
        elif key in ("const", "enum"):
            _require_exact(key, value)
        elif key == "multipleOf":
            _require_quick(value)
        elif key not in _VALUES:
            value = prepared(value)
        result[key] = value
    if result.get("uniqueItems") is True and result.get("maxItems") in (0, 1):
        del result["uniqueItems"]
    pattern = result.get("pattern")
    if isinstance(pattern, str) and len(parts := _without_look_ahead(pattern)) > 1:
        result["pattern"], *others = parts
        more = result.get("allOf", [])
        result["allOf"] = [*(more if isinstance(more, list) else [more]), *({"pattern": other} for other in others)]
    return result


def bound_whitespace(schema: Any) -> Any:
    """A schema with a bound for white space, unless it sets one itself."""
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else None
    if not isinstance(options, dict) or not options.keys().isdisjoint({"whitespace_flexible", "whitespace_pattern"}):
        return schema
    return schema | {"x-guidance": {"whitespace_pattern": WHITESPACE, **options}}


def advice(reason: str) -> str:
    """What to do about an error of llguidance; empty if it says so itself."""
    if "Unimplemented keys" in reason:
        return '; leave them out, or have all such keys ignored by "x-guidance": {"lenient": true} in the schema'
    if "oneOf constraints" in reason:
        return '; write anyOf, or have oneOf read so by "x-guidance": {"coerce_one_of": true} in the schema'
    if "look-around" in reason:
        return "; only look-ahead at a pattern's start can be followed: (?=...), (?!x) and (?!.*xx) for a character x"
    return ""


def _bound(key: str, value: Any) -> Any:
    """A bound as a double, rounded towards the numbers that it allows; these lose at most a 2^53th."""
    lower = key in ("minimum", "exclusiveMinimum")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or -(2**53) <= value <= 2**53:
        return value
    if value == _INT64 and not lower:  # llguidance takes it as it is
        return value
    if value > _LIMIT if lower else value < -_LIMIT:
        raise ValueError(f"{key} is {shown(value)}; the numbers that it allows have too many digits to be followed")
    number = float(max(-_LIMIT, min(value, _LIMIT)))
    if lower and number < value:
        number = math.nextafter(number, math.inf)
    elif not lower and number > value:
        number = math.nextafter(number, -math.inf)
    return int(number)


def _require_exact(key: str, value: Any) -> None:
    """Refuses a number in constants that llguidance would write differently, or that ends the process."""
    if isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            _require_exact(key, part)
    elif isinstance(value, (int, float)) and value != _INT64:
        rounded = isinstance(value, int) and (abs(value) > _LIMIT or int(float(value)) != value)
        if rounded or value == -(2.0**63):
            raise ValueError(f"{key} has the number {shown(value)}, which a double does not hold; write it as a text")


def _require_quick(multiple: Any) -> None:
    """Refuses a ``multipleOf`` of many digits, whose masks would take seconds."""
    if isinstance(multiple, (int, float)):
        digits = Decimal(str(multiple)).normalize().as_tuple().digits
        if int("".join(map(str, digits))) > MAX_MULTIPLE:
            expected = f"at most {MAX_MULTIPLE}, perhaps times a power of ten"
            raise ValueError(f"multipleOf is {shown(multiple)}; expected {expected}")


def _without_look_ahead(pattern: str) -> list[str]:
    """Patterns that a text matches together if it matches ``pattern``; that alone if its look-ahead is of other kinds.

    Generators write look-ahead at the start: for passwords, and for e-mail addresses (zod).
    """
    rest, others = pattern.removeprefix("^"), list[str]()
    while pattern.startswith("^") and rest.startswith(("(?=", "(?!")):
        end = next((at for at, letter, depth in _letters(rest) if (letter, depth) == (")", 0)), None)
        if end is None:
            return [pattern]
        kind, inner, rest = rest[:3], rest[3:end], rest[end + 1 :]
        if kind == "(?=":
            others.append(f"^(?:{inner})" if _has_alternatives(inner) else f"^{inner}")
        elif _LETTER.fullmatch(inner):
            others.append(rf"^(?:{_not(inner)}[\s\S]*)?$")
        elif match := _DOUBLED.fullmatch(inner):
            letter = match["letter"]
            other = rf"[^{letter}\n]"
            others.append(rf"^(?:{other}|{letter}{other})*{letter}?(?:\n[\s\S]*)?$")
        else:
            return [pattern]
    return [pattern] if _has_alternatives(rest) else [f"^{rest}", *others]


def _not(letter: str) -> str:
    """A class of all other characters than those of one."""
    if letter.startswith("[^"):
        return f"[{letter[2:]}"
    return f"[^{letter[1:]}" if letter.startswith("[") else f"[^{letter}]"


def _has_alternatives(pattern: str) -> bool:
    return any((letter, depth) == ("|", 0) for _, letter, depth in _letters(pattern))


def _letters(pattern: str) -> Iterator[tuple[int, str, int]]:
    """The index, character and depth of parentheses outside of classes; an outermost one has depth 0."""
    depth, in_class, escaped = 0, False, False
    for at, letter in enumerate(pattern):
        if escaped or letter == "\\":
            escaped = not escaped
        elif in_class:
            in_class = letter != "]"
        elif letter == "[":
            in_class = True
        else:
            depth -= letter == ")"
            yield at, letter, depth
            depth += letter == "("
