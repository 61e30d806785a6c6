"""Bundles for the tests, made once a session, or taken ready-made where torch is not installed."""

import asyncio
import gc
import importlib.util
import inspect
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest
from filelock import FileLock

from specexport.cli import main
from specexport.runtime import Engine
from specexport.runtime.backends.onnxruntime.kernels import kernels
from specexport.runtime.speculation.policy import SpeculationPolicy
from tests.threads import JOIN

# Models this small are several times slower on more threads. torch reads it when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile("specexport", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("specexport")

MAX_CHILDREN = 4
READY_MADE = "SPECEXPORT_TEST_BUNDLES"
"""A folder written by ``python -m tests.make_bundles``; with it, tests not marked ``exporter`` run without torch."""


SLOW_MINUTES = "SPECEXPORT_SLOW_MINUTES"
"""Minutes after which no slow test begins: machines for CI differ threefold, and end what takes too long."""
_START = time.monotonic()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says in one line if the kernels are missing."""
    if not kernels().instruction_set:
        terminalreporter.write_line(f"kernels: {kernels().described}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests come last."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


def pytest_collection_finish() -> None:
    """What was imported and collected stays, so the garbage collector need not scan it again in every test."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = float(os.environ.get(SLOW_MINUTES, "inf"))
    if item.get_closest_marker("slow") and time.monotonic() - _START > 60 * minutes:
        pytest.skip(f"slow, and {minutes:g} minutes have passed on this machine ({SLOW_MINUTES})")


def _shared(factory: pytest.TempPathFactory) -> Path:
    """A folder of the session, which pytest-xdist's workers share: theirs lie in it."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(autouse=True)
def seeded_torch() -> None:
    """Every test draws the same numbers from torch, whichever tests ran before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def fixed_number_of_draft_tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines of tests draft as many tokens as their bundles say, whatever steps cost on the machine at hand.

    What commands and processes keep lies in a folder of the session, not in the user's.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECEXPORT_CACHE", str(_shared(tmp_path_factory) / "cache"))
        for name in ("calibrate", "cache_graphs"):
            patch.setitem(Engine.load.__func__.__kwdefaults__, name, False)
        yield


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the bundle of a name that ``tests.make_bundles`` knows. Not to be changed: the session shares it."""
    ready = os.environ.get(READY_MADE)

    def get(name: str) -> Path:
        if ready:
            return Path(ready).resolve() / name  # some tests run elsewhere
        from tests.make_bundles import make

        return make(name, _shared(tmp_path_factory) / "bundles")

    return get


@pytest.fixture(scope="session", autouse=True)
def traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was traced once in this session is not traced again.

    Matrices of models this small count as large ones, so that checkpoints which differ in them alone share a trace.
    """
    if importlib.util.find_spec("torch") is None:
        yield
        return
    from specexport.exporter import trace, trace_cache
    from specexport.exporter.passes import simplify

    folder = _shared(tmp_path_factory)
    trace_accept = trace._accept

    def accept(rule: str, max_children: int, candidates: int) -> bytes:
        file = folder / f"accept.{rule}.c{max_children}.m{candidates}.onnx"
        with FileLock(file.with_suffix(".lock")):
            if not file.exists():
                file.write_bytes(trace_accept(rule, max_children, candidates))
        return file.read_bytes()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "_accept", accept)
        patch.setattr(trace_cache, "cache_folder", lambda: folder)
        patch.setattr(trace_cache, "MOST", 10_000)
        patch.setattr(simplify, "LARGEST_FOLDED", 512)
        yield


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a random Llama. Not to be changed: the session shares it."""
    from tests.checkpoints import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "target", "llama")


@pytest.fixture(scope="session")
def accept_graph(traces: None) -> Callable[[Any, int], bytes]:
    """Gives an accept graph by its rule and M, for trees of up to ``MAX_CHILDREN`` children; tracing takes seconds."""
    from specexport.exporter import trace

    accept = trace._accept  # tests put others in its place
    return lambda rule, candidates: accept(rule, MAX_CHILDREN, candidates)


@pytest.fixture
def shared_accept_graphs(accept_graph: Callable[[Any, int], bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives bundles accept graphs for trees of up to ``MAX_CHILDREN`` children, whatever theirs need."""
    from specexport.exporter import trace

    monkeypatch.setattr(trace, "_accept", lambda rule, children, candidates: accept_graph(rule, candidates))


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


class Printed(NamedTuple):
    """What a command printed."""

    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def words(self) -> str:
        """Standard output, wherever its lines end."""
        return " ".join(self.out.split())


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Printed]:
    """Runs a command, which is to end with a status, and gives what it printed."""

    def run(*words: object, status: int = 0) -> Printed:
        capsys.readouterr()
        assert main([str(word) for word in words]) == status
        return Printed(*capsys.readouterr())

    return run


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Lists what ``note`` makes of the arguments of each call of ``owner.name`` from here on; the calls take place."""

    def watched(owner: Any, name: str, note: Callable[..., Any], into: list[Any] | None = None) -> list[Any]:
        noted: list[Any] = [] if into is None else into
        real = getattr(owner, name)

        def called(*arguments: Any, **named: Any) -> Any:
            noted.append(note(*arguments, **named))
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, called)
        return noted

    return watched


@pytest.fixture
def whole_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests verify the trees they ask for, whatever runs beside them: so that a seed says what it says alone."""
    monkeypatch.setattr(SpeculationPolicy, "_share", lambda self, request, others: request.tree)


@pytest.fixture(scope="session")
def uncompiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives a bundle for TensorRT-RTX without engines by its name; see ``tests.engine_bundles``."""
    from tests.engine_bundles import make

    root = _shared(tmp_path_factory) / "uncompiled"
    return lambda name: make(name, root)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An imaginary GPU, and onnxruntime for it; see ``tests.onnxruntime_stand_in``."""
    from tests.onnxruntime_stand_in import installed

    with installed(monkeypatch) as module:
        yield module


@pytest.fixture
def cuda_bundle(
    bundle: Callable[[str], Path], shared_accept_graphs: None, gpu: Any, tmp_path: Path
) -> Callable[[str], Path]:
    """Gives a copy of a bundle as one that was built for onnxruntime-cuda."""
    from tests.step_program import for_onnxruntime

    def get(name: str) -> Path:
        folder = tmp_path / name
        return folder if folder.exists() else for_onnxruntime(Path(shutil.copytree(bundle(name), folder)))

    return get


@pytest.fixture(scope="session")
def dry_run_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives a bundle for onnxruntime-cuda by its name; see ``tests.null_cuda.bundles``.

    ``SPECEXPORT_DRY_RUN_BUNDLES`` names a folder that keeps them for the next session, which takes them as they are.
    """
    from tests.null_cuda.bundles import make

    ready = os.environ.get("SPECEXPORT_DRY_RUN_BUNDLES")
    root = Path(ready) if ready else _shared(tmp_path_factory) / "dry-run"
    return lambda name: make(name, root)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine, which must not hang."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), JOIN))
    return True


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out modules that need the exporter where torch is not installed: their imports alone would fail."""
    if importlib.util.find_spec("torch") is not None or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    return True if re.search(r"^pytestmark = .*pytest\.mark\.exporter", text, re.MULTILINE) else None
