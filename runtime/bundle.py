"""Opened bundles: a checked manifest, the folder that it describes, and the tokenizer.

Also opens graphs whose weights are symbolic links, as in the Hugging Face cache. For graphs with loops onnxruntime runs
onnx's checker, which refuses links; their targets were checked when the bundle was opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

        Args:
            name: the file; None for the target's.
            split_special_tokens: whether special tokens in a text are encoded as plain text; None for the target's
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


@contextlib.contextmanager
def without_links(path: Path, weights: Sequence[Path]) -> Iterator[Path]:
    """Yields a graph without links for onnx's checker: the graph, or a copy beside sparse files.

    The checker does not read the weights, so sparse files of their names and sizes will do. ``weights`` are in the
    graph's folder.
    """
    if not any(file.is_symlink() for file in (path, *weights)):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        for file in weights:
            with Path(folder, file.name).open("wb") as sparse:
                sparse.truncate(file.stat().st_size)
        yield Path(shutil.copy(path, folder))


def open_linked(path: Path, options: Any, open_graph: Callable[[Path], Any]) -> Any:
    """Opens a session of a graph whose weights may be links.

    ``options`` are the ``onnxruntime.SessionOptions`` that ``open_graph`` uses; modified.
    """
    try:
        return open_graph(path)
    except Exception:
        links = [file for file in path.parent.glob("*.bin") if file.is_symlink() and file.stat().st_size]
        if not links:
            raise
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(without_links(path, links))
        files = [stack.enter_context(file.open("rb")) for file in links]
        contents = [stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) for file in files]
        options.add_external_initializers_from_files_in_memory(
            [file.name for file in links], contents, list(map(len, contents))
        )
        return open_graph(plain)
