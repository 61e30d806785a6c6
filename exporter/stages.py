"""Stages of a build, each recorded when it is whole, so that a build that was killed goes on after them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from specexport.contract.errors import UNREADABLE
from specexport.contract.manifest import FileEntry
from specexport.contract.methods import decode_hook
from specexport.contract.model import Strict
from specexport.contract.reading import file_entry

RECORDS = ".stages"
"""The folder of records, while a bundle is being written."""
Made = TypeVar("Made")


class _Record(Strict, frozen=True):
    """What a stage wrote and found out."""

    built_with: dict[str, str]
    files: tuple[FileEntry, ...]
    made: msgspec.Raw


class Stages:
    """Runs the stages of a build, but for those that an earlier build of the same inputs finished in the same folder.

    A stage writes into the folder of its name and nowhere else. Its record comes last, and holds the hash of every
    file: what is cut short, altered or beside it is not trusted, and the stage runs again.

    Args:
        folder: where the bundle is written.
        built_with: versions of libraries; what others made is made again.

    Attributes:
        files: entries of the files of all stages so far.
    """

    def __init__(self, folder: Path, built_with: dict[str, str]) -> None:
        self._folder = folder
        self._records = folder / RECORDS
        self._built_with = built_with
        self.files: list[FileEntry] = []
        kept = {RECORDS, *(record.stem for record in self._records.glob("*.json"))}
        for path in folder.iterdir():
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._records.mkdir(exist_ok=True)

    def run(self, name: str, kind: type[Made], make: Callable[[], Made]) -> Made:
        """What a stage returns, from its record or by running it."""
        path = self._records / f"{name}.json"
        record = self._whole(path, name)
        if record is None:
            path.unlink(missing_ok=True)
            shutil.rmtree(self._folder / name, ignore_errors=True)
            made = make()
            files = tuple(file_entry(self._folder, file) for file in self._in(name))
            record = _Record(built_with=self._built_with, files=files, made=msgspec.Raw(msgspec.json.encode(made)))
            beside = path.with_suffix(".part")
            beside.write_bytes(msgspec.json.encode(record))
            beside.replace(path)
        self.files += record.files
        # The same road for what was made now and what was read, so that both are the same.
        return msgspec.json.decode(record.made, type=kind, dec_hook=decode_hook)

    def _whole(self, path: Path, name: str) -> _Record | None:
        """The record of a stage, if all it wrote is there as it was written."""
        try:
            record = msgspec.json.decode(path.read_bytes(), type=_Record)
        except (OSError, *UNREADABLE):
            return None
        if record.built_with != self._built_with or [entry.path for entry in record.files] != self._in(name):
            return None
        return record if all(file_entry(self._folder, entry.path) == entry for entry in record.files) else None

    def _in(self, name: str) -> list[str]:
        files = sorted(path for path in (self._folder / name).rglob("*") if path.is_file())
        return [path.relative_to(self._folder).as_posix() for path in files]

    def close(self) -> None:
        """Removes the records: the bundle is whole."""
        shutil.rmtree(self._records)
