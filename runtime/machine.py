"""This machine: what it is called, what a process may use of it, and what was found out on it and is remembered."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from specexport.contract.errors import UNREADABLE
from specexport.contract.folders import expanded, home

Found = TypeVar("Found")

_UNUSED = 30 * 24 * 3600
"""Seconds after which what was not used again is removed from the cache folder."""


def cache_folder() -> Path | None:
    """``$SPECEXPORT_CACHE``, or ``specexport`` in the user's cache folder; None without either, to keep nothing.

    Raises:
        BuildError: a variable names a home folder, and there is none.
    """
    own, caches = os.environ.get("SPECEXPORT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return expanded(own)
    if caches:
        return expanded(caches) / "specexport"
    return None if (user := home()) is None else user / ".cache" / "specexport"


def disable_telemetry() -> None:
    """Keeps onnxruntime, before it is imported, from sending its makers what it runs on.

    Without a home folder to keep a number for this machine in, it would print a warning too.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor, as Linux names it, elsewhere at least its architecture."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_features() -> str:
    """The instruction sets of the processor, as Linux lists them; empty elsewhere."""
    return _cpuinfo("flags") or _cpuinfo("Features")


def _cpuinfo(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field)
    return next(found, "")


def machine_key(about: Sequence[str]) -> str:
    """A name for what depends on these texts and on what this machine is."""
    return hashlib.sha256("\n".join((cpu_name(), cpu_features(), *about)).encode()).hexdigest()[:32]


def remove_unused(folder: Path, stamp: str = "") -> None:
    """Removes entries of a cache folder that were not used for long.

    Args:
        folder: has them.
        stamp: a file of each whose time says when it was last used; without it that of the entry itself.
    """
    for entry in folder.iterdir():
        file = entry / stamp
        used = (file if file.exists() else entry).stat().st_mtime
        if time.time() - used > _UNUSED:
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)


class Remembered(Generic[Found]):
    """What was found out about one thing on this machine, kept in a file of the cache folder.

    Where there is no folder, or it cannot be written, it is found out anew each time; a file that is damaged counts as
    none.

    Args:
        name: what kind of thing it is: a folder in the cache folder.
        about: all that it depends on; the file is named by a hash of it, and of what this machine is.
        kind: how it is stored, as JSON.
        limit: most bytes of the file; a larger one counts as damaged.
    """

    def __init__(self, name: str, about: Sequence[str], kind: type[Found], limit: int = 1 << 20) -> None:
        root = cache_folder()
        self._path = None if root is None else root / name / f"{machine_key(about)}.json"
        self._kind = kind
        self._limit = limit

    def load(self) -> Found | None:
        """What is remembered; None for nothing."""
        with contextlib.suppress(OSError, RuntimeError, *UNREADABLE):
            if self._path is not None and self._path.stat().st_size <= self._limit:
                return msgspec.json.decode(self._path.read_bytes(), type=self._kind)
        return None

    def save(self, found: Found) -> None:
        """Remembers it, instead of what was remembered."""
        if self._path is None:
            return
        with contextlib.suppress(OSError, RuntimeError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._path.parent, delete=False) as file:
                file.write(msgspec.json.encode(found))
            Path(file.name).replace(self._path)
