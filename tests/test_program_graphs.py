"""The fill and commit graphs, traced and run in onnxruntime, against their NumPy twins."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from specexport.contract import signature, tensors
from specexport.contract.model import CacheLayer
from specexport.contract.tree import TokenTree
from specexport.exporter.trace import trace_commit, trace_fill
from specexport.methods.mlp_speculator.propose import MlpSpeculatorProposer
from specexport.runtime.proposal import drawn

pytestmark = pytest.mark.exporter

CANDIDATES = 6


def _session(model: ir.Model) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options)


@pytest.fixture(scope="module")
def fill() -> Any:
    return _session(trace_fill(CANDIDATES))


@pytest.mark.parametrize(
    "choices",
    [
        [[0], [0, 0], [0, 0, 0]],
        [[0], [1], [2], [3], [4]],
        [[0], [1], [2], [0, 0], [0, 1], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 3]],
    ],
    ids=["chain", "star", "spine"],
)
def test_fill_graph_equals_the_proposer(fill: Any, choices: list[list[int]]) -> None:
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


def test_fill_graph_of_stages_equals_the_proposer() -> None:
    choices = [[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]
    tree, random, stages = TokenTree.from_choices(choices), np.random.default_rng(0), 4
    fill, width = _session(trace_fill(CANDIDATES, stages)), tree.level_width + 1
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


def test_a_commit_moves_the_rows_of_the_path_and_no_others_that_are_seen() -> None:
    shapes = [CacheLayer(heads=2, key_size=4, value_size=4), CacheLayer(heads=1, key_size=8, value_size=4)]
    session, random = _session(trace_commit(shapes)), np.random.default_rng(1)
    rows, past, path = 16, np.array([3, 7]), np.array([[0, 2, 5, 0, 0, 0], [0, 1, 3, 4, 0, 0]])
    kept = (3, 4)
    caches = {
        name: random.standard_normal(name.shape({"B": 2, "S": rows})).astype(np.float32)
        for name in signature.caches(shapes)
    }
    outputs = session.run(None, {tensors.PAST_LENGTH: past, tensors.PATH: path, **caches})
    names = [value.name for value in session.get_outputs()]
    for name, moved in zip(names, outputs, strict=True):
        before = caches[name.replace("present", "past")]
        for slot in range(2):
            length, nodes = past[slot], path[slot, : kept[slot]]
            np.testing.assert_array_equal(moved[slot, :, :length], before[slot, :, :length])
            np.testing.assert_array_equal(moved[slot, :, length : length + len(nodes)], before[slot][:, length + nodes])
