"""The exporter's fingerprint follows its code and its libraries, and costs next to nothing to ask for."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specexport.exporter import records as module
from specexport.exporter.records import PACKAGES, fingerprint


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    fingerprint.cache_clear()
    yield
    fingerprint.cache_clear()


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The exporter's packages in a folder of their own."""
    for package in PACKAGES:
        (folder,) = module._folders(package)
        shutil.copytree(folder, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(module, "_folders", lambda package: [tmp_path / package])
    return tmp_path


def test_the_same_code_has_the_same_fingerprint_wherever_it_lies(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fingerprint()
    fingerprint.cache_clear()
    monkeypatch.undo()
    assert fingerprint() == first and len(first) == 64


@pytest.mark.parametrize(
    "file", ["contract/tensors.py", "graphs/step.py", "methods/medusa/export.py", "exporter/texts/calibration.txt"]
)
def test_a_changed_file_changes_it(copied: Path, file: str) -> None:
    before = fingerprint()
    (copied / file).write_text((copied / file).read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert fingerprint() == before  # it is asked for once a process
    fingerprint.cache_clear()
    assert fingerprint() != before


def test_a_renamed_file_changes_it(copied: Path) -> None:
    before = fingerprint()
    (copied / "graphs/step.py").rename(copied / "graphs/steps.py")
    fingerprint.cache_clear()
    assert fingerprint() != before


def test_another_version_of_a_library_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint()
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0" if name == "torch" else installed(name))
    fingerprint.cache_clear()
    assert fingerprint() != before


def test_it_imports_no_heavy_packages() -> None:
    code = (
        "import sys; from specexport.exporter.records import fingerprint; fingerprint(); "
        "print([name for name in ('torch', 'transformers', 'onnx') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
