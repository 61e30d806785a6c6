"""The exceptions that specexport raises. Messages state the wrong value, the expected one, and what to do."""

from __future__ import annotations

import re

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The exceptions that msgspec raises for invalid input."""
_TYPES = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "object": "an object",
    "str": "a text",
}
_FIELD = re.compile(r"Object (missing|contains).* field `(.*)`")
_EXPECTED = re.compile(r"Expected `([^`]*)`(.*?)(?:, got `([^`]*)`)?")
_LONGEST = 4000
"""Most characters of a message."""


def explained(error: Exception) -> str:
    """Describes one of :data:`UNREADABLE`: the field, its value's type, and the expected type."""
    what, _, place = str(error).partition(" - at ")
    place = place.removeprefix("key in ").strip("`$").removeprefix(".")
    if field := _FIELD.fullmatch(what):
        name = f"{place}.{field[2]}" if place else field[2]
        return f"{name} is {'missing' if field[1] == 'missing' else 'unknown'}"
    if types := _EXPECTED.fullmatch(what):
        what = f"expected {_words(types[1])}{types[2]}"
        return f"{place or 'it'} is {_words(types[3])}; {what}" if types[3] else f"{place or 'it'}: {what}"
    return f"{place}: {what}" if place else what


def _words(types: str) -> str:
    return " or ".join(_TYPES.get(name, name) for name in types.split(" | "))


class SpecExportError(Exception):
    """Base of every error raised on purpose; the command line prints its message without a stack trace.

    Messages may quote libraries and files, so they are reduced to one line of printable characters.

    Attributes:
        param: the wrong parameter; None if the error is about something else.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        line = " ".join(message.split())
        printable = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)
        super().__init__(printable if len(printable) <= _LONGEST else printable[:_LONGEST] + "…")
        self.param = param


class BundleError(SpecExportError):
    """A bundle is missing, incomplete, altered, too new, or contradicts its manifest."""


class BuildError(SpecExportError):
    """A checkpoint cannot be turned into a bundle, or the bundle cannot be written.

    Nearly every function of the exporter raises it; the message names the file, and the field or the tensor.
    """


class TrainError(SpecExportError):
    """A draft or heads cannot be trained: an option, the data or a checkpoint to resume from is wrong."""


class RequestError(SpecExportError, ValueError):
    """A generation request has a prompt or a parameter that cannot be honoured."""


class ContextLengthError(RequestError):
    """The prompt leaves the context no room for an output."""


class BackendError(SpecExportError):
    """An inference backend is missing or refused to run a graph."""


class QueueFullError(SpecExportError):
    """The queue is full.

    Attributes:
        retry_after: seconds after which a request may find room.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[type[QueueFullError], tuple[str, int]]:
        """Supports pickling, as between processes; by default the constructor would get the message alone."""
        return type(self), (str(self), self.retry_after)


class DeadlineError(SpecExportError):
    """A request exceeded its time limit."""


class ClosedError(SpecExportError):
    """A request was refused or ended because the engine is shutting down."""
