"""Steps that stay on the device, through the whole engine: real graphs on the CPU in a GPU's place (the stand-ins)."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from specexport.commands.run import describe
from specexport.contract.reading import read_manifest
from specexport.contract.tree import TokenTree
from specexport.exporter.engines import program
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.budget import Budget
from specexport.runtime.cuda import api, libraries
from specexport.runtime.cuda.executor import Enqueue
from specexport.runtime.request import Request
from specexport.runtime.step import ROOT
from tests.compiled import compiled
from tests.cuda_stand_in import StandIn
from tests.tensorrt_stand_in import TensorRT

pytestmark = pytest.mark.exporter  # it traces the step program's graphs

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, top_k=40, seed=5, ignore_eos=True)
TYPICAL = SAMPLED.replace(acceptance="typical", posterior_threshold=0.3)
WAYS = {
    "dice-near": ("draft_model",),
    "dice-mixed": ("draft_model", "ngram"),
    "dice-mixed-portable": ("draft_model", "ngram"),
    "dice-self": ("self_draft",),
    "dice-medusa": ("medusa",),
    "dice-medusa-draft": ("medusa_draft",),
}
"""Bundles, and the methods of theirs whose steps stay on the device."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TensorRT]:
    cuda = StandIn()
    module = TensorRT(cuda, tmp_path / "bundle")
    monkeypatch.setattr(api.Cuda, "load", lambda: api.Cuda(cuda))
    monkeypatch.setattr(libraries, "import_tensorrt", lambda runtime, version_compatible: module)
    yield module
    gc.collect()
    assert cuda.leaks == []


@pytest.fixture
def load(
    bundle: Callable[[str], Path],
    accept_graph: Callable[[str, int], bytes],
    gpu: TensorRT,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[str], Engine]:
    """Loads a copy of a bundle with engines of its models and of the step program's graphs."""
    monkeypatch.setattr(program, "_accept", lambda rule, children, candidates: accept_graph(rule, candidates))

    def get(name: str) -> Engine:
        shutil.copytree(bundle(name), gpu.folder)
        manifest = read_manifest(gpu.folder)
        graphs = program.write_program(gpu.folder, manifest.methods, manifest.target.cache, manifest.lowering)
        return Engine.load(compiled(bundle(name), gpu.folder, program=graphs))

    return get


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
    name: str, load: Callable[[str], Engine], engine: Callable[[str], Engine], gpu: TensorRT
) -> None:
    """Greedy, lossless and typical acceptance of chains and trees, the same noise: the same tokens."""
    cpu = engine(name)
    with load(name) as there:
        assert there.backend.execution == "graph per step", there.backend.fallback
        with gpu.cuda.sealed():
            for params, prompt in (
                (GREEDY, [7, 9, 11]),
                (SAMPLED, list(range(12)) * 2),
                (TYPICAL, [5] * 20),
                (GREEDY, [5]),
            ):
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


@pytest.mark.parametrize("name", ["dice-near", "dice-mixed", "dice-medusa"])
def test_a_step_is_one_launch_and_one_wait(name: str, load: Callable[[str], Engine], gpu: TensorRT) -> None:
    with load(name) as there:
        there.generate([5, 6, 7, 8], GREEDY)
        gpu.cuda.calls.clear()
        with gpu.cuda.sealed():
            done = there.generate([5, 6, 7, 8], GREEDY)  # nothing of the prompt is to be read again
        assert done.stats.steps > 1
        assert gpu.cuda.calls.count("cudaGraphLaunch") == done.stats.steps
        assert gpu.cuda.calls.count("cudaStreamSynchronize") == done.stats.steps
        assert set(gpu.cuda.calls) == {"cudaGraphLaunch", "cudaStreamSynchronize"}


def test_requests_that_the_host_looks_into_share_graphs_and_caches(
    load: Callable[[str], Engine], engine: Callable[[str], Engine], gpu: TensorRT
) -> None:
    """One after another in the same slot, each going on from what the last one's steps left in the caches."""
    cpu = engine("dice-mixed")
    with load("dice-mixed") as there:
        texts: list[list[int]] = [[7, 9, 11], [7, 9, 11]]
        for params, execution in (
            (SAMPLED, "graph per step"),
            (GREEDY.replace(logprobs=2), "graph per engine"),
            (GREEDY, "graph per step"),
            (SAMPLED.replace(logprobs=0), "graph per engine"),
            (TYPICAL, "graph per step"),
        ):
            for method in ("draft_model", "ngram"):
                found = [
                    one.generate(text, params.replace(max_tokens=5), method=method)
                    for one, text in zip((there, cpu), texts, strict=True)
                ]
                assert found[0].token_ids == found[1].token_ids
                assert found[0].stats.execution == execution
                texts = [[*text, *done.token_ids] for text, done in zip(texts, found, strict=True)]


def test_lookahead_is_driven_from_the_host(
    load: Callable[[str], Engine], engine: Callable[[str], Engine], gpu: TensorRT
) -> None:
    with load("dice-lookahead") as there:
        ours = there.generate([7, 9, 11], GREEDY)
        assert ours.stats.execution == "graph per engine"
        _same(ours, engine("dice-lookahead").generate([7, 9, 11], GREEDY))
        assert there.generate([7, 9, 11], GREEDY, speculation=False).stats.execution == "graph per step"


def test_trees_that_a_budget_hands_out_run_in_larger_steps(
    load: Callable[[str], Engine], bundle: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains of two draft tokens, which nothing was captured for, proposed from the host."""

    def assign(self: Budget, requests: Sequence[Request]) -> None:
        for request in requests:
            request.view.tree = TokenTree.chain(3) if request.room > 1 and request.view.method else ROOT

    monkeypatch.setattr(Budget, "assign", assign)
    with load("dice-near-batch") as there, Engine.load(bundle("dice-near-batch"), threads=1) as cpu:
        for params in (GREEDY, SAMPLED):
            ours = there.generate([7, 9, 11], params)
            assert ours.stats.execution == "graph per step"
            _same(ours, cpu.generate([7, 9, 11], params))


def test_nothing_is_left_over_from_the_step_before(
    load: Callable[[str], Engine], engine: Callable[[str], Engine], gpu: TensorRT
) -> None:
    """Every input, output and scratch byte on the device is poisoned before each step, the caches alone are kept."""
    with load("dice-mixed") as there:
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
            _same(there.generate([7, 9, 11], params), engine("dice-mixed").generate([7, 9, 11], params))


@pytest.mark.parametrize(("most", "execution"), [(25, "graph per engine"), (0, "plain")])
def test_without_one_graph_a_step_it_does_the_next_best_and_says_why(
    most: int, execution: str, load: Callable[[str], Engine], engine: Callable[[str], Engine], gpu: TensorRT
) -> None:
    gpu.cuda.most_captured = most
    with load("dice-mixed") as there:
        ours = there.generate([7, 9, 11], SAMPLED)
        assert ours.stats.execution == there.backend.execution == execution
        assert f"device      {execution} (cudaStream" in describe(ours.stats, there.backend.fallback)
        assert "cudaErrorStreamCaptureInvalidated" in there.backend.fallback
        _same(ours, engine("dice-mixed").generate([7, 9, 11], SAMPLED))
