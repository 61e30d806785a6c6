"""Opened bundles: a checked manifest, the folder that it describes, and the tokenizer."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from specexport.contract.errors import BundleError
from specexport.contract.folders import expanded
from specexport.contract.manifest import Manifest
from specexport.contract.reading import check_files, read_manifest
from specexport.runtime.chat import ChatTemplate
from specexport.runtime.machine import MachineRecord
from specexport.runtime.text import decoder_fault

_TIMESTAMP_RESOLUTION = 2.0
"""Seconds within which a second change of a file may leave its time stamps unchanged."""


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: str | Path, *, check_hashes: bool = True) -> Bundle:
        """Reads the manifest and checks every file that it lists.

        Raises:
            BundleError: names the file that is missing, altered, outside the bundle or too new.
        """
        path = expanded(folder, BundleError)
        try:
            str(path).encode()
        except UnicodeEncodeError as error:
            raise BundleError(f"{path}: the folder's name is not UTF-8; rename it") from error
        manifest = read_manifest(path)
        check_bundle(path, manifest, hashes=check_hashes)
        return cls(path, manifest)

    @property
    def files_hash(self) -> str:
        """A hash of the bundle's content."""
        return hashlib.sha256(msgspec.json.encode(self.manifest.files)).hexdigest()

    def file(self, name: str) -> Path:
        """The path of a file that the manifest names."""
        return self.folder / name

    def tokenizer(self, name: str | None = None, *, split_special_tokens: bool | None = None) -> Tokenizer:
        """Loads the tokenizer, or another one that the manifest names; it neither truncates nor pads texts.

        ``split_special_tokens`` says whether special tokens in a text are encoded as plain text; None for the target's
        setting.

        Raises:
            BundleError: the file is not a tokenizer.
        """
        path = self.file(name or self.manifest.tokenizer.file)
        try:
            loaded: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise BundleError(f"{path}: not a tokenizer: {error}; build the bundle again") from error
        if fault := decoder_fault(loaded):
            raise BundleError(f"{path}: {fault} there")
        loaded.no_truncation()
        loaded.no_padding()
        default = self.manifest.tokenizer.split_special_tokens
        loaded.encode_special_tokens = default if split_special_tokens is None else split_special_tokens
        return loaded

    def chat_template(self) -> ChatTemplate | None:
        """The model's chat templates; None if it has none."""
        info = self.manifest.tokenizer
        sources = {name: _text(self.file(file)) for name, file in info.templates.items()}
        return ChatTemplate(sources, info.special_tokens) if sources else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BundleError(f"{path}: not text: {error}; build the bundle again") from error


def check_bundle(folder: Path, manifest: Manifest, *, hashes: bool) -> None:
    """Checks a bundle's files, see :func:`~specexport.contract.reading.check_files`, but hashes them only once.

    Files whose hashes were right and that have not changed since are not hashed again on this machine: their device,
    inode, size and time stamps are stored in the cache folder.
    """
    check_files(folder, manifest, hashes=False)
    if not hashes:
        return
    stats = [(entry.sha256, (folder / entry.path).stat()) for entry in manifest.files]
    stamps = [f"{sha256} {s.st_dev} {s.st_ino} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}" for sha256, s in stats]
    checked = MachineRecord("checked", stamps, bool)
    if checked.load():
        return
    check_files(folder, manifest, hashes=True)
    if time.time() - max((s.st_ctime for _, s in stats), default=0) > _TIMESTAMP_RESOLUTION:
        checked.save(True)
