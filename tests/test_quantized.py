"""Checkpoints that are quantized already: read as what their integers stand for, and stored as the same integers."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specexport.contract.engines import BackendName
from specexport.contract.errors import BuildError
from specexport.contract.model import LoweredAs, Model, StoredAs
from specexport.contract.reading import read_manifest
from specexport.exporter import build as building
from specexport.exporter.checkpoints.checkpoint import load_checkpoint
from specexport.exporter.checkpoints.config import checkpoint_tensors, quantized_in, stored_table
from specexport.exporter.checkpoints.quantized import quantization
from specexport.exporter.engines.bundle import compile_bundle
from specexport.exporter.options import BuildOptions, CompileOptions
from specexport.verify.bundle import verify
from tests.checkpoints import changed, make_checkpoint
from tests.quantized import FORMATS, make_mxfp4, make_quantized

pytestmark = pytest.mark.exporter

KEPT = {"gptq", "gptq_int8", "gptq_dynamic", "packed", "packed_channel", "int8", "float", "awq", "packed_zeros", "fp8"}
ZEROS = {"awq", "packed_zeros"}
Small = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Gives a checkpoint of one layer in a layout and its plain twin, which are not to be changed."""
    root = tmp_path_factory.mktemp("small")
    return cache(lambda layout: make_quantized(root / layout, layout, num_hidden_layers=1))


def _built(
    source: Path,
    output: Path,
    precision: StoredAs | None = None,
    lowering: LoweredAs = "native",
    backend: BackendName = "onnxruntime",
) -> Model:
    options = BuildOptions(
        target=str(source), output=output, precision=precision, lowering=lowering, backend=backend, max_batch_size=1,
        max_seq_len=128,
    )  # fmt: skip
    building.build(options)
    return read_manifest(output).target


def _matrices(bundle: Path, model: Model) -> dict[str, np.ndarray]:
    """What each product's stored numbers stand for, ``[K,N]`` by name, worked out as the ONNX standard says."""
    graph = onnx.load(bundle / model.graph.master).graph
    held = {initializer.name: initializer for initializer in graph.initializer}
    folder = str((bundle / model.graph.master).parent)
    held |= {
        node.output[0]: held[node.input[0]] for node in graph.node if node.op_type == "Cast" and node.input[0] in held
    }
    matrices = {}
    for node in graph.node:
        if node.op_type == "DequantizeLinear":
            numbers, scale, *zero = (
                onnx.numpy_helper.to_array(held[name], folder).astype(np.float32) for name in node.input
            )
            fields = {initializer.name: initializer.i for initializer in node.attribute}
            if "block_size" in fields:
                scale, *zero = (
                    np.repeat(initializer, fields["block_size"], axis=fields["axis"]) for initializer in (scale, *zero)
                )
            matrices[node.input[0]] = (numbers - zero[0] if zero else numbers) * scale
    return matrices


@pytest.mark.parametrize("layout", FORMATS)
def test_quantized_checkpoints_are_built_unchanged(tmp_path, layout):
    quantized, plain = make_quantized(tmp_path, layout)
    loaded, expected = load_checkpoint(str(quantized)).model.state_dict(), load_file(plain / "model.safetensors")
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in expected.items())
    model = _built(quantized, tmp_path / "bundle")
    precision = model.precision
    before = precision.quantized_before
    assert before is not None and before.rest == "bf16"
    matrices = _matrices(tmp_path / "bundle", model)
    if layout in KEPT:
        assert (before.kept, before.converted, before.converted_rms_error) == (14, 0, None)
        assert precision.only_cpu == (layout in ZEROS or layout == "fp8")
        assert len(matrices) == 8  # of each of two layers: q, k and v; o; gate and up; down
        name = next(name for name in matrices if "layers.1.mlp.{gate_proj,up_proj}" in name)
        parts = [expected[f"model.layers.1.mlp.{part}_proj.weight"].T for part in ("gate", "up")]
        np.testing.assert_array_equal(matrices[name], torch.cat(parts, 1).numpy())
        assert precision.weight_rms_error is not None and precision.weight_rms_error < 1e-7
    else:
        assert (before.kept, before.converted) == (0, 14) and before.converted_rms_error is not None
        assert 0.02 < before.converted_rms_error < 0.2
    report = verify(tmp_path / "bundle")
    assert report.passed, report


def test_mxfp4_experts_are_kept_in_int8(tmp_path):
    quantized, plain = make_mxfp4(tmp_path)
    loaded, expected = load_checkpoint(str(quantized)).model.state_dict(), load_file(plain / "model.safetensors")
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in expected.items())
    precision = _built(quantized, tmp_path / "bundle").precision
    assert precision.weights == "int8" and precision.quantized_before is not None
    assert (precision.quantized_before.kept, precision.quantized_before.converted) == (4 * 4, 0)
    assert precision.weight_rms_error is not None and precision.weight_rms_error < 1e-7
    report = verify(tmp_path / "bundle")
    assert report.passed, report
    four = _built(quantized, tmp_path / "four", "int4").precision.quantized_before
    assert four is not None and (four.kept, four.converted) == (0, 4 * 4) and (four.converted_rms_error or 0) > 0.01


@pytest.mark.parametrize("layout", ["fp8", "mxfp4"])
def test_transformers_reads_the_same(tmp_path, layout):
    """Where it needs no other package; it rounds to bfloat16."""
    quantized, _ = make_mxfp4(tmp_path) if layout == "mxfp4" else make_quantized(tmp_path, layout)
    theirs = AutoModelForCausalLM.from_pretrained(quantized).state_dict()
    ours = load_checkpoint(str(quantized)).model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name].bfloat16(), tensor.bfloat16(), rtol=1e-2, atol=0, msg=name)


@pytest.mark.parametrize(
    ("layout", "precision", "lowering", "backend", "kept"),
    [
        ("packed", "int8", "native", "onnxruntime", True),
        ("awq", "int8", "native", "onnxruntime", True),
        ("int8", "int4", "native", "onnxruntime", False),
        ("int8", None, "portable", "onnxruntime", True),
        ("float", None, "portable", "onnxruntime", True),
        ("packed_channel", None, "portable", "onnxruntime", True),
        ("packed", None, "portable", "onnxruntime", False),
        ("packed", None, "native", "tensorrt-rtx", True),
        ("awq", None, "native", "tensorrt-rtx", False),
        ("fp8", None, "native", "tensorrt-rtx", False),
    ],
)
def test_scales_are_kept_where_they_fit(small, tmp_path, layout, precision, lowering, backend, kept):
    quantized, _ = small(layout)
    stored = _built(quantized, tmp_path / "bundle", precision, lowering, backend).precision
    before = stored.quantized_before
    assert before is not None and (before.kept, before.converted) == ((7, 0) if kept else (0, 7))
    assert (before.converted_rms_error or 0) < 0.2 and not (stored.only_cpu and backend != "onnxruntime")
    assert before.rest == ("bf16" if precision is None else None)


def test_fp32_dequantizes(small, tmp_path):
    precision = _built(small("awq")[0], tmp_path / "bundle", "fp32").precision
    assert precision.weights == "fp32" and precision.quantized_before is not None
    assert (precision.quantized_before.kept, precision.quantized_before.converted) == (0, 0)


def test_zero_points_are_not_compiled_for_tensorrt(small, tmp_path):
    _built(small("awq")[0], tmp_path / "bundle")
    with pytest.raises(BuildError, match=r"have zero points.*build with --backend tensorrt-rtx"):
        compile_bundle(tmp_path / "bundle", CompileOptions(backend="tensorrt-rtx"))


def test_a_head_stored_with_its_embedding_is_not_compiled_for_tensorrt(tmp_path):
    tied = make_checkpoint(tmp_path / "tied", "qwen3")
    _built(tied, tmp_path / "bundle", "int8")
    with pytest.raises(BuildError, match=r"the target's head is stored once.*build with --backend tensorrt-rtx"):
        compile_bundle(tmp_path / "bundle", CompileOptions(backend="tensorrt-rtx"))


def test_the_head_of_a_quantized_checkpoint_is_found(small):
    quantized, plain = small("awq")
    table = stored_table(quantized, head=True)
    assert table.name == "lm_head.weight"
    assert torch.equal(table.finite(quantized), load_file(plain / "model.safetensors")["lm_head.weight"])


def test_symmetric_zero_points_tell_their_version(small, tmp_path):
    """As of GPTQ-Int4 checkpoints that are in the second version and say that they are in the first."""
    other = shutil.copytree(small("gptq")[0], tmp_path / "second")
    tensors = load_file(other / "model.safetensors")
    changed(other, {name: tensor + 0x11111111 for name, tensor in tensors.items() if name.endswith("qzeros")})
    first, second = (list(checkpoint_tensors(folder)) for folder in (small("gptq")[0], other))
    assert all(torch.equal(a.read(), b.read()) for a, b in zip(first, second, strict=True))


def test_the_language_model_may_state_its_quantization(small):
    """As in some multimodal checkpoints."""
    path = small("gptq_int8")[0] / "config.json"
    config = json.loads(path.read_text())
    assert quantization(path, {"text_config": config}) == quantization(path, config) == ("GPTQ", "int8")


Q = "model.layers.0.self_attn.q_proj"
Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]


def _set(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors, _: tensors.update({name: make(tensors[name])})


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("awq", lambda tensors, _: tensors.pop(f"{Q}.scales"), r"lack '.*q_proj.scales', a part of a quantized"),
        ("awq", lambda tensors, _: tensors.pop(f"{Q}.qzeros"), r"lack '.*q_proj.qzeros'"),
        ("awq", _set(f"{Q}.scales", lambda t: t[:, :8].clone()), r"q_proj.scales' has shape \[2, 8\]; expected"),
        ("awq", _set(f"{Q}.qzeros", lambda t: t[:1].clone()), r"q_proj.qzeros' has shape \[1, 8\]; expected \[2, 8\]"),
        ("awq", _set(f"{Q}.qweight", lambda t: t.float()), r"q_proj.qweight' is F32 \[64, 8\]; expected I32"),
        ("awq", _set(f"{Q}.qweight", lambda t: t[:32].clone()), r"expected|sizes make"),
        ("awq", _set(f"{Q}.scales", lambda t: t * torch.inf), r"q_proj.scales' holds numbers that are not finite"),
        ("gptq", _set(f"{Q}.g_idx", lambda t: t + 1), r"q_proj.g_idx' holds 2; expected 0 to 1"),
        ("gptq", _set(f"{Q}.g_idx", lambda t: t - 1), r"q_proj.g_idx' holds -1; expected 0 to 1"),
        ("gptq", _set(f"{Q}.g_idx", lambda t: t[:3].clone()), r"q_proj.g_idx' has shape \[3\]; expected \[64\]"),
        ("gptq", lambda _, config: config.update(bits=3), r"'gptq' \(.*bits 3.*\) is not supported; expected AWQ"),
        ("gptq", lambda _, config: config.update(dynamic={"+:a": {"bits": 3}}), r"'gptq' \(.*\) is not supported"),
        ("gptq", lambda _, config: config.update(bits="4"), "bits is a text; expected a whole number or null"),
        ("awq", lambda _, config: config.update(version="gemv"), r"version gemv.* is not supported"),
        ("awq", lambda _, config: config.update(quant_method="bitsandbytes"), r"'bitsandbytes'.* is not supported"),
        ("awq", lambda _, config: config.pop("quant_method"), r"quantization_config: .*quant_method"),
        (
            "packed",
            _set(f"{Q}.weight_shape", lambda t: t * (1 << 40)),
            r"q_proj.weight_shape' says \[\d{14,}, \d{14,}\], and .*weight_packed' has shape \[64, 8\]",
        ),
        ("packed", _set(f"{Q}.weight_shape", lambda t: -t), r"q_proj.weight_shape' says \[-64, -64\]"),
        ("packed", _set(f"{Q}.weight_scale", lambda t: t[:1].clone()), r"q_proj.weight_scale' has shape \[1, 2\]"),
        ("packed", lambda _, config: config.update(format="nvfp4-pack-quantized"), r"nvfp4-pack.* not supported"),
        ("fp8", lambda tensors, _: tensors.pop(f"{Q}.weight_scale_inv"), r"lack '.*q_proj.weight_scale'"),
        ("fp8", _set(f"{Q}.weight_scale_inv", lambda t: t[:1].clone()), r"weight_scale_inv' has shape \[1, 2\]"),
        ("fp8", lambda _, config: config.update(weight_block_size=[0, 32]), r"weight_block_size\[0\]"),
        (
            "fp8",
            lambda _, config: config.update(weight_block_size=[1 << 24, 1]),
            r"weight_scale_inv' has shape \[2, 3\]; expected one a block of \[\(64, 1\)\]",
        ),
        ("float_blocks", lambda _, config: config.pop("config_groups"), r"weight_scale' has shape \[2, 3\]; expected"),
        ("packed", lambda _, config: config.update(transform_config={"R4": {}}), r"transform_config rotates"),
        ("int8", _set(f"{Q}.weight_scale", lambda t: t * torch.nan), r"weight_scale' holds numbers that are not fin"),
    ],
)  # fmt: skip
def test_faults_are_named(small, tmp_path, layout, change, message):
    quantized = shutil.copytree(small(layout)[0], tmp_path / "quantized")
    tensors, config = load_file(quantized / "model.safetensors"), json.loads((quantized / "config.json").read_text())
    change(tensors, config["quantization_config"])
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(BuildError, match=message):
        load_checkpoint(str(quantized))


def test_checkpoints_of_mlx_are_refused_by_name(small, tmp_path):
    folder = shutil.copytree(small("awq")[0], tmp_path / "mlx")
    quantization = {"group_size": 64, "bits": 4}
    for settings in (quantization, None, 4):
        changed(folder, quantization=quantization, quantization_config=settings)
        with pytest.raises(BuildError, match="quantization: the format of MLX is not supported"):
            quantized_in(folder)


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("gate_up_proj_scales", lambda t: t.fill_(255), r"gate_up_proj_scales' holds 255"),
        ("gate_up_proj_scales", lambda t: t[..., :1].clone(), r"gate_up_proj_scales' has shape \[4, 192, 1\]"),
        ("down_proj_blocks", lambda t: t[..., :8].clone(), r"down_proj_blocks' has shape .*; expected blocks of 16"),
    ],
)
def test_wrong_experts_are_named(tmp_path, name, make, message):
    quantized, _ = make_mxfp4(tmp_path)
    full = f"model.layers.0.mlp.experts.{name}"
    changed(quantized, {full: make(load_file(quantized / "model.safetensors")[full])})
    with pytest.raises(BuildError, match=message):
        load_checkpoint(str(quantized))
