"""Engines: real builds with TensorRT-RTX, which needs no GPU to compile, and what is compiled against onnxruntime."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from safetensors.torch import load_file

from specexport.contract import tensors
from specexport.contract.engines import Accept, Commit, CompiledEngine, Fill
from specexport.contract.errors import BuildError
from specexport.contract.manifest import Manifest
from specexport.contract.model import Model
from specexport.contract.reading import check_files, read_manifest
from specexport.contract.signature import caches
from specexport.exporter.build import build
from specexport.exporter.engines import bundle as bundle_module
from specexport.exporter.engines import compiler as compiler_module
from specexport.exporter.engines.bundle import compile_bundle
from specexport.exporter.engines.source import engine_caches, model_jobs, write_source
from specexport.exporter.options import BuildOptions, CompileOptions, capability
from specexport.runtime import Engine as SpecEngine
from specexport.runtime import SamplingParams
from tests.checkpoints import changed, make_checkpoint
from tests.engine_bundles import SMALL
from tests.fixtures import Bundles
from tests.reference import plain_session

pytestmark = pytest.mark.exporter

DEVICES = ((8, 6), (8, 9), (12, 0))
RTX = CompileOptions("tensorrt-rtx", compute_capability=((8, 9),))
"""For one device, which compiles in less time."""
PROMPT = "people went back home and"


@pytest.fixture(scope="module")
def plain_engines(uncompiled: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle without methods, compiled for one device; to be copied."""
    folder = tmp_path_factory.mktemp("plain") / "bundle"
    shutil.copytree(uncompiled("fp16-portable-plain"), folder)
    compile_bundle(folder, RTX)
    return folder


def _tokens(folder: Path) -> list[int]:
    with SpecEngine.load(folder, threads=1, backend="onnxruntime") as engine:
        return engine.generate(PROMPT, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)).token_ids


def _widths(engine: CompiledEngine) -> list[int]:
    return [profile.tokens for profile in engine.profiles]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("fp16-native-both", DEVICES[1:2]),
        ("int8-native-both", DEVICES[1:2]),
        ("int4-native-both", DEVICES[1:2]),
        ("fp16-portable-ngram", DEVICES),
        ("int8-portable-draft", DEVICES[1:2]),
    ],
)
def test_every_graph_of_a_bundle_compiles(name, devices, uncompiled, tmp_path):
    folder = shutil.copytree(uncompiled(name), tmp_path / name)
    before = _tokens(folder)
    _, lowering, method = name.split("-")
    report = compile_bundle(folder, msgspec.structs.replace(RTX, compute_capability=devices))
    manifest = read_manifest(folder)
    check_files(folder, manifest, hashes=True)
    listed = {file.path for file in manifest.files}
    assert listed == {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")} - {"specexport.json"}
    assert len(report.engines) == len(manifest.engines)
    for engine, engine_ in zip(manifest.engines, report.engines, strict=True):
        assert engine.runtime == "tensorrt-rtx"
        assert engine.compute_capabilities == tuple(f"{major}.{minor}" for major, minor in devices)
        assert all(engine.runs_on(device) for device in devices) and not engine.runs_on((9, 0))
        assert engine_.size == (folder / engine.file).stat().st_size > 1000
        assert engine_.layers > 0 and engine_.profiles == len(engine.profiles)
    (target,) = manifest.target.engines
    assert target.compute == "fp16"
    nodes = max(len(tree) for tree in manifest.methods[0].token_trees())
    points = [point for point in manifest.target.graph.points if point.batch == 1]
    # Without a profile of one token, which would store the weights twice.
    assert _widths(target) == sorted({point.tokens for point in points} - {1}) and nodes in _widths(target)
    attentions = {
        engine_.attentions for engine, engine_ in zip(manifest.engines, report.engines, strict=True) if engine is target
    }
    assert attentions == {1 if lowering == "native" else 0}
    assert all(engine_.decomposed is None for engine_ in report.engines)
    if method in ("draft", "both"):
        (draft,) = manifest.models["draft"].engines
        assert [(profile.tokens, profile.drafts) for profile in draft.profiles] == [(2, 1), (64, 1)]
    kinds = {type(graph) for graph in manifest.program}
    # A draft's tree is filled on the device; beside heads, which have the tree, a draft has a chain.
    expected = {Accept} | ({Fill} if method == "draft" else set())
    assert kinds == expected | ({Commit} if method == "both" else set())
    assert all(len(graph.engines) == 1 for graph in manifest.program)
    for graph in manifest.program:
        assert nodes in _widths(graph.engines[0])
        if isinstance(graph, Commit):
            assert graph.engines[0].compute == "fp16"
    assert _tokens(folder) == before  # the ONNX graphs are there still, and run


MODELS = ("target", "draft")
"""How the engines of models are called; those of the step program have no weights to hold."""


@pytest.mark.slow
def test_several_slots_are_compiled_into_one_engine_that_holds_the_weights_once(uncompiled, tmp_path):
    """Every slot's prompt is read by itself, so that shapes of one slot and of several lie side by side."""
    folder = shutil.copytree(uncompiled("fp16-native-batch"), tmp_path / "bundle")
    alone = compile_bundle(folder, RTX)
    report = compile_bundle(folder, msgspec.structs.replace(RTX, engine_batch_sizes=(4,)))
    manifest = read_manifest(folder)
    check_files(folder, manifest, hashes=True)
    engines = {engine.file.split(".")[0]: engine for engine in manifest.engines}
    assert engines["target"].source == "target.slots.fp16.onnx"
    shapes = {name: [(at.batch, at.tokens) for at in engine.profiles] for name, engine in engines.items()}
    steps = [(4, 2), (4, 3), (4, 4), (4, 5), (4, 9)]  # those of methods that read text alone among them
    assert shapes["target"] == [(1, 64), *steps]
    assert shapes["draft"] == [(1, 64), (4, 2)]
    assert (shapes["program/accept"], shapes["program/fill"]) == (steps, [(4, 4)])
    # A path through the draft's tree, which a slot may have verified beside a wider chain of another one.
    assert shapes["program/commit"] == [(4, 4), (4, 5), (4, 9)]
    models = [each for each in zip(alone.engines, report.engines, strict=True) if each[0].file.startswith(MODELS)]
    assert len(models) == 2
    for before, after in models:
        assert after.size < 1.2 * before.size, before.file
    assert report.engines[0].attentions == 1 and report.engines[0].decomposed is None
    with pytest.raises(BuildError, match=r"engine_batch_sizes has 3, and the bundle is built for 1, 2, 4"):
        compile_bundle(folder, msgspec.structs.replace(RTX, engine_batch_sizes=(1, 3)))


@pytest.mark.slow
def test_engines_of_several_devices_lie_side_by_side(plain_engines, tmp_path):
    folder = shutil.copytree(plain_engines, tmp_path / "bundle")
    blackwell = msgspec.structs.replace(RTX, compute_capability=((12, 0),))
    first = read_manifest(folder)
    compile_bundle(folder, blackwell)
    both = read_manifest(folder)
    assert both.target.engines[:1] == first.target.engines
    assert [engine.compute_capabilities for engine in both.target.engines] == [("8.9",), ("12.0",)]
    assert len({engine.source for engine in both.target.engines}) == 1
    compile_bundle(folder, blackwell)
    again = read_manifest(folder)
    check_files(folder, again, hashes=True)
    replaced = next(engine for engine in again.target.engines if engine.runs_on((12, 0)))
    assert replaced.file != both.target.engines[1].file
    assert _widths(replaced) == [3, 5, 9, 64]
    assert len(list(folder.glob("target.*.engine"))) == 2  # what was replaced is gone


@pytest.mark.slow
def test_fp32_attention_is_decomposed_and_said_so(uncompiled, tmp_path):
    folder = shutil.copytree(uncompiled("fp32-native-plain"), tmp_path / "bundle")
    target = compile_bundle(folder, RTX).engines[0]
    assert target.attentions == 1 and target.decomposed == "fp32 has no fused kernel"
    assert read_manifest(folder).target.engines[0].compute == "fp32"


@pytest.mark.slow
def test_fp8_weights_compile_from_ada_on_and_are_refused_below(uncompiled, tmp_path):
    folder = Path(shutil.copytree(uncompiled("fp8-native-medusa"), tmp_path / "bundle"))
    before = read_manifest(folder)
    with pytest.raises(BuildError, match=r"compute_capability is 8\.6, and fp8 weights need 8\.9 \(Ada\) or higher"):
        compile_bundle(folder, msgspec.structs.replace(RTX, compute_capability=DEVICES))
    assert read_manifest(folder) == before
    report = compile_bundle(folder, CompileOptions("tensorrt-rtx"))  # every device that is new enough
    assert report.compute_capabilities[0] == "8.9" and "12.0" in report.compute_capabilities
    (engine,) = read_manifest(folder).target.engines
    assert engine.compute == "fp16"
    model = onnx.load(folder / engine.source, load_external_data=False)
    stored = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    undone = [stored[node.input[0]] for node in model.graph.node if node.op_type == "DequantizeLinear"]
    assert undone and set(undone) == {onnx.TensorProto.FLOAT8E4M3FN}
    names = [name for name in stored if ".fp8." in name]
    assert any(name.startswith("model.layers.0.mlp.{gate_proj,up_proj}.weight.") for name in names)
    assert any(name.startswith("medusa_head.") for name in names)


def test_the_compiler_itself_knows_no_fp8_below_ada(uncompiled, tmp_path, monkeypatch):
    """Why we refuse it: no kernel of an older device would undo it either."""
    folder = Path(shutil.copytree(uncompiled("fp8-native-medusa"), tmp_path / "bundle"))
    monkeypatch.setattr(bundle_module, "check_stored", lambda *_: None)
    with pytest.raises(BuildError, match=r"Cannot compile for target\(s\) sm86.*fp8_e4m3"):
        compile_bundle(folder, msgspec.structs.replace(RTX, compute_capability=((8, 6),)))


@pytest.mark.slow
def test_bf16_is_computed_in_bf16(uncompiled, tmp_path):
    folder = Path(shutil.copytree(uncompiled("bf16-native-ngram"), tmp_path / "bundle"))
    compile_bundle(folder, RTX)
    manifest = read_manifest(folder)
    (engine,) = manifest.target.engines
    assert engine.compute == "bf16" and engine.compute_capabilities == ("8.9",)
    graph = onnx.load(folder / engine.source, load_external_data=False).graph
    caches = {v.type.tensor_type.elem_type for v in (*graph.input, *graph.output) if v.name.startswith(tensors.CACHES)}
    assert caches == {onnx.TensorProto.BFLOAT16}
    # What is stored in bf16 is read from the master's own weights, and stored no second time.
    assert not (folder / engine.source).with_suffix(".bin").exists()


@pytest.mark.slow
def test_attention_without_a_fused_kernel_is_decomposed_and_said_so(bundle, tmp_path):
    folder = shutil.copytree(bundle("dice-ngram"), tmp_path / "bundle")  # heads of 8
    assert read_manifest(folder).backend == "onnxruntime"
    target = compile_bundle(folder, msgspec.structs.replace(RTX, compute="fp16")).engines[0]
    assert target.attentions == 1
    assert target.decomposed == "no fused kernel for its shapes"
    # It was built without a step program, which is traced now.
    manifest = read_manifest(folder)
    assert manifest.backend == "tensorrt-rtx"
    assert [type(graph) for graph in manifest.program] == [Accept] * 3
    check_files(folder, manifest, hashes=True)


def test_a_failed_compilation_leaves_the_bundle_as_it_was(plain_engines, tmp_path, monkeypatch):
    folder = shutil.copytree(plain_engines, tmp_path / "bundle")
    before = read_manifest(folder)

    def refuse(*_: Any) -> Any:
        raise BuildError("no")

    monkeypatch.setattr(compiler_module, "_config", refuse)
    with pytest.raises(BuildError, match="no"):
        compile_bundle(folder, RTX)
    assert read_manifest(folder) == before
    check_files(folder, before, hashes=True)


# --- what is compiled -------------------------------------------------------------------------------------------------


def _feed(model: Model, manifest: Manifest, float16: bool) -> dict[str, np.ndarray]:
    random, tokens, cache = np.random.default_rng(0), 5, model.graph.points[0].cache
    feed: dict[str, np.ndarray] = {
        tensors.INPUT_IDS: random.integers(3, manifest.target.vocab_size, (1, tokens)),
        tensors.POSITION_IDS: 40 + np.arange(tokens)[None],
        tensors.TREE_MASK: np.tri(tokens, dtype=np.bool_)[None],
        tensors.PAST_LENGTH: np.array([40]),
        tensors.LOGITS_ROWS: np.arange(tokens)[None],
    }
    for tensor in caches(model.cache):
        rows = random.standard_normal(tensor.shape({"B": 1, "S": cache})).astype(np.float16)
        feed[tensor] = rows if float16 else rows.astype(np.float32)
    return feed


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fp16-native-both", "int8-native-both", "int4-native-both", "int8-portable-draft", "fp8-native-medusa"]
)
@pytest.mark.parametrize("compiled", [True, False])
def test_device_graphs_equal_the_bundles(name, compiled, uncompiled, tmp_path):
    folder = shutil.copytree(uncompiled(name), tmp_path / "bundle")
    manifest = read_manifest(folder)
    master = folder / manifest.target.graph.master
    source = master.with_name("step.fp16.onnx")
    write_source(master, source, "fp16", 0, {"B": 1}, compiled=compiled)
    halved, whole = plain_session(source), plain_session(master)
    types = {value.name: value.type for value in (*halved.get_inputs(), *halved.get_outputs())}
    for value, kind in types.items():
        assert kind != "tensor(float)" or not value.startswith(tensors.CACHES)
    assert types[tensors.LOGITS] == "tensor(float)"
    for value in halved.get_inputs():
        assert value.shape[0] == 1
    outputs = halved.run(None, _feed(manifest.target, manifest, float16=True))
    expected = whole.run(None, _feed(manifest.target, manifest, float16=False))
    # Half precision resolves 2^-11, here of weights' scales too.
    assert np.abs(outputs[0] - expected[0]).max() < 0.02 * expected[0].std()
    graph = onnx.load(source, load_external_data=False)
    graph = onnx.shape_inference.infer_shapes(graph)
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.graph.value_info, *graph.graph.output)}
    products = [node for node in graph.graph.node if node.op_type in ("MatMul", "Attention", "TensorScatter")]
    assert len(products) >= 5
    assert {kinds[node.output[0]] for node in products} == {onnx.TensorProto.FLOAT16}
    wide = [node for node in graph.graph.node if node.op_type in ("Softmax", "Cos", "ReduceMean")]
    norms = [node for node in graph.graph.node if node.op_type == "RMSNormalization"]
    assert {kinds[node.output[0]] for node in wide} == {onnx.TensorProto.FLOAT}
    assert {kinds[node.output[0]] for node in norms} <= {
        onnx.TensorProto.FLOAT if compiled else onnx.TensorProto.FLOAT16
    }
    stored = {tensor.name: tensor.data_type for tensor in graph.graph.initializer}
    widened = [node for node in graph.graph.node if node.op_type == "Cast" and node.input[0] in stored]
    assert not widened
    tables = [
        stored[node.input[0]] for node in graph.graph.node if node.op_type == "Gather" and node.input[0] in stored
    ]
    assert (onnx.TensorProto.INT8 in tables) == (name.startswith("int") and "native" in name and not compiled)


@pytest.mark.parametrize("compiled", [True, False])
def test_noise_keeps_its_precision(compiled, uncompiled, tmp_path):
    """Rounded to half precision, tokens would be drawn from another distribution than the q that is compared with p."""
    folder = shutil.copytree(uncompiled("fp16-native-both"), tmp_path / "bundle")
    draft = read_manifest(folder).models["draft"]
    source = folder / "half.onnx"
    write_source(folder / draft.graph.master, source, "fp16", 1, {"B": 1}, compiled=compiled)
    nodes = onnx.load(source, load_external_data=False).graph.node
    readers = [node for node in nodes if tensors.UNIFORM in node.input]
    assert readers
    assert not [node.name for node in readers if node.op_type == "Cast"]


def test_a_weight_beyond_half_precision_is_refused(tmp_path):
    target = make_checkpoint(tmp_path / "target", "qwen3", **SMALL)
    name = "model.layers.0.self_attn.o_proj.weight"
    weight = load_file(target / "model.safetensors")[name]
    weight[0, 0] = 7e4
    folder = build(BuildOptions(changed(target, {name: weight}), tmp_path / "bundle", max_seq_len=64))
    master = folder / read_manifest(folder).target.graph.master
    with pytest.raises(BuildError, match=r"its largest weight, 7e\+04, does not fit float16"):
        write_source(master, master.with_name("step.fp16.onnx"), "fp16", 0, {}, compiled=True)
    write_source(master, master.with_name("step.bf16.onnx"), "bf16", 0, {}, compiled=True)


def test_one_token_has_a_profile_where_asked_for(uncompiled):
    manifest = read_manifest(uncompiled("int4-native-both"))
    for plain, expected in ((False, [3, 4, 5, 9, 64]), (True, [1, 3, 4, 5, 9, 64])):
        (job,) = model_jobs(manifest.target, manifest, (1,), plain=plain)
        assert [profile.tokens for profile in job.profiles] == expected
        assert job.fixed == {"B": 1, "S": 256}


def test_caches_are_of_one_size_natively_and_grow_fourfold_portably():
    sizes = [256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 32832]
    assert engine_caches(sizes, "native") == [32832]
    assert engine_caches(sizes, "portable") == [2048, 8192, 32832]
    assert engine_caches([256, 384, 512, 768, 1024, 1536, 2048, 2112], "portable") == [2112]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["89", "8.9", "sm_89", "SM89"])
def test_capabilities_are_read_as_people_write_them(text):
    assert capability(text) == (8, 9)
    assert capability("120") == (12, 0)


@pytest.mark.parametrize("text", ["", "9", "ada", "8.9.1.0", "-89"])
def test_invalid_capabilities_are_refused(text):
    with pytest.raises(BuildError, match="expected something like 89"):
        capability(text)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"engine_batch_sizes": ()}, "engine_batch_sizes is empty; expected at least one"),
        ({"engine_batch_sizes": (0,)}, "engine_batch_sizes is .0,.; expected a list, each a whole number >= 1"),
        ({"compute": "fp8"}, "compute is 'fp8'; expected one of fp32, fp16, bf16"),
    ],
)
def test_options_that_say_nothing_are_refused(options, reason):
    with pytest.raises(BuildError, match=reason):
        CompileOptions("tensorrt-rtx", **options)


def test_a_device_the_library_does_not_know_is_refused(uncompiled, target, tmp_path):
    with pytest.raises(BuildError, match=r"is 9.0, which TensorRT-RTX .* does not know; it knows 7.5, 8.0, 8.6"):
        compile_bundle(uncompiled("fp16-portable-plain"), CompileOptions("tensorrt-rtx", compute_capability=((9, 0),)))
    unknown = CompileOptions("tensorrt-rtx", compute_capability=((99, 9),))
    options = BuildOptions(target=str(target), output=tmp_path / "bundle", backend="tensorrt-rtx", engines=unknown)
    with pytest.raises(BuildError, match=r"is 99\.9, which TensorRT-RTX"):
        build(options, lambda *step: pytest.fail(f"{step} comes first"))


def test_a_library_that_is_not_installed_is_named(uncompiled):
    with pytest.raises(BuildError, match=r"needs the \[tensorrt\] and \[compile\] extras"):
        compile_bundle(uncompiled("fp16-portable-plain"), CompileOptions("tensorrt"))


def test_flags_without_a_backend_for_them_are_refused(cli, tmp_path):
    build_line = ["build", "--target", "x", "-o", str(tmp_path / "b")]
    printed = cli(*build_line, "--compute", "fp16", status=2)
    assert "--compute was given without --backend onnxruntime-cuda or tensorrt" in printed.err
    printed = cli(*build_line, "--backend", "tensorrt", "--no-compile", "--compute", "fp16", status=2)
    assert "--compute was given with --no-compile" in printed.err


def test_the_command_reports_its_result(uncompiled, tmp_path, cli):
    folder = shutil.copytree(uncompiled("fp16-portable-plain"), tmp_path / "bundle")
    report = cli("compile", folder, "--backend", "tensorrt-rtx", "--compute-capability", "8.9", "--json").json
    assert report["compute_capabilities"] == ["8.9"]
    assert [engine["size"] for engine in report["engines"]] == [
        (folder / engine.file).stat().st_size for engine in read_manifest(folder).engines
    ]


def test_engines_compute_without_tf32_on_one_stream():
    """By default the library's engines round fp32 products to TF32, and may run parts on streams of their own."""
    library = compiler_module.load_library("tensorrt-rtx")
    with compiler_module.messages():
        builder, network = library.polygraphy.create_network(strongly_typed=True)
        network.mark_output(network.add_input("x", library.trt.float32, (2, 2)))
        config = compiler_module._config(library, ((8, 9),), [])(builder, network)
    tf32 = library.trt.BuilderFlag.TF32
    assert builder.create_builder_config().get_flag(tf32)
    assert not config.get_flag(tf32)
    assert config.max_aux_streams == 0
