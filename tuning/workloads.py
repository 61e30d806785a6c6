"""Three kinds of text to measure methods on, made of what every Python installation holds."""

from __future__ import annotations

import importlib
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from specexport.contract.errors import UNREADABLE, RequestError

_FILES = ("queue.py", "heapq.py", "shlex.py", "textwrap.py", "sched.py", "fnmatch.py", "bisect.py", "colorsys.py")
"""Of Python's standard library."""
_TOPICS = ("objects", "typesmapping", "exceptions", "formatstrings", "naming", "yield", "class", "import")
"""Of Python's own help texts (``pydoc_data.topics``), which are prose."""
_SKIPPED = 200
"""Tokens left out at a file's start, where licences and lists of names are."""
_BEGUN = 48
"""Tokens of the copy that an edit has begun with."""

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Task:
    """One request of a workload.

    Attributes:
        workload: its name.
        prompt: tokens.
        hypothesis: the expected output, for methods that read it; None if unknown.
    """

    workload: str
    prompt: list[int]
    hypothesis: list[int] | None = None


def built_in(encode: Encode, count: int, tokens: int) -> list[Task]:
    """Tasks of three workloads: ``completion`` goes on with code, ``edit`` writes again what it was given, and ``text``
    goes on with prose.

    At most eight of each, with so many tokens of prompt; edits hold as much again for the copy that has begun.

    Raises:
        RequestError: Python was installed without its sources.
    """
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    tasks: list[Task] = []
    for name in _FILES[:count]:
        try:
            code = encode((stdlib / name).read_text(encoding="utf-8"))[_SKIPPED:]
        except OSError as error:
            raise RequestError(
                f"{stdlib / name}: {error}; this Python has no sources to measure on, pass --data"
            ) from error
        tasks.append(Task("completion", code[:tokens]))
        body = code[:tokens]
        tasks.append(Task("edit", [*body, *body[:_BEGUN]], body[_BEGUN:]))
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    tasks += [Task("text", encode(topics[name])[:tokens]) for name in _TOPICS[:count]]
    return tasks


class Line(msgspec.Struct):
    """A line of a ``.jsonl``; other keys are left alone."""

    text: str
    workload: str = "data"
    hypothesis: str | None = None


def read_lines(path: Path) -> Iterator[Line]:
    """The objects of JSON lines, without empty lines.

    Raises:
        RequestError: the file is missing, or has a line without a text; names it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: {error}; expected a file of JSON lines") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield msgspec.json.decode(line.encode(), type=Line)
            except UNREADABLE as error:
                raise RequestError(f"{path}: line {number}: {error}; expected an object with a text") from error


def read(encode: Encode, files: Sequence[Path], count: int, tokens: int) -> list[Task]:
    """Tasks from JSON lines: objects with a ``text``, and perhaps a ``workload`` and a ``hypothesis``.

    Raises:
        RequestError: a file is missing, or has a line that is none of these; names it.
    """
    tasks: list[Task] = []
    for path in files:
        for found in read_lines(path):
            if sum(task.workload == found.workload for task in tasks) < count:
                expected = encode(found.hypothesis) if found.hypothesis is not None else None
                tasks.append(Task(found.workload, encode(found.text)[-tokens:], expected))
    if not tasks:
        raise RequestError(f"{', '.join(map(str, files))}: no text; expected JSON lines with one each")
    return tasks
