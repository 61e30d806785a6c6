"""Harm done to valid inputs: bytes that flip, files that end early, JSON of other types, sizes and depths."""

import json
from typing import Any

from hypothesis import strategies as st

Edit = tuple[int, int, int]
"""What is done, where, and with what; each number counts modulo the choices there are."""

edits = st.lists(
    st.tuples(st.integers(0, 255), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), min_size=1, max_size=5
)

_DEEP = 2000
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 64, 4097, 10**9, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 10**30),
    *(0.5, -0.0, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", "x", "0", "a\nb\x1b[31m\0", "../x", "/etc/passwd", "C:\\x", "\ud800", "e" * 100_000),
    *([], {}, [[]], [0] * 5000, "deep list", "deep object"),
)


def harmed_bytes(raw: bytes, done: list[Edit]) -> bytes:
    """Bytes after each of some edits."""
    for kind, where, value in done:
        at = where % (len(raw) + 1)
        size = 1 + value % 64
        match kind % 8:
            case 0:
                raw = raw[:at] + bytes([raw[at] ^ (1 << value % 8)]) + raw[at + 1 :] if at < len(raw) else raw
            case 1:
                raw = raw[:at] + bytes([value % 256]) + raw[at + 1 :]
            case 2:
                raw = raw[:at]
            case 3:
                raw = raw[:at] + raw[at + size :]
            case 4:
                raw = raw[:at] + raw[at : at + size] + raw[at:]
            case 5:
                raw = raw[:at] + b"\xff" * (value % 12) + raw[at + value % 12 :]
            case 6:
                raw = raw[:at] + (1 << value % 64).to_bytes(8, "little") + raw[at + 8 :]
            case _:
                other = value % (len(raw) + 1)
                raw = raw[:at] + raw[other : other + size] + raw[at + size :]
    return raw


def harmed_json(document: Any, done: list[Edit]) -> bytes:
    """A JSON document after each of some edits; the last may leave something that is no JSON."""
    document = json.loads(json.dumps(document))
    doubled = ""
    raw: list[Edit] = []
    for edit in done:
        kind, where, value = edit
        if kind >= 245:
            raw.append(edit)
            continue
        nodes = list(_places(document))
        if not nodes:
            break
        holder, key = nodes[where % len(nodes)]
        match kind % 8:
            case 0 | 1:
                holder[key] = _value(value)
            case 2:
                del holder[key]
            case 3:
                _twice(holder, key)
            case 4:
                other, name = nodes[value % len(nodes)]
                holder[key], other[name] = json.loads(json.dumps([other[name], holder[key]]))
            case 5:
                holder[key] = [holder[key]] if value % 2 else {"a": holder[key]}
            case 6 if isinstance(holder[key], int | float):
                number = holder[key]
                holder[key] = (number + 1, number - 1, number * 2, -number, float(number), str(number))[value % 6]
            case 6:
                holder[key] = _value(value)
            case _:
                doubled = f"{json.dumps(str(key))}: {json.dumps(_value(value))}, "
    text = _deepened(json.dumps(document))
    if doubled and text.startswith("{"):
        text = "{" + doubled + text[1:]
    return harmed_bytes(text.encode("utf-8", "surrogatepass"), raw)


def _value(choice: int) -> Any:
    return json.loads(json.dumps(_VALUES[choice % len(_VALUES)]))


def _deepened(text: str) -> str:
    text = text.replace('"deep list"', "[" * _DEEP + "]" * _DEEP)
    return text.replace('"deep object"', '{"a": ' * _DEEP + "1" + "}" * _DEEP)


def _twice(holder: Any, key: Any) -> None:
    copied = json.loads(json.dumps(holder[key]))
    if isinstance(holder, list):
        holder.insert(key, copied)
    else:
        holder[f"{key}_"] = copied


def _places(value: Any) -> Any:
    """Every value inside a document: what holds it, and its key there."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(inner):
        yield value, key
        yield from _places(child)
