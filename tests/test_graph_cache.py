"""Graphs that are kept as onnxruntime runs them: the same numbers, and no harm where they cannot be."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specexport.contract.model import CacheLayer
from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions
from specexport.runtime import Engine, SamplingParams, machine
from specexport.runtime.backends.onnxruntime import session
from specexport.runtime.backends.onnxruntime.graph import Rows
from specexport.runtime.machine import available_cores, remove_unused
from specexport.runtime.speculative import PLAIN
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.exporter
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, ignore_eos=True)


@pytest.fixture(scope="module", params=["int8", "int4"])
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kept")
    target, draft = make_checkpoint(root / "target", "qwen3"), make_checkpoint(root / "draft", "qwen3", seed=1)
    method = f"draft_model:{draft},num_speculative_tokens=3"
    return build(BuildOptions(str(target), root / "bundle", method, precision=request.param, max_seq_len=96))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SPECEXPORT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SPECEXPORT_KERNELS", "0")  # with them a session takes the bundle's own graph
    yield tmp_path / "cache" / "graphs"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Which graphs sessions were opened over."""
    import onnxruntime

    real, paths = onnxruntime.InferenceSession, list[Path]()

    def opening(path: str, *arguments: Any, **named: Any) -> Any:
        result = real(path, *arguments, **named)
        paths.append(Path(path))
        return result

    monkeypatch.setattr(onnxruntime, "InferenceSession", opening)
    return paths


def greedy_texts(bundle: Path, *, cache_graphs: bool = True) -> tuple[Any, ...]:
    with Engine.load(bundle, threads=1, cache_graphs=cache_graphs) as engine:
        done = engine.generate([5, 6, 7, 8], PARAMS, {"method": "draft_model", "num_speculative_tokens": 3})
        plain = engine.generate([5, 6, 7, 8], PARAMS, PLAIN)
        return done.token_ids, done.logprobs, plain.token_ids, plain.logprobs


def test_the_next_opening_takes_the_kept_graphs_and_says_the_same(quantized, cache, opened):
    without = greedy_texts(quantized, cache_graphs=False)
    assert not cache.exists()
    assert greedy_texts(quantized) == without
    assert all(path.is_relative_to(quantized) for path in opened)
    opened.clear()
    assert greedy_texts(quantized) == without
    assert {path.parent.parent for path in opened} == {cache}
    assert len(opened) == len(list(cache.iterdir())) == 2
    assert greedy_texts(quantized, cache_graphs=False) == without  # what is there is taken, whoever made it


def test_damaged_or_unwritable_files_are_recreated(quantized, cache, opened, monkeypatch):
    without = greedy_texts(quantized)
    for graph in cache.glob("*/graph.onnx"):
        graph.write_bytes(graph.read_bytes()[:50])
    opened.clear()
    assert greedy_texts(quantized) == without
    assert all(path.is_relative_to(quantized) for path in opened)
    monkeypatch.setenv("SPECEXPORT_CACHE", os.devnull)
    assert greedy_texts(quantized) == without
    monkeypatch.setenv("SPECEXPORT_CACHE", str(cache / "full"))
    monkeypatch.setattr(session.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert greedy_texts(quantized) == without
    assert not [*(cache / "full").glob("graphs/*")]


def test_unused_bundles_are_removed(cache, tmp_path):
    for name, age in (("old", 40), ("new", 20), ("killed", 40)):
        (cache / name).mkdir(parents=True)
        graph = cache / name if name == "killed" else cache / name / "graph.onnx"
        graph.touch()
        os.utime(graph, times=(0, graph.stat().st_mtime - age * 24 * 3600))
    remove_unused(cache.iterdir(), "graph.onnx")
    assert [folder.name for folder in cache.iterdir()] == ["new"]


def test_a_cache_of_many_slots_takes_memory_for_rows_that_are_there():
    (zeros,) = Rows([CacheLayer(heads=2, key_size=16, value_size=16)] * 2, slots=8, rows=256).blocks
    assert zeros.shape == (4, 8, 2, 256, 16)
    assert not zeros.any()
    zeros[:, 1] = 1.0  # it can be written
    assert zeros.sum() == 4 * 2 * 256 * 16


V2, V1 = "0::/a/b", "4:cpu,cpuacct:/a/b"


@pytest.mark.parametrize(
    ("group", "texts", "cores"),
    [
        (V2, {"cpu.max": "250000 100000"}, 2),
        (V2, {"a/b/cpu.max": "50000 100000"}, 1),
        (V2, {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
        (V2, {"a/cpu.max": "100000 100000", "a/b/cpu.max": "350000 100000", "b/cpu.max": "1 1"}, 1),
        (V2, {"cpu/a/cpu.cfs_quota_us": "100000", "cpu/a/cpu.cfs_period_us": "100000"}, 4),
        (V1, {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"}, 3),
        (V1, {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "50000"}, 2),
        (V1, {"cpu/a/b/cpu.cfs_quota_us": "-1", "cpu/a/b/cpu.cfs_period_us": "100000"}, 4),
        ("", {"cpu.max": "100000 100000"}, 4),
    ],
)
def test_quotas_of_control_groups_count_as_cores(tmp_path, monkeypatch, group, texts, cores):
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "cgroup").write_text(f"2:memory:/m\n{group}\n" if group else "")
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "cgroup")
    mounted = {name: (tmp_path / name, files) for name, (_, files) in machine._QUOTAS.items()}
    monkeypatch.setattr(machine, "_QUOTAS", mounted)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert available_cores() == cores
