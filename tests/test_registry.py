"""A method is known in its own folder only: everything else asks what it can do."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import specexport.contract
from specexport.contract import methods, plugins
from specexport.contract.errors import SpecExportError
from specexport.contract.methods import TextMethod, known, method_type

ROOT = Path(specexport.contract.__file__).parent.parent
KNOWN_BY = ("methods", "kernels", "__pycache__")
"""Folders whose modules may know a method, or have none."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Modules that know no method. That none imports one is import-linter's to check."""
    for folder in sorted(path for path in ROOT.iterdir() if path.is_dir() and path.name not in KNOWN_BY):
        for path in sorted(folder.rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def test_no_other_package_tells_methods_apart_by_type():
    kinds = {method_type(name).__name__ for name in known()}
    calls = [
        f"{name}:{node.lineno}"
        for name, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass")
        for word in ast.walk(node.args[1])
        if isinstance(word, ast.Name) and word.id in kinds
    ]
    assert calls == []
    assert {"runtime/step.py", "exporter/build.py", "server/app.py"} <= {name for name, _ in sources()}


def test_every_method_is_an_entry_point_with_a_proposer():
    folders = {path.stem for path in (ROOT / "methods").iterdir() if path.name[0] != "_"}
    assert set(known()) == folders - {"hidden_states"}, "install the package again (make .venv/.dev)"
    for name in known():
        kind = method_type(name)
        assert kind.__doc__
        assert any(hasattr(methods.module_of(base), "open_proposer") for base in kind.__mro__), name


class _Entry:
    """An entry point of somebody else's package."""

    name, value = "theirs", "their_package:Theirs"

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
def test_somebody_else_s_package_is_named_if_it_does_not_fit(load, reason, monkeypatch):
    ours = tuple(plugins.entry_points(group=methods.GROUP))
    monkeypatch.setattr(plugins, "entry_points", lambda group: [*ours, _Entry(load)])
    for cached in (plugins.installed, methods.method_type):
        cached.cache_clear()
    try:
        with pytest.raises(SpecExportError, match=reason):
            method_type("theirs")
    finally:
        for cached in (plugins.installed, methods.method_type):
            cached.cache_clear()


def test_an_installation_without_entry_points_says_what_to_do(monkeypatch):
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])
    plugins.installed.cache_clear()
    try:
        with pytest.raises(
            SpecExportError, match=r"without its entry points of specexport\.methods.*; install it again"
        ):
            plugins.installed(methods.GROUP)
    finally:
        plugins.installed.cache_clear()
