"""Many requests at once: each gets what it would get alone, and none waits longer than it must."""

import errno
import itertools
import mmap
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from specexport.contract.reading import read_manifest
from specexport.contract.shapes import batch_points, window
from specexport.contract.tree import TokenTree
from specexport.runtime import Engine, RequestError, SamplingParams, Stream
from specexport.runtime.proposal import PLAIN_TREE, SlotView
from specexport.runtime.request import Request
from specexport.runtime.scheduler import Slots
from specexport.runtime.speculation.policy import SpeculationPolicy
from specexport.runtime.step import StepProgram
from tests.fixtures import Bundles, Engines
from tests.manifests import curve
from tests.reference import chi_square_p, exact_texts
from tests.streams import started, tokens_of
from tests.threads import in_threads

SLOTS = 8
DICE_PROMPT = (5, 8, 5, 8)
TIE = 1e-4
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
BUNDLES = [
    "llama-near-batch",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "llama-near-batch-portable", "gpt2-tree-batch", "qwen3-medusa-batch", "qwen3-medusa-draft-batch",
            "qwen3-mlp", "qwen3-lookup-batch",
        )
    ),
]  # fmt: skip


class Generous(SpeculationPolicy):
    """Lets every request speculate as if it were alone."""

    def assign(self, requests: Sequence[Request], joining: int = 0) -> None:
        """Sets the tree of each request's next step."""
        for request in requests:
            request.view.tree = request.tree if request.remaining > 1 else PLAIN_TREE


@pytest.fixture
def generous(bundle: Bundles) -> Iterator[Engines]:
    """Loads a bundle for a test of its own, with every request speculating fully."""
    loaded: list[Engine] = []

    def load(name: str, **options: Any) -> Engine:
        lm = Engine.load(bundle(name), threads=1, **options)
        lm._scheduler._policy = Generous(lm.manifest, lm.proposers)
        loaded.append(lm)
        return lm

    yield load
    for engine in loaded:
        engine.close()


def prompts(seed: int, count: int, longest: int = 150) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 300) for _ in range(draw.randrange(1, longest))] for _ in range(count)]


# --- shapes and slots -------------------------------------------------------------------------------------------------


def test_batch_points_are_powers_of_two_and_the_largest():
    assert [batch_points(most) for most in (1, 2, 3, 8)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 8)]
    assert batch_points(12) == (1, 2, 4, 8, 12)


@pytest.mark.parametrize("sizes", [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 8), (1, 2, 4, 6)])
def test_a_window_is_the_smallest_that_spans_its_slots(sizes):
    for bits in range(1, 2 ** sizes[-1]):
        slots = [slot for slot in range(sizes[-1]) if bits >> slot & 1]
        covered = window(slots, sizes)
        assert set(slots) <= set(covered) <= set(range(sizes[-1]))
        assert len(covered) == min(size for size in sizes if size >= slots[-1] - slots[0] + 1)


class Caches:
    """Stands for a program: only what slots ask of it, with the texts its caches would hold."""

    sizes = (1, 2, 4, 8)

    def __init__(self) -> None:
        self.rows: list[list[int]] = [[] for _ in range(SLOTS)]

    def filled(self, slot: int) -> int:
        return len(self.rows[slot])

    def reusable(self, slot: int, tokens: int) -> int:
        return tokens

    def share(self, source: int, to: int, tokens: int) -> None:
        self.rows[to] = self.rows[source][:tokens]


def test_running_slots_stay_close_and_caches_are_exact():
    caches, draw = Caches(), random.Random(0)
    slots = Slots(caches, reuse=True)
    running: dict[int, list[int]] = {}
    saved = 0
    for _ in range(3000):
        if slots.free and draw.random() < 0.5:
            text = [draw.randrange(2) for _ in range(draw.randrange(1, 12))]
            slot = slots.take(text)
            known = slots.begin(slot)
            saved += known
            assert caches.rows[slot] == text[:known]
            assert known < len(text)
            caches.rows[slot] = text[:-1]
            running[slot] = text
        elif running:
            slot = draw.choice(list(running))
            del running[slot]
            slots.leave(slot)
            while (move := slots.next_move()) is not None:
                source, to = move
                assert to not in running
                caches.rows[to] = list(caches.rows[source])
                slots.record_move(source, to)
                running[to] = running.pop(source)
        if running:
            assert len(window(running, Caches.sizes)) == next(s for s in Caches.sizes if s >= len(running))
    assert saved > 2000


# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUNDLES)
def test_requests_that_join_and_leave_get_the_text_they_get_alone(name, generous, oracle):
    """All methods and trees and none, side by side; some are cancelled, closed or dropped on the way."""
    cases = [case for case in oracle(name)["greedy"] if len(case["prompt"]) < 400]
    first, draw = generous(name), random.Random(1)
    ways: list[dict[str, Any]] = [{"num_speculative_tokens": 0}]
    for method, speculation in first.methods.items():
        ways += [{"method": method, "num_speculative_tokens": len(tree) - 1} for tree in speculation.token_trees()]
    running: list[tuple[dict[str, Any], Stream, list[int]]] = []
    whole = ties = widest = drafted = 0
    for turn in range(3 * len(cases)):
        case = cases[turn % len(cases)]
        params = SamplingParams(temperature=0.0, max_tokens=len(case["tokens"]))
        way = draw.choice(ways)
        expected = case["tokens"] if way.get("method") == "hypothesis" else None
        stream = first.stream(case["prompt"], params, {**way, "hypothesis": expected})
        stream.start()
        running.append((case, stream, []))
        while len(running) > draw.choice((3, 8, 16)):
            case, stream, got = draw.choice(running)
            chunk = next(stream, None)
            if chunk is not None and draw.random() < 0.98:
                got += chunk.token_ids
                continue
            running.remove((case, stream, got))
            if chunk is not None:
                draw.choice((stream.close, stream.cancel, lambda: None))()
                continue
            drafted += stream.stats.drafted
            same = got == case["tokens"]
            whole += same
            if not same:
                at = next(i for i, pair in enumerate(zip(got, case["tokens"], strict=True)) if len(set(pair)) > 1)
                assert case["gaps"][at] < TIE, (case, got)
                ties += 1
        widest = max(widest, len(first._scheduler._running))
    assert widest == SLOTS
    assert whole > len(cases)
    assert ties <= 2
    assert drafted > 500


def test_a_seed_draws_the_same_text_in_a_batch(generous):
    first = generous("llama-near-batch", prefix_cache=False)
    sampled = [GREEDY.replace(temperature=1.0, top_p=0.95, seed=seed) for seed in range(12)]
    alone = [first.generate(prompt, params).token_ids for prompt, params in zip(prompts(3, 12), sampled, strict=True)]
    streams = started(first.stream(prompt, params) for prompt, params in zip(prompts(3, 12), sampled, strict=True))
    assert [tokens_of(stream) for stream in streams] == alone


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["generous", "own", "measured"])
def test_a_batch_samples_the_target_distribution(budget, bundle, generous, oracle):
    """By measured costs with as many draft tokens as pay; else with as many as requests ask for, if there is room."""
    name, params = "dice-near-batch", SamplingParams(temperature=0.9, max_tokens=3, ignore_eos=True)
    prices = (lambda slots, tokens: 1.0 + 0.05 * slots * (tokens - 1), lambda *_: 0.02, 0.1)
    costs = curve(read_manifest(bundle(name)), *prices) if budget == "measured" else None
    loaded = generous(name) if budget == "generous" else Engine.load(bundle(name), threads=1, costs=costs)
    ways = [None] if costs else [{"num_speculative_tokens": count} for count in (5, 1, 3)]
    queue = [loaded.stream(DICE_PROMPT, params.replace(seed=seed), ways[seed % len(ways)]) for seed in range(1000)]
    texts, drafted = [], 0
    for at, stream in enumerate(queue):
        for ahead in queue[at : at + SLOTS]:
            ahead.start()
        texts.append(tokens_of(stream))
        drafted += stream.stats.drafted
    assert drafted > 100 or budget == "own"  # where all slots run it drafts next to nothing
    assert chi_square_p(texts, exact_texts(oracle(name)["next_logits"], params, 3)) > 1e-3
    loaded.close()


def test_cache_sizes_follow_the_longest_request(generous):
    single = generous("llama-near-batch", prefix_cache=False)
    long, short = [5 + i % 290 for i in range(400)], [9, 8, 7]
    alone = single.generate(short, GREEDY).token_ids, single.generate(long, GREEDY).token_ids
    first = single.stream(short, GREEDY.replace(max_tokens=80))
    start = next(first).token_ids
    second = single.stream(long, GREEDY)
    begun = next(second).token_ids
    large = single._target.cache_rows
    assert (*begun, *tokens_of(second)) == alone[1]
    assert (*start, *tokens_of(first))[:24] == alone[0]
    assert single.generate(short, GREEDY).token_ids == alone[0]
    assert single._target.cache_rows < large


def test_without_address_space_the_cache_grows_with_its_texts(generous, monkeypatch):
    prompt = [5 + i % 290 for i in range(100)]
    params = GREEDY.replace(max_tokens=80)
    expected = generous("llama-near-batch").generate(prompt, params).token_ids
    reserve = mmap.mmap

    def limited(file: int, length: int, *arguments: Any) -> mmap.mmap:
        if length > limit:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return reserve(file, length, *arguments)

    engine = generous("llama-near-batch")
    limit = engine.slots * engine._target.cache_rows * engine.manifest.target.cache_row_bytes * 3
    engine.close()
    monkeypatch.setattr(mmap, "mmap", limited)
    engine = generous("llama-near-batch")
    assert engine.generate(prompt, params).token_ids == expected
    assert 128 < engine._target._cache.rows < engine._target.cache_sizes[-1]


# --- prefixes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUNDLES)
def test_a_prefix_is_read_once(name, generous):
    engine, system = generous(name), [7 + i % 250 for i in range(150)]
    plain = generous(name, prefix_cache=False)
    texts = [[*system, 30 + i, 40 + i, 50] for i in range(5)]
    streams = started(engine.stream(text, GREEDY) for text in texts)
    got = [tokens_of(stream) for stream in streams]
    assert got == [plain.generate(text, GREEDY).token_ids for text in texts]
    assert [stream.stats.cached_tokens for stream in streams] == [0, 150, 150, 150, 150]


def test_conversations_resume_independently(generous):
    first = generous("llama-near-batch")
    plain = generous("llama-near-batch", prefix_cache=False)
    talks = [list(prompt) for prompt in prompts(5, 4, 40)]
    for turn in range(3):
        for talk in talks:
            with first.stream(talk, GREEDY) as stream:
                got = tokens_of(stream)
            assert got == plain.generate(talk, GREEDY).token_ids
            # Its last token is in the cache if it was a draft token that the last step accepted.
            assert stream.stats.cached_tokens in ((len(talk) - 3, len(talk) - 2) if turn else (0,))
            talk += [*got, 11, 12]


def test_single_drafts_catch_up_while_drafting(generous, spy):
    engine = generous("llama-near-batch")
    program = engine._scheduler._program
    runs = spy(engine.proposers["draft_model"].graph, "run", lambda tokens, *_, **__: tokens)
    text = [int(token) for token in np.random.default_rng(0).integers(0, 96, 90)]

    def drafted(slot: int, length: int) -> list[int]:
        runs.clear()
        tree, noise = engine.methods["draft_model"].token_trees()[0], np.random.default_rng(0)
        view = SlotView(slot, text[:length], GREEDY, noise, tree, text[:1], "draft_model")
        (proposal,) = program.propose([view]).values()
        return [int(token) for token in proposal.tokens]

    for slot, missed in enumerate((1, 2, 6, 20), start=1):
        drafted(0, 60)
        shared = drafted(0, 60 + missed)
        assert len(runs) == 1, (missed, runs)
        assert drafted(slot, 60 + missed) == shared


# --- turns ------------------------------------------------------------------------------------------------------------


def test_decoding_never_stalls_for_more_than_a_chunk(generous, spy):
    single = generous("llama-near-batch")
    calls = spy(StepProgram, "prefill", lambda *_, **__: "chunk")
    spy(StepProgram, "step", lambda *_: "step", into=calls)
    first = single.stream([5, 6, 7], GREEDY.replace(max_tokens=100))
    next(first)
    others = [single.stream(prompt, GREEDY) for prompt in prompts(2, 6, 400)]
    for other in others:
        other.start()
    calls.clear()
    tokens_of(first)
    assert calls.count("chunk") > 12
    assert all(pair != ("chunk", "chunk") for pair in itertools.pairwise(calls))
    assert first.stats.stalled > 0


def test_slots_that_are_taken_are_waited_for(generous):
    """In one thread too: a request that waits takes the steps of those before it."""
    first = generous("llama-near-batch", max_batch_size=2)
    wanted = [first.generate(prompt, GREEDY).token_ids for prompt in prompts(7, 6)]
    streams = started(first.stream(prompt, GREEDY) for prompt in prompts(7, 6))
    assert tokens_of(streams[-1]) == wanted[-1]
    assert [tokens_of(stream) for stream in streams[:-1]] == wanted[:-1]
    assert streams[-1].stats.queued > 0


def test_threads_share_the_slots(generous):
    first = generous("llama-near-batch")
    request = prompts(9, 40, 80)
    alone = [first.generate(prompt, GREEDY).token_ids for prompt in request]
    assert in_threads(12, 40, lambda number: first.generate(request[number], GREEDY).token_ids) == alone


def test_an_error_in_a_step_ends_its_requests_and_no_others(generous, monkeypatch):
    first = generous("llama-near-batch", max_batch_size=2)
    wanted = first.generate([5, 6, 7], GREEDY).token_ids
    streams = started(first.stream([5, 6, 7], GREEDY) for _ in range(3))
    next(streams[0])
    with monkeypatch.context() as patch:
        patch.setattr(StepProgram, "step", lambda *_: 1 / 0)
        for stream in streams[:2]:
            with pytest.raises(ZeroDivisionError):
                while True:
                    next(stream)
    assert tokens_of(streams[2]) == wanted
    assert first.generate([5, 6, 7], GREEDY).token_ids == wanted


# --- how much is speculated -------------------------------------------------------------------------------------------


def test_k_shrinks_as_the_batch_fills(bundle):
    with Engine.load(bundle("llama-near-batch"), threads=1) as loaded:
        streams = [loaded.stream(prompt, GREEDY.replace(max_tokens=60)) for prompt in prompts(6, SLOTS, 30)]
        seen: dict[int, set[int]] = {}
        for count, stream in enumerate(streams, start=1):
            for _ in range(3):
                next(stream)
            running = loaded._scheduler._running
            assert len(running) == count
            seen[count] = {len(request.view.tree) for request in running}
        assert seen == {1: {5}, 2: {2}} | {count: {1} for count in range(3, SLOTS + 1)}


def test_a_batch_size_the_bundle_was_not_built_for_is_refused(bundle):
    with pytest.raises(RequestError, match=r"max_batch_size is 3; the bundle was built for 1, 2, 4, 8"):
        Engine.load(bundle("llama-near-batch"), threads=1, max_batch_size=3)
    with Engine.load(bundle("llama-near-batch"), threads=1, max_batch_size=1) as loaded:
        assert loaded._scheduler._slots.free == 1


def test_a_smaller_tree_in_a_wider_step_says_the_same(bundle):
    """Logits of a tree padded to another width, beside slots that take no part."""
    from specexport.contract import tensors
    from specexport.runtime.proposal import NOTHING, Proposal, SlotView

    with Engine.load(bundle("llama-near-batch"), threads=1) as loaded:
        program = StepProgram(loaded.manifest, loaded._target, loaded.proposers)
        noise, tree = np.random.default_rng(0), TokenTree((-1, 0))
        views = {slot: SlotView(slot, [9 + slot, 20, 30 + slot], GREEDY, noise, tree) for slot in (1, 3, 6)}
        for view in views.values():
            loaded._target.copy(view.slot, view.slot, 0)
            while program.prefill(view):
                pass
        proposals = {
            1: Proposal(np.array([44]), tree, None, np.array([[44]])),
            3: NOTHING,
            6: Proposal(np.arange(50, 57), TokenTree.chain(8), None, np.arange(50, 57)[:, None]),
        }
        together = program._verify(list(views.values()), proposals)
        for slot, view in views.items():
            alone, nodes = program._verify([view], {slot: proposals[slot]}), len(proposals[slot].tree)
            np.testing.assert_allclose(
                together[slot][tensors.LOGITS][:nodes], alone[slot][tensors.LOGITS][:nodes], atol=2e-5
            )
