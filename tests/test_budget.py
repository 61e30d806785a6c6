"""How much a batch speculates: the best choice by a measured curve, tries that stay cheap, and the same text."""

import doctest
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport.contract.manifest import Manifest
from specexport.contract.methods import method_name
from specexport.contract.methods.base import for_bundle
from specexport.contract.reading import read_manifest
from specexport.contract.tree import TokenTree
from specexport.methods.ngram import Ngram
from specexport.runtime import Engine, SamplingParams
from specexport.runtime import engine as engine_module
from specexport.runtime.backends.onnxruntime.backend import OnnxRuntimeBackend
from specexport.runtime.proposal import Proposer, SlotView
from specexport.runtime.request import Request
from specexport.runtime.speculation import choice
from specexport.runtime.speculation.acceptance import KEEP, PRIOR, WEIGHT, Acceptance
from specexport.runtime.speculation.choice import Option, best_options
from specexport.runtime.speculation.costs import Cost, CostCurve, Costs, MethodCosts
from specexport.runtime.speculation.policy import (
    MARGIN,
    PROBE_SHARE,
    READ_SHARE,
    TRIAL_STEPS,
    MeasuredPolicy,
    SpeculationPolicy,
)
from specexport.runtime.speculation.probing import MAX_PLAIN_STEPS
from specexport.runtime.speculative import PLAIN
from specexport.runtime.step import Outcome, StepResult, Verified
from specexport.runtime.text import TextStream
from tests.fixtures import Bundles
from tests.manifests import curve, trees_of
from tests.streams import started, tokens_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SIZES = (1, 2, 4, 8)


def proposers(manifest: Manifest) -> dict[str, Proposer]:
    """Ways to propose that nothing is choices of."""
    return {
        method_name(method): cast(Any, SimpleNamespace(method=method, reads_along=0))
        for method in (*manifest.methods, for_bundle(Ngram(), manifest.target))
    }


class Batch:
    """Requests that only a budget sees, and steps that accept what a test says."""

    def __init__(self, manifest: Manifest, costs: CostCurve, count: int, arguments: int) -> None:
        self.budget = MeasuredPolicy(manifest, proposers(manifest), Costs(costs), SIZES)
        self._method = method_name(manifest.methods[0])
        self._tree = next(tree for tree in trees_of(manifest, self._method) if len(tree) == arguments)
        self.replace(count)

    def replace(self, count: int, params: SamplingParams = GREEDY) -> None:
        """Other requests take their place, of which nothing is known."""
        views = [
            SlotView(slot, [1, 2, 3], params, np.random.default_rng(0), self._tree, (), self._method)
            for slot in range(count)
        ]
        self.requests = [Request(view, TextStream.__new__(TextStream), 10**6, ()) for view in views]
        for request in self.requests:
            request.history.unread = 0

    def step(self, accepted: Callable[[int], int], rejected: int | None = None) -> list[int]:
        """Takes a step in which of a path of each depth so many tokens are accepted, and none of one request; nodes
        verified by each request.
        """
        self.budget.assign(self.requests)
        trees = [request.view.tree for request in self.requests]
        outcomes = []
        for at, tree in enumerate(trees):
            kept = accepted(tree.depth) if len(tree) > 1 and at != rejected else 0
            outcomes.append(Outcome([0] * (kept + 1), verified=Verified(tree, (), range(kept))))
        self.budget.learn(self.requests, StepResult(outcomes, 0.0, 0.0, 0.0, "host"), 1.0)
        return [len(tree) for tree in trees]


@pytest.fixture
def manifest(bundle: Bundles) -> Manifest:
    return read_manifest(bundle("llama-near-batch"))


# --- the choice -------------------------------------------------------------------------------------------------------


def test_the_example_of_the_choice_is_true():
    assert doctest.testmod(choice) == (0, 5)


def test_flat_costs_lead_to_full_k_and_steep_ones_to_none(manifest):
    for count in (1, 3, 8):
        assert Batch(manifest, curve(manifest, lambda *_: 1.0), count, 8).step(lambda k: k) == [8] * count
    steep = curve(manifest, lambda slots, tokens: 1.0 if slots < 8 else float(tokens))
    full = Batch(manifest, steep, 8, 8)
    for _ in range(50):
        assert full.step(lambda k: k) == [1] * 8
    assert Batch(manifest, steep, 4, 8).step(lambda k: k) == [8] * 4


def test_requested_draft_tokens_are_a_maximum(manifest):
    free = curve(manifest, lambda *_: 1.0)
    assert Batch(manifest, free, 2, 3).step(lambda k: k) == [3, 3]
    # Each token costs as much as one accepted is worth; where all are accepted, none of what was choices pays.
    dear = curve(manifest, lambda _, tokens: float(tokens))
    assert Batch(manifest, dear, 1, 5).step(lambda k: k) == [1]


def test_k_shrinks_as_the_batch_fills_and_as_drafts_are_rejected(manifest):
    bound = curve(manifest, lambda slots, tokens: max(8.0, slots * tokens), lambda slots, nodes: 0.2 * nodes)
    seen = [Batch(manifest, bound, count, 8).step(lambda k: k)[0] for count in SIZES]
    assert seen == sorted(seen, reverse=True)
    assert seen[0] == 8
    assert seen[-1] == 1
    rejected = Batch(manifest, curve(manifest, lambda _, tokens: 4.0 + tokens), 1, 8)
    widths = [rejected.step(lambda _: 0)[0] for _ in range(40)]
    assert widths[0] > 2
    assert widths[-1] == 1
    assert sorted(widths[:20], reverse=True) == widths[:20]


def test_new_requests_try_what_nearly_pays(manifest):
    """K = 1 promises 1.7 tokens in 1.8 times the time: too little, but that is only what is assumed of any draft."""
    costs = curve(manifest, lambda _, tokens: {1: 1.0, 2: 1.8}.get(tokens, 9.0))
    poor = Batch(manifest, costs, 4, 2)
    widths = [poor.step(lambda _: 0)[0] for _ in range(10)]
    assert widths[0] == 2
    assert widths[TRIAL_STEPS:] == [1] * (10 - TRIAL_STEPS)
    good = Batch(manifest, costs, 4, 2)
    assert [good.step(lambda k: k)[0] for _ in range(10)] == [2] * 10


@pytest.mark.parametrize("read", [0.9, 1.1])
def test_nothing_is_tried_if_the_draft_has_much_to_read(manifest, read):
    """A twentieth of 20 plain steps is 1; either way K = 1 promises a little less than plain decoding."""
    batch = Batch(manifest, curve(manifest, lambda _, tokens: {1: 1.0, 2: 1.65}.get(tokens, 9.0), read=read), 1, 2)
    request = Request(batch.requests[0].view, TextStream.__new__(TextStream), 20, ())
    request.history.unread = manifest.prefill_chunk
    batch.requests = [request]
    assert batch.step(lambda k: k) == [2 if read < 1 else 1]


def test_speculation_is_left_later_than_it_is_begun(manifest):
    batch = Batch(manifest, curve(manifest, lambda *_: 1.0), 1, 2)
    for _ in range(60):
        assert batch.step(lambda k: k) == [2]
    # Nearly two tokens, in twice the time.
    batch.budget._costs = Costs(curve(manifest, lambda _, tokens: float(tokens)))
    assert batch.step(lambda k: k) == [2]
    batch.requests[0].history.unread = 1  # as after a plain step
    assert batch.step(lambda k: k) == [1]


def test_while_others_join_a_step_has_to_beat_the_full_batch(manifest):
    """Eight tokens of a full batch take as long as one alone: what one saves before that is worth next to nothing."""
    batch = Batch(manifest, curve(manifest, lambda _, tokens: 1.0 + 0.1 * tokens), 1, 8)
    assert batch.step(lambda k: k)[0] > 1
    batch.budget.assign(batch.requests, joining=7)
    assert [len(request.view.tree) for request in batch.requests] == [1]
    batch.budget.assign(batch.requests)
    assert len(batch.requests[0].view.tree) > 1


def test_a_look_up_is_weighed_by_the_speed_without_it(manifest):
    """What a draft promises is more, but not in the time that it takes: 8 tokens in 38 seconds to 3.1 in 13.5."""
    batch = Batch(manifest, curve(manifest, lambda _, tokens: 9.5 + 0.5 * tokens, lambda _, nodes: 3.0 * nodes), 1, 8)
    policy, (request,) = batch.budget, batch.requests
    for _ in range(30):
        last = batch.step(lambda k: k)
    assert last == [8]
    request.lookup, policy.look_up = "ngram", lambda *_: [1] * 7
    policy.assign([request])
    assert request.view.lookup == "ngram"


def test_requests_share_the_run_of_a_device_s_draft(manifest):
    """Four requests gain 6 tokens each for one second of drafting, and 2 by look-ups."""
    batch = Batch(manifest, curve(manifest, lambda *_: 1.0, lambda *_: 1.0), 4, 8)
    batch.budget = policy = MeasuredPolicy(manifest, proposers(manifest), batch.budget._costs, (4,))
    for _ in range(30):
        assert batch.step(lambda k: k) == [8] * 4
    policy.look_up = lambda *_: [1] * 7
    for request in batch.requests:
        request.lookup = "ngram"
    policy.assign(batch.requests)
    assert [request.view.lookup for request in batch.requests] == [None] * 4


def test_acceptance_transfers_between_similar_temperatures(manifest):
    batch = Batch(manifest, curve(manifest, lambda _, tokens: 4.0 + tokens), 1, 5)
    hot, warm = SamplingParams(temperature=1.5), SamplingParams(temperature=1.4)
    for params, kept in ((GREEDY, 4), (hot, 0)):
        batch.replace(1, params)
        for _ in range(30):
            batch.step(lambda depth, kept=kept: min(depth, kept))
    batch.replace(1)
    assert batch.step(lambda _: 0) == [5]
    batch.replace(1, warm)
    assert batch.step(lambda _: 0)[0] <= 2


def test_rejections_affect_only_their_request(manifest):
    """All slots pay for the widest tree, so that one that is always rejected costs nothing beside the others."""
    batch = Batch(manifest, curve(manifest, lambda _, tokens: 4.0 + tokens), 4, 5)
    for _ in range(40):
        widths = batch.step(lambda k: k, rejected=3)
    assert widths[:3] == [5] * 3
    chances = [request.history.acceptance(request.view.method, 0).expected(1)[1] for request in batch.requests]
    assert min(chances[:3]) > 0.9
    assert chances[3] < 0.2


@given(
    st.lists(
        st.lists(st.tuples(st.integers(2, 9), st.floats(0.01, 20), st.floats(0, 5)), max_size=4), min_size=1, max_size=3
    ),
    st.integers(1, 8),
    st.lists(st.floats(0, 3), min_size=9, max_size=9),
)
def test_the_best_choice_is_the_best_of_all(ways, requests, more):
    seconds = list(itertools.accumulate([1.0, *more]))
    options = [[Option(width, gain, spent, {}) for width, gain, spent in known] for known in ways]

    def rate(picks: Sequence[Option | None]) -> float:
        taken = [pick for pick in picks if pick is not None]
        width = max((pick.width for pick in taken), default=1)
        return (requests + sum(pick.gain for pick in taken)) / (seconds[width - 1] + sum(p.seconds for p in taken))

    reached, chosen = best_options(options, requests, MARGIN * requests / seconds[0], lambda width: seconds[width - 1])
    most = max(rate(picks) for picks in itertools.product(*([None, *known] for known in options)))
    plain = requests / seconds[0]
    if all(pick is None for pick in chosen):
        assert most <= MARGIN * plain * (1 + 1e-9)
    else:
        assert rate(chosen) == pytest.approx(reached)
        assert reached == pytest.approx(most)


# --- what is learned --------------------------------------------------------------------------------------------------


def test_acceptance_combines_observations_and_prior():
    seen = Acceptance()
    assert seen.expected(3)[3] == pytest.approx(PRIOR + PRIOR**2 + PRIOR**3)
    noise = np.random.default_rng(0)
    chances = (0.9, 0.6, 0.3)
    for _ in range(4000):
        accepted = next((at for at, chance in enumerate(chances) if noise.random() > chance), 3)
        seen.learn(3, accepted)
    assert seen.expected(3)[3] == pytest.approx(0.9 + 0.54 + 0.162, abs=0.35)
    # Depths nobody tried are taken to be like the last one known.
    first = Acceptance()
    for _ in range(100):
        first.learn(1, 1)
    assert first.expected(4)[4] > 3.2


def test_acceptance_follows_the_text():
    seen = Acceptance()
    for _ in range(200):
        seen.learn(4, 4)
    for _ in range(60):
        seen.learn(4, 0)
    assert seen.expected(4)[4] < 0.3


def test_counts_fade_to_the_prior_s_weight():
    seen = Acceptance()
    for _ in range(1000):
        seen.learn(1, 1)
    tried = 1 / (1 - KEEP)
    assert seen.expected(1)[1] == pytest.approx((WEIGHT * PRIOR + tried) / (WEIGHT + tried))


# --- trying again -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("read", [0.0, 0.8])
def test_retries_are_bounded_and_detect_changes(manifest, count, read):
    costs = curve(manifest, lambda _, tokens: 1.0 + 0.5 * (tokens > 1), lambda *_: 0.1, read)
    batch = Batch(manifest, costs, count, 8)
    while max(batch.step(lambda _: 0)) > 1:
        pass
    steps, spent = 4000, 0.0
    tries = 0
    for _ in range(steps):
        unread = min(request.history.unread for request in batch.requests)
        if max(batch.step(lambda _: 0)) > 1:
            tries += 1
            spent += 0.6 + read * -(-unread // 64)
    assert tries >= 3
    assert spent <= 1.1 * (PROBE_SHARE + READ_SHARE * (read > 0)) * steps
    if read and count > 1:
        return  # a draft that has to read one text after the other takes longer than this to find out
    # From here on everything is accepted: that is found, and soon everyone speculates again.
    for _ in range(steps):
        if set(batch.step(lambda k: k)) == {8}:
            break
    else:
        pytest.fail("nobody speculates again")


def test_where_nothing_pays_it_is_not_asked_each_step(manifest, spy):
    batch = Batch(manifest, curve(manifest, lambda _, tokens: float(tokens)), 2, 8)
    choices = spy(batch.budget, "_choose", lambda *_: True)
    for _ in range(100):
        assert batch.step(lambda _: 0) == [1, 1]
    assert 100 / (MAX_PLAIN_STEPS + 1) <= len(choices) <= 100 / (MAX_PLAIN_STEPS + 1) + 4
    # Others are there: it is choices at once.
    choices.clear()
    batch.requests.pop()
    batch.step(lambda _: 0)
    assert choices


@pytest.mark.parametrize(("plain", "longest"), [(3e-3, MAX_PLAIN_STEPS), (6e-4, 16), (1e-5, 32)])
@pytest.mark.parametrize("repeats", [False, True])
def test_short_steps_are_evaluated_less_often(manifest, plain, longest, repeats, spy):
    """An evaluation takes a tenth of a millisecond. Look-ups that do not pay are no reason for another."""
    batch = Batch(manifest, curve(manifest, lambda _, tokens: plain * tokens), 1, 8)
    policy, (request,) = batch.budget, batch.requests
    evaluated = spy(policy, "_choose", lambda *_: True)
    looked_up = [1] * 7 if repeats else []
    request.lookup, policy.look_up = "ngram", lambda *_: looked_up
    for _ in range(400):
        batch.step(lambda _: 0)
    if repeats and longest == MAX_PLAIN_STEPS:
        assert len(evaluated) == 400  # what look-ups would have gained is learned from each step
        return
    # The longest is reached in steps, again after each probe.
    assert 400 / (longest + MAX_PLAIN_STEPS + 1) <= len(evaluated) <= 400 / (longest + 1) + 16
    if not repeats:
        # As soon as the text repeats itself, it is looked up, if that has become worth it.
        looked_up = [1] * 7
        policy._costs = Costs(curve(manifest, lambda *_: plain))
        steps = [batch.step(lambda k: k) for _ in range(MAX_PLAIN_STEPS + 1)]
        assert steps[-1][0] > 1


# --- the curve --------------------------------------------------------------------------------------------------------


def test_costs_are_interpolated(manifest):
    steps, longer = (
        tuple(
            Cost(batch=batch, tokens=tokens, seconds=float(tokens) + cache / 256)
            for batch, tokens in itertools.product(batches, (1, 2, 8))
        )
        for cache, batches in ((256, (1, 4)), (512, (1,)))
    )
    costs = Costs(CostCurve(text=256, steps=steps, longer_text=512, longer=longer, methods=()))
    assert costs.step(1, 2, 256) == 3.0
    assert costs.step(1, 5, 256) == 6.0
    assert costs.step(1, 5, 384) == pytest.approx(6.5)
    assert costs.step(1, 5, 1024) == pytest.approx(9.0)
    assert costs.step(4, 5, 1024) == pytest.approx(18.0)
    assert costs.step(1, 14, 256) == pytest.approx(15.0)
    # Of 4 slots at most: 8 of them with 2 tokens each take as long as 4 with 4.
    assert costs.step(8, 2, 256) == pytest.approx(costs.step(4, 4, 256))


def test_a_longer_text_costs_all_slots_of_a_device(manifest):
    """Every run takes all of them, so no single one was measured."""
    steps, longer = (
        tuple(Cost(batch=4, tokens=tokens, seconds=tokens + cache / 256) for tokens in (1, 8)) for cache in (256, 512)
    )
    costs = Costs(CostCurve(text=256, steps=steps, longer_text=512, longer=longer, methods=()))
    assert costs.step(4, 8, 512) == pytest.approx(10.0)
    assert costs.step(4, 1, 768) == pytest.approx(4.0)


TRUE = {1: 1.0, 3: 1.2, 5: 1.4}
"""Seconds of steps by their tokens; proposing for the widest takes ``PROPOSING``."""
PROPOSING = 0.3


def _busy_costs(refined: bool) -> Costs:
    """What a machine that was busy made of ``TRUE``: speculation does not seem to pay."""
    measured = {1: 1.0, 3: 1.6, 5: 2.0}
    steps = tuple(Cost(batch=1, tokens=tokens, seconds=seconds) for tokens, seconds in measured.items())
    method = MethodCosts(method="draft_model", propose=(Cost(batch=1, tokens=5, seconds=0.36),), read=0.0)
    return Costs(CostCurve(text=256, steps=steps, longer_text=256, longer=(), methods=(method,)), refined)


@pytest.mark.parametrize("speed", [0.5, 1.0, 3.0], ids=lambda speed: f"{speed}x")
def test_steps_times_refine_costs(speed):
    """How costs compare is found out, whatever the machine's speed is, among times a tenth of which are outliers."""
    costs, noise = _busy_costs(refined=True), np.random.default_rng(0)

    def took(true: float) -> float:
        return true * speed * (1 + noise.exponential(0.02)) * (4.0 if noise.random() < 0.1 else 1.0)

    for _ in range(150):
        for tokens, true in TRUE.items():
            costs.refine(None, 1, tokens, costs.step(1, tokens, 256), took(true))
        costs.refine("draft_model", 1, 5, costs.propose("draft_model", 1, 5), took(PROPOSING))
    for tokens, true in TRUE.items():
        assert costs.step(1, tokens, 256) / costs.step(1, 1, 256) == pytest.approx(true, rel=0.06)
    assert costs.propose("draft_model", 1, 5) / costs.step(1, 1, 256) == pytest.approx(PROPOSING, rel=0.06)


def test_costs_are_moved_only_so_far_and_those_that_were_given_not_at_all():
    inputs, refined = _busy_costs(refined=False), _busy_costs(refined=True)
    for costs in (inputs, refined):
        for _ in range(2000):
            costs.refine(None, 1, 1, costs.step(1, 1, 256), 1.0)
            costs.refine(None, 1, 5, costs.step(1, 5, 256), 100.0)
    assert (inputs.step(1, 1, 256), inputs.step(1, 5, 256)) == (1.0, 2.0)
    assert 2.0 < refined.step(1, 5, 256) / refined.step(1, 1, 256) <= 2.0 * 1.5**2
    assert refined.step(1, 3, 256) == 1.6  # never seen


def test_a_step_that_drafts_on_the_device_refines_the_draft_s_cost(manifest):
    """It has one time, which says nothing of steps whose draft tokens the host writes."""
    batch = Batch(manifest, curve(manifest, lambda *_: 1.0, lambda *_: 0.5), 1, 8)
    costs = batch.budget._costs = Costs(batch.budget._costs.curve, refined=True)

    def drafted(seconds: float) -> None:
        batch.budget.assign(batch.requests)
        assert len(batch.requests[0].view.tree) == 8
        outcome = Outcome([0] * 8, verified=Verified(TokenTree.chain(8), (), range(7)))
        batch.budget.learn(batch.requests, StepResult([outcome], 0.0, seconds, 0.0, "graph per step", True), seconds)

    for _ in range(200):
        drafted(1.7)
        costs.refine(None, 1, 1, costs.step(1, 1, 1), 1.0)
    whole = costs.step(1, 8, 1) + costs.propose("draft_model", 1, 8)
    assert whole / costs.step(1, 1, 1) == pytest.approx(1.7, rel=0.04)
    assert costs.step(1, 8, 1) == 1.0


@pytest.mark.parametrize(("along", "chunks"), [(2, 1), (4, 2 / 64), (64, 5 / 64)])
def test_what_a_draft_reads_along_is_less_than_a_chunk(manifest, along, chunks):
    """Two tokens are read along in any case, so a graph for two has another run for each further one."""
    batch = Batch(manifest, curve(manifest, lambda *_: 1.0, read=1.0), 1, 8)
    request = batch.requests[0]
    request.history.unread = 2 if along == 4 else 5
    batch.budget._proposers["draft_model"].reads_along = along
    assert manifest.prefill_chunk == 64
    assert batch.budget._read("draft_model", request) == pytest.approx(chunks)


def test_decoding_refines_measured_costs(bundle, remembered):
    with Engine.load(bundle("dice-near-batch"), threads=1, calibrate=True) as engine:
        points, before = [(1, 1, 128), (1, 5, 128)], Costs(engine.costs.curve)
        engine.generate([5, 6, 7] * 8, GREEDY)
        engine.generate([5, 6, 7] * 8, GREEDY, PLAIN)
        assert any(engine.costs.step(*point) != before.step(*point) for point in points)
        # What is remembered is what was measured.
        assert next(remembered.iterdir()).read_bytes() == msgspec.json.encode(engine.costs.curve)


@pytest.fixture
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; gives where curves are kept in it."""
    monkeypatch.setenv("SPECEXPORT_CACHE", str(tmp_path))
    monkeypatch.setattr(engine_module, "MOST_NOISE", 1e9)  # a machine that runs tests may be busy
    return tmp_path / "costs"


def test_a_bundle_is_measured_once_on_a_machine(bundle, remembered, monkeypatch):
    folder, prompt = bundle("dice-near-batch"), [5, 6, 7] * 8
    with Engine.load(folder, threads=1) as ruled:
        assert ruled.costs is None
        assert type(ruled._scheduler._policy) is SpeculationPolicy
        plain = ruled.generate(prompt, GREEDY, PLAIN)
    assert not remembered.exists()
    with Engine.load(folder, threads=1, calibrate=True) as first:
        assert isinstance(first._scheduler._policy, MeasuredPolicy)
        assert first.generate(prompt, GREEDY).token_ids == plain.token_ids
        # What was measured left nothing behind.
        assert first.generate(prompt, GREEDY, PLAIN).token_ids == plain.token_ids
    (file,) = remembered.iterdir()
    curve = msgspec.json.decode(file.read_bytes(), type=CostCurve)
    assert {cost.batch for cost in curve.steps} == set(SIZES)
    assert {cost.tokens for cost in curve.steps if cost.batch == 1} >= {1, 2, 3, 6, 9}
    # Of a batch those at most twice as wide as a single request's, all slots together, and the widest.
    assert {cost.tokens for cost in curve.steps if cost.batch == 8} == {1, 2, 9}
    (method,) = curve.methods
    assert method.read > 0
    before = file.read_bytes()
    with Engine.load(folder, threads=1, calibrate=True) as second:
        assert [second.costs.step(*at, 1) for at in ((1, 9), (8, 2))] == [
            next(step_.seconds for step_ in curve.steps if (step_.batch, step_.tokens) == at) for at in ((1, 9), (8, 2))
        ]
    assert file.read_bytes() == before
    with Engine.load(folder, threads=2, calibrate=True):  # another number of threads is another machine
        assert len(list(remembered.iterdir())) == 2
    with monkeypatch.context() as updated:
        updated.setattr(OnnxRuntimeBackend, "kernels_build", "an update of our kernels")
        with Engine.load(folder, threads=1, calibrate=True):
            assert len(list(remembered.iterdir())) == 3
    file.write_bytes(before[:-9])
    with Engine.load(folder, threads=1, calibrate=True):
        assert msgspec.json.decode(file.read_bytes(), type=CostCurve) != curve


def test_noisy_measurements_are_discarded(bundle, remembered, monkeypatch):
    monkeypatch.setattr(engine_module, "MOST_NOISE", 0.5)
    with Engine.load(bundle("llama-near"), threads=1, calibrate=True) as engine:
        assert engine.costs is not None
    assert not remembered.exists()


def test_batches_that_steps_were_too_slow_to_measure_speculate_too(bundle, remembered):
    with Engine.load(bundle("llama-near-batch"), threads=1) as engine:
        measured = engine.calibrate(seconds=1e-9)
        flat = curve(engine.manifest, lambda slots, tokens: 0.01)
    assert {cost.batch for cost in measured.steps} == {1}
    alone = msgspec.structs.replace(flat, steps=tuple(cost for cost in flat.steps if cost.batch == 1))
    with Engine.load(bundle("llama-near-batch"), threads=1, costs=alone) as engine:
        prompt, params = [9, 8, 7, 6] * 4, GREEDY.replace(max_tokens=24)
        plain = engine.generate(prompt, params, PLAIN)
        streams = started(engine.stream(prompt, params) for _ in range(2))
        for stream in streams:
            assert tokens_of(stream) == plain.token_ids
            assert stream.stats.drafted > 0


def test_tune_batch_measures_again(bundle, remembered, cli):
    words = ["tune", "batch", str(bundle("dice-near-batch")), "--threads", "1", "--seconds", "1"]
    assert "draft_model: ms to propose" in cli(*words).out
    (file,) = remembered.iterdir()
    before = file.read_bytes()
    assert {cost["batch"] for cost in cli(*words, "--json").json["steps"]} == set(SIZES)
    assert file.read_bytes() != before


def test_steps_draft_as_many_tokens_as_pay(bundle, tmp_path):
    """Without a word: the most where tokens are free, none where each costs a step; a number that is named stays."""
    folder, params = bundle("llama-near"), GREEDY.replace(max_tokens=60)
    manifest = read_manifest(folder)
    most = max(len(tree) for tree in trees_of(manifest, "draft_model")) - 1
    for price, expected in ((lambda *_: 1.0, most), (lambda _, tokens: float(tokens), 0)):
        with Engine.load(folder, threads=1, costs=curve(manifest, price)) as engine:
            done = engine.generate([9, 8, 7, 6] * 4, params)
            steps = {size: n for by in done.stats.steps_by_draft.values() for size, n in by.items()}
            assert max(steps, key=steps.__getitem__) == expected
            named = engine.generate([9, 8, 7, 6] * 4, params, {"num_speculative_tokens": 2}).stats.steps_by_draft
            assert named.keys() <= {"draft_model", "plain"}  # the last token needs no draft
            assert named["draft_model"].keys() == {2}


def test_a_text_that_repeats_itself_is_looked_up(bundle):
    """Where nobody names a method: look-ups come true and cost less than the draft, so the draft is left."""
    folder, params = bundle("llama-near"), GREEDY.replace(max_tokens=120)
    manifest = read_manifest(folder)
    costs = curve(manifest, lambda _, tokens: 4.0 + tokens, lambda _, nodes: 1.0 * nodes, 1.0)
    with Engine.load(folder, threads=1, costs=costs) as measured:
        plain = measured.generate([5, 6, 7] * 8, params, PLAIN)
        done = measured.generate([5, 6, 7] * 8, params)
        assert done.token_ids == plain.token_ids
        assert done.stats.steps_by_draft.keys() >= {"ngram"}
        assert done.stats.steps < plain.stats.steps
        named = measured.generate([5, 6, 7] * 8, params, {"method": "draft_model"})
        assert named.token_ids == plain.token_ids
        assert named.stats.steps_by_draft.keys() <= {"draft_model", "plain"}
        # The next request in the slot has a text of its own.
        other = [9, 4, 3, 8, 1, 2] * 4
        assert measured.generate(other, params).token_ids == measured.generate(other, params, PLAIN).token_ids


# --- engines ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(bundle: Bundles) -> Iterator[Callable[..., Engine]]:
    """Loads a bundle with a made-up curve."""
    loaded: list[Engine] = []

    def load(name: str, *prices: Any) -> Engine:
        folder = bundle(name)
        loaded.append(Engine.load(folder, threads=1, check_hashes=False, costs=curve(read_manifest(folder), *prices)))
        return loaded[-1]

    yield load
    for engine in loaded:
        engine.close()


def _steps_dear(slots: int, tokens: int) -> float:
    """Full batches pay for every token; the draft is right often enough for K to go up and down."""
    return 1.0 + 0.12 * slots * (tokens - 1)


@pytest.mark.parametrize(
    "name",
    [
        "llama-near-batch",
        *(pytest.param(f"qwen3-{at}-batch", marks=pytest.mark.slow) for at in ("medusa", "medusa-draft", "lookup")),
    ],
)
def test_requests_use_the_models_defaults(name, measured, oracle):
    first = measured(name, _steps_dear, lambda *_: 0.05, 0.3)
    cases = [case for case in oracle(name)["greedy"] if len(case["prompt"]) < 100]
    drafted = []
    for count in (1, 4, 8):
        for start in range(0, len(cases), count):
            some = cases[start : start + count]
            streams = started(
                first.stream(case["prompt"], GREEDY.replace(max_tokens=len(case["tokens"]), ignore_eos=False))
                for case in some
            )
            for case, stream in zip(some, streams, strict=True):
                got = list(tokens_of(stream))
                if got != case["tokens"]:
                    at = next(i for i, pair in enumerate(zip(got, case["tokens"], strict=True)) if len(set(pair)) > 1)
                    assert case["gaps"][at] < 1e-4
                drafted.append(stream.stats.drafted)
    assert sum(drafted) > 0


def test_unmeasured_methods_join_a_measured_batch(measured):
    first = measured("llama-near-batch", lambda *_: 1.0, lambda *_: 0.05, 0.3)
    prompt, params = [9, 8, 7, 6] * 4, GREEDY.replace(max_tokens=24)
    plain = first.generate(prompt, params, PLAIN)
    methods = ("draft_model", "ngram", "suffix", PLAIN)
    streams = started(first.stream(prompt, params, method) for method in methods)
    for stream, drafts in zip(streams, (True, True, True, False), strict=True):
        assert tokens_of(stream) == plain.token_ids
        assert (stream.stats.drafted > 0) == drafts


def test_where_nothing_pays_a_batch_decodes_plainly_and_drafts_read_nothing(measured, spy):
    from specexport.methods.draft_model import DraftModelProposer

    first = measured("llama-near-batch", lambda slots, tokens: 1.0 if slots < 8 else float(tokens))
    read = spy(DraftModelProposer, "_read_chunk", lambda *_: True)
    streams = started(first.stream([5 + at, 9, 30], GREEDY) for at in range(8))
    for stream in streams:
        for _ in stream:
            pass
    counts = [stream.stats for stream in streams]
    assert sum(stats.steps_with_draft for stats in counts) < 0.2 * sum(stats.steps for stats in counts)
    assert len(read) < 8
    alone = first.generate([5, 9, 30], GREEDY).stats
    assert alone.steps_with_draft == alone.steps - 1 or alone.steps_with_draft == alone.steps


def test_a_request_alone_is_reproducible(measured):
    """K goes to 0 and back, by what requests before it learned; an engine that begins anew takes the same steps."""
    params = SamplingParams(temperature=0.9, max_tokens=55, ignore_eos=True)
    texts, back = [], 0
    for _ in range(2):
        single = measured("dice-near-batch", lambda _, tokens: 1.0 + 0.5 * (tokens - 1), lambda *_: 0.05, 0.001)
        done = [single.generate([5, 8, 5, 8], params.replace(seed=seed)) for seed in range(4)]
        back += sum(2 < first.stats.steps_with_draft < first.stats.steps - 2 for first in done)
        texts.append([first.token_ids for first in done])
    assert back
    assert texts[0] == texts[1]
