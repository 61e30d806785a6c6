"""Modules that the tests never load, as those for GPU hosts, still name what exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = ("specexport", "benchmarks", "scripts", "tests")
FOLDERS = (*OURS, *(path.name for path in (ROOT / "specexport").iterdir() if path.is_symlink()))


def _file(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    candidates = (path.with_suffix(".py"), path / "__init__.py", path)
    return next((candidate for candidate in candidates if candidate.exists()), None)


def _unresolved(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] not in OURS:
            continue
        module = str(node.module)
        file = _file(module)
        text = file.read_text(encoding="utf-8") if file is not None and file.is_file() else ""
        for alias in node.names:
            if not re.search(rf"\b{alias.name}\b", text) and _file(f"{module}.{alias.name}") is None:
                yield f"{source.relative_to(ROOT)}:{node.lineno}: {module} has no {alias.name}"


def test_imports_resolve() -> None:
    sources = [sorted((ROOT / folder).rglob("*.py")) for folder in FOLDERS]
    assert all(sources), "a folder without sources"
    assert [line for folder in sources for source in folder for line in _unresolved(source)] == []
