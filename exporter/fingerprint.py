"""A hash of the exporter: the cache rebuilds bundles of other exporters. Imports little."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path

PACKAGES = ("contract", "graphs", "exporter", "methods")
"""Those whose code decides what is in a bundle."""
LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "onnx-ir")
"""Those that trace and rewrite graphs."""


@functools.cache
def fingerprint() -> str:
    """SHA-256 of the exporter's source files and of its libraries' versions, in hexadecimal."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for folder in _folders(package):
            for file in sorted(folder.rglob("*.py")):
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
