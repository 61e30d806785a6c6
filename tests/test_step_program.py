"""Steps that stay on the device, through the whole engine: real graphs on the CPU in a GPU's place (the stand-ins)."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specexport.contract.reading import read_manifest
from specexport.exporter.engines.program import write_program
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.cuda import api, libraries
from specexport.runtime.cuda.executor import Enqueue
from tests.compiled import compiled
from tests.cuda_stand_in import StandIn
from tests.tensorrt_stand_in import TensorRT

pytestmark = pytest.mark.exporter  # it traces the step program's graphs

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, top_k=40, seed=5, ignore_eos=True)
TYPICAL = SAMPLED.replace(acceptance="typical", posterior_threshold=0.3)
WAYS = {
    "llama-near": ("draft_model",),
    "llama-near-portable": ("draft_model",),
    "gpt2-tree": ("draft_model",),
    "gpt2-tree-portable": ("draft_model",),
    "gemma2-self": ("self_draft",),
    "qwen3-medusa": ("medusa",),
    "qwen3-medusa-draft": ("medusa_draft",),
    "qwen3-lookup": ("draft_model", "ngram", "suffix"),
}
"""Bundles, and the methods of theirs whose steps stay on the device."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TensorRT]:
    cuda = StandIn()
    module = TensorRT(cuda, tmp_path / "bundle")
    monkeypatch.setattr(api.Cuda, "load", lambda: api.Cuda(cuda))
    monkeypatch.setattr(libraries, "import_tensorrt", lambda runtime, version_compatible: module)
    yield module
    cuda.sealed = False
    gc.collect()
    assert cuda.leaks == []


def _compiled(source: Path, folder: Path, **options: Any) -> Path:
    """A copy of a bundle with engines of its models and of the step program's graphs."""
    shutil.copytree(source, folder)
    manifest = read_manifest(folder)
    program = write_program(folder, manifest.methods, manifest.target.cache, manifest.lowering)
    return compiled(source, folder, program=program, **options)


def _same(ours: Any, theirs: Any) -> None:
    assert ours.token_ids == theirs.token_ids
    assert (ours.stats.steps, ours.stats.drafted, ours.stats.accepted, ours.stats.accepted_at) == (
        theirs.stats.steps,
        theirs.stats.drafted,
        theirs.stats.accepted,
        theirs.stats.accepted_at,
    )


@pytest.mark.parametrize("name", WAYS)
def test_says_what_the_cpu_says(
    name: str, bundle: Callable[[str], Path], engine: Callable[[str], Engine], gpu: TensorRT
) -> None:
    """Greedy, lossless and typical acceptance of chains and trees, the same noise: the same tokens."""
    cpu = engine(name)
    with Engine.load(_compiled(bundle(name), gpu.folder)) as there:
        assert there.backend.execution == "graph per step", there.backend.fallback
        gpu.cuda.sealed = True
        for params, prompt in ((GREEDY, [7, 9, 11]), (SAMPLED, list(range(3, 90))), (TYPICAL, [5] * 30), (GREEDY, [5])):
            for method in (*WAYS[name], None):
                ours = there.generate(prompt, params, method=method, speculation=method is not None)
                _same(ours, cpu.generate(prompt, params, method=method, speculation=method is not None))
                assert ours.stats.execution == "graph per step"
        for count in (len(tree) - 1 for tree in there.speculations[WAYS[name][0]].trees):
            ours, theirs = (
                one.generate([7, 9, 11], SAMPLED, method=WAYS[name][0], num_speculative_tokens=count)
                for one in (there, cpu)
            )
            _same(ours, theirs)


@pytest.mark.parametrize("name", ["llama-near", "gpt2-tree", "qwen3-medusa"])
def test_a_step_is_one_launch_and_one_wait(name: str, bundle: Callable[[str], Path], gpu: TensorRT) -> None:
    with Engine.load(_compiled(bundle(name), gpu.folder)) as there:
        there.generate([5, 6, 7, 8], GREEDY)
        gpu.cuda.sealed = True
        gpu.cuda.calls.clear()
        done = there.generate([5, 6, 7, 8], GREEDY)  # nothing of the prompt is to be read again
        assert done.stats.steps > 1
        assert gpu.cuda.calls.count("cudaGraphLaunch") == done.stats.steps
        assert gpu.cuda.calls.count("cudaStreamSynchronize") == done.stats.steps
        assert set(gpu.cuda.calls) == {"cudaGraphLaunch", "cudaStreamSynchronize"}


def test_requests_that_the_host_looks_into_share_graphs_and_caches(
    bundle: Callable[[str], Path], engine: Callable[[str], Engine], gpu: TensorRT
) -> None:
    """One after another in the same slot, each going on from what the last one's steps left in the caches."""
    cpu = engine("qwen3-lookup")
    with Engine.load(_compiled(bundle("qwen3-lookup"), gpu.folder)) as there:
        gpu.cuda.sealed = True
        texts: list[list[int]] = [[7, 9, 11, 7, 9], [7, 9, 11, 7, 9]]
        for params, execution in (
            (SAMPLED, "graph per step"),
            (GREEDY.replace(logprobs=2), "graph per engine"),
            (GREEDY, "graph per step"),
            (SAMPLED.replace(logprobs=0), "graph per engine"),
            (TYPICAL, "graph per step"),
        ):
            for method in ("draft_model", "ngram"):
                found = [
                    one.generate(text, params, method=method) for one, text in zip((there, cpu), texts, strict=True)
                ]
                assert found[0].token_ids == found[1].token_ids
                assert found[0].stats.execution == execution
                texts = [[*text, *done.token_ids] for text, done in zip(texts, found, strict=True)]


def test_lookahead_is_driven_from_the_host(
    bundle: Callable[[str], Path], engine: Callable[[str], Engine], gpu: TensorRT
) -> None:
    with Engine.load(_compiled(bundle("qwen3-lookahead"), gpu.folder)) as there:
        ours = there.generate([7, 9, 11, 7, 9], GREEDY)
        assert ours.stats.execution == "graph per engine"
        _same(ours, engine("qwen3-lookahead").generate([7, 9, 11, 7, 9], GREEDY))
        assert there.generate([7, 9, 11], GREEDY, speculation=False).stats.execution == "graph per step"


def test_nothing_is_left_over_from_the_step_before(
    bundle: Callable[[str], Path], engine: Callable[[str], Engine], gpu: TensorRT
) -> None:
    """Every input, output and scratch byte on the device is poisoned before each step, the caches alone are kept."""
    with Engine.load(_compiled(bundle("gpt2-tree"), gpu.folder)) as there:
        backend: Any = there.backend
        memories = [*(graph._memory for graph in backend.graphs), backend._steps._memory]
        regions = [
            memory._regions[name] for memory in memories for name in memory._regions if not name.startswith("cache")
        ]

        def poisoned(launch: Enqueue) -> None:
            for region in regions:
                backend.cuda.fill(region.address, 0xA5, region.nbytes, backend.stream.handle)
            launch()

        backend.watch(poisoned)
        for params in (GREEDY, SAMPLED):
            _same(there.generate([7, 9, 11], params), engine("gpt2-tree").generate([7, 9, 11], params))


@pytest.mark.parametrize(("most", "execution"), [(25, "graph per engine"), (0, "plain")])
def test_without_one_graph_a_step_it_does_the_next_best_and_says_why(
    most: int, execution: str, bundle: Callable[[str], Path], engine: Callable[[str], Engine], gpu: TensorRT
) -> None:
    gpu.cuda.most_captured = most
    with Engine.load(_compiled(bundle("gpt2-tree"), gpu.folder)) as there:
        ours = there.generate([7, 9, 11], SAMPLED)
        assert ours.stats.execution == there.backend.execution == execution
        assert "cudaErrorStreamCaptureInvalidated" in there.backend.fallback
        _same(ours, engine("gpt2-tree").generate([7, 9, 11], SAMPLED))
