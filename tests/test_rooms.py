"""A method is known in its own rooms only: everything else asks what it can do."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import specexport.contract
from specexport.contract import methods
from specexport.contract.errors import SpecExportError
from specexport.contract.methods import TextMethod, known, method_type

ROOT = Path(specexport.contract.__file__).parent.parent
SOURCES = ("checkpoints", "contract", "exporter", "graphs", "runtime", "specexport", "training", "tuning", "verify")
ROOMS = ("contract/methods/", "exporter/methods/", "runtime/proposers/")
FORMATS = ("checkpoints/dflash.py", "checkpoints/drafts.py", "checkpoints/mlp_speculator.py", "training/options.py")
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


class _Entry:
    """An entry point of somebody else's package."""

    name = "theirs"

    def __init__(self, load: Callable[[], Any]) -> None:
        self.load = load


class Demanding(TextMethod, frozen=True, kw_only=True, tag="theirs"):
    must: int


def _broken() -> Any:
    raise ImportError("no module named numbers_of_theirs")


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (_broken, "cannot be loaded: ImportError: no module named numbers_of_theirs"),
        (lambda: int, "expected a subclass of Method with tag='theirs'"),
        (lambda: Demanding, "'must' has to have a default"),
    ],
)
def test_somebody_else_s_package_is_named_if_it_does_not_fit(
    load: Callable[[], Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methods, "entry_points", lambda group: [_Entry(load)])
    for cached in (methods._entries, methods.known, methods.method_type):
        cached.cache_clear()
    try:
        with pytest.raises(SpecExportError, match=reason):
            method_type("theirs")
    finally:
        for cached in (methods._entries, methods.known, methods.method_type):
            cached.cache_clear()
