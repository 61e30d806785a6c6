"""The static graphs of the shape points: shapes pinned, loop unrolled, the same results as the master."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from specexport.contract import tensors
from specexport.contract.model import Model, PointGraph
from specexport.contract.reading import read_manifest

pytestmark = pytest.mark.exporter

_TYPES = {"tensor(int64)": np.int64, "tensor(float)": np.float32, "tensor(bool)": np.bool_}


@pytest.fixture(scope="module", params=["llama-near", "llama-near-portable"])
def pair(bundle: Callable[[str], Path], request: pytest.FixtureRequest) -> Path:
    return bundle(request.param)


def _session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options)


def _feed(session: ort.InferenceSession, point: Any, vocab: int) -> dict[str, np.ndarray]:
    """Plausible random inputs for a static graph."""
    rng = np.random.default_rng(0)
    past = 17
    feed: dict[str, np.ndarray] = {}
    for value in session.get_inputs():
        kind = _TYPES[value.type]
        feed[value.name] = (
            rng.standard_normal(value.shape).astype(kind) if kind is np.float32 else np.zeros(value.shape, kind)
        )
    feed[tensors.INPUT_IDS] = rng.integers(0, vocab, (point.batch, point.tokens))
    feed[tensors.PAST_LENGTH][:] = past
    if point.drafts:
        feed |= {
            tensors.LAST_ROW: np.full(point.batch, point.tokens - 1),
            tensors.UNIFORM: rng.random((point.batch, point.drafts), np.float32),
            tensors.TEMPERATURE: np.full(point.batch, 0.8, np.float32),
            tensors.TOP_P: np.full(point.batch, 0.9, np.float32),
            tensors.MIN_P: np.zeros(point.batch, np.float32),
        }
    else:
        feed[tensors.POSITION_IDS][:] = past + np.arange(point.tokens)
        feed[tensors.TREE_MASK][:] = np.tri(point.tokens, dtype=np.bool_)
        feed[tensors.LOGITS_ROWS][:] = np.arange(point.tokens)[-point.rows :]
    return feed


def _models(folder: Path) -> list[Model]:
    return list(read_manifest(folder).models.values())


@pytest.mark.parametrize("role", [0, 1], ids=["step", "propose"])
def test_static_graphs_compute_what_the_master_does(pair: Path, role: int) -> None:
    model = _models(pair)[role]
    master = _session(pair / model.graph.master)
    smallest: dict[tuple[int, int], PointGraph] = {}
    for graph in model.graph.points:
        smallest.setdefault((graph.point.tokens, graph.point.drafts), graph)
    for graph in smallest.values():
        static = _session(pair / graph.file)
        feed = _feed(static, graph.point, model.vocab_size)
        found = static.run(None, feed)
        if graph.point.drafts:
            feed[tensors.NUM_DRAFT_TOKENS] = np.array(graph.point.drafts)
        for name, a, b in zip(static.get_outputs(), found, master.run(None, feed), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5, err_msg=f"{graph.file}: {name.name}")


def test_every_point_graph_is_static_standard_and_small(pair: Path) -> None:
    for model in _models(pair):
        for graph in model.graph.points:
            path = pair / graph.file
            onnx.checker.check_model(str(path), full_check=True)
            proto = onnx.load(path, load_external_data=False)
            assert {node.domain for node in proto.graph.node} == {""}
            assert "Loop" not in {node.op_type for node in proto.graph.node}
            dims = [d for v in (*proto.graph.input, *proto.graph.output) for d in v.type.tensor_type.shape.dim]
            assert all(d.dim_value > 0 for d in dims), graph.file
            assert path.stat().st_size < 1 << 20
