"""Dynamic trees: the most probable nodes are chosen, greedy text stays plain decoding's, samples stay the target's."""

import itertools
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

from specexport.contract.errors import SpecExportError
from specexport.contract.tree import TokenTree
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.proposal import most_probable_tree
from specexport.runtime.speculative import PLAIN
from tests.manifests import put
from tests.reference import exact_texts
from tests.streams import started, tokens_of
from tests.test_losslessness import LENGTH, PROMPT, Setting, assert_distributed, engine_texts

NAMES = {"dflash": 10, "eagle3": 8}
"""With the draft tokens of their trees."""
WIDE = TokenTree.from_choices([[0], [0, 0], [0, 0, 0], [1], [2], [3], [4], [5]])


def dynamic(source: Path, to: Path, trees: list[Any] | None = None) -> Path:
    """The bundle with dynamic trees, and perhaps with others."""
    copytree(source, to)
    put(to, "methods.0.dynamic_tree", True)
    if trees is not None:
        put(to, "methods.0.trees", trees)
    return to


@pytest.mark.parametrize("spine", [False, True])
def test_the_most_probable_nodes_are_chosen(spine):
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


def test_impossible_candidates_are_left_out():
    weights = np.array([[1, 0, 0], [0.5, 0.5, 0], [1, 0, 0]], np.float32)
    assert set(most_probable_tree(WIDE, weights, False).choices) == {(0,), (0, 0), (0, 1), (0, 0, 0), (0, 1, 0)}
    assert set(most_probable_tree(WIDE, weights, True).choices) == {(0,), (0, 0), (0, 1), (0, 0, 0)}


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_plain_decoding_s(bundle, tmp_path, monkeypatch, name):
    draw, shapes, drafted, accepted = np.random.default_rng(1), set(), set(), 0
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with Engine.load(dynamic(bundle(f"dice-{name}"), tmp_path / "b"), threads=1, calibrate=False) as engine:
        proposer = engine.proposers[name]
        assert "dynamic trees" in engine.methods[name].describe()
        propose = proposer.propose

        def watched(views: Any) -> Any:
            proposals = propose(views)
            shapes.update(proposal.tree for proposal in proposals.values())
            drafted.update(len(proposal.candidates) for proposal in proposals.values())
            return proposals

        monkeypatch.setattr(proposer, "propose", watched)
        for length in (1, 2, 7, 30):
            prompt = draw.integers(3, 12, length).tolist()
            plain = engine.generate(prompt, params, PLAIN).token_ids
            done = engine.generate(prompt, params, name)
            assert done.token_ids == plain
            accepted += done.stats.accepted
    assert accepted > 0 and len(shapes) > 1
    assert drafted == {3}  # candidates, even where the chosen tree is less deep


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_distributed_as_the_target_s(bundle, oracle, tmp_path, name):
    with Engine.load(dynamic(bundle(f"dice-{name}"), tmp_path / "b"), threads=1) as engine:
        for temperature in (1.0, 0.6):
            setting = Setting(name, NAMES[name], SamplingParams(temperature=temperature))
            texts, rate = engine_texts(engine, setting)
            assert rate > 0
            assert_distributed(texts, exact_texts(oracle(f"dice-{name}")["next_logits"], setting.params, LENGTH))
        again = setting.params.replace(max_tokens=LENGTH, seed=3, ignore_eos=True)
        assert engine.generate(PROMPT, again, name).token_ids == texts[3]


@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize("name", NAMES)
def test_several_requests_at_once(bundle, tmp_path, name):
    draw = np.random.default_rng(3)
    texts = [draw.integers(3, 12, length).tolist() for length in (1, 4, 9, 2)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with Engine.load(dynamic(bundle(f"dice-{name}-batch"), tmp_path / "b"), threads=1) as engine:
        alone = [engine.generate(text, params, PLAIN).token_ids for text in texts]
        streams = started(engine.stream(text, params, name) for text in texts)
        together = [tokens_of(stream) for stream in streams]
        assert sum(stream.stats.drafted for stream in streams) > 0
    assert together == alone


def test_chains_leave_nothing_to_choose_beside_them(bundle, tmp_path):
    source = dynamic(bundle("dice-eagle3"), tmp_path / "b", [[[0], [0, 0]]])
    with pytest.raises(SpecExportError, match="dynamic_tree: its trees are chains"):
        Engine.load(source)
