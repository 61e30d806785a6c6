"""This machine: its processor, the cores that a process may use, and the cache folder with records about it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from specexport.contract.errors import UNREADABLE
from specexport.contract.folders import expanded, home, remove, write_file

Record = TypeVar("Record")

_GROUPS = Path("/proc/self/cgroup")
_QUOTAS = {
    "": (Path("/sys/fs/cgroup"), ("cpu.max",)),
    "cpu": (Path("/sys/fs/cgroup/cpu"), ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
}
"""Linux's control groups by their controller, which version 2 does not name: the folder of all groups, and the files in
each with its microseconds of processor time a period, and the period."""
_UNUSED = 30 * 24 * 3600
"""Seconds after which unused entries are removed from the cache folder."""


def cache_folder() -> Path | None:
    """``$SPECEXPORT_CACHE``, or ``specexport`` in the user's cache folder; None without either: nothing is cached.

    Raises:
        BuildError: a variable contains ``~``, and there is no home folder.
    """
    folder, caches = os.environ.get("SPECEXPORT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if folder:
        return expanded(folder)
    if caches:
        return expanded(caches) / "specexport"
    return None if (user := home()) is None else user / ".cache" / "specexport"


def disable_telemetry() -> None:
    """Disables onnxruntime's telemetry; call it before onnxruntime is imported.

    Telemetry would also print a warning if there is no home folder for its machine id.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def available_cores() -> int:
    """Cores that this process may use; with a quota of processor time, as many as the quota is worth."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *(max(1, int(quota)) for quota in _quotas())])


def _quotas() -> Iterator[float]:
    """The quotas of this process's control groups and of those above them, in cores."""
    try:
        lines = _GROUPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in _QUOTAS.keys() & controllers.split(","):
            root, files = _QUOTAS[controller]
            group = Path(path.lstrip("/"))
            for folder in (group, *group.parents):  # in a container the first may be paths of its host
                with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
                    texts = [(root / folder / file).read_text(encoding="ascii") for file in files]
                    quota, period = map(int, " ".join(texts).split())
                    if quota > 0:
                        yield quota / period


def cpu_name() -> str:
    """The processor's name on Linux; elsewhere at least its architecture."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_features() -> str:
    """The processor's instruction sets, as Linux lists them; empty elsewhere."""
    return _cpuinfo("flags") or _cpuinfo("Features")


@functools.cache
def _cpuinfo(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    values = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field)
    return next(values, "")


def machine_key(about: Sequence[str]) -> str:
    """A file name for a result that depends on these texts and this machine."""
    return hashlib.sha256("\n".join((cpu_name(), cpu_features(), *about)).encode()).hexdigest()[:32]


def remove_unused(entries: Iterable[Path], stamp: str = "", seconds: float = _UNUSED) -> None:
    """Removes entries of a cache folder that have not been used for ``seconds``.

    The time of an entry, or of its file ``stamp`` if it has one, is that of its last use.
    """
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):  # another process removes it too
            file = entry / stamp
            used = (file if file.exists() else entry).stat().st_mtime
            if time.time() - used > seconds:
                remove(entry)


class MachineRecord(Generic[Record]):
    """A result that holds for this machine, stored in the cache folder.

    Nothing is stored if there is no such folder or it is not writable; a damaged file counts as missing.

    Args:
        name: the kind of result, a folder in the cache folder.
        about: everything that the result depends on; its file is named by a hash of this and of the machine.
        kind: its type, stored as JSON.
        limit: most bytes of the file; a larger file counts as damaged.
    """

    def __init__(self, name: str, about: Sequence[str], kind: type[Record], limit: int = 1 << 20) -> None:
        root = cache_folder()
        self._path = None if root is None else root / name / f"{machine_key(about)}.json"
        self._kind = kind
        self._limit = limit

    def load(self) -> Record | None:
        """The stored result; None if there is none."""
        with contextlib.suppress(OSError, RuntimeError, *UNREADABLE):
            if self._path is not None and self._path.stat().st_size <= self._limit:
                return msgspec.json.decode(self._path.read_bytes(), type=self._kind)
        return None

    def save(self, record: Record) -> None:
        if self._path is None:
            return
        with contextlib.suppress(OSError, RuntimeError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._path, msgspec.json.encode(record))
