"""Bundles built on first use: a folder for what was asked of which checkpoints, by their content."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from specexport.checkpoints.locate import locate
from specexport.contract.manifest import MANIFEST_NAME
from specexport.contract.methods import Method
from specexport.contract.reading import sha256
from specexport.fingerprint import fingerprint
from specexport.runtime.machine import cache_folder

_READ = (".json", ".safetensors", ".jinja", ".txt", ".model", ".pt")
"""Files of a checkpoint that a build may read."""


def cached_bundle(options: Mapping[str, Any], build: Callable[[dict[str, Any], Path], object]) -> Path:
    """The bundle of these build options, built if it is not in the cache.

    Its name is a hash of the options and of the content of every checkpoint they name, so a changed checkpoint is built
    anew and a moved one is not. Of several processes one builds, and the others wait for it. A build that is killed
    leaves its lock free and nothing under the bundle's name; the next one goes on after the models it had written.

    Args:
        options: fields of ``BuildOptions``, without ``output``.
        build: called with the options and the folder to write.

    Raises:
        BuildError: a checkpoint cannot be found, or the build fails.
    """
    root = cache_folder()
    methods: tuple[Method, ...] = options.get("methods", ())
    named = {"target": locate(str(options["target"]))}
    for method in methods:
        for key, kind in method.sources.items():
            source = str(getattr(method, key))
            named[f"{method.name}.{key}"] = locate(source) if kind == "checkpoint" else Path(source).expanduser()
    asked = {
        "options": {key: value for key, value in options.items() if key not in ("target", "methods")},
        # Where checkpoints lie does not count: what they hold does.
        "methods": [
            {key: value for key, value in msgspec.to_builtins(method).items() if key not in method.sources}
            for method in methods
        ],
        "checkpoints": {name: _content(folder, root / "hashes") for name, folder in named.items()},
        "exporter": fingerprint(),
    }
    key = _digest(asked)
    bundle = root / "bundles" / f"{Path(str(options['target'])).name}-{key[:16]}"
    if not (bundle / MANIFEST_NAME).is_file():
        bundle.parent.mkdir(parents=True, exist_ok=True)
        with locked(bundle):
            if not (bundle / MANIFEST_NAME).is_file():
                build(dict(options), bundle)
    return bundle


def locked(bundle: Path) -> AbstractContextManager[object]:
    """Held by the one process that writes a bundle of the cache."""
    # Imported here: what runs a bundle that is built already does without.
    from filelock import FileLock

    return FileLock(bundle.parent / f".{bundle.name}.lock")


def _content(folder: Path, known: Path) -> dict[str, str]:
    """SHA-256 of a checkpoint's files by their names; remembered until a file changes its size or time."""
    found: dict[str, str] = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        if file.suffix not in _READ or not file.is_file():
            continue
        state = file.stat()
        memo = known / _digest([str(file.resolve()), state.st_size, state.st_mtime_ns, state.st_ino])
        if memo.is_file():
            found[file.name] = memo.read_text(encoding="ascii")
        else:
            found[file.name] = sha256(file)
            known.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=known, delete=False, encoding="ascii") as written:
                written.write(found[file.name])
            Path(written.name).replace(memo)
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
