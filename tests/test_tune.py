"""Choosing a tree from what is accepted and what steps cost, and writing it into a bundle."""

import errno
import itertools
import json
import os
from collections import Counter
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport.contract.errors import BuildError, RequestError
from specexport.contract.folders import write_lock
from specexport.contract.reading import read_manifest
from specexport.contract.tree import TokenTree
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.bundle import Bundle
from specexport.runtime.request import Stats
from specexport.tree_search import Observed, candidates, observe, record_proposals, set_default_tree, step_costs
from tests.manifests import rewritten
from tests.test_bundle import compiled

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
PROMPTS = [[3 + (7 * i + k) % 300 for i in range(12)] for k in range(6)]


def quiet(*_: object) -> None:
    """Shows no progress."""


# --- the search -------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), min_size=1, max_size=30), st.integers(2, 6)
)
def test_the_best_tree_is_the_best_of_all(paths, nodes):
    counts = Counter(path[:end] for path in paths for end in range(1, len(path) + 1))
    tree = TokenTree.best(lambda path: counts[path], nodes, 3, 3)
    assert len(tree) == min(nodes, 1 + len(counts))
    every = [path for length in (1, 2, 3) for path in itertools.product(range(3), repeat=length)]
    most = 0
    for chosen in itertools.combinations([path for path in every if counts[path]], len(tree) - 1):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            most = max(most, sum(counts[path] for path in chosen))
    assert sum(counts[path] for path in tree.choices) == most


def test_a_wider_tree_must_pay_for_itself(bundle):
    (method,) = read_manifest(bundle("qwen3-medusa")).methods
    paths = Counter({(0,): 80, (1,): 15, (0, 0): 50, (0, 1): 10, (0, 0, 0): 30})
    seen = Observed(paths, 100, Stats(steps=100, steps_with_draft=100), 3)
    free = candidates(method, seen, [1.0] * 6)
    assert len(free[0].tree) == 6
    assert free[0].tokens == pytest.approx(1 + 1.85)
    assert free[0].speed_up == pytest.approx(2.85)
    steep = candidates(method, seen, [1.0, 1.3, 2.0, 3.0, 4.0, 5.0])
    assert steep[0].tree.choices == ((0,),)
    assert {len(tree.tree) for tree in steep} == {2, 3, 4, 5, 6}


def test_passes_of_a_draft_cost_too(bundle):
    (method,) = read_manifest(bundle("gpt2-tree")).methods
    paths = Counter({(0,): 90, (0, 0): 80, (0, 0, 0): 70, (1,): 5, (0, 1): 5})
    cheap, dear = (
        candidates(method, Observed(paths, 100, Stats(steps=100, steps_with_draft=100, propose=cost), 3), [1.0] * 4)
        for cost in (1.0, 300.0)
    )
    assert cheap[0].tree == TokenTree.chain(4)
    assert dear[0].tree.depth == 1


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3-medusa", "qwen3-medusa-draft", "gpt2-tree"])
def test_observed_acceptance_equals_actual_acceptance(bundle, name):
    """Paths within the tree that was verified were accepted as often as they came true."""
    with Engine.load(bundle(name), threads=1) as engine:
        method = next(iter(engine.methods))
        deepest = max(engine.methods[method].token_trees(), key=lambda tree: tree.depth)
        seen = observe(engine, method, PROMPTS, GREEDY, quiet)
        accepted = 0
        steps = 0
        for prompt in PROMPTS:
            with record_proposals(engine, method) as recorder:
                done = engine.generate(prompt, GREEDY, {"method": method, "num_speculative_tokens": len(deepest) - 1})
            whole = [*prompt, *done.token_ids]
            for at, proposal in recorder:
                if len(whole) - at >= len(proposal.candidates):
                    steps += 1
                    accepted += sum(
                        all(whole[at + depth] == proposal.candidates[depth][rank] for depth, rank in enumerate(path))
                        for path in deepest.choices
                    )
        assert seen.steps == steps
        assert sum(seen.paths[path] for path in deepest.choices) == accepted > 0


def test_drawn_drafts_are_not_tuned(bundle):
    with Engine.load(bundle("gpt2-tree"), threads=1) as engine, pytest.raises(RequestError, match="temperature 0"):
        observe(engine, "draft_model", PROMPTS, GREEDY.replace(temperature=1.0), quiet)


def test_costs_of_every_width(bundle):
    costs = step_costs(Bundle.open(bundle("qwen3-medusa")), 100, 18, 1, quiet)
    assert len(costs) == 18
    assert costs == sorted(costs)
    assert np.all(np.array(costs) > 0)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"text": f"the {word} of all words and more"}) + "\n" for word in "abcdef"))
    return file


@pytest.mark.exporter
@pytest.mark.parametrize("name", ["qwen3-medusa", "qwen3-medusa-draft", "gpt2-tree", "gpt2-tree-portable"])
def test_tuning_writes_the_tree_into_the_bundle(bundle, name, tmp_path, data, cli):
    from specexport.verify.bundle import verify

    folder = copytree(bundle(name), tmp_path / "bundle")
    before = read_manifest(folder)
    words = ["tune", "tree", str(folder), "--data", str(data), "--max-nodes", "9", "-n", "24", "--threads", "1"]
    assert "; nothing was changed" in cli(*words, "--dry-run").out
    document = cli(*words, "--json", "--dry-run").json
    assert read_manifest(folder) == before
    assert len(document["step_ms"]) == 9
    rates = [tree["tokens_per_second"] for tree in document["trees"]]
    assert rates == sorted(rates, reverse=True)
    assert "now verifies" in cli(*words).out
    after = read_manifest(folder)
    sizes = {len(tree) for tree in before.methods[0].token_trees()}
    assert {len(tree) for tree in after.methods[0].token_trees()} >= sizes
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "data.jsonl"]
    report = verify(folder, prompts=("the words of all",), max_tokens=12)
    assert report.verdict == "passed", report


@pytest.mark.exporter
def test_a_tree_the_bundle_has_no_room_for(bundle, tmp_path):
    folder = copytree(bundle("qwen3-medusa"), tmp_path / "bundle")
    wide = TokenTree.best(lambda path: 0.5 ** sum(rank + 1 for rank in path), 128, 10, 3)
    before = (folder / "specexport.json").read_bytes()
    with pytest.raises(BuildError, match="a step of 128 tokens does not fit after a context of 512"):
        set_default_tree(folder, "medusa", wide)
    with pytest.raises(BuildError, match="has no method 'draft_model'"):
        set_default_tree(folder, "draft_model", TokenTree.chain(2))
    assert (folder / "specexport.json").read_bytes() == before


def test_steps_are_observed_where_they_are_timed(bundle, tmp_path, data, cli):
    """Both by ONNX Runtime on the CPU, also where the bundle's own backend is another one."""
    folder = copytree(bundle("qwen3-medusa"), tmp_path / "bundle")
    rewritten(folder, lambda document: document.update(backend="onnxruntime-cuda"))
    words = ["tune", "tree", str(folder), "--data", str(data), "--max-nodes", "3", "-n", "12", "--threads", "1"]
    assert len(cli(*words, "--json", "--dry-run").json["step_ms"]) == 3


@pytest.mark.exporter
def test_a_bundle_made_for_its_trees_is_refused_before_anything_is_measured(bundle, tmp_path, data, cli, monkeypatch):
    folder = copytree(bundle("qwen3-medusa"), tmp_path / "bundle")
    rewritten(folder, lambda document: (compiled(document), document.update(backend="tensorrt-rtx")))
    monkeypatch.setattr(Engine, "load", lambda *_, **__: pytest.fail("it is loaded"))
    for more in ([], ["--dry-run"]):
        printed = cli("tune", "tree", folder, "--data", data, *more, status=1)
        assert "is built for tensorrt-rtx; its step program and engines" in printed.err


@pytest.mark.exporter
def test_a_bundle_that_cannot_be_changed_is_refused_before_measuring(bundle, tmp_path, data, cli, monkeypatch):
    folder = copytree(bundle("qwen3-medusa"), tmp_path / "bundle")
    monkeypatch.setattr(Engine, "load", lambda *_, **__: pytest.fail("it is loaded"))

    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with write_lock(folder):
        assert f"is writing {folder}" in cli("tune", "tree", folder, "--data", data, status=1).err
    monkeypatch.setattr(Path, "touch", refuse)
    printed = cli("tune", "tree", folder, "--data", data, status=1)
    assert f"{folder / 'specexport.json.part'}: Read-only file system" in printed.err


@pytest.mark.exporter
@pytest.mark.parametrize(
    ("words", "status", "reason"),
    [
        (["--data", "gone.txt"], 1, "gone.txt: "),
        (["--max-nodes", "1"], 2, "--max-nodes is 1; expected a whole number >= 2"),
        (["--method", "ngram"], 2, "--method is 'ngram'; the bundle has medusa"),
    ],
)
def test_wrong_arguments_are_explained(bundle, data, words, status, reason, cli):
    given_data = [] if words[0] == "--data" else ["--data", str(data)]
    assert reason in cli("tune", "tree", bundle("qwen3-medusa"), *given_data, *words, status=status).err


def test_a_line_without_a_text_is_named(bundle, tmp_path, cli):
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "fine"}\n\n{"txt": "not"}\n')
    printed = cli("tune", "tree", bundle("qwen3-medusa"), "--data", file, "--dry-run", status=1)
    assert "data.jsonl: line 3: " in printed.err
