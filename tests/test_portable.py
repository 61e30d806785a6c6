"""The portable lowering says what the native one does, in operators of opset 20."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from specexport.contract import tensors
from specexport.contract.reading import read_manifest
from specexport.contract.tree import TokenTree
from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions
from specexport.runtime import SamplingParams
from specexport.runtime.backend import Graph, RunShape, open_target
from specexport.runtime.bundle import Bundle
from specexport.verify.bundle import verify
from tests.checkpoints import VOCAB, make_checkpoint
from tests.make_bundles import PORTABLE

pytestmark = pytest.mark.exporter

OPSET = 20
TOLERANCE = 2e-5
CHUNK, PROMPT = 64, 90


def _target(folder: Path) -> Graph:
    opened = Bundle.open(folder)
    return open_target(opened, threads=1)


def _step(graph: Graph, past: int, tokens: np.ndarray, tree: TokenTree, rows: int, keep: list[int]) -> dict[str, Any]:
    """A step over a padded chunk or a tree; what it makes at the last ``rows`` rows."""
    graph.reserve(past + len(tree))
    inputs = graph.inputs(RunShape(len(tree), rows))
    inputs[tensors.INPUT_IDS][0] = np.pad(tokens, (0, len(tree) - len(tokens)))
    inputs[tensors.POSITION_IDS][0] = past + tree.depths
    inputs[tensors.TREE_MASK][0] = tree.mask
    inputs[tensors.PAST_LENGTH][0] = past
    inputs[tensors.LOGITS_ROWS][0] = len(tokens) - rows + np.arange(rows)
    outputs = {name: array.copy() for name, array in graph.run(RunShape(len(tree), rows)).items()}
    graph.commit(0, past, keep)
    return outputs


def _everything(graph: Graph, tree: TokenTree) -> list[dict[str, Any]]:
    """A prefill in chunks, two plain steps, the tree, and two plain steps behind its deepest path."""
    random = np.random.default_rng(6)
    text = random.integers(3, VOCAB, PROMPT)
    results, past = [], 0
    for done in range(0, PROMPT, CHUNK):
        part = text[done : done + CHUNK]
        results.append(_step(graph, done, part, TokenTree.chain(CHUNK), 1, list(range(len(part)))))
        past += len(part)
    deepest = int(tree.depths.argmax())
    path = np.flatnonzero(tree.mask[deepest]).tolist()
    for shape, keep in ((TokenTree.chain(1), [0]),) * 2 + ((tree, path),) + ((TokenTree.chain(1), [0]),) * 2:
        results.append(_step(graph, past, random.integers(3, VOCAB, len(shape)), shape, len(shape), keep))
        past += len(keep)
    return results


# Of a vocabulary for a text as long as a chunk, and one way to propose; the other one runs in test_step_program.
TWINS = tuple(name for name in PORTABLE if not name.startswith("dice-"))


@pytest.mark.parametrize("name", TWINS)
def test_portable_steps_equal_native_ones(name, bundle):
    folders = bundle(name), bundle(f"{name}-portable")
    method = read_manifest(folders[0]).methods[0]
    for tree in method.token_trees():
        for native, portable in zip(*(_everything(_target(folder), tree) for folder in folders), strict=True):
            assert native.keys() == portable.keys()
            np.testing.assert_allclose(portable[tensors.LOGITS], native[tensors.LOGITS], atol=TOLERANCE, rtol=TOLERANCE)
            if tensors.CANDIDATES in native:
                np.testing.assert_array_equal(portable[tensors.CANDIDATES], native[tensors.CANDIDATES])


@pytest.mark.parametrize("name", TWINS)
def test_texts_and_proposals_are_those_of_native_bundles(name, engine):
    """The prompt is longer than a chunk, and the text makes the cache grow."""
    prompt = np.random.default_rng(7).integers(3, VOCAB, 230).tolist()
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=50, ignore_eos=True)
    native, portable = (engine(twin).generate(prompt, params) for twin in (name, f"{name}-portable"))
    assert portable.token_ids == native.token_ids
    assert (portable.stats.drafted, portable.stats.accepted) == (native.stats.drafted, native.stats.accepted)


@pytest.mark.parametrize("name", PORTABLE)
def test_every_operator_is_known_to_opset_20(name, bundle):
    folder = bundle(f"{name}-portable")
    assert read_manifest(folder).lowering == "portable"
    graphs = sorted(folder.rglob("*.onnx"))
    assert graphs
    for path in graphs:
        # The whole check runs shape inference, which knows each operator as it is in the graph's opset.
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(path, load_external_data=False)
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", OPSET)]
        assert model.ir_version <= 10
        for node in _nodes(model.graph):
            assert node.domain == ""
            assert onnx.defs.get_schema(node.op_type, OPSET).since_version <= OPSET
            assert node.op_type not in ("Attention", "TensorScatter", "RMSNormalization", "RotaryEmbedding")


def _nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    inner = [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    return [*graph.node, *(node for subgraph in inner for node in _nodes(subgraph))]


@pytest.mark.parametrize("name", ["llama-near-portable", "qwen3-medusa-draft-portable"])
def test_a_portable_bundle_passes_verification(name, bundle):
    report = verify(bundle(name), prompts=("people went back home and thought",), max_tokens=16)
    assert report.verdict == "passed", report
    assert "; not promised bit for bit: " in report.checks[-1].sentence


def test_int8_has_a_scale_for_every_column(tmp_path):
    """Tied embeddings, which are looked up too, and a merged matrix; on every onnxruntime they are fp32 in memory."""
    checkpoint = make_checkpoint(tmp_path / "qwen3", "qwen3")
    options: dict[str, Any] = {"precision": "int8", "lowering": "portable", "max_seq_len": 128}
    folder = build(BuildOptions(str(checkpoint), tmp_path / "bundle", f"draft_model:{checkpoint}", **options))
    target = read_manifest(folder).target
    assert target.precision.weights == "int8"
    assert target.precision.block_size is None
    assert 0.001 < target.precision.quality.logits_rms_error < 0.15
    model = onnx.load(folder / target.graph.master, load_external_data=False)
    shapes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    undone = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    assert len(undone) == 9  # query-key-value, output, gate-up and down of two layers, and the head
    for node in undone:
        assert [(attribute.name, attribute.i) for attribute in node.attribute] == [("axis", 1)]
        assert shapes[node.input[1]] == shapes[node.input[0]][1:]
    report = verify(folder, prompts=("people went back home and thought",), max_tokens=16)
    assert report.verdict != "failed", report


def test_an_old_onnxruntime_is_named(bundle, monkeypatch):
    import onnxruntime

    from specexport.contract.errors import BackendError

    monkeypatch.setattr(onnxruntime, "__version__", "1.23.2")
    with pytest.raises(BackendError, match=r"1.23.2 is too old for a bundle of the native lowering; .*portable"):
        _target(bundle("llama-near"))
    _target(bundle("llama-near-portable"))
