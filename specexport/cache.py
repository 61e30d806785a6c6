"""Bundles built on first use: a folder for each combination of options and checkpoints, by their content."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from specexport.contract.errors import BundleError
from specexport.contract.folders import expanded, locked, remove, temporary_folder, writing
from specexport.contract.methods import MethodOptions, method_type
from specexport.contract.reading import read_manifest, sha256
from specexport.exporter.checkpoints.locate import GGUF, find
from specexport.exporter.fingerprint import fingerprint
from specexport.runtime.bundle import check_bundle
from specexport.runtime.machine import cache_folder

_READ = (".json", ".safetensors", ".gguf", ".jinja", ".txt", ".model", ".pt", "pytorch_model.bin", "adapter_model.bin")
"""Suffixes of a checkpoint's files that a build may read."""
_TEMPLATES = "additional_chat_templates/*.jinja"
_ABANDONED_AFTER = 7 * 24 * 3600
"""Seconds."""


def cached_bundle(
    options: Mapping[str, Any], build: Callable[[dict[str, Any], Path], object], *, check_hashes: bool = True
) -> Path:
    """Returns the checked bundle of these build options, and builds it if it is missing or damaged.

    Its name is a hash of the options and of every checkpoint's content, so a changed checkpoint is built again and a
    moved one is not. If several processes need a bundle, one builds it and the others wait. A killed build leaves
    nothing under the bundle's name; the next one resumes after the models that were written. A damaged bundle is
    removed with a warning. Unfinished builds untouched for a week are removed when another bundle is built. Without a
    writable home folder or ``$SPECEXPORT_CACHE``, a bundle is deleted when the process ends, with a warning.

    Args:
        options: fields of ``BuildOptions``, without ``output``.
        build: called with the options and the output folder.
        check_hashes: compare files with their hashes; otherwise only with their sizes.

    Raises:
        BuildError: a checkpoint cannot be found, or the build fails.
    """
    root = cache_folder() or temporary_folder()
    methods: tuple[MethodOptions, ...] = options.get("methods", ())
    checkpoints = {"target": find(str(options["target"]))}
    for method in methods:
        for key, kind in method_type(method.name).sources.items():
            source = str(getattr(method, key))
            checkpoints[f"{method.name}.{key}"] = find(source) if kind == "checkpoint" else expanded(source)
    identity = {
        "options": {key: value for key, value in options.items() if key not in ("target", "methods")},
        # The content of checkpoints counts, not their paths.
        "methods": [
            {
                key: value
                for key, value in msgspec.to_builtins(method).items()
                if key not in method_type(method.name).sources
            }
            for method in methods
        ],
        "checkpoints": {name: _content(folder, root / "hashes") for name, folder in checkpoints.items()},
        "exporter": fingerprint(),
    }
    key = _digest(identity)
    name = f"{Path(str(options['target'])).name}-{key[:16]}"
    bundle = root / "bundles" / name
    if _damage(bundle, check_hashes) is not None and not _is_usable(root):
        root = temporary_folder()
        bundle = root / "bundles" / name
        if _damage(bundle, check_hashes) is not None:
            warnings.warn(
                "there is no writable home folder: the bundle is deleted when this process ends; set "
                "SPECEXPORT_CACHE to a folder to keep it",
                stacklevel=2,
            )
    if _damage(bundle, check_hashes) is not None:
        with writing(root):
            bundle.parent.mkdir(parents=True, exist_ok=True)
            with build_lock(bundle):
                damage = _damage(bundle, check_hashes)
                if damage is not None:
                    if os.path.lexists(bundle):
                        warnings.warn(f"{damage}; it is removed and built again", stacklevel=2)
                        remove(bundle)
                    _sweep(root)
                    build(dict(options), bundle)
    return bundle


def _is_usable(root: Path) -> bool:
    """Whether the cache folder is writable; one that ``$SPECEXPORT_CACHE`` names is never replaced."""
    if os.environ.get("SPECEXPORT_CACHE"):
        return True
    if cache_folder() is None:
        return False
    with contextlib.suppress(OSError):
        root.mkdir(parents=True, exist_ok=True)
    return os.access(root, os.W_OK)


def build_lock(bundle: Path) -> AbstractContextManager[None]:
    """The lock of the process that builds a bundle of the cache."""
    return locked(bundle.parent / f".{bundle.name}.turn")


def _damage(bundle: Path, check_hashes: bool) -> BundleError | None:
    """Why a bundle is missing or damaged; None if it is intact."""
    try:
        check_bundle(bundle, read_manifest(bundle), hashes=check_hashes)
    except BundleError as error:
        return error
    return None


def _sweep(root: Path) -> None:
    """Removes leftovers of killed processes that were untouched for a week."""
    for path in (*(root / "bundles").glob(".*"), *(root / "hashes").glob("tmp*")):
        with contextlib.suppress(FileNotFoundError):  # another process sweeps too
            if time.time() - path.stat().st_mtime > _ABANDONED_AFTER:
                remove(path)


def _content(folder: Path, memos: Path) -> dict[str, str]:
    """SHA-256 of a checkpoint's files by their names; cached until a file's size or time changes."""
    hashes: dict[str, str] = {}
    files = sorted([*folder.iterdir(), *folder.glob(_TEMPLATES)]) if folder.is_dir() else []
    # Files beside a GGUF model were derived from it, perhaps by this process.
    models = [file for file in files if file.suffix == GGUF]
    for file in files if any(file.suffix == ".safetensors" for file in files) else models or files:
        if not file.name.endswith(_READ) or not file.is_file():
            continue
        name, state = file.relative_to(folder).as_posix(), file.stat()
        memo = memos / _digest([str(file.resolve()), state.st_size, state.st_mtime_ns, state.st_ino])
        if memo.is_file() and memo.stat().st_size == 2 * hashlib.sha256().digest_size:
            hashes[name] = memo.read_text(encoding="ascii", errors="replace")
        else:
            hashes[name] = sha256(file)
            with contextlib.suppress(OSError):  # then it is hashed again
                memos.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile("w", dir=memos, delete=False, encoding="ascii") as written:
                    written.write(hashes[name])
                Path(written.name).replace(memo)
    return hashes


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
