"""Dynamic trees: the most probable nodes are chosen, greedy text stays plain decoding's, samples stay the target's."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

from specexport.contract.errors import BuildError, SpecExportError
from specexport.contract.methods import read_methods
from specexport.contract.tree import TokenTree
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.proposal import most_probable_tree
from specexport.runtime.proposers.eagle3 import best_of_levels
from specexport.runtime.speculative import PLAIN
from tests.reference import exact_texts, prefix_p_values
from tests.test_losslessness import PROMPT as DICE_PROMPT

NAMES = ("dflash", "eagle3", "eagle3-levels")
RUNS, LENGTH, SIGNIFICANCE = 6000, 3, 1e-3
WIDE = TokenTree.from_choices([[0], [0, 0], [0, 0, 0], [1], [2], [3], [4], [5]])


def dynamic(source: Path, to: Path, trees: list[Any] | None = None) -> Path:
    """The bundle with dynamic trees, and perhaps with others."""
    copytree(source, to)
    manifest = json.loads((to / "specexport.json").read_text())
    manifest["methods"][0]["dynamic_tree"] = True
    if trees is not None:
        manifest["methods"][0]["trees"] = trees
    (to / "specexport.json").write_text(json.dumps(manifest))
    return to


def _method(name: str) -> str:
    return name.partition("-")[0]


@pytest.mark.parametrize("spine", [False, True])
def test_the_most_probable_nodes_are_chosen(spine: bool) -> None:
    """Against all paths, listed; the chain is whole where a spine is asked for."""
    draw = np.random.default_rng(0)
    for _ in range(50):
        weights = -np.sort(-draw.dirichlet([0.4] * 4, 3).astype(np.float32), 1)
        tree = most_probable_tree(WIDE, weights, spine)
        paths = [path for length in (1, 2, 3) for path in itertools.product(range(4), repeat=length)]
        if spine:
            paths = [path for path in paths if not any(path[:-1])]

        def weight(path: tuple[int, ...], known: Any = weights) -> float:
            forced = spine and not any(path)
            return 2.0 if forced else float(np.prod([known[at, rank] for at, rank in enumerate(path)], dtype=float))

        expected = sorted(paths, key=weight, reverse=True)[: len(WIDE) - 1]
        assert set(tree.choices) == set(expected)


def test_of_expanded_levels_the_most_probable_paths_are_taken() -> None:
    """Against all paths that the levels know; nodes off them have no children."""
    draw, W, K, M = np.random.default_rng(5), 2, 3, 4
    for _ in range(30):
        ids = np.stack([[draw.permutation(9)[:M] for _ in range(W)] for _ in range(K)])
        probs = -np.sort(-draw.dirichlet([0.5] * M, (K, W)).astype(np.float32), 2)
        known: dict[tuple[int, ...], float] = {}
        tokens, parents = np.zeros((K, W), np.int64), np.zeros((K, W), np.int64)
        level: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        for at in range(K):
            reached = [
                ((*path, rank), before * float(probs[at, row, rank]), row)
                for row, (path, before) in enumerate(level)
                for rank in range(M)
            ]
            known |= {path: weight for path, weight, _ in reached if path[-1] < W}
            level = []
            for place, (path, weight, row) in enumerate(sorted(reached, key=lambda one: -one[1])[:W]):
                tokens[at, place], parents[at, place] = ids[at, row, path[-1]], row
                level.append((path, weight))
        tree, rows = best_of_levels(TokenTree.chain(6), tokens, parents, ids, probs)
        expected = sorted(known, key=lambda path: -known[path])[: len(tree) - 1]
        assert set(tree.choices) <= set(known)
        if all(path[-1] < W for path, _ in level):
            assert set(tree.choices) == {path for path in expected if len(path) <= 5}
        for path, (at, row) in zip(tree.choices, rows, strict=True):
            assert at == len(path) - 1
            assert known[path] == pytest.approx(known.get(path[:-1], 1.0) * float(probs[at, row, path[-1]]))


def test_what_has_no_probability_is_left_out() -> None:
    weights = np.array([[1, 0, 0], [0.5, 0.5, 0], [1, 0, 0]], np.float32)
    assert set(most_probable_tree(WIDE, weights, False).choices) == {(0,), (0, 0), (0, 1), (0, 0, 0), (0, 1, 0)}
    assert set(most_probable_tree(WIDE, weights, True).choices) == {(0,), (0, 0), (0, 1), (0, 0, 0)}


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_plain_decoding_s(
    bundle: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    draw, shapes, accepted = np.random.default_rng(1), set(), 0
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with Engine.load(dynamic(bundle(f"dice-{name}"), tmp_path / "b"), threads=1, calibrate=False) as engine:
        method, proposer = _method(name), engine.speculations[_method(name)].proposer
        assert "dynamic trees" in engine.methods[method].describe()
        proposal = proposer._proposal  # type: ignore[attr-defined]

        def watched(*given: Any) -> Any:
            made = proposal(*given)
            shapes.add(made.tree)
            return made

        monkeypatch.setattr(proposer, "_proposal", watched)
        for length in (1, 2, 7, 30):
            prompt = draw.integers(3, 12, length).tolist()
            plain = engine.generate(prompt, params, PLAIN).token_ids
            done = engine.generate(prompt, params, method)
            assert done.token_ids == plain
            accepted += done.stats.accepted
    assert accepted > 0 and len(shapes) > 1


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_distributed_as_the_target_s(
    bundle: Callable[[str], Path], oracle: Callable[[str], Any], tmp_path: Path, name: str
) -> None:
    with Engine.load(dynamic(bundle(f"dice-{name}"), tmp_path / "b"), threads=1) as engine:
        for temperature in (1.0, 0.6):
            params = SamplingParams(temperature=temperature, max_tokens=LENGTH, ignore_eos=True)
            made = [engine.generate(DICE_PROMPT, params.replace(seed=seed), _method(name)) for seed in range(RUNS)]
            assert sum(one.stats.accepted for one in made) > 0
            exact = exact_texts(oracle(f"dice-{name}")["next_logits"], params, LENGTH)
            assert min(prefix_p_values([one.token_ids for one in made], exact)) > SIGNIFICANCE
            assert engine.generate(DICE_PROMPT, params.replace(seed=3), _method(name)).token_ids == made[3].token_ids


@pytest.mark.parametrize("name", NAMES)
def test_several_requests_at_once(bundle: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    draw = np.random.default_rng(3)
    texts = [draw.integers(3, 12, length).tolist() for length in (1, 4, 9, 2)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with Engine.load(dynamic(bundle(f"dice-{name}-batch"), tmp_path / "b"), threads=1) as engine:
        alone = [engine.generate(text, params, PLAIN).token_ids for text in texts]
        streams = [engine.stream(text, params, _method(name)) for text in texts]
        together = [tuple(token for chunk in stream for token in chunk.token_ids) for stream in streams]
        assert sum(stream.stats.drafted for stream in streams) > 0
    assert together == alone


def test_only_dynamic_trees_are_expanded(bundle: Callable[[str], Path], tmp_path: Path) -> None:
    source = copytree(bundle("dice-eagle3-levels"), tmp_path / "b")
    manifest = json.loads((source / "specexport.json").read_text())
    manifest["methods"][0]["dynamic_tree"] = False
    (source / "specexport.json").write_text(json.dumps(manifest))
    with pytest.raises(SpecExportError, match="expand is 3, but only a dynamic tree is expanded; set dynamic_tree too"):
        Engine.load(source)


@pytest.mark.exporter
def test_engines_expand_no_trees() -> None:
    from specexport.exporter.options import BuildOptions

    levels = read_methods([{"method": "eagle3", "model": "here", "expand": 3, "dynamic_tree": True}])
    for lowering, backend in (("portable", "onnxruntime"), ("native", "tensorrt-rtx"), ("native", "onnxruntime-cuda")):
        said = f"eagle3: expand was given with lowering {lowering} and backend {backend}"
        with pytest.raises(BuildError, match=said):
            BuildOptions("there", Path("out"), methods=levels, lowering=lowering, backend=backend)


def test_chains_leave_nothing_to_choose_beside_them(bundle: Callable[[str], Path], tmp_path: Path) -> None:
    source = dynamic(bundle("dice-eagle3"), tmp_path / "b", [[[0], [0, 0]]])
    with pytest.raises(SpecExportError, match="dynamic_tree: its trees are chains"):
        Engine.load(source)
