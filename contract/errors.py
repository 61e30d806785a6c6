"""The exceptions specexport raises. Each message says what was found, what was expected and what to do."""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises of bytes from outside that are not what was expected."""
_LONGEST = 4000


class SpecExportError(Exception):
    """Base of every error raised on purpose; the command line prints its message without a stack trace.

    Messages quote libraries and files from outside: whatever these say, a message is one line of what can be printed.
    """

    def __init__(self, message: str = "") -> None:
        line = " ".join(message.split())
        printable = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)
        super().__init__(printable if len(printable) <= _LONGEST else printable[:_LONGEST] + "…")


class BundleError(SpecExportError):
    """A bundle is missing, incomplete, altered, too new, or not what its manifest says."""


class BuildError(SpecExportError):
    """A checkpoint cannot be turned into a bundle, or what is made of it cannot be written."""


class TrainError(SpecExportError):
    """A draft or heads cannot be trained: an option, the data or a checkpoint to go on from is wrong."""


class RequestError(SpecExportError, ValueError):
    """A generation request has a parameter, or a prompt, that cannot be honoured.

    Attributes:
        param: the parameter that is wrong, if one is.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """The prompt leaves the context no room for an output."""


class BackendError(SpecExportError):
    """An inference backend is missing or refused to run a graph."""


class QueueFullError(SpecExportError):
    """More requests wait than may.

    Attributes:
        retry_after: seconds after which there may be a place.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineError(SpecExportError):
    """A request was not done when its time was up."""


class ClosedError(SpecExportError):
    """An engine that shuts down takes no request, or ended one."""
