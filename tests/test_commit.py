"""Commits: after any pattern of acceptance the cache is what it would be had the text been read from its start."""

import numpy as np
import pytest

from specexport.contract import tensors
from specexport.contract.tree import TokenTree
from specexport.methods.draft_model import DraftModelProposer
from specexport.runtime import SamplingParams
from specexport.runtime.backend import BackendOptions, Graph, RunShape, open_backend, open_target
from specexport.runtime.bundle import Bundle
from specexport.runtime.proposal import SlotView
from tests.fixtures import Bundles

NODES, STEPS, VOCAB = 8, 300, 120
POISON = 1e6
TOLERANCE = 2e-5  # steps of another width sum in another order


@pytest.fixture(params=["llama-near", "llama-near-portable"])
def graphs(bundle: Bundles, request: pytest.FixtureRequest) -> tuple[Graph, Graph]:
    opened = Bundle.open(bundle(request.param))
    first, second = (open_target(opened, threads=1) for _ in range(2))
    return first, second


def verify(graph: Graph, past: int, tree: TokenTree, tokens: np.ndarray) -> np.ndarray:
    """Logits at every node; no row is kept yet."""
    graph.reserve(past + len(tree))
    inputs = graph.inputs(RunShape(len(tree), len(tree)))
    inputs[tensors.INPUT_IDS][0] = tokens
    inputs[tensors.POSITION_IDS][0] = past + tree.depths
    inputs[tensors.TREE_MASK][0] = tree.mask
    inputs[tensors.PAST_LENGTH][0] = past
    return graph.run(RunShape(len(tree), len(tree)))[tensors.LOGITS][0].copy()


def random_tree(random: np.random.Generator) -> TokenTree:
    return TokenTree((-1, *(int(random.integers(0, node)) for node in range(1, NODES))))


def random_path(tree: TokenTree, random: np.random.Generator) -> list[int]:
    """Down from the root, stopping anywhere."""
    path: list[int] = []
    node = 0
    while tree.children[node] and random.random() < 0.8:
        node = int(random.choice(tree.children[node]))
        path.append(node)
    return path


def rows_of(graph: Graph, count: int) -> list[np.ndarray]:
    return [cache[0, :, :count].copy() for cache in graph._cache.parts.values()]


def test_rows_of_accepted_paths_are_those_of_the_text(graphs):
    graph, fresh = graphs
    random = np.random.default_rng(4)
    moved = 0
    text = [3]  # the last token is the root of the next step
    for _ in range(STEPS):
        tree = random_tree(random)
        tokens = random.integers(3, VOCAB, NODES)
        past = len(text) - 1
        tokens[0] = text[-1]
        logits = verify(graph, past, tree, tokens)
        path = random_path(tree, random)
        moved += path != list(range(1, len(path) + 1))
        graph.commit(0, past, [0, *path])
        text += [*(int(tokens[node]) for node in path), int(random.integers(3, VOCAB))]
        last = path[-1] if path else 0
        if len(text) > 80:
            chain = TokenTree.chain(NODES)
            for start in range(0, len(text) - 1, NODES):
                part = (text[start : min(start + NODES, len(text) - 1)] + [3] * NODES)[:NODES]
                again = verify(fresh, start, chain, np.array(part))
                fresh.commit(0, start, range(NODES))
                if start + NODES >= len(text) - 1:
                    np.testing.assert_allclose(logits[last], again[len(text) - 2 - start], atol=TOLERANCE)
            for ours, theirs in zip(rows_of(graph, len(text) - 1), rows_of(fresh, len(text) - 1), strict=True):
                np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
            text = [3]
    assert moved > STEPS / 3


@pytest.mark.parametrize("name", ["llama-near-batch", "llama-near-batch-portable"])
def test_a_commit_touches_its_slot_and_the_rows_it_keeps(name, bundle):
    """Two slots of a window."""
    opened = Bundle.open(bundle(name))
    graph = open_target(opened, 2, threads=1)
    both_slots = RunShape(NODES, NODES, slots=range(2))
    inputs = graph.inputs(both_slots)
    inputs[tensors.INPUT_IDS][:] = np.arange(2 * NODES).reshape(2, NODES) + 5
    caches = graph._cache.parts
    for cache in caches.values():
        cache[:, :, NODES:] = POISON
    graph.run(both_slots)
    portable = opened.manifest.lowering == "portable"
    expected = {name: cache.copy() for name, cache in caches.items()}
    if portable:
        assert all((cache[:, :, :NODES] == 0).all() for cache in caches.values()), "a run alone wrote rows"
        for block, rows in zip(graph._cache.blocks, graph._last[1].new_rows, strict=True):
            for name, cache in caches.items():
                layer = next((at for at, part in enumerate(block) if np.shares_memory(part, cache)), None)
                if layer is not None:
                    expected[name][:, :, :NODES] = rows[layer]
    before = {name: cache.copy() for name, cache in caches.items()}
    graph.commit(1, 0, [0, 3, 5])
    for name, cache in caches.items():
        np.testing.assert_array_equal(cache[0], before[name][0])
        np.testing.assert_array_equal(cache[1, :, :3], expected[name][1][:, [0, 3, 5]])
        np.testing.assert_array_equal(cache[1, :, 3:], before[name][1][:, 3:])
    graph.commit(0, 4, range(2))
    for name, cache in caches.items():
        wanted = expected[name][0, :, :2] if portable else before[name][0, :, 4:6]
        np.testing.assert_array_equal(cache[0, :, 4:6], wanted)
        np.testing.assert_array_equal(np.delete(cache[0], [4, 5], 1), np.delete(before[name][0], [4, 5], 1))
        assert (cache[:, :, NODES:] == POISON).all()


def test_portable_drafts_commit_only_input_rows(bundle):
    """K - 1 of its own tokens and those it had not seen; the padding of a prefill chunk is never written."""
    opened = Bundle.open(bundle("llama-near-portable"))
    (method,) = opened.manifest.methods
    graph = open_backend(opened, BackendOptions("onnxruntime", 1)).open(method.draft, 1, method.signature.buffers)
    for cache in graph._cache.parts.values():
        cache[:] = POISON
    proposer = DraftModelProposer(graph, opened.manifest)
    tree = method.token_trees()[0]
    view = SlotView(0, list(range(5, 25)), SamplingParams(temperature=0.0), np.random.default_rng(0), tree)
    proposer.propose([view])
    for cache in graph._cache.parts.values():
        written = (cache[0, 0] != POISON).any(-1)
        assert written.sum() == len(view.tokens) + tree.depth - 1
        assert written[: written.sum()].all()
