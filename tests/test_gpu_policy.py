"""How much each step speculates on a GPU: costs of whole steps, measured once, and choices that never change the text.

Real graphs run on the CPU in the GPU's place (the stand-ins), so times mean nothing: costs are injected, and where they
are measured the clock counts launches.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from specexport.contract.reading import read_manifest
from specexport.runtime import Engine, step
from specexport.runtime import engine as engine_module
from specexport.runtime.backends.cuda import device_program
from specexport.runtime.request import complete
from specexport.runtime.speculation import timing
from specexport.runtime.speculation.costs import CostCurve
from specexport.runtime.speculation.policy import TRIAL_STEPS, MeasuredPolicy
from specexport.runtime.speculative import PLAIN
from tests.fixtures import Bundles
from tests.manifests import Price, curve
from tests.onnxruntime_stand_in import OnnxRuntimeGpu
from tests.step_program import GREEDY
from tests.streams import started

pytestmark = pytest.mark.exporter  # the step program's graphs

PROMPT = [7, 9, 11, 5, 8]
LONG = GREEDY.replace(max_tokens=80)
Load = Callable[..., Engine]


@pytest.fixture
def load(cuda_bundle: Bundles) -> Load:
    """Loads a bundle with an invented curve."""

    def get(name: str, step: Price, propose: Price, read: float = 0.0, **options: Any) -> Engine:
        costs = curve(read_manifest(cuda_bundle(name)), step, propose, read)
        return Engine.load(cuda_bundle(name), check_hashes=False, costs=costs, **options)

    return get


@pytest.fixture
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: OnnxRuntimeGpu) -> Path:
    """An empty cache folder, and a clock that counts launches; gives where curves are stored."""
    monkeypatch.setenv("SPECEXPORT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(engine_module, "MOST_NOISE", 1e9)
    clock = SimpleNamespace(perf_counter=lambda: float(gpu.cuda.launches))
    for module in (timing, step, device_program):
        monkeypatch.setattr(module, "time", clock)
    return tmp_path / "cache" / "costs"


# --- costs ------------------------------------------------------------------------------------------------------------


def test_a_bundle_is_measured_once_on_a_gpu(cuda_bundle, remembered, engine, gpu):
    """What is measured are launches of captured graphs: nothing is allocated, and the texts stay the CPU's."""
    name = "dice-mixed"
    with Engine.load(cuda_bundle(name), check_hashes=False, calibrate=False) as ruled:
        assert ruled.costs is None
        assert ruled.generate(PROMPT, GREEDY).stats.steps_by_draft.keys() == {"draft_model", "plain"}
        allocated = len(gpu.cuda.allocations)
    assert not remembered.exists()
    with Engine.load(cuda_bundle(name), check_hashes=False, calibrate=True) as first:
        assert len(gpu.cuda.allocations) == 2 * allocated
        assert first.backend.execution == "graph per step"
        assert first.costs is not None
        with gpu.cuda.sealed():
            for text in (PROMPT, [5, 6, 7] * 8):
                expected = engine(name).generate(text, LONG, PLAIN).token_ids
                for way in (None, "draft_model", "ngram", PLAIN):
                    assert first.generate(text, LONG, way).token_ids == expected
            first.calibrate(seconds=1.0)
        assert first.generate(PROMPT, LONG).token_ids == engine(name).generate(PROMPT, LONG, PLAIN).token_ids
    (file,) = remembered.iterdir()
    stored = file.read_bytes()
    before = gpu.cuda.launches
    with Engine.load(cuda_bundle(name), check_hashes=False, calibrate=False):
        unmeasured = gpu.cuda.launches - before
    before = gpu.cuda.launches
    with Engine.load(cuda_bundle(name), check_hashes=False, calibrate=True) as second:
        assert gpu.cuda.launches - before == unmeasured
        assert second.costs is not None
        assert second.costs.curve == msgspec.json.decode(stored, type=CostCurve)


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("dice-mixed", {"draft_model": 0, "ngram": 0}),
        ("dice-mixed-portable", {"draft_model": 3, "ngram": 0}),
        ("dice-lookahead", {"lookahead": 0}),
        ("dice-mixed-batch", {"draft_model": 0, "ngram": 0}),
    ],
)
def test_proposing_costs_what_it_adds_to_a_step(name, launches, cuda_bundle, remembered):
    """Any step is one launch, also one in which a draft proposes; calls of a draft that the host drives are more."""
    slots = 4 if name.endswith("batch") else 1
    with Engine.load(cuda_bundle(name), check_hashes=False, calibrate=True, max_batch_size=slots) as engine:
        costs = engine.costs
        assert costs is not None
        assert {cost.batch for cost in costs.curve.steps} == {slots}
        assert {cost.seconds for cost in (*costs.curve.steps, *costs.curve.longer)} == {1.0}
        for method, expected in launches.items():
            trees = engine.methods[method].smaller_trees(engine.manifest.target)
            (found,) = (measured for measured in costs.curve.methods if measured.method == method)
            assert {cost.tokens for cost in found.propose} == {len(tree) for tree in trees}
            assert round(max(cost.seconds for cost in found.propose)) == expected
            # A chunk that the draft reads is a launch of its own.
            assert found.read == (method == "draft_model")


# --- choices ----------------------------------------------------------------------------------------------------------


def test_a_draft_that_is_never_right_is_left(load, engine):
    """As on an H200: a step of the draft takes three plain ones."""
    with load("qwen3-bad", lambda _, tokens: 6e-4, lambda _, nodes: 3e-4 * (nodes - 1), 1e-3) as measured:
        first, second = (measured.generate(PROMPT, LONG, {"method": "draft_model"}) for _ in range(2))
        assert first.token_ids == second.token_ids == engine("qwen3-bad").generate(PROMPT, LONG, PLAIN).token_ids
        assert first.stats.accepted == second.stats.accepted == 0
        assert 1 <= first.stats.steps_with_draft <= 3 * TRIAL_STEPS
        # What the first request learned about the draft holds for the second.
        assert second.stats.steps_with_draft <= TRIAL_STEPS


def test_look_ups_take_the_place_of_a_draft(load, engine, gpu):
    """Where rows are free and the draft is slow; each of these steps is one launch."""
    text, params = [5, 6, 7] * 8, GREEDY.replace(max_tokens=120)
    with load("gemma2-equal", lambda *_: 6e-4, lambda *_: 1e-3, 1e-3) as measured:
        measured.generate(text, params)
        before = gpu.cuda.launches
        done = measured.generate(text, params)
        assert done.token_ids == engine("gemma2-equal").generate(text, params, PLAIN).token_ids
        assert done.stats.execution == "graph per step"
        counts = {name: sum(sizes.values()) for name, sizes in done.stats.steps_by_draft.items()}
        assert counts["ngram"] > done.stats.steps / 2
        assert done.stats.output_tokens > 2 * done.stats.steps
        # One for each step, and one for what the draft reads before it drafts.
        assert gpu.cuda.launches - before <= done.stats.steps + counts.get("draft_model", 0) + 2


def test_a_draft_catches_up_and_drafts_in_the_step(load, gpu):
    """After plain steps it reads the text that it missed, and then proposes on the device at once: two launches."""
    with load("dice-mixed", lambda *_: 6e-4, lambda *_: 1e-5, 1e-5) as measured:
        stream = measured.stream(PROMPT, LONG, {"method": "draft_model"})
        request = stream._request
        next(stream)
        policy = measured._scheduler._policy
        assert isinstance(policy, MeasuredPolicy)
        free, request.fixed = request.tree, True
        request.tree = request.tree.chain(1)
        for _ in range(5):
            next(stream)
        request.tree = free
        for expected in (2, 1):
            before, drafted = gpu.cuda.launches, stream.stats.steps_with_draft
            next(stream)
            assert gpu.cuda.launches - before == expected
            assert stream.stats.steps_with_draft == drafted + 1


def test_requests_of_a_batch_look_up_beside_each_other(load, engine):
    """With look-ups in some slots and a draft in others of the same step."""
    texts = ([5, 6, 7] * 8, PROMPT, [2, 4] * 9, [1, 8, 3])
    with load("dice-mixed-batch", lambda *_: 6e-4, lambda *_: 3e-4, 1e-4, max_batch_size=4) as measured:
        streams = started(measured.stream(text, LONG) for text in texts)
        methods = set[str]()
        for text, stream in zip(texts, streams, strict=True):
            done = complete(stream)
            assert done.token_ids == engine("dice-mixed-batch").generate(text, LONG, PLAIN).token_ids
            methods |= done.stats.steps_by_draft.keys()
        assert methods >= {"ngram", "draft_model"}
