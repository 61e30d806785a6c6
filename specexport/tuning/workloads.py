"""Three workloads for measuring methods, from texts of every Python installation."""

from __future__ import annotations

import importlib
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from specexport.contract.errors import UNREADABLE, RequestError

_FILES = ("queue.py", "heapq.py", "shlex.py", "textwrap.py", "sched.py", "fnmatch.py", "bisect.py", "colorsys.py")
"""Files of Python's standard library."""
_TOPICS = ("objects", "typesmapping", "exceptions", "formatstrings", "naming", "yield", "class", "import")
"""Topics of Python's help texts (``pydoc_data.topics``), which are prose."""
_SKIPPED = 200
"""Tokens left out at a file's start, where licences and lists of names are."""
_COPIED = 48
"""Tokens of an edit's copy that are part of its prompt."""

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
    """Tasks of three workloads: ``completion`` continues code, ``edit`` copies code, and ``text`` continues prose.

    At most eight of each, with prompts of ``tokens`` tokens; those of edits also have the beginning of the copy.

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
        tasks.append(Task("edit", [*body, *body[:_COPIED]], body[_COPIED:]))
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    tasks += [Task("text", encode(topics[name])[:tokens]) for name in _TOPICS[:count]]
    return tasks


class Line(msgspec.Struct):
    """A line of a ``.jsonl``; other keys are ignored."""

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
        RequestError: a file is missing, or has an invalid line; names it.
    """
    tasks: list[Task] = []
    for path in files:
        for line in read_lines(path):
            if sum(task.workload == line.workload for task in tasks) < count:
                expected = encode(line.hypothesis) if line.hypothesis is not None else None
                tasks.append(Task(line.workload, encode(line.text)[-tokens:], expected))
    if not tasks:
        raise RequestError(f"{', '.join(map(str, files))}: no text; expected JSON lines with one each")
    return tasks
