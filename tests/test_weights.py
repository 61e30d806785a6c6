"""Quantization, the weights file, and matrices that are in memory only while they are read."""

import hashlib
import itertools
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from specexport import LLM, SamplingParams
from specexport.exporter.build import build
from specexport.exporter.checkpoints import stored
from specexport.exporter.checkpoints.checkpoint import load_checkpoint
from specexport.exporter.checkpoints.config import stored_table
from specexport.exporter.checkpoints.stored import Blocks, Factors, QuantizedTensor, Scales, StoredTensor
from specexport.exporter.external_data import pack_int4
from specexport.exporter.graph_checks import reference
from specexport.exporter.options import QUANTIZED, BuildOptions, Storage
from specexport.exporter.passes.tensorrt import restore_tables
from specexport.exporter.quantize import apply_scales, column_scales, fit_blocks, fits_half, quantize_blocks
from specexport.exporter.target import for_checkpoint
from specexport.exporter.weights import WeightsFile
from tests.checkpoints import changed, make_checkpoint, make_heads
from tests.threads import python

pytestmark = pytest.mark.exporter

K, N, VOCAB = 64, 48, 40


@given(
    seed=st.integers(0, 2**32 - 1),
    axis=st.sampled_from([0, 1]),
    block=st.sampled_from([16, 32, 64]),
    largest=st.sampled_from([7, 127]),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
)
def test_each_weight_is_restored_within_half_a_step(seed, axis, block, largest, scale):
    matrix = (np.random.default_rng(seed).standard_normal((128, 64)) * scale).astype(np.float32)
    matrix[:64, :16] = 0.0
    blocks = quantize_blocks(matrix, axis, block, largest)
    restored = blocks.restored(axis)
    assert np.abs(blocks.integers).max() <= largest
    # A scale that was rounded to fp16 cuts the largest weight off: by 2^-8 of it at most.
    least = np.repeat(blocks.scale, block, axis=axis) * (0.5001 + largest * 2.0**-8)
    assert np.all(np.abs(restored - matrix) <= least)
    assert np.all(restored[:64, :16] == 0.0)
    assert fits_half(blocks.scale) or not 1e-4 < scale / largest < 1e4  # otherwise it would be too inexact


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    axis=st.sampled_from([0, 1]),
    block=st.sampled_from([16, 32, 64]),
    zero_points=st.booleans(),
    scale=st.sampled_from([1e-30, 1e-6, 1e-3, 1.0, 1e30]),
)
def test_blocks_are_rounded_with_the_scale_of_least_error(seed, axis, block, zero_points, scale):
    """Never worse than the scale of the largest weight, and better by as much as that costs."""
    matrix = (np.random.default_rng(seed).standard_normal((128, 64)) * scale).astype(np.float32)
    matrix[:64, :16] = 0.0
    blocks = fit_blocks(matrix, axis, block, zero_points=zero_points)
    assert (blocks.zero is not None) == zero_points
    assert blocks.scale.shape == (128 // block, 64) if axis == 0 else (128, 64 // block)
    restored, plain = blocks.restored(axis), quantize_blocks(matrix, axis, block, 7).restored(axis)
    assert np.all(restored[:64, :16] == 0.0)
    error, of_largest = (
        float(np.square((weights - matrix) / scale, dtype=np.float64).sum()) for weights in (restored, plain)
    )
    # Squares of the smallest and largest numbers are 0 and infinite in fp32: then the widest range is taken.
    assert error < of_largest * ((0.75 if zero_points else 0.95) if 1e-12 < scale < 1e12 else 1.01)
    assert fits_half(blocks.scale) or not 1e-3 < scale < 1e3
    scales, zeros = (
        None if weights is None else np.repeat(weights, block, axis=axis) for weights in (blocks.scale, blocks.zero)
    )
    again, _ = apply_scales(matrix, np.where(scales > 0, scales, np.float32(1)), zeros, "int4")
    assert np.array_equal(again.clip(-8 if zero_points else -7), blocks.integers)


@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-6, 1e-3, 1.0, 1e3]))
def test_fp8_is_as_exact_at_any_scale_and_its_scales_are_the_same_in_half_precision(seed, scale):
    matrix = (np.random.default_rng(seed).standard_normal((64, 16)) * scale).astype(np.float32)
    matrix[:, 3] = 0.0
    scales = column_scales(np.abs(matrix).max(axis=0), "fp8")
    assert np.array_equal(scales, scales.astype(np.float16)) and (scales > 0).all()
    restored = apply_scales(matrix, scales, None, "fp8")[1]
    # Three bits behind the point, and below the normal numbers what lies between two of the smallest.
    assert np.all(np.abs(restored - matrix) <= np.maximum(np.abs(matrix) * 2**-4, scales * 2**-10))


@settings(deadline=None)
@given(st.lists(st.integers(-8, 7), min_size=2, max_size=64).filter(lambda values: len(values) % 2 == 0))
def test_packed_int4_reads_back_through_onnx(values):
    packed = pack_int4(np.array(values, np.int8))
    tensor = onnx.helper.make_tensor("t", onnx.TensorProto.INT4, [len(values)], packed.tobytes(), raw=True)
    assert onnx.numpy_helper.to_array(tensor).astype(int).tolist() == values


def stored_graph(model: ir.Model, path: Path, *storage: Storage, **more: Any) -> WeightsFile:
    """Writes a graph, and its weights as builds store them into ``weights.bin`` beside it."""
    with WeightsFile(path.with_name("weights.bin"), *storage, **more) as weights:
        weights.externalize(model)
    passes.RemoveUnusedNodesPass()(model)
    ir.save(model, path)
    return weights


def _model(embedding: np.ndarray, weight: np.ndarray, *, tied: bool) -> ir.Model:
    """``(embedding[ids]) @ weight``, and with ``tied`` the embedding again as head."""
    head = "h = MatMul(y, table_t)" if tied else "h = Identity(y)"
    transpose = "table_t = Transpose<perm=[1, 0]>(table)" if tied else ""
    text = f"""<ir_version: 10, opset_import: ["" : 24]>
        g (int64[B,T] ids) => (float[B,T,W] h) {{
            x = Gather<axis=0>(table, ids)
            y = MatMul(x, weight)
            {transpose}
            {head}
        }}"""
    model = ir.from_onnx_text(text)
    for name, array in (("table", embedding), ("weight", weight)):
        value = next(v for node in model.graph for v in node.inputs if v is not None and v.name == name)
        value.const_value = ir.Tensor(array, name=name)
        value.shape, value.type = ir.Shape(array.shape), ir.TensorType(ir.DataType.FLOAT)
        model.graph.register_initializer(value)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [("fp32", 1e-6), ("fp16", 1e-3), ("bf16", 5e-3), ("int8", 0.02), ("int4", 0.2), ("fp8", 0.05)],
)
def test_stored_graphs_equal_the_original(tmp_path, precision, tolerance, tied):
    rng = np.random.default_rng(0)
    embedding = rng.standard_normal((VOCAB, K)).astype(np.float32)
    weight = rng.standard_normal((K, K if tied else N)).astype(np.float32)
    model = _model(embedding, weight, tied=tied)
    weights = stored_graph(model, tmp_path / "model.onnx", Storage(precision, 32))
    ids = rng.integers(0, VOCAB, (2, 5))
    expected = embedding[ids] @ weight
    if tied:
        expected = expected @ embedding.T
    outputs = ort.InferenceSession(str(tmp_path / "model.onnx")).run(None, {"ids": ids})[0]
    assert np.sqrt(np.mean((outputs - expected) ** 2)) <= tolerance * np.sqrt(np.mean(expected**2))
    if precision in QUANTIZED:
        looked_up = precision != "fp8"  # which has its table in fp16
        assert len(weights.report.quantized) == 1 + tied + looked_up
        assert 0 < weights.report.rounding.rms < tolerance


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_rows_are_looked_up_without_an_operator_that_gpus_lack(tmp_path, precision):
    embedding = np.random.default_rng(0).standard_normal((VOCAB, K)).astype(np.float32)
    model = _model(embedding, np.eye(K, dtype=np.float32), tied=False)
    with WeightsFile(tmp_path / "weights.bin", Storage(precision, 32)) as weights:
        weights.externalize(model)
    looked_up = next(node for node in model.graph if node.op_type == "MatMul").inputs[0]
    looked_up.type = ir.TensorType(ir.DataType.FLOAT)
    model.graph.outputs.append(looked_up)
    passes.RemoveUnusedNodesPass()(model)
    ir.save(model, tmp_path / "model.onnx")
    undone = [node.inputs[0] for node in model.graph if node.op_type == "DequantizeLinear"]
    assert len(undone) == 1 and undone[0] is not None and undone[0].is_initializer()
    expected = quantize_blocks(embedding, 1, 32, 127).restored(1)
    ids = np.array([[3, 0, VOCAB - 1], [7, 7, 1]])
    outputs = ort.InferenceSession(str(tmp_path / "model.onnx")).run(None, {"ids": ids})[1]
    assert np.array_equal(outputs, expected[ids])


@pytest.mark.parametrize("restored", [False, True], ids=["onnxruntime", "tensorrt"])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_experts_are_dequantized_exactly(tmp_path, precision, restored):
    experts = np.random.default_rng(0).standard_normal((4, K, N)).astype(np.float32)
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 24]>
        g (int64[L] ids) => (float[L,K,N] h) { h0 = Gather<axis=0>(stack, ids) h = Identity(h0) }"""
    )
    stack = model.graph[0].inputs[0]
    stack.const_value, stack.shape = ir.Tensor(experts, name="stack"), ir.Shape(experts.shape)
    model.graph.register_initializer(stack)
    with WeightsFile(tmp_path / "weights.bin", Storage(precision, 32)) as weights:
        weights.externalize(model)
    passes.RemoveUnusedNodesPass()(model)
    if restored:
        restore_tables(model, lambda name, dtype, array: ir.tensor(array, dtype, name=name))
        assert [node.op_type for node in model.graph] == ["Cast", "Gather", "Reshape", "Identity"]
    ir.save(model, tmp_path / "model.onnx")
    fitted = fit_blocks(experts, 1, 32, zero_points=False)
    expected = (quantize_blocks(experts, 1, 32, 127) if precision == "int8" else fitted).restored(1)
    outputs = ort.InferenceSession(str(tmp_path / "model.onnx")).run(None, {"ids": np.array([3, 0])})[0]
    assert np.array_equal(outputs, (expected.astype(np.float16).astype(np.float32) if restored else expected)[[3, 0]])


def test_a_matrix_that_blocks_do_not_divide_stays_fp32_and_is_reported(tmp_path):
    model = _model(np.ones((VOCAB, 24), np.float32), np.ones((24, N), np.float32), tied=False)
    weights = stored_graph(model, tmp_path / "model.onnx", Storage("int8", 32))
    assert set(weights.report.not_quantized) == {"table", "weight"}
    assert "24" in weights.report.not_quantized["weight"]


def test_weights_beyond_fp16_stay_fp32_and_are_reported(tmp_path):
    model = _model(np.ones((VOCAB, K), np.float32), np.full((K, N), 1e6, np.float32), tied=False)
    weights = stored_graph(model, tmp_path / "model.onnx", Storage("fp16", 32))
    assert list(weights.report.not_quantized) == ["weight"]


MEASURE = """
import sys, threading, time
from pathlib import Path
import onnxruntime, torch, transformers
from specexport import LLM, SamplingParams
from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def watch():
    global most
    while True:
        most = max(most, held())
        time.sleep(0.005)

before = most = held()
threading.Thread(target=watch, daemon=True).start()
build(BuildOptions(target=sys.argv[1], output=Path(sys.argv[2]), precision=sys.argv[3], max_seq_len=256))
print(max(most, held()) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of a process's memory")
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_building_takes_at_most_1_6_times_the_memory_of_the_fp32_weights(tmp_path, precision):
    """Pages of files, which the system may drop, not counted. A child's ru_maxrss would begin with its parent's.

    Calibration adds activations and square matrices of the greatest depth, which for larger models are a smaller part.
    """
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}
    calibration = 4 * 4 * sizes["intermediate_size"] ** 2 if precision == "int4" else 0
    source = make_checkpoint(tmp_path / "model", "llama", **sizes)
    weights = (source / "model.safetensors").stat().st_size
    peak = int(python(MEASURE, source, tmp_path / "bundle", precision).split()[-1])
    assert 0.2 * weights < peak <= 1.6 * weights + calibration


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ({"precision": "fp32"}, Storage("int8", 32)),
        ({"precision": "int8", "block_size": 128}, Storage("int8", 128)),
        ({"precision": "int4"}, Storage("int4", 32)),
        ({"precision": "int4", "block_size": 16}, Storage("int4", 16)),
        ({"precision": "int4", "block_size": 128}, Storage("int4", 32)),
        ({"precision": "int4", "block_size": 128, "draft_precision": "int8"}, Storage("int8", 128)),
        ({"precision": "int8", "lowering": "portable"}, Storage("int8", None)),
    ],
)
def test_drafts_are_rounded_within_limits(tmp_path, options, stored):
    resolved = BuildOptions("target", tmp_path / "bundle", **options).draft_storage
    assert (resolved.kind, resolved.block_size) == (stored.kind, stored.block_size)


def test_heads_are_stored_in_the_draft_precision(tmp_path):
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 24]>
        g (float[B,T,128] x) => (float[B,T,128] logits, float[B,T,128] candidates) {
            logits = MatMul(x, own)
            candidates = MatMul(x, head)
        }"""
    )
    for node in model.graph:
        weight = node.inputs[1]
        weight.const_value = ir.Tensor(np.random.default_rng(0).standard_normal((128, 128)).astype(np.float32))
        weight.shape, weight.type = ir.Shape((128, 128)), ir.TensorType(ir.DataType.FLOAT)
        model.graph.register_initializer(weight)
    with WeightsFile(tmp_path / "weights.bin", Storage("int4", 128), Storage("int4", 32)) as weights:
        weights.externalize(model)
    blocks = [node.attributes["block_size"].as_int() for node in model.graph if node.op_type == "DequantizeLinear"]
    assert blocks == [128, 32]


@pytest.mark.parametrize(
    ("storage", "kept"),
    [(Storage("stored", None), []), (Storage("int8", 32, any_scales=True), ["weight"])],
    ids=["one scale a column", "zero points of rows"],
)
def test_scales_that_a_graph_cannot_read_are_rounded_again(tmp_path, storage, kept):
    """No column of four bits has one scale, and rows are looked up without zero points."""
    rng = np.random.default_rng(0)
    tensors: dict[str, StoredTensor] = {}
    matrices = {}
    for name, columns in (("table", VOCAB), ("weight", N)):
        scale = rng.random((K // 32, columns), np.float32) + np.float32(0.5)
        zero = rng.integers(-3, 4, scale.shape).astype(np.int8)
        blocks = Blocks(rng.integers(-8, 8, (K, columns)).astype(np.int8), scale, zero)
        scales = partial(Scales, "int4", 32, Factors(scale), zero)
        tensors[name] = QuantizedTensor(name, (columns, K), "F32", lambda: None, scales=scales, kind="int4")  # type: ignore[arg-type, return-value]
        matrices[name] = blocks.restored(0)
    model = _model(matrices["table"].T.copy(), matrices["weight"], tied=False)
    with WeightsFile(tmp_path / "weights.bin", storage, checkpoint=tensors) as weights:
        weights.externalize(model)
    assert weights.report.kept == kept
    passes.RemoveUnusedNodesPass()(model)
    ir.save(model, tmp_path / "model.onnx")
    ids = rng.integers(0, VOCAB, (2, 5))
    expected = matrices["table"].T[ids] @ matrices["weight"]
    outputs = ort.InferenceSession(str(tmp_path / "model.onnx")).run(None, {"ids": ids})[0]
    assert np.sqrt(np.mean((outputs - expected) ** 2)) <= 0.02 * np.sqrt(np.mean(expected**2))


# --- weights that are read where they are needed ----------------------------------------------------------------------


@pytest.fixture
def halved(tmp_path: Path) -> Path:
    """A checkpoint in bf16 but for its norms, as some are."""
    folder = make_checkpoint(tmp_path / "target", "qwen3")
    state = load_file(folder / "model.safetensors")
    changed(folder, {name: tensor.to(torch.bfloat16) for name, tensor in state.items() if tensor.ndim > 1})
    return folder


@pytest.mark.parametrize(
    ("types", "more", "precision"),
    [
        (["bfloat16"], {}, "bf16"),
        (["float16"], {}, "fp16"),
        (["float16"], {"precision": "stored", "lowering": "portable"}, "fp16"),
        (["float32"], {}, "fp32"),  # though the configuration says that it was trained in bf16
        (["bfloat16", "float32"], {}, "fp32"),
        (["bfloat16"], {"backend": "onnxruntime-cuda"}, "fp32"),
        (["bfloat16"], {"lowering": "portable"}, "fp32"),
    ],
)
def test_matrices_keep_their_type_by_default(halved, tmp_path, types, more, precision):
    kinds = itertools.cycle(getattr(torch, name) for name in types)
    state = load_file(halved / "model.safetensors")
    weights = {name: tensor.to(next(kinds)) for name, tensor in state.items() if tensor.ndim > 1}
    target = changed(halved, weights, dtype="bfloat16")
    assert for_checkpoint(BuildOptions(target=target, output=tmp_path / "bundle", **more)).precision == precision


def test_weights_in_bf16_are_those_in_fp32(halved, tmp_path):
    results, params = [], SamplingParams(temperature=0.0, max_tokens=8, logprobs=3)
    for precision in (None, "fp32"):
        options = BuildOptions(
            target=str(halved), output=tmp_path / str(precision), precision=precision, max_seq_len=64
        )
        with LLM(str(build(options))) as llm:
            text = llm.generate({"prompt_token_ids": [5, 6, 7]}, params)[0].outputs[0]
        results.append((text.token_ids, text.logprobs))
    assert results[0] == results[1]


def hashes(bundle: Path) -> dict[str, str]:
    files = sorted(path for path in bundle.rglob("*") if path.is_file() and path.name != "specexport.json")
    return {str(path.relative_to(bundle)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_bundles_are_those_of_a_model_that_is_held(halved, tmp_path, monkeypatch, precision):
    results, heads = [], make_heads(tmp_path / "heads", halved, 2, tied=True)
    for large in (stored.LARGE, 1):
        monkeypatch.setattr(stored, "LARGE", large)
        methods = ({"method": "draft_model", "model": str(halved)}, {"method": "self_draft", "layers": 1})
        methods += ({"method": "medusa", "model": str(heads)},)  # which read the target's head too
        options = BuildOptions(
            target=str(halved), output=tmp_path / f"b{large}", methods=methods, precision=precision, max_seq_len=64
        )
        results.append(hashes(build(options)))
    assert results[0] == results[1] and len(results[0]) > 4


def test_matrices_are_in_memory_only_while_they_are_read(halved, monkeypatch):
    whole = load_checkpoint(str(halved))
    monkeypatch.setattr(stored, "LARGE", 1)
    loaded = load_checkpoint(str(halved))
    state, held = load_file(halved / "model.safetensors"), dict(loaded.model.named_parameters())
    for name, parameter in held.items():
        assert bool(parameter.isnan().all()) == (parameter.ndim > 1), name
        assert parameter.untyped_storage().nbytes() == 4 * (1 if parameter.ndim > 1 else parameter.numel())
        tensor = stored.stored_tensor(parameter)
        assert tensor is None or torch.equal(tensor.read(), state[name])
    tokens = list(range(3, 40))
    assert (reference(loaded, tokens).logits == reference(whole, tokens).logits).all()
    assert dict(loaded.model.named_parameters()) == held  # nothing is left behind


def test_a_module_that_fails_holds_nothing(halved, monkeypatch):
    monkeypatch.setattr(stored, "LARGE", 1)
    model = load_checkpoint(str(halved)).model
    head = model.get_output_embeddings()
    with stored.read_weights(model):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            head(torch.zeros(1, 7))
        assert bool(head.weight.isnan().all())


@pytest.mark.parametrize("same", [True, False])
def test_a_head_stored_beside_its_embedding_is_tied_as_in_transformers(halved, monkeypatch, same):
    monkeypatch.setattr(stored, "LARGE", 1)
    table = load_file(halved / "model.safetensors")["model.embed_tokens.weight"]
    stated = table.clone() if same else 2 * table
    model = load_checkpoint(changed(halved, {"lm_head.weight": stated})).model
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == same
    for head, expected in ((False, table), (True, stated)):
        assert torch.equal(stored_table(halved, head=head).read(), expected)
