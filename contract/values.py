"""Values that callers pass: numbers and arrays of NumPy, torch and others, text, and functions that report progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from specexport.contract.errors import RequestError

Progress = Callable[[str, int, int], None]
"""Reports progress: called with the name of a step, the amount done and the total."""


class Array(Protocol):
    """An array of NumPy, torch or others."""

    def tolist(self) -> Any: ...


_SHOWN = 80
"""Most characters of a value in an error."""
_DEEPEST = 64
"""Most levels of nested lists and mappings in the value of an option."""


def plain(value: Any) -> Any:
    """A number or an array of NumPy or torch as Python's numbers and lists; anything else unchanged."""
    convert = getattr(value, "tolist", None)
    return convert() if callable(convert) and not isinstance(value, type) else value


def plain_deep(value: Any, deepest: int = _DEEPEST) -> Any:
    """Applies :func:`plain` to a value, and to the elements of lists and mappings; lists become tuples."""
    value = plain(value)
    if not isinstance(value, (list, tuple, Mapping)):
        return value
    if not deepest:
        raise ValueError("lists or mappings are nested too deeply")
    if isinstance(value, Mapping):
        return {plain(key): plain_deep(part, deepest - 1) for key, part in value.items()}
    return tuple(plain_deep(part, deepest - 1) for part in value)


def is_sequence(value: Any) -> bool:
    """Whether a plain value is a sequence other than text or bytes."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def token_ids(value: Any, name: str, param: str | None = None) -> list[int]:
    """Token ids from a sequence of whole numbers or an array, ``[N]`` or ``[1,N]``.

    Raises:
        RequestError: an element is not a whole number; names the first such element.
    """
    values = plain(value)
    if not is_sequence(values):
        raise RequestError(f"{name} is {shown(value)}; expected a list of token ids", param=param)
    ids = list(map(plain, values))
    if len(ids) == 1 and is_sequence(ids[0]):
        ids = list(map(plain, ids[0]))
    if ids and all(map(is_sequence, ids)):
        raise RequestError(f"{name} is {len(ids)} lists; expected one of token ids", param=param)
    for at, token in enumerate(ids):
        if type(token) is not int:
            raise RequestError(
                f"{name}: token {at} is {shown(token)}; expected a token id, a whole number", param=param
            )
    return ids


def require_text(text: str, name: str, param: str | None = None) -> None:
    """Refuses lone surrogates, which also stand for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # Python decodes invalid bytes as surrogates from U+DC80 on.
        wrong = f"the byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"U+{code:04X}, half of a character,"
        raise RequestError(
            f"{name}: {wrong} at position {error.start} is not UTF-8; send text in UTF-8", param=param
        ) from error


def counted(count: int, noun: str) -> str:
    """``1 graph`` or ``2 graphs``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def shown(value: object) -> str:
    """A value for an error, shortened if it is long."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} of too many inside each other"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
