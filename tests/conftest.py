"""Bundles for the tests, made once a session, or taken ready-made where torch is not installed."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from specexport.runtime import Engine

# Models this small are several times slower on more threads. torch reads it when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile("specexport", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("specexport")

MAX_CHILDREN = 4
READY_MADE = "SPECEXPORT_TEST_BUNDLES"
"""A folder written by ``python -m tests.make_bundles``; with it, tests not marked ``exporter`` run without torch."""


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the bundle of a name that ``tests.make_bundles`` knows. Not to be changed: the session shares it."""
    ready = os.environ.get(READY_MADE)

    def get(name: str) -> Path:
        if ready:
            return Path(ready) / name
        from tests.make_bundles import make

        # The parent is shared by pytest-xdist's workers.
        base = tmp_path_factory.getbasetemp()
        return make(name, (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "bundles")

    return get


@pytest.fixture(scope="session")
def accept_graph(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], bytes]:
    """Gives an accept graph by its rule and M, for trees of up to ``MAX_CHILDREN`` children; tracing takes seconds."""
    import onnx_ir as ir
    from filelock import FileLock

    from specexport.exporter.trace import trace_accept

    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def get(rule: Any, candidates: int) -> bytes:
        path = folder / f"accept.{rule}.{candidates}.onnx"
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                path.write_bytes(ir.to_proto(trace_accept(rule, MAX_CHILDREN, candidates)).SerializeToString())
        return path.read_bytes()

    return get


@pytest.fixture(scope="session")
def oracle(bundle: Callable[[str], Path]) -> Callable[[str], Any]:
    """Gives what transformers says of a bundle's target; see ``tests.make_bundles``."""
    return lambda name: json.loads((bundle(name) / ".." / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def engine(bundle: Callable[[str], Path]) -> Callable[[str], Engine]:
    """Gives a loaded bundle by its name. The session shares it, so tests leave it open and without a running stream."""
    loaded: dict[str, Engine] = {}

    def get(name: str) -> Engine:
        if name not in loaded:
            loaded[name] = Engine.load(bundle(name), threads=1)
        return loaded[name]

    return get


@pytest.fixture(scope="session")
def uncompiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives a bundle for TensorRT-RTX without engines by its name; see ``tests.engine_bundles``."""
    from tests.engine_bundles import make

    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "uncompiled"
    return lambda name: make(name, root)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out modules that need the exporter where torch is not installed: their imports alone would fail."""
    if importlib.util.find_spec("torch") is not None or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    return True if "pytestmark = pytest.mark.exporter" in text else None
