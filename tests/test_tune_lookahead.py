"""Choosing W, N and G: a replayed run says what the run itself would, and the choice goes into the bundle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

from specexport.cli import main
from specexport.contract.errors import BuildError
from specexport.contract.methods import Lookahead
from specexport.contract.reading import read_manifest
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.bundle import Bundle
from specexport.runtime.stats import Stats
from specexport.tuning.lookahead import ReplayedStep, Run, any_widths, candidates, observe, proposing, replay, widest
from specexport.tuning.record import recorded

Bundles = Callable[[str], Path]
NAME = "qwen3-lookahead"
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPTS = [[int(token) for token in np.random.default_rng(seed).integers(3, 300, 24)] for seed in range(3)]


def quiet(*_: object) -> None:
    """Shows no progress."""


@pytest.fixture(scope="module")
def wide(bundle: Bundles) -> Any:
    """An engine that runs steps of any width up to 60."""
    with Engine.load(any_widths(Bundle.open(bundle(NAME)), 60), threads=1, cost_curve=False) as engine:
        yield engine


def test_a_replay_is_the_run(wide: Engine) -> None:
    """With the run's own sizes, step by step; bundles were built for none of these."""
    for method in (Lookahead.of(6, 3, 5, True), Lookahead.of(3, 5, 2, False), Lookahead.of(7, 2, 4, True)):
        runs, stats = observe(wide, method, PROMPTS, GREEDY, quiet)
        tokens, at = replay(method, runs)
        committed: list[int] = []
        widths: list[int] = []
        for prompt in PROMPTS:
            accepted = [0]
            with proposing(wide, method), recorded(wide, "lookahead") as recorder:
                with wide.stream(prompt, GREEDY, method="lookahead") as stream:
                    accepted += [stream.stats.accepted for _ in stream]
                whole = stream.tokens
            assert tuple(whole[len(prompt) :]) == wide.generate(prompt, GREEDY, speculation=False).token_ids
            # A text that lacks one token takes a plain step, of which nothing is recorded.
            for index, (length, proposal) in enumerate(recorder.made):
                if length + method.ngram - 1 <= len(whole):
                    committed.append(1 + accepted[index + 1] - accepted[index])
                    assert proposal.window is not None
                    widths.append(len(proposal.window.tree))
        assert tokens == pytest.approx(sum(committed) / len(committed))
        assert tokens > 1 or method.ngram == 3
        assert at.total() == len(committed) <= stats.steps
        # While the window fills, steps are narrower than a replay takes them for.
        assert sum(width * count for width, count in at.items()) >= sum(widths)
        assert set(at) <= set(method.widths())


def test_a_narrow_window_is_the_beginning_of_a_wide_one(wide: Engine) -> None:
    (broad,), _ = observe(wide, Lookahead.of(9, 4, 3, True), PROMPTS[:1], GREEDY, quiet)
    (narrow,), _ = observe(wide, Lookahead.of(4, 4, 3, True), PROMPTS[:1], GREEDY, quiet)
    pairs = list(zip(broad.steps, narrow.steps, strict=False))
    alike = next((at for at, (a, b) in enumerate(pairs) if (a.root, a.ahead) != (b.root, b.ahead)), len(pairs))
    assert alike > 4
    said = [(a.said[:4], b.said) for a, b in pairs[: alike - 1]]
    assert all(a == b for a, b in said)
    assert any(b for _, b in said)


def test_what_a_pool_would_have_guessed() -> None:
    steps = (
        ReplayedStep(5, (6, 7), ((1, (2, 3)), (4, (8, 8)))),
        ReplayedStep(1, (2, 9), ((1, (2, 9)), (4, (8, 9)))),
        ReplayedStep(4, (8, 8), ()),
        ReplayedStep(4, (8,), ()),
    )
    run = Run(((5, (6, 7)),), steps)
    # All three guesses are found; with one column nothing is known of 4, with one guess only the latest.
    assert replay(Lookahead.of(2, 3, 2, True), [run])[0] == pytest.approx((3 + 2 + 3) / 3)
    assert replay(Lookahead.of(1, 3, 2, True), [run])[0] == pytest.approx((3 + 2 + 1) / 3)
    assert replay(Lookahead.of(2, 3, 1, True), [run])[0] == pytest.approx((3 + 2 + 2) / 3)
    # The window has 4 nodes; guesses that begin alike share them.
    assert dict(replay(Lookahead.of(2, 3, 2, True), [run])[1]) == {6: 2, 8: 1}
    stats = Stats(steps=4, steps_with_draft=4)
    free = candidates(Lookahead.of(2, 3, 2, True), [run], stats, [1.0] * 8)
    assert (free[0].method.window, free[0].speed_up) == (2, pytest.approx(8 / 3))
    steep = candidates(Lookahead.of(2, 3, 2, True), [run], stats, [1.0, 1.5, 2.0, 2.5, 9.0, 9.0, 9.0, 9.0])
    assert (steep[0].method.window, steep[0].method.guesses) == (1, 1)


def test_the_widest_that_is_observed() -> None:
    assert widest(3, 16, 100, True) == Lookahead.of(8, 3, 8, True)
    assert widest(3, 16, 20, True) == Lookahead.of(5, 3, 5, True)
    assert widest(5, 16, 100, False) == Lookahead.of(4, 5, 4, False)
    assert widest(5, 15, 100, True) is None
    assert widest(2, 2, 2, True) == Lookahead.of(1, 2, 1, True)


@pytest.mark.exporter
def test_tuning_writes_the_sizes_into_the_bundle(
    bundle: Bundles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from specexport.exporter.retree import set_lookahead
    from specexport.verify.bundle import verify

    folder = copytree(bundle(NAME), tmp_path / "bundle")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"the {word} of all words and more"}) + "\n" for word in "abc"))
    before = read_manifest(folder)
    words = ["tune", "lookahead", str(folder), "--data", str(data), "--max-nodes", "9", "-n", "16", "--threads", "1"]
    assert main([*words, "--json", "--dry-run"]) == 0
    assert read_manifest(folder) == before
    found = json.loads(capsys.readouterr().out)
    assert len(found["step_ms"]) == 9
    rates = [one["speed_up"] for one in found["expected"]]
    assert rates == sorted(rates, reverse=True)
    assert all(one["nodes"] <= 9 for one in found["expected"])
    sizes = [tuple(one["lookahead"]) for one in found["measured"]]
    assert [ngram for _, ngram, _ in sizes[:-1]] == [2, 3, 4]
    assert sizes[-1] == (5, 4, 4)
    assert found["chosen"] in [list(one) for one in sizes]
    assert main([*words, "--dry-run"]) == 0
    assert "to build with these sizes: --lookahead " in capsys.readouterr().out
    assert main(words) == 0
    (after,) = read_manifest(folder).methods
    assert isinstance(after, Lookahead)
    assert f"has W,N,G = {after.window},{after.ngram},{after.guesses} now" in capsys.readouterr().out

    set_lookahead(folder, Lookahead.of(3, 3, 2, True))
    (after,) = read_manifest(folder).methods
    assert isinstance(after, Lookahead)
    assert (after.window, after.ngram, after.guesses) == (3, 3, 2)
    assert verify(folder, prompts=("the words of all",), max_tokens=12).passed
    whole = (folder / "specexport.json").read_bytes()
    with pytest.raises(BuildError, match="a step of 120 tokens does not fit behind a context of 512"):
        set_lookahead(folder, Lookahead.of(15, 5, 15, True))
    with pytest.raises(BuildError, match="has no method 'lookahead'"):
        set_lookahead(bundle("qwen3-medusa"), Lookahead.of(3, 3, 2, True))
    assert (folder / "specexport.json").read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "data.jsonl"]


def test_a_bundle_without_it_is_refused(bundle: Bundles, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "lookahead", str(bundle("qwen3-medusa")), "--data", "any", "--dry-run"]) == 1
    assert "built without lookahead decoding; build it with --lookahead first" in capsys.readouterr().err
