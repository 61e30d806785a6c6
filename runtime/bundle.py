"""An opened bundle: a checked manifest, the folder it describes, and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from specexport.contract.errors import BundleError
from specexport.contract.manifest import Manifest
from specexport.contract.reading import check_files, read_manifest
from specexport.runtime.chat import ChatTemplate


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk.

    Attributes:
        folder: where it lies.
        manifest: its validated manifest.
    """

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: str | Path, *, check_hashes: bool = True) -> Bundle:
        """Reads the manifest and checks every file it lists.

        Raises:
            BundleError: names the file that is missing, altered, outside the bundle or too new.
        """
        path = Path(folder).expanduser()
        manifest = read_manifest(path)
        check_files(path, manifest, hashes=check_hashes)
        return cls(path, manifest)

    def file(self, name: str) -> Path:
        """The path of a file the manifest names."""
        return self.folder / name

    def tokenizer(self, name: str | None = None) -> Tokenizer:
        """Loads the tokenizer, or another one the manifest names.

        Raises:
            BundleError: the file is not a tokenizer.
        """
        path = self.file(name or self.manifest.tokenizer.file)
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise BundleError(f"{path}: not a tokenizer: {error}; build the bundle again") from error

    def chat_template(self) -> ChatTemplate | None:
        """The model's chat templates, if it has any."""
        info = self.manifest.tokenizer
        sources = {name: _text(self.file(file)) for name, file in info.templates.items()}
        return ChatTemplate(sources, info.special_tokens) if sources else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BundleError(f"{path}: not text: {error}; build the bundle again") from error
