"""Where a checkpoint lies. Imports nothing heavy: what is built already is found without torch."""

from __future__ import annotations

import os
from pathlib import Path

from specexport.contract.errors import BuildError
from specexport.contract.folders import expanded, home, passing_folder

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]


def locate(source: str) -> Path:
    """The local folder of a checkpoint; a hub id is downloaded into the hub's own cache.

    Raises:
        BuildError: it is neither a folder with a ``config.json`` and safetensors nor a reachable hub id.
    """
    path = expanded(source)
    if path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))):
        raise BuildError(
            f"{source}: GGUF files are not read; expected a Hugging Face model folder or a hub id. Build from the "
            "original that the file was made of: it is rounded once then, and with --precision int4 or int8 as small"
        )
    if not path.is_dir():
        if path.exists() or source.count("/") != 1 or source.startswith((".", "/", "~")):
            raise BuildError(f"{source}: no such folder; expected a Hugging Face model folder or a hub id (owner/name)")
        try:
            from huggingface_hub import snapshot_download
        except ImportError as error:
            raise BuildError(
                f"{source}: no such folder, and fetching a hub id needs the [export] extra; install it with: "
                "pip install 'specexport[cpu,export]'"
            ) from error

        try:
            path = Path(snapshot_download(source, allow_patterns=_HUB_FILES, cache_dir=hub_cache()))
        except Exception as error:  # the hub client raises a dozen unrelated types
            raise BuildError(f"{source}: not a local folder, and the hub could not provide it: {error}") from error
    if not (path / "config.json").is_file():
        raise BuildError(f"{path}: no config.json; expected a Hugging Face model folder")
    if not any(path.glob("*.safetensors")):
        found = ", ".join(sorted(p.name for p in path.glob("*.bin"))) or "no weights"
        raise BuildError(
            f"{path}: found {found}, expected *.safetensors. Pickled weights are not read, as they can run code; "
            "convert them with model.save_pretrained(..., safe_serialization=True) where you trust them"
        )
    return path


def hub_cache() -> Path | None:
    """Where the hub's client keeps its files, None for where it does by itself: not below a folder called ``~``."""
    told = any(map(os.environ.get, ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")))
    return None if told or home() is not None else passing_folder() / "hub"
