"""Reuse of earlier builds: a fingerprint of the exporter, and records of finished stages. Imports nothing heavy."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from specexport.contract.errors import UNREADABLE
from specexport.contract.folders import write_file
from specexport.contract.manifest import FileEntry
from specexport.contract.methods import decode_hook
from specexport.contract.reading import file_entry
from specexport.contract.shapes import Strict

PACKAGES = ("contract", "graphs", "exporter", "methods")
"""Packages whose code determines the content of a bundle."""
LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "onnx-ir")
"""Libraries that trace and rewrite graphs."""
RECORDS = ".stages"
"""The folder of records while a bundle is being written."""
Result = TypeVar("Result")


@functools.cache
def fingerprint() -> str:
    """A hexadecimal SHA-256 of the exporter's source files and texts, and of its libraries' versions."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for folder in _folders(package):
            for file in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".txt", ".json")):
                content = hashlib.sha256(file.read_bytes()).hexdigest()
                digest.update(f"{package}/{file.relative_to(folder).as_posix()} {content}\n".encode())
    for library in LIBRARIES:
        digest.update(f"{library} {_version(library)}\n".encode())
    return digest.hexdigest()


def _folders(package: str) -> list[Path]:
    spec = importlib.util.find_spec(f"specexport.{package}")  # finds the package without importing it
    return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec is not None else []


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


class _Record(Strict, frozen=True):
    """The files of a stage, and its result as JSON."""

    files: tuple[FileEntry, ...]
    result: msgspec.Raw


class Records:
    """Runs stages, except those that an earlier build with the same inputs finished in the same folder.

    The files of a recorded stage begin with its name. Its record is written last, with the hash of every file: a stage
    runs again if files are missing, altered or not in the record, or if a stage before it ran again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records = folder / RECORDS
        self._ran = False
        self.files: list[FileEntry] = []
        kept = {record.stem for record in self._records.glob("*.json")}
        for path in folder.iterdir():
            if path.name.partition(".")[0] not in kept and path.name != RECORDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._records.mkdir(exist_ok=True)

    def run(self, name: str, kind: type[Result], stage: Callable[[], Result]) -> Result:
        """The result of a stage, from its record or by running it."""
        path = self._records / f"{name}.json"
        record = None if self._ran else self._valid(path, name)
        if record is None:
            self._ran = True
            path.unlink(missing_ok=True)
            for file in self._files(name):
                (self._folder / file).unlink()
            result = msgspec.Raw(msgspec.json.encode(stage()))
            files = tuple(file_entry(self._folder, file) for file in self._files(name))
            record = _Record(files=files, result=result)
            write_file(path, msgspec.json.encode(record))
        self.files += record.files
        # New results are decoded too, so that they equal recorded results.
        return msgspec.json.decode(record.result, type=kind, dec_hook=decode_hook)

    def _valid(self, path: Path, name: str) -> _Record | None:
        """The record of a stage, if none of its files has changed."""
        try:
            record = msgspec.json.decode(path.read_bytes(), type=_Record)
        except (OSError, *UNREADABLE):
            return None
        same_files = [entry.path for entry in record.files] == self._files(name)
        return record if same_files and all(file_entry(self._folder, e.path) == e for e in record.files) else None

    def _files(self, name: str) -> list[str]:
        return sorted(path.name for path in self._folder.glob(f"{name}.*"))

    def close(self) -> None:
        """Removes the records: the bundle is complete."""
        shutil.rmtree(self._records)
