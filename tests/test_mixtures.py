"""Mixtures of experts and attention sinks: what transformers computes, from the experts that are used."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specexport.contract.errors import BuildError
from specexport.contract.reading import read_manifest
from specexport.contract.tree import TokenTree
from specexport.exporter import build as building
from specexport.exporter import trace, trace_cache
from specexport.exporter.checkpoints import parity
from specexport.exporter.checkpoints.checkpoint import Checkpoint, load_checkpoint
from specexport.exporter.checkpoints.config import sizes_of
from specexport.exporter.dequantize import gathers_experts, routers
from specexport.exporter.engines.bundle import compile_bundle
from specexport.exporter.engines.source import write_source
from specexport.exporter.graph_checks import reference
from specexport.exporter.options import BuildOptions, CompileOptions, Storage
from specexport.exporter.passes import simplify
from specexport.exporter.passes.experts import lower_experts
from specexport.graphs.step import StepModule
from specexport.runtime.backends.onnxruntime import kernels
from tests.checkpoints import GROUPED, WINDOW, changed, make_checkpoint
from tests.engine_bundles import SMALL
from tests.reference import plain_session
from tests.test_families import TOLERANCE, Family, Graph, differences, random_text
from tests.test_weights import stored_graph

pytestmark = pytest.mark.exporter

EXPERTS, USED = 8, 2
FORMS = {"step.onnx": False, "branches.onnx": True}
_ONE = {**GROUPED, "num_hidden_layers": 1, "head_dim": 16, "num_experts_per_tok": USED}
_GROUPS = {"n_group": 2, "topk_group": 1, "n_routed_experts": EXPERTS, "moe_intermediate_size": 32}

MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_ONE, "num_experts": EXPERTS, "moe_intermediate_size": 32},
    "mixtral": {**_ONE, "num_local_experts": EXPERTS},
    "olmoe": {**_ONE, "num_experts": EXPERTS},
    "phimoe": {
        **_ONE,
        "num_local_experts": EXPERTS,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "granitemoe": {**_ONE, "num_local_experts": EXPERTS},
    "glm4_moe": {**_ONE, **_GROUPS, "first_k_dense_replace": 0},
    "lfm2_moe": {
        **_ONE,
        "num_experts": EXPERTS,
        "moe_intermediate_size": 32,
        "layer_types": ["full_attention"],
        "num_dense_layers": 0,
    },
    "gpt_oss": {**_ONE, "num_hidden_layers": 2, "num_local_experts": EXPERTS, "sliding_window": WINDOW},
    "deepseek_v3": {
        **{name: value for name, value in _ONE.items() if name != "head_dim"},
        **_GROUPS,
        "first_k_dense_replace": 0,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
}


@pytest.fixture(scope="module", params=MIXTURES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, **MIXTURES[request.param])
    loaded = load_checkpoint(str(folder))
    eager = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).eval()
    for name, branches in FORMS.items():
        ir.save(_step_graph(loaded, branches=branches), folder / name)
    return Family(request.param, loaded, eager, folder)


def _step_graph(loaded: Checkpoint, *, branches: bool) -> ir.Model:
    model = trace.trace_step(StepModule(loaded.model), loaded.cache)
    lower_experts(model, branches=branches)
    return model


@pytest.mark.parametrize("form", FORMS)
def test_step_graph_equals_transformers(family, form):
    parity.require_parity(family.checkpoint, "portable")
    worst = differences(family, family.folder / form, (2 * WINDOW + 5, WINDOW + 3), 8, 40)
    assert max(worst.values()) < TOLERANCE, worst


def test_experts_of_a_cpu_are_products_of_their_own(family):
    """Each with its matrices in a branch, none gathered."""
    graph = ir.load(family.folder / "branches.onnx").graph
    assert not any(gathers_experts(node, 3) for node in graph)
    chosen = [node.attributes["then_branch"].as_graph() for node in graph if node.op_type == "If"]
    assert len(chosen) == EXPERTS * len(family.checkpoint.cache)
    for branch in chosen:
        weights = [value.name for node in branch if node.op_type == "MatMul" for value in node.inputs[1:]]
        assert len(weights) == 2 and set(weights) <= branch.initializers.keys()


def test_many_experts_are_in_groups_that_run_if_one_of_them_is_chosen(tmp_path):
    config = {**MIXTURES["qwen3_moe"], "num_experts": 32}
    loaded = load_checkpoint(str(make_checkpoint(tmp_path, "qwen3_moe", **config)))
    model = _step_graph(loaded, branches=True)
    assert [routed.name for routed in routers(model.graph)] == ["model.layers.0.mlp.gate.weight"]
    groups = [node.attributes["then_branch"].as_graph() for node in model.graph if node.op_type == "If"]
    assert [sum(node.op_type == "If" for node in group) for group in groups] == [4] * 8
    ir.save(model, tmp_path / "step.onnx")
    text = random_text(24, 5)
    logits = Graph(tmp_path / "step.onnx", loaded, 1, 32).step(np.array([text]), [0], TokenTree.chain(24))[0]
    expected = reference(loaded, text).logits[0]
    assert np.abs(logits - expected).max() < TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_experts_are_gathered_before_they_are_dequantized(family, tmp_path, kind):
    """And the router stays in fp32."""
    model = ir.load(family.folder / "step.onnx")
    weights = stored_graph(model, tmp_path / "step.onnx", Storage(kind, 32))
    assert not weights.report.not_quantized
    stored = {str(value.name): value for value in model.graph.initializers.values()}
    integers = [value for name, value in stored.items() if name.endswith(f".{kind}.experts")]
    scales = [value for name, value in stored.items() if name.endswith(f".{kind}.experts.scale")]
    assert len(integers) == len(scales) == 2 * len(family.checkpoint.cache)
    stacked = sum(parameter.numel() for parameter in family.eager.parameters() if parameter.ndim == 3)
    assert sum(value.const_value.nbytes for value in integers) == stacked * {"int8": 1, "int4": 0.5}[kind]
    assert all({node.op_type for node, _ in value.uses()} == {"Gather"} for value in (*integers, *scales))
    routers = [
        value
        for value in model.graph.initializers.values()
        if value.dtype == ir.DataType.FLOAT and value.shape is not None and list(value.shape) == [64, EXPERTS]
    ]
    assert len(routers) == len(family.checkpoint.cache)
    text = random_text(12, 0)
    ours = Graph(tmp_path / "step.onnx", family.checkpoint, 1, 16).step(np.array([text]), [0], TokenTree.chain(12))[0]
    theirs = family.logits(text)
    # A token whose experts are nearly equally good may take others; most do not.
    assert 1e-5 < np.median(np.abs(ours - theirs)) / np.abs(theirs).mean() < {"int8": 0.1, "int4": 0.6}[kind]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_a_gpu_chooses_the_experts_of_the_cpu(family, tmp_path, kind, compiled):
    """In half precision too, from scores and masks in fp32."""
    model, master, source = ir.load(family.folder / "step.onnx"), tmp_path / "step.onnx", tmp_path / "half.onnx"
    stored_graph(model, master, Storage(kind, 32))
    write_source(master, source, "fp16", 0, {}, compiled=compiled)
    nodes = ir.load(source).graph
    scores = [node.outputs[0] for node in nodes if node.op_type == "MatMul" and node.outputs[0].shape[-1] == EXPERTS]
    chosen = [node.inputs[0] for node in nodes if node.op_type == "TopK"]
    assert len(scores) == len(family.checkpoint.cache)
    assert {value.dtype for value in (*scores, *chosen)} == {ir.DataType.FLOAT}
    text = random_text(64, 0)
    whole, half = (_logits(path, family.checkpoint, text) for path in (master, source))
    errors = np.abs(half - whole).max(-1) / whole.std()
    # A token whose experts are nearly equally good may take others.
    assert np.median(errors) < 0.02 and np.mean(errors > 0.1) < 0.1


def _logits(path: Path, checkpoint: Checkpoint, text: list[int]) -> np.ndarray:
    """The logits ``[N,V]`` of a graph that computes in any type, without onnxruntime's own rounding of activations."""
    graph = Graph(path, checkpoint, 1, len(text))
    graph.session = plain_session(path)
    halves = {value.name for value in graph.session.get_inputs() if value.type == "tensor(float16)"}
    graph.caches = {
        name: np.zeros_like(rows, np.float16 if name in halves else np.float32) for name, rows in graph.caches.items()
    }
    logits: np.ndarray = graph.step(np.array([text]), [0], TokenTree.chain(len(text)))[0]
    return logits


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kind", "size"), [("fp32", 4), ("int8", 1 + 4 / 32), ("int4", 0.5 + 4 / 32)])
def test_a_plain_step_reads_the_active_parameters(tmp_path, kind, size, form):
    """And no more than half as many bytes again, counted over the weights that the graph reads."""
    sizes = {"num_experts": 16, "hidden_size": 128, "moe_intermediate_size": 128}
    folder = make_checkpoint(tmp_path, "qwen3_moe", **{**MIXTURES["qwen3_moe"], **sizes})
    loaded = load_checkpoint(str(folder))
    model = _step_graph(loaded, branches=FORMS[form])
    stored_graph(model, tmp_path / "step.onnx", Storage(kind, 32))
    branches = [graph for graph in model.graph.subgraphs() if graph.name == "chosen"]
    read = sum(value.const_value.nbytes for branch in branches for value in branch.initializers.values()) * USED / 16
    for value in model.graph.initializers.values():
        held, readers = value.const_value, {(node.op_type, index) for node, index in value.uses()}
        assert held is not None
        experts_read = USED if "experts" in str(value.name) else 1
        gathered = readers == {("Gather", 0)} and len(held.shape) > 1
        read += held.nbytes * (experts_read / held.shape.numpy()[0] if gathered else 1)
    table = loaded.model.get_input_embeddings().weight.numel()
    assert 1 <= read / ((sizes_of(loaded.model, loaded.model.config).active - table) * size) < 1.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_mixture_compiles(tmp_path, kind):
    """With TensorRT-RTX itself, to which experts are given in fp16."""
    config = {**SMALL, "num_experts": EXPERTS, "num_experts_per_tok": USED, "moe_intermediate_size": 96}
    target = make_checkpoint(tmp_path / "target", "qwen3_moe", **config)
    options = BuildOptions(
        str(target), tmp_path / "bundle", precision=kind, max_seq_len=192, max_batch_size=1, backend="tensorrt-rtx"
    )
    building.build(options)
    report = compile_bundle(options.output, CompileOptions("tensorrt-rtx", compute_capability=((8, 9),)))
    assert report.engines[0].attentions == 1 and report.engines[0].decomposed is None
    (engine,) = read_manifest(options.output).target.engines
    graph = ir.load(options.output / engine.source).graph
    stacks = [value for name, value in graph.initializers.items() if ".experts.restored" in name]
    experts = [value for value in stacks if value.dtype == ir.DataType.FLOAT16]
    assert len(experts) == 2 and all({node.op_type for node, _ in value.uses()} == {"Gather"} for value in experts)


@pytest.mark.parametrize("ours", [False, True], ids=["onnxruntime's kernels", "ours"])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_is_the_same_whatever_runs_beside_it(tmp_path, form, ours):
    """Bit for bit on kernels of ours."""
    folder = make_checkpoint(tmp_path, "mixtral", **MIXTURES["mixtral"])
    loaded = load_checkpoint(str(folder))
    ir.save(_step_graph(loaded, branches=FORMS[form]), folder / "step.onnx")
    text = random_text(16, 5)
    wide = Graph(folder / "step.onnx", loaded, 1, 32, ours).step(np.array([text]), [0], TokenTree.chain(16))[0]
    for width in (1, 2, 3, 4, 8):
        graph = Graph(folder / "step.onnx", loaded, 1, 32, ours)
        parts = [(at, text[at : at + width]) for at in range(0, 16, width)]
        rows = [graph.step(np.array([part]), [at], TokenTree.chain(len(part)))[0] for at, part in parts]
        difference = np.abs(np.concatenate(rows) - wide).max()
        assert difference <= (0 if ours and kernels.LIBRARY.is_file() else TOLERANCE), width


def test_a_graph_that_is_not_finite_is_not_built(tmp_path, tmp_path_factory, monkeypatch):
    """Helium's padding is embedded as zero, and its norms add 1e-8, which the optimizer would take for zero."""
    target = make_checkpoint(tmp_path / "helium", "helium", **{**GROUPED, "num_hidden_layers": 1, "head_dim": 16})
    table = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    table[2] = 0
    changed(target, {"model.embed_tokens.weight": table})
    options = BuildOptions(target=str(target), output=tmp_path / "bundle", methods=(), precision="fp32")
    building.build(options)
    with monkeypatch.context() as patched:
        patched.setattr(simplify, "keep_epsilons", lambda model: None)
        patched.setattr(trace_cache, "cache_folder", lambda: tmp_path_factory.mktemp("cache"))
        refused = BuildOptions(target=options.target, output=tmp_path / "refused", methods=(), precision="fp32")
        with pytest.raises(BuildError, match=r"'helium': target.onnx: \d+ of \d+ numbers .* not finite"):
            building.build(refused)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "helium"]
