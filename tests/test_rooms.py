"""A method is known in its own rooms only: everything else asks what it can do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import specexport.contract
from specexport.contract.methods import known, method_type

ROOT = Path(specexport.contract.__file__).parent.parent
SOURCES = ("checkpoints", "contract", "exporter", "graphs", "runtime", "specexport", "training", "tuning", "verify")
ROOMS = ("contract/methods/", "exporter/methods/", "runtime/proposers/")
FORMATS = ("checkpoints/mlp_speculator.py", "training/options.py")
"""They read and write a method's checkpoints, and take its limits from its room."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def test_no_other_room_imports_a_method() -> None:
    modules = {f"specexport.contract.methods.{name}" for name in known()}
    found = {
        f"{name}: {node.module}"
        for name, tree in sources()
        if not name.startswith(ROOMS) and name not in FORMATS
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in modules
    }
    assert found == set()


def test_no_room_but_its_own_tells_methods_apart_by_type() -> None:
    kinds = {method_type(name).__name__ for name in known()}
    found = [
        f"{name}:{node.lineno}"
        for name, tree in sources()
        if not name.startswith(ROOMS)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass")
        for word in ast.walk(node.args[1])
        if isinstance(word, ast.Name) and word.id in kinds
    ]
    assert found == []


def test_every_method_has_its_rooms() -> None:
    for name in known():
        kind = method_type(name)
        assert kind.__doc__
        for room, own in ((kind.proposer, "runtime/proposers"), (kind.exporter, "exporter/methods")):
            assert room or (ROOT / own / f"{name}.py").is_file(), (name, own)
