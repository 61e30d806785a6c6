"""Steps that stay on the device, through the whole engine: real graphs on the CPU in a GPU's place (the stand-ins)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from specexport.commands.run import describe
from specexport.contract.manifest import GenerationRules
from specexport.contract.tree import TokenTree
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.backends.cuda.library import Enqueue
from specexport.runtime.proposal import PLAIN_TREE
from specexport.runtime.request import Completion, Request, Stream, complete
from specexport.runtime.speculation.policy import SpeculationPolicy
from specexport.runtime.speculative import PLAIN
from tests.compiled import compiled
from tests.fixtures import Bundles
from tests.step_program import GREEDY, SAMPLED, TYPICAL, program_of, same
from tests.tensorrt_stand_in import TensorRT, installed

pytestmark = pytest.mark.exporter  # it traces the step program's graphs
READ_AGAIN = ("dice-eagle3", "dice-dflash", "dice-mtp-cuda")
"""Bundles that read a cached prompt again, for the target's states at its end."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TensorRT]:
    with installed(monkeypatch, tmp_path / "bundle") as module:
        yield module


@pytest.fixture
def load(bundle: Bundles, shared_accept_graphs: None, gpu: TensorRT) -> Load:
    """Loads a copy of a bundle with engines of its models and of the step program's graphs, for so many slots."""

    def get(name: str, slots: int = 1) -> Engine:
        shutil.copytree(bundle(name), gpu.folder)
        return Engine.load(compiled(bundle(name), gpu.folder, program=program_of(gpu.folder), batches=(slots,)))

    return get


class Load(Protocol):
    """Loads a copy of a bundle with engines."""

    def __call__(self, name: str, slots: int = 1) -> Engine: ...


@pytest.mark.parametrize("name", ["dice-mixed", "dice-medusa", "dice-mlp", *READ_AGAIN])
def test_a_step_is_one_launch_and_one_wait(name, load, gpu):
    with load(name) as on_gpu:
        on_gpu.generate([5, 6, 7, 8], GREEDY)
        gpu.cuda.calls.clear()
        with gpu.cuda.sealed():
            done = on_gpu.generate([5, 6, 7, 8], GREEDY)
        assert done.stats.steps > 1
        assert gpu.cuda.calls.count("cudaGraphLaunch") == done.stats.steps + (name in READ_AGAIN)
        assert gpu.cuda.calls.count("cudaStreamSynchronize") == done.stats.steps + (name in READ_AGAIN)
        assert set(gpu.cuda.calls) == {"cudaGraphLaunch", "cudaStreamSynchronize"}


def test_requests_that_the_host_looks_into_share_graphs_and_caches(load, engine, gpu):
    """One after another in the same slot, each going on from what the last one's steps left in the caches."""
    cpu = engine("dice-mixed")
    with load("dice-mixed") as on_gpu:
        texts: list[list[int]] = [[7, 9, 11], [7, 9, 11]]
        for params, execution in (
            (SAMPLED, "graph per step"),
            (GREEDY.replace(logprobs=2), "graph per engine"),
            (SAMPLED.replace(top_k=257), "graph per engine"),
            (SAMPLED.replace(rules=GenerationRules(typical_p=0.9)), "graph per engine"),
            (GREEDY.replace(rules=GenerationRules(typical_p=0.9)), "graph per step"),
            (GREEDY.replace(rules=GenerationRules(no_repeat_ngram_size=2)), "graph per engine"),
            (GREEDY, "graph per step"),
            (SAMPLED.replace(logprobs=0), "graph per engine"),
            (TYPICAL, "graph per step"),
        ):
            for method in ("draft_model", "ngram"):
                completions = [
                    side.generate(text, params.replace(max_tokens=3), method)
                    for side, text in zip((on_gpu, cpu), texts, strict=True)
                ]
                assert completions[0].token_ids == completions[1].token_ids
                assert completions[0].stats.execution == execution
                texts = [[*text, *done.token_ids] for text, done in zip(texts, completions, strict=True)]


def test_lookahead_is_driven_from_the_host(load, engine, gpu):
    with load("dice-lookahead") as on_gpu:
        ours = on_gpu.generate([7, 9, 11], GREEDY)
        assert ours.stats.execution == "graph per engine"
        same(ours, engine("dice-lookahead").generate([7, 9, 11], GREEDY))
        assert on_gpu.generate([7, 9, 11], GREEDY, PLAIN).stats.execution == "graph per step"


def test_trees_that_a_budget_hands_out_run_in_larger_steps(load, bundle, monkeypatch):
    """Chains of two draft tokens, which nothing was captured for, proposed from the host."""

    def assign(self: SpeculationPolicy, requests: Sequence[Request], joining: int = 0) -> None:
        for request in requests:
            request.view.tree = TokenTree.chain(3) if request.remaining > 1 and request.view.method else PLAIN_TREE

    monkeypatch.setattr(SpeculationPolicy, "assign", assign)
    with load("dice-near-batch") as on_gpu, Engine.load(bundle("dice-near-batch"), threads=1) as cpu:
        for params in (GREEDY, SAMPLED):
            ours = on_gpu.generate([7, 9, 11], params)
            assert ours.stats.execution == "graph per step"
            same(ours, cpu.generate([7, 9, 11], params))


def _poison(engine: Engine) -> None:
    """Fills everything on the device but the caches with nonsense before each launch from now on."""
    backend: Any = engine.backend
    memories = [*(graph._memory for graph in backend.graphs), backend._steps._memory]
    regions = [memory._regions[name] for memory in memories for name in memory._regions if not name.startswith("cache")]

    def poisoned(launch: Enqueue) -> None:
        for region in regions:
            backend.stream.fill(region.address, 0xA5, region.nbytes)
        launch()

    backend.watch(poisoned)


@pytest.mark.parametrize("name", ["dice-mixed", "dice-mlp"])
def test_nothing_is_left_over_from_the_step_before(name, load, bundle, gpu):
    """Every input, output and scratch byte on the device is poisoned before each step, the caches alone are kept."""
    with load(name) as on_gpu, Engine.load(bundle(name), backend="onnxruntime", threads=1) as cpu:
        _poison(on_gpu)
        for params in (GREEDY, SAMPLED):
            same(on_gpu.generate([7, 9, 11], params), cpu.generate([7, 9, 11], params))


@pytest.mark.parametrize(("most", "execution"), [(25, "graph per engine"), (0, "plain")])
def test_without_one_graph_a_step_it_does_the_next_best_and_says_why(most, execution, load, engine, gpu):
    gpu.cuda.most_captured = most
    with load("dice-mixed") as on_gpu:
        ours = on_gpu.generate([7, 9, 11], SAMPLED)
        assert ours.stats.execution == on_gpu.backend.execution == execution
        assert f"device      {execution} (cudaStream" in describe(ours.stats, on_gpu)
        assert "cudaErrorStreamCaptureInvalidated" in on_gpu.backend.fallback
        same(ours, engine("dice-mixed").generate([7, 9, 11], SAMPLED))


# --- several requests -------------------------------------------------------------------------------------------------

SLOTS = 4
TOGETHER = {
    "dice-near-batch": ("draft_model", None),
    "dice-mixed-batch": ("draft_model", "ngram", None),
    "dice-mixed-batch-portable": ("draft_model", "ngram", None),
    "dice-medusa-batch": ("medusa", None),
    "dice-mlp-batch": ("mlp_speculator", None),
    "dice-dflash-batch": ("dflash", None),
}
"""Bundles for several requests, and how requests of theirs speculate."""
STARTS = ([7, 9, 11], list(range(12)) * 2, [5] * 20, [*range(12), 3], [5])
Ask = tuple[list[int], SamplingParams, str | None]


def _asks(methods: Sequence[str | None], *params: SamplingParams) -> list[Ask]:
    """More requests than slots, which end one after another; every method with every way to sample.

    Prompts begin alike and none is the start of another: heads propose in a first step where they read the last token.
    """
    ways = [(param, method) for method in methods for param in params]
    return [
        ([*STARTS[at % len(STARTS)], at, 1], param.replace(max_tokens=6 + 3 * (at % 5), seed=at), method)
        for at, (param, method) in enumerate(ways * (-(-2 * SLOTS // len(ways))))
    ]


def _start(engine: Engine, ask: Ask) -> Stream:
    prompt, params, method = ask
    stream = engine.stream(prompt, params, method or PLAIN)
    stream.start()
    return stream


def _together(engine: Engine, asks: Sequence[Ask]) -> list[Completion]:
    """All of them at once; they join as others leave."""
    streams = [_start(engine, ask) for ask in asks]
    return [complete(stream) for stream in streams]


@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize("name", TOGETHER)
def test_batches_equal_single_requests_on_the_cpu(name, load, bundle, gpu):
    """Greedy and sampled, by every method and by none, joining and leaving, with prompts that begin alike."""
    asks = _asks(TOGETHER[name], GREEDY, SAMPLED)
    with Engine.load(bundle(name.replace("-batch", "")), threads=1, prefix_cache=False) as alone:
        expected = [complete(_start(alone, ask)) for ask in asks]
    with load(name, SLOTS) as on_gpu:
        assert on_gpu.slots == SLOTS
        assert on_gpu.backend.execution == "graph per step", on_gpu.backend.fallback
        with gpu.cuda.sealed():
            completions = _together(on_gpu, asks)
        for ours, theirs in zip(completions, expected, strict=True):
            same(ours, theirs)
            assert ours.stats.execution == "graph per step"
        assert sum(ours.stats.cached_tokens for ours in completions) > 0


@pytest.mark.usefixtures("whole_trees")
def test_a_batch_that_no_one_graph_decides_is_driven_from_the_host(load, engine, gpu):
    """Two rules of acceptance, or logits that the host reads: until those who want it have left."""
    for others in (TYPICAL, GREEDY.replace(logprobs=1)):
        asks: list[Ask] = [([7, 9, 11], others.replace(max_tokens=6), "draft_model"), ([5] * 20, SAMPLED, "ngram")]
        with load("dice-mixed-batch", SLOTS) as on_gpu:
            first, second = (_start(on_gpu, ask) for ask in asks)
            ours = complete(first)
            assert first.stats.execution == second.stats.execution == "graph per engine"
            for actual, ask in ((ours, asks[0]), (complete(second), asks[1])):
                assert actual.token_ids == complete(_start(engine("dice-mixed"), ask)).token_ids
            assert second.stats.execution == "graph per step"
        shutil.rmtree(gpu.folder)


@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize("name", ["dice-near-batch", "dice-mixed-batch", "dice-medusa-batch"])
def test_a_step_of_all_slots_is_one_launch_and_one_wait(name, load, gpu):
    asks = [([*STARTS[at], at], GREEDY.replace(max_tokens=12), TOGETHER[name][0]) for at in range(SLOTS)]
    with load(name, SLOTS) as on_gpu:
        _together(on_gpu, asks)
        gpu.cuda.calls.clear()
        with gpu.cuda.sealed():
            done = _together(on_gpu, asks)  # nothing of the prompts is to be read again
        assert set(gpu.cuda.calls) == {"cudaGraphLaunch", "cudaStreamSynchronize"}
        steps = gpu.cuda.calls.count("cudaGraphLaunch")
        assert steps == gpu.cuda.calls.count("cudaStreamSynchronize")
        most = max(completion.stats.steps for completion in done)
        assert most <= steps <= most + SLOTS  # they join one a turn


@pytest.mark.usefixtures("whole_trees")
def test_nothing_of_another_slot_or_step_is_left_over(load, bundle, gpu):
    """As with one slot, everything but the caches is poisoned before each step."""
    asks = _asks(("draft_model", None), SAMPLED, GREEDY)
    with load("dice-mixed-batch", SLOTS) as on_gpu, Engine.load(bundle("dice-mixed"), threads=1) as alone:
        _poison(on_gpu)
        for ask, ours in zip(asks, _together(on_gpu, asks), strict=True):
            same(ours, complete(_start(alone, ask)))
