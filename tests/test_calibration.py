"""Matrices that are rounded for a text."""

import json

import numpy as np
import onnx
import pytest
import torch

from specexport.contract.errors import BuildError
from specexport.contract.reading import read_manifest
from specexport.exporter.build import build
from specexport.exporter.calibration import InputFactor, calibrate, calibration_text, gptq
from specexport.exporter.checkpoints.checkpoint import load_checkpoint
from specexport.exporter.options import BuildOptions
from specexport.exporter.quantize import RoundedTensor, fit_blocks
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.exporter

DEPTH, OUTPUTS = 128, 96
WIDE = {"hidden_size": 128, "intermediate_size": 256}


def test_outputs_change_less_than_by_rounding_each_weight_alone():
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(DEPTH // 4, DEPTH, generator=generator)  # inputs that go together, as in models
    x = torch.randn(512, DEPTH // 4, generator=generator) @ mixed + 0.3 * torch.randn(512, DEPTH, generator=generator)
    weight = torch.randn(OUTPUTS, DEPTH, generator=generator)
    weight[: OUTPUTS // 8, 32:64] = 0  # whole blocks, as in pruned models
    rounded = gptq("w", weight, InputFactor.of(x), 32)
    alone = torch.from_numpy(fit_blocks(weight.T.numpy(), 0, 32, zero_points=True).restored(0)).T

    def error(other: torch.Tensor) -> float:
        return float((x @ (other - weight).T).square().sum())

    assert error(rounded.read()) < 0.4 * error(alone)
    assert rounded.rounding.error == pytest.approx(float((rounded.read() - weight).square().sum()), rel=1e-4)
    scales = rounded.scales()
    assert scales is not None and scales.zero is not None and scales.scale.coarse.dtype == np.float16
    # Inputs that are always 0 say nothing of their weights, and few tokens leave most directions open.
    x[:, 3] = 0
    assert bool(gptq("w", weight, InputFactor.of(x[:4]), 32).read().isfinite().all())


def test_calibration_uses_rounded_inputs(tmp_path):
    checkpoint = load_checkpoint(str(make_checkpoint(tmp_path / "target", "llama", **WIDE)))
    exact = {name: weight.detach().clone() for name, weight in checkpoint.model.named_parameters()}
    seen: list[int] = []
    rounded = calibrate(checkpoint, list(range(3, 300)), 32, lambda _, done, total: seen.append(done))
    tensors = {name: weight for name, weight in rounded.tensors.items() if isinstance(weight, RoundedTensor)}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in tensors} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
    } - {name for name in ("k_proj", "v_proj") if exact[f"model.layers.0.self_attn.{name}.weight"].numel() <= 1 << 13}
    assert tensors["lm_head.weight"].kind == "int8"
    assert seen == sorted(seen) and seen[-1] >= 10
    for name, tensor in tensors.items():
        assert tensor.rounding.error == pytest.approx(float((tensor.read() - exact[name]).square().sum()), rel=1e-3)
        assert tensor.rounding.rms**2 < (0.03 if tensor.kind == "int4" else 1e-4)
    # Afterwards the model reads as before.
    assert all(torch.equal(weight, exact[name]) for name, weight in checkpoint.model.named_parameters())


def test_values_and_down_projections_get_int8_while_the_model_is_no_larger_than_q4_k_m(tmp_path):
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 8, "num_key_value_heads": 4}
    checkpoint = load_checkpoint(str(make_checkpoint(tmp_path / "target", "llama", **sizes)))
    tensors = calibrate(checkpoint, list(range(3, 300)), 32, lambda *_: None).tensors
    kinds = {name: weight.kind for name, weight in tensors.items() if isinstance(weight, RoundedTensor)}
    assert {name.split(".")[-2] for name, kind in kinds.items() if kind == "int4"} == {
        *("q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    assert {kinds[f"model.layers.{at}.self_attn.v_proj.weight"] for at in range(8)} == {"int8"}
    down = [at for at in range(8) if kinds[f"model.layers.{at}.mlp.down_proj.weight"] == "int8"]
    assert {0, 7} < set(down) < set(range(8))  # those of the outer layers first
    # llama.cpp has 5.5 bits for rows of 192, and Q4_K or Q6_K for those of 512.
    matrices = sum(tensors[name].read().numel() * (8.5 if kind == "int8" else 4.625) for name, kind in kinds.items())
    narrow = sum(tensors[name].read().numel() for name in kinds if "down_proj" not in name and "lm_head" not in name)
    outer, head = 4 * 192 * 512, tensors["lm_head.weight"].read().numel()
    assert matrices <= 8.5 * head + 5.5 * narrow + 3 * 4 * 192 * 192 + 6.5625 * outer + 4.5 * outer


def test_calibration_data_changes_the_rounding(tmp_path):
    target = make_checkpoint(tmp_path / "target", "llama", **WIDE)
    (tmp_path / "a.txt").write_text("people went back home and thought " * 40, encoding="utf-8")
    lines = [{"text": "3, 14, 15, 92, 65 " * 40}, {"messages": [{"role": "user", "content": "one word " * 40}]}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    stored = {}
    for name in ("a.txt", "b.jsonl", "again"):
        path = tmp_path / ("a.txt" if name == "again" else name)
        options = BuildOptions(
            str(target), tmp_path / f"{name}.bundle", precision="int4", max_seq_len=128, calibration_data=path
        )
        stored[name] = (build(options) / "target.bin").read_bytes()
    assert stored["a.txt"] == stored["again"] != stored["b.jsonl"]
    manifest = read_manifest(tmp_path / "a.txt.bundle")
    precision = manifest.target.precision
    assert precision.only_cpu and precision.weight_rms_error is not None and 0.02 < precision.weight_rms_error < 0.12
    graph = onnx.load(tmp_path / "a.txt.bundle" / manifest.target.graph.master, load_external_data=False).graph
    types = {
        initializer.name: onnx.TensorProto.DataType.Name(initializer.data_type) for initializer in graph.initializer
    }
    undone = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    assert {types[node.input[0]] for node in undone if len(node.input) == 3} == {"INT4"}
    assert {types[name] for name in types if name.endswith(".scale")} == {"FLOAT16"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.txt", None, "No such file or directory; expected text or JSON lines"),
        ("empty.txt", " \n", "holds no text; expected a few thousand tokens"),
        ("bytes.txt", "\udcff", "can't decode byte 0xff .*; expected text or JSON lines"),
        ("no.jsonl", '{"text": "a"}\n{"words": "b"}', "line 2 has neither text nor messages"),
        ("bad.jsonl", '{"text": 3}', "line 1: text is a whole number; expected a text or null"),
    ],
)
def test_faults_of_calibration_data_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(BuildError, match=message) as raised:
        calibration_text(path)
    assert str(raised.value).startswith(str(path)) and "\n" not in str(raised.value)
    with pytest.raises(BuildError, match="calibration_data was given with precision int8"):
        BuildOptions("target", tmp_path / "bundle", precision="int8", calibration_data=path)


def test_line_ends_of_unicode_do_not_end_a_line_of_json(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "one\u2028two\x85three"}\n{"text": "four"}\n', encoding="utf-8")
    assert calibration_text(path) == "one\u2028two\x85three\n\nfour"


def test_a_short_calibration_text_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    target = make_checkpoint(tmp_path / "target", "llama", **WIDE)
    monkeypatch.setattr("specexport.exporter.target.load_checkpoint", lambda _: pytest.fail("loaded"))
    (tmp_path / "short.txt").write_text("one word", encoding="utf-8")
    with pytest.raises(BuildError, match=r"short\.txt: \d+ tokens of calibration data; expected at least \d+"):
        build(BuildOptions(str(target), tmp_path / "bundle", precision="int4", calibration_data=tmp_path / "short.txt"))
