"""Graphs of the step program, traced and run in onnxruntime, against their NumPy twins: same noise, same tokens."""

import itertools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specexport.contract import signature, tensors
from specexport.contract.engines import LARGEST_TOP_K
from specexport.contract.model import CacheLayer
from specexport.contract.tree import TokenTree
from specexport.exporter.trace import trace_commit, trace_fill
from specexport.graphs.propose import most_probable
from specexport.methods.mlp_speculator import MlpSpeculatorProposer
from specexport.runtime import SamplingParams
from specexport.runtime.proposal import drawn
from specexport.runtime.sampling import (
    Distributions,
    accept_greedy,
    accept_sampled,
    accept_typical,
    target_distribution,
)
from tests.conftest import MAX_CHILDREN
from tests.reference import draw_candidates, p_of, plain_session

pytestmark = pytest.mark.exporter

CANDIDATES = 12


# --- accepting --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sessions(accept_graph: Callable[[str, int], bytes]) -> dict[int, Any]:
    """The lossless graph by how many candidates q has."""
    return {candidates: plain_session(accept_graph("lossless", candidates)) for candidates in (1, CANDIDATES)}


@pytest.fixture(scope="module")
def greedy(accept_graph: Callable[[str, int], bytes]) -> Any:
    return plain_session(accept_graph("greedy", 1))


@pytest.fixture(scope="module")
def typical(accept_graph: Callable[[str, int], bytes]) -> Any:
    return plain_session(accept_graph("typical", 1))


@st.composite
def trees(draw_value: Any) -> TokenTree:
    parents = [-1]
    for node in range(1, draw_value(st.integers(2, 14))):
        free = [parent for parent in range(node) if parents.count(parent) < MAX_CHILDREN]
        parents.append(draw_value(st.sampled_from(free)))
    return TokenTree(tuple(parents))


def params_of(seed: int) -> SamplingParams:
    random = np.random.default_rng(seed)
    return (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8),
        SamplingParams(top_k=int(random.integers(2, 20))),
        SamplingParams(temperature=1.5, top_p=float(random.uniform(0.2, 0.99))),
        SamplingParams(top_k=9, top_p=0.8, min_p=float(random.uniform(0, 0.4))),
    )[seed % 5]


def feed(
    tree: TokenTree, logits: np.ndarray, tokens: np.ndarray, q: Distributions, params: SamplingParams, uniform: Any
) -> dict[str, np.ndarray]:
    """One slot's inputs, without the batch axis."""
    return {
        tensors.LOGITS: logits,
        tensors.PARENTS: np.array(tree.parents),
        tensors.TREE_MASK: tree.mask,
        tensors.DRAFT_TOKENS: tokens,
        tensors.DRAFT_IDS: q.ids,
        tensors.DRAFT_PROBS: q.probs,
        tensors.UNIFORM: uniform.astype(np.float32),
        tensors.TEMPERATURE: np.float32(params.temperature or 1.0),
        tensors.TOP_K: np.int64(1 if params.greedy else params.top_k),
        tensors.TOP_P: np.float32(params.top_p),
        tensors.MIN_P: np.float32(params.min_p),
    }


def run(session: Any, slots: list[dict[str, np.ndarray]]) -> list[tuple[list[int], list[int]]]:
    """Path and tokens of each slot."""
    batch = {name: np.stack([slot[name] for slot in slots]) for name in slots[0]}
    counts, tokens, paths = session.run([tensors.NUM_ACCEPTED, tensors.TOKENS, tensors.PATH], batch)
    parts = []
    for count, row, path in zip(counts, tokens, paths, strict=True):
        assert path[0] == 0
        assert not path[count + 1 :].any()
        assert not row[count + 1 :].any()
        parts.append((path[1 : count + 1].tolist(), row[: count + 1].tolist()))
    return parts


def accepted(
    tree: TokenTree, logits: np.ndarray, tokens: np.ndarray, q: Distributions | None, params: SamplingParams, noise: Any
) -> tuple[list[int], list[int]]:
    """Path and tokens by the runtime's own functions."""
    if params.greedy:
        path, bonus = accept_greedy(logits, tree, tokens)
    elif params.acceptance == "typical":
        path, bonus = accept_typical(logits, tree, tokens, params, float(noise[0]))
    else:
        path, bonus = accept_sampled(logits, tree, tokens, q, params, noise.astype(np.float64))
    return path, [*(int(tokens[node - 1]) for node in path), bonus]


def drafted(
    tree: TokenTree, logits: np.ndarray, params: SamplingParams, random: np.random.Generator
) -> tuple[np.ndarray, Distributions]:
    """Draft tokens drawn from a q that is near p at the parent of each node, or chosen of what it knows (q = 1).

    Siblings may be the same token.
    """
    parents = np.array(tree.parents[1:])
    near = (logits + random.normal(0, 0.7, logits.shape)).astype(np.float32)[parents]  # siblings know the same tokens
    tokens, ids, probs = draw_candidates(near, random.random(len(parents), np.float32), params, CANDIDATES)
    chosen = random.random(len(parents)) < 0.4
    return tokens, Distributions(ids, np.where(chosen[:, None], ids == tokens[:, None], probs).astype(np.float32))


@settings(max_examples=150, deadline=None)
@given(trees(), st.integers(0, 10**6))
def test_accept_graph_equals_numpy(sessions, tree, seed):
    slots, expected = [], []
    for slot in (seed, seed + 1):  # two slots with parameters of their own
        random = np.random.default_rng(slot)
        params = params_of(slot)
        logits = random.normal(0, 1.5, (len(tree), 30)).astype(np.float32)
        tokens, q = drafted(tree, logits, params, random)
        noise = random.random(len(tree), np.float32)
        slots.append(feed(tree, logits, tokens, q, params, noise))
        expected.append(accepted(tree, logits, tokens, q, params, noise))
    assert run(sessions[CANDIDATES], slots) == expected


@settings(max_examples=80, deadline=None)
@given(trees(), st.integers(0, 10**6))
def test_tokens_chosen_without_drawing_have_q_of_one(sessions, tree, seed):
    random = np.random.default_rng(seed)
    params = params_of(seed)
    logits = random.normal(0, 1.5, (len(tree), 30)).astype(np.float32)
    ranked = np.argsort(-logits, axis=-1)
    rank = [tree.children[parent].index(node) for node, parent in enumerate(tree.parents[1:], start=1)]
    tokens = ranked[np.array(tree.parents[1:]), rank]  # siblings are different tokens
    noise = random.random(len(tree), np.float32)
    certain = Distributions(tokens[:, None], np.ones((len(tokens), 1), np.float32))
    outputs = run(sessions[1], [feed(tree, logits, tokens, certain, params, noise)])
    assert outputs == [accepted(tree, logits, tokens, None, params, noise)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_ties_and_thresholds_are_kept_as_numpy_keeps_them(sessions, seed):
    """Whole-number logits tie; the final draw, over all of p's range, shows which tokens were kept."""
    random = np.random.default_rng(seed)
    params = SamplingParams(top_k=int(random.integers(0, 12)), top_p=float(random.choice([1.0, 0.55, 0.93])))
    logits = random.integers(-3, 4, (2, 10)).astype(np.float32)
    chain = TokenTree.chain(2)
    tokens = np.array([int(logits[0].argmin())])
    certain = Distributions(tokens[:, None], np.ones((1, 1), np.float32))
    for last in np.linspace(0.003, 0.997, 12, dtype=np.float32):
        noise = np.array([0.999, last], np.float32)
        outputs = run(sessions[1], [feed(chain, logits, tokens, certain, params, noise)])
        assert outputs == [accepted(chain, logits, tokens, None, params, noise)]


@pytest.mark.parametrize("spread", [0.05, 0.5, 2.0, 8.0])
@pytest.mark.parametrize("arguments", [{"top_p": 0.3}, {"top_p": 0.97}, {"top_k": LARGEST_TOP_K, "top_p": 0.9}])
def test_thresholds_deep_in_a_large_vocabulary(sessions, spread, arguments):
    """The last token that is kept, and so every other: where p is nearly flat, thousands are."""
    random = np.random.default_rng(int(10 * spread))
    params, vocab, chain = SamplingParams(**arguments), 9001, TokenTree.chain(2)
    logits = np.sort(random.normal(0, spread, (2, vocab)).astype(np.float32))[:, ::-1].copy()
    p = target_distribution(logits[0], params)
    kept = vocab if p.ids is None else len(p.ids)
    certain = Distributions(np.array([[vocab - 1]]), np.ones((1, 1), np.float32))
    slots = []
    for last in (0.0, 0.2, 0.5, 0.8, 1 - 2**-24):
        noise = np.array([0.9999, last], np.float32)
        slots.append(feed(chain, logits, np.array([vocab - 1]), certain, params, noise))
    outputs = [tokens[-1] for _, tokens in run(sessions[1], slots)]
    assert outputs[0] == 0
    for token, last in zip(outputs[1:4], (0.2, 0.5, 0.8), strict=True):
        assert abs(token - p.draw(last)) <= 1  # float32 sums against float64 ones
    assert kept - 2 <= outputs[4] < kept


@settings(max_examples=100, deadline=None)
@given(trees(), st.integers(0, 10**6), st.integers(0, 3))
def test_greedy_acceptance_has_a_separate_graph(greedy, tree, seed, padding):
    random = np.random.default_rng(seed)
    nodes = len(tree) + padding
    logits = random.integers(0, 4, (nodes, 6)).astype(np.float32)  # of which many tie
    firsts = logits.argmax(-1)
    tokens = (firsts[list(tree.parents[1:])] + tree.ranks[1:] + random.integers(0, 2)) % 6
    mask = np.eye(nodes, dtype=np.bool_)
    mask[: len(tree), : len(tree)] = tree.mask
    slot = {
        tensors.LOGITS: logits,
        tensors.PARENTS: np.array([*tree.parents, *range(len(tree), nodes)]),
        tensors.TREE_MASK: mask,
        tensors.DRAFT_TOKENS: np.concatenate([tokens, firsts[len(tree) :]]),
    }
    assert run(greedy, [slot]) == [accepted(tree, logits[: len(tree)], tokens, None, params_of(0), None)]


@pytest.mark.parametrize(
    ("rule", "candidates", "most"), [("greedy", 1, 28), ("lossless", 64, 240), ("typical", 1, 190)]
)
def test_a_graph_has_few_operators(accept_graph, rule, candidates, most):
    """On a GPU each is a launch, or two; views are none."""
    views = {"Reshape", "Unsqueeze", "Squeeze", "Shape", "Range"}
    nodes = [node.op_type for node in onnx.load_from_string(accept_graph(rule, candidates)).graph.node]
    assert sum(node not in views for node in nodes) <= most
    # ReduceMax and ReduceMin are cuDNN's; a CumSum or TopK over all of a vocabulary takes quadratic time or one block.
    assert not {"ReduceMax", "ReduceMin"} & set(nodes)


# --- typical acceptance -----------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(trees(), st.integers(0, 10**6))
def test_typical_acceptance_graph_equals_numpy(typical, tree, seed):
    random = np.random.default_rng(seed)
    threshold, alpha = random.uniform(0, 0.3), random.uniform(0, 1)
    params = params_of(seed).replace(acceptance="typical", posterior_threshold=threshold, posterior_alpha=alpha)
    if params.greedy:
        params = params.replace(temperature=1.0)
    logits = random.normal(0, 1.5, (len(tree), 30)).astype(np.float32)
    ranked = np.argsort(-logits - random.normal(0, 0.7, logits.shape))
    tokens = ranked[np.array(tree.parents[1:]), tree.ranks[1:]]  # siblings differ, as they do in any proposal
    noise = random.random(1, np.float32)
    slot = feed(tree, logits, tokens, Distributions(tokens[:, None], np.ones((len(tokens), 1))), params, noise)
    slot = {name: value for name, value in slot.items() if name not in (tensors.DRAFT_IDS, tensors.DRAFT_PROBS)}
    slot[tensors.THRESHOLD] = np.float32(params.posterior_threshold)
    slot[tensors.ALPHA] = np.float32(params.posterior_alpha)
    assert run(typical, [slot]) == [accepted(tree, logits, tokens, None, params, noise)]


@given(trees(), st.integers(0, 10**6))
def test_typical_acceptance_is_the_rule_of_the_paper(tree, seed):
    """Written out slowly: every path is judged on its own, the deepest wins, then the most probable."""
    random = np.random.default_rng(seed)
    params = SamplingParams(temperature=0.9, posterior_threshold=0.12, posterior_alpha=0.4)
    logits = random.normal(0, 1.5, (len(tree), 12)).astype(np.float32)
    firsts = random.integers(0, 12, len(tree))
    tokens = (firsts[list(tree.parents[1:])] + tree.ranks[1:]) % 12  # siblings differ, as they do in any proposal
    paths = []
    for leaf in tree.leaf_paths:
        taken, log_p = [], 0.0
        for parent, node in itertools.pairwise(leaf):
            p = p_of(logits[parent], params)
            limit = min(0.12, 0.4 * np.exp((p * np.log(p)).sum()))
            if not p[tokens[node - 1]] > limit:
                break
            taken.append(node)
            log_p += np.log(p[tokens[node - 1]])
        paths.append((len(taken), log_p, taken))
    best = max(paths, key=lambda path: path[:2])
    path, bonus = accept_typical(logits, tree, tokens, params, 0.5)
    assert path == best[2]
    assert bonus == target_distribution(logits[path[-1] if path else 0], params).draw(0.5)


# --- filling and committing -------------------------------------------------------------------------------------------


def serialized(model: ir.Model) -> bytes:
    return ir.to_proto(model).SerializeToString()


@pytest.fixture(scope="module")
def fill() -> Any:
    return plain_session(serialized(trace_fill(CANDIDATES)))


@pytest.mark.parametrize(
    "choices",
    [
        [[0], [0, 0], [0, 0, 0]],
        [[0], [1], [2], [3], [4]],
        [[0], [1], [2], [0, 0], [0, 1], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 3]],
    ],
    ids=["chain", "star", "spine"],
)
def test_fill_graph_equals_the_proposer(fill, choices):
    tree, random = TokenTree.from_choices(choices), np.random.default_rng(0)
    for _ in range(40):
        ids = np.stack([random.permutation(50)[:CANDIDATES] for _ in range(tree.depth)])
        probs = np.sort(random.dirichlet(np.ones(CANDIDATES), tree.depth).astype(np.float32))[:, ::-1].copy()
        drafted = np.array([random.choice(row) for row in ids])
        outputs = fill.run(
            None,
            {
                tensors.DRAFT_TOKENS: drafted[:, None],
                tensors.DRAFT_IDS: ids[:, None],
                tensors.DRAFT_PROBS: probs[:, None],
                tensors.TREE_ROWS: tree.depths[None, 1:] - 1,
                tensors.TREE_RANKS: np.array([tree.ranks[1:]]),
            },
        )
        tokens, node_ids, q = (array[0] for array in outputs)
        taken, expected, _ = drawn(tree, tree.depths[1:] - 1, drafted, ids, probs)
        np.testing.assert_array_equal(tokens, taken)
        for node in range(len(tree) - 1):
            # A distribution is the same in any order; a chain's has one row a depth, as a tree's has one a node.
            probs_of = dict(zip(expected.ids[node].tolist(), expected.probs[node].tolist(), strict=True))
            assert dict(zip(node_ids[node].tolist(), q[node].tolist(), strict=True)) == probs_of


def test_fill_graph_of_stages_equals_the_proposer():
    choices = [[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]
    tree, random, stages = TokenTree.from_choices(choices), np.random.default_rng(0), 4
    fill, width = plain_session(serialized(trace_fill(CANDIDATES, stages))), tree.level_width + 1
    rows = MlpSpeculatorProposer(cast(Any, None)).rows(tree, width)
    for _ in range(40):
        count = 1 + (stages - 1) * width
        ids = np.stack([random.permutation(50)[:CANDIDATES] for _ in range(count)])
        probs = random.dirichlet(np.ones(CANDIDATES), count).astype(np.float32)
        drafted = np.array([random.choice(row) for row in ids])
        inputs = {tensors.TREE_ROWS: rows[None], tensors.TREE_RANKS: np.array([tree.ranks[1:]])}
        for kind, values in zip(tensors.DRAFTED, (drafted, ids, probs), strict=True):
            parts = np.split(values, [1 + stage * width for stage in range(stages - 1)])
            inputs |= {kind.of_stage(stage): part[None] for stage, part in enumerate(parts)}
        tokens, node_ids, q = (array[0] for array in fill.run(None, inputs))
        for node, (row, rank) in enumerate(zip(rows, tree.ranks[1:], strict=True)):
            others = [token for token in ids[row] if token != drafted[row]]
            assert tokens[node] == (others[rank - 1] if rank else drafted[row])
            np.testing.assert_array_equal(node_ids[node], ids[row])
            np.testing.assert_array_equal(q[node], probs[row] if rank == 0 else ids[row] == tokens[node])
    # Siblings share a row, and children of different nodes do not.
    pairs = set(zip(tree.parents[1:], rows.tolist(), strict=True))
    assert len(pairs) == len(set(tree.parents[1:])) == len(set(rows.tolist()))


def test_a_commit_moves_the_rows_of_the_path_and_no_others_that_are_seen():
    shapes = [CacheLayer(heads=2, key_size=4, value_size=4), CacheLayer(heads=1, key_size=8, value_size=4)]
    commit, random = plain_session(serialized(trace_commit(shapes))), np.random.default_rng(1)
    rows, past, path = 16, np.array([3, 7]), np.array([[0, 2, 5, 0, 0, 0], [0, 1, 3, 4, 0, 0]])
    kept = (3, 4)
    caches = {
        name: random.standard_normal(name.shape({"B": 2, "S": rows})).astype(np.float32)
        for name in signature.caches(shapes)
    }
    outputs = commit.run(None, {tensors.PAST_LENGTH: past, tensors.PATH: path, **caches})
    names = [value.name for value in commit.get_outputs()]
    for name, moved in zip(names, outputs, strict=True):
        before = caches[name.replace("present", "past")]
        for slot in range(2):
            length, nodes = past[slot], path[slot, : kept[slot]]
            np.testing.assert_array_equal(moved[slot, :, :length], before[slot, :, :length])
            np.testing.assert_array_equal(moved[slot, :, length : length + len(nodes)], before[slot][:, length + nodes])


# --- the most probable tokens -----------------------------------------------------------------------------------------


class MostProbable(torch.nn.Module):
    def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return most_probable(logits, 10)


@pytest.mark.parametrize(
    ("vocab", "block"), [(1 << 14, 128), (29 * 600, 120), (29 * 1733, 29), (16_411, None), (11, None)]
)
def test_the_most_probable_tokens_are_found_and_ties_go_to_the_lower_id(tmp_path, vocab, block):
    program = torch.onnx.export(
        MostProbable().eval(), (torch.zeros(2, 3, vocab),), dynamo=True, opset_version=20, verbose=False
    )
    program.save(tmp_path / "model.onnx")
    shapes = [value.shape for node in ir.load(tmp_path / "model.onnx").graph for value in node.outputs]
    divided = [tuple(shape) for shape in shapes if shape is not None and len(shape) > 3]
    assert divided[:1] == ([(2, 3, vocab // block, block)] if block else [])
    random, session = np.random.default_rng(vocab), ort.InferenceSession(str(tmp_path / "model.onnx"))
    for spread in (0.3, 3.0, 300.0):  # many ties, some, and few
        logits = np.rint(random.standard_normal((2, 3, vocab)) * spread).astype(np.float32)
        best, ids = session.run(None, {session.get_inputs()[0].name: logits})
        expected = np.argsort(-logits, axis=-1, kind="stable")[..., :10]
        assert np.array_equal(ids, expected)
        assert np.array_equal(best, np.take_along_axis(logits, expected, -1))
