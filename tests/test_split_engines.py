"""Targets that GPUs share: engines of every rank, and the host's side of running them, against stand-ins."""

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from specexport.contract import tensors
from specexport.contract.errors import BackendError, BuildError, BundleError
from specexport.contract.manifest import Manifest
from specexport.contract.reading import check_files, read_manifest
from specexport.contract.shapes import ShapePoint
from specexport.exporter.build import build
from specexport.exporter.engines import compiler
from specexport.exporter.engines.bundle import compile_bundle
from specexport.exporter.engines.source import write_segments, write_source
from specexport.exporter.options import BuildOptions, CompileOptions
from specexport.exporter.passes.ranks import cut
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.backends.cuda import nccl
from specexport.runtime.backends.cuda.memory import Tensor
from specexport.runtime.backends.cuda.ort import _Exchange
from specexport.runtime.backends.onnxruntime import segments
from specexport.runtime.backends.onnxruntime.segments import open_whole
from specexport.runtime.bundle import Bundle
from specexport.runtime.speculative import PLAIN
from specexport.verify.bundle import check_graphs
from specexport.verify.engines import runnable
from tests.checkpoints import GROUPED, make_checkpoint
from tests.compiled import compiled
from tests.fixtures import Bundles
from tests.manifests import put
from tests.nccl_stand_in import followed
from tests.onnxruntime_stand_in import installed as onnxruntime_installed
from tests.ranks import followers, split_bundle
from tests.streams import started, tokens_of
from tests.tensorrt_stand_in import TensorRT, installed

pytestmark = pytest.mark.exporter

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = ([7, 9, 11], list(range(3, 90)))
RTX = CompileOptions("tensorrt-rtx", compute_capability=((8, 9),))


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """A bundle whose target two ranks share, with a draft, in a precision; not compiled."""
    root = tmp_path_factory.mktemp("split")
    return lambda precision: split_bundle(root, "llama", 2, precision, max_seq_len=192, backend="tensorrt-rtx")


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "compute"), [("fp16", None), ("int4", "bf16")])
def test_every_rank_gets_an_engine(precision, compute, split, tmp_path):
    """By the real TensorRT-RTX, for one slot and for two."""
    pytest.importorskip("tensorrt_rtx")
    folder = shutil.copytree(split(precision), tmp_path / "bundle")
    options = CompileOptions("tensorrt-rtx", compute, RTX.compute_capability, engine_batch_sizes=(1, 2))
    report = compile_bundle(folder, options)
    manifest = read_manifest(folder)
    check_files(folder, manifest, hashes=True)
    first, second = manifest.target.engines
    assert (first.rank, second.rank) == (0, 1)
    assert [engine.file.split(".")[1] for engine in (first, second)] == ["rank-0", "rank-1"]
    assert first.profiles == second.profiles
    assert [(engine_.attentions, engine_.decomposed) for engine_ in report.engines[:2]] == [(2, None)] * 2
    assert len(manifest.models["draft"].engines) == 1 and manifest.program == ()
    for engine in (first, second):
        kinds = [node.op_type for node in onnx.load(folder / engine.source, load_external_data=False).graph.node]
        assert kinds.count("DistCollective") == 6  # the embedding, two a layer, the head
    if compute is None:  # again: its engines replace those that are there
        again = compile_bundle(folder, options)
        assert len(again.engines) == 3 and len(read_manifest(folder).target.engines) == 2
    with pytest.raises(BackendError, match="split among 2 ranks, whose engines run only together"):
        runnable(manifest)


def test_the_network_has_a_collective_for_each_meeting(split, tmp_path):
    trt = pytest.importorskip("tensorrt_rtx")
    folder = shutil.copytree(split("fp32"), tmp_path / "bundle")
    source, sizes = folder / "half.onnx", {"B": 1, "S": 256}
    write_source(folder / "target.rank-1.onnx", source, "fp16", 0, sizes, compiled=True, ranks=2)
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(source)), [parser.get_error(at).desc() for at in range(parser.num_errors)]
    layers = [network.get_layer(at) for at in range(network.num_layers)]
    meetings = [layer for layer in layers if layer.type == trt.LayerType.DIST_COLLECTIVE]
    assert [layer.num_ranks for layer in meetings] == [2] * 6
    assert {layer.get_input(0).dtype for layer in meetings} == {trt.DataType.HALF}


@pytest.mark.parametrize(
    ("family", "meetings", "more"),
    [
        ("llama", 6, {}),
        ("phi", 4, {}),  # attention and MLP side by side: one sum
        ("glm4_moe", 6, {"n_shared_experts": 1, "first_k_dense_replace": 0, "head_dim": 16}),  # experts alike
    ],
)
def test_graphs_with_collectives_equal_the_cpus_segments(family, meetings, more, tmp_path, monkeypatch):
    """TensorRT's and ONNX Runtime's, cut at the collectives and run with what these do in between."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if more else {}
    make_checkpoint(tmp_path / family, family, **{**GROUPED, "num_key_value_heads": 4}, **experts, **more)
    folder = tmp_path / "bundle"
    options: dict[str, Any] = {"max_seq_len": 64, "max_batch_size": 2, "backend": "tensorrt-rtx"}
    build(BuildOptions(str(tmp_path / family), folder, (), 2, **options))
    manifest = read_manifest(folder)
    expected = {slots: _expected(folder, manifest, slots) for slots in (1, 2)}
    for slots, fixed, by_tensorrt in ((1, {"B": 1}, True), (2, {}, True), (2, {}, False)):
        _combine_by(np.concatenate if by_tensorrt else np.stack, monkeypatch)
        ranks = []
        for files in manifest.target.ranks:
            source = (folder / files.master).with_suffix(".source.onnx")
            write_source(folder / files.master, source, "fp32", 0, fixed, compiled=by_tensorrt, ranks=2)
            model = ir.load(source)
            if by_tensorrt:
                assert _as_in_the_master(model) == ["SumOfRanks"] * (meetings - 1) + ["JoinOfRanks"]
            ranks.append([_opened(part, folder) for part in cut(model, repeat_sizes=True)])
        inputs, wanted = expected[slots]
        outputs = segments.AllRanks(ranks).run(list(wanted), inputs)
        for name, output in zip(wanted, outputs, strict=True):
            np.testing.assert_allclose(output, wanted[name], atol=1e-5, err_msg=name)


def _combine_by(join: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are joined as the collectives of TensorRT do it, or NCCL's."""

    def whole(name: str, part: Sequence[int], ranks: int) -> Sequence[int]:
        return join([np.empty(part)] * ranks).shape if name.startswith("join.") else part

    def combine(name: str, parts: Any, whole: Any) -> None:
        whole[...] = join(parts) if name.startswith("join.") else sum(parts)

    monkeypatch.setattr(segments, "_whole", whole)
    monkeypatch.setattr(segments, "combine", combine)


def _opened(part: ir.Model, folder: Path) -> onnxruntime.InferenceSession:
    ir.save(part, folder / "part.onnx")
    return onnxruntime.InferenceSession(str(folder / "part.onnx"))


def _as_in_the_master(model: ir.Model) -> list[str]:
    """Puts the operators of masters, at which graphs are cut, in the place of TensorRT's collectives; their names."""
    operators, names = {("all_reduce", "sum"): "SumOfRanks", ("all_gather", "none"): "JoinOfRanks"}, []
    for node in model.graph:
        if node.op_type == "DistCollective":
            text = {name: attribute.value for name, attribute in node.attributes.items()}
            assert (text["nb_rank"], text["root"], text["group_size"]) == (2, -1, 0)
            node.op_type = operators[text["collective_operation"], text["reduce_op"]]
            node.domain = tensors.COLLECTIVE_DOMAIN
            names.append(node.op_type)
    model.graph.opset_imports[tensors.COLLECTIVE_DOMAIN] = 1
    return names


def _expected(folder: Path, manifest: Manifest, slots: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs of a step, and what the CPU's segments make of them."""
    whole = open_whole(lambda name: folder / name, manifest.target, "native")
    fields, generator = {}, np.random.default_rng(0)
    tokens = {"B": slots, "T": 3, "R": 2, "S": 16}
    for tensor in whole.get_inputs():
        shape = [size if isinstance(size, int) else tokens[size] for size in tensor.shape]
        fields[tensor.name] = (
            generator.standard_normal(shape, np.float32) if "float" in tensor.type else np.zeros(shape, int)
        )
    fields |= {"input_ids": generator.integers(0, 90, (slots, 3)), "tree_mask": np.tile(np.tri(3) > 0, (slots, 1, 1))}
    fields |= {"position_ids": np.tile([5, 6, 7], (slots, 1)), "past_length": np.full(slots, 5)}
    fields["logits_rows"] = np.tile([0, 2], (slots, 1))
    names = [tensor.name for tensor in whole.get_outputs()]
    return fields, dict(zip(names, whole.run(None, fields), strict=True))


def test_libraries_without_collectives_are_refused(split, tmp_path, monkeypatch):
    class Old:
        __version__ = "10.3.0"

    old = compiler.CompilerLibrary("tensorrt", Old, None)
    for module in ("build", "engines.bundle"):
        monkeypatch.setattr(f"specexport.exporter.{module}.load_library", lambda runtime: old)
    words = r"tensorrt 10\.3\.0 has no collective layers.*install TensorRT 11 or newer, or build without --tensor-par"
    with pytest.raises(BuildError, match=words):
        compile_bundle(split("fp32"), CompileOptions("tensorrt"))
    target = str(split("fp32").parent / "llama")
    options = BuildOptions(target, tmp_path / "out", (), 2, backend="tensorrt", engines=CompileOptions("tensorrt"))
    with pytest.raises(BuildError, match=words):
        build(options)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(Old, "IDistCollectiveLayer", None, raising=False)
    with pytest.raises(BuildError, match=r"compute_capability is 7\.5, and the collective layers.*need 8\.0"):
        compile_bundle(split("fp32"), CompileOptions("tensorrt", compute_capability=((8, 9), (7, 5))))


@pytest.mark.parametrize(("compute", "kind"), [("fp16", 10), ("bf16", 16)])
def test_segments_for_onnxruntime_meet_in_the_type_they_compute_in(compute, kind, split, tmp_path):
    """And sizes do not go from one to another, where the host would read them back from the device."""
    folder = shutil.copytree(split("fp32"), tmp_path / "bundle")
    write_source(folder / "target.rank-1.onnx", folder / "half.onnx", compute, 0, {"S": 256}, compiled=False, ranks=2)
    graphs = [onnx.load(path, load_external_data=False).graph for path in write_segments(folder / "half.onnx", {})]
    between = [
        value for graph in graphs for value in graph.output if value.name.startswith(("sum.", "join.", "carried."))
    ]
    met = [value for value in between if not value.name.startswith("carried.")]
    assert [value.name for value in met] == [*(f"sum.{at}" for at in range(5)), "join.5"]
    assert {value.type.tensor_type.elem_type for value in met} == {kind}
    assert all(len(value.type.tensor_type.shape.dim) > 2 for value in between)


def test_every_rank_has_as_many_segments(split, tmp_path):
    folder = shutil.copytree(split("fp32"), tmp_path / "bundle")
    for _ in range(2):  # again it takes the graphs that are there
        compile_bundle(folder, CompileOptions("onnxruntime-cuda"))
    manifest = read_manifest(folder)
    check_files(folder, manifest, hashes=True)
    check_graphs(Bundle.open(folder), lambda *_: None)
    first, second = manifest.target.engines
    assert (first.rank, second.rank, len(first.segments), len(second.segments)) == (0, 1, 7, 7)
    put(folder, "target.engines.1.segments", second.segments[:-1])
    with pytest.raises(BundleError, match="engines of the target for onnxruntime-cuda: expected as many segments"):
        read_manifest(folder)


def test_buffers_between_segments_are_large_enough():
    """A carried value keeps its place until it was read for the last time; a part is apart from what it becomes."""

    def session(arguments: list[str], checkpoint: list[str], size: Any = "2*T") -> Any:
        def values(names: list[str]) -> list[Any]:
            return [SimpleNamespace(name=name_, type="tensor(float16)", shape=["B", size, 32]) for name_ in names]

        return SimpleNamespace(get_inputs=lambda: values(arguments), get_outputs=lambda: values(checkpoint))

    point = ShapePoint(2, 4, 128, 4)
    sessions = [
        session([], ["sum.0", "carried.a"]),
        session(["sum.0"], ["sum.1", "carried.b"]),
        session(["sum.1", "carried.a"], ["join.2"]),
        session(["join.2", "carried.b"], ["logits"]),
    ]
    exchange = _Exchange.of(sessions, point, 2)
    each = 2 * 8 * 32 * 2
    at = {name: tensor.address // each for name, tensor in exchange.outputs.items()}
    assert at == {"sum.0": 0, "carried.a": 1, "sum.1": 2, "carried.b": 3, "join.2": 0}
    assert (exchange.inputs["join.2"].address, exchange.inputs["join.2"].shape) == (4 * each, (2, 2, 8, 32))
    assert exchange.nbytes == 6 * each and "logits" not in exchange.outputs
    with pytest.raises(BackendError, match=r"sum\.0, which goes from one .* unknown type or size \('Z'\); compile the"):
        _Exchange.of([session([], ["sum.0"], "S + Z")], point, 2)


def test_engines_of_unknown_ranks_are_refused(split, tmp_path):
    folder = compiled(split("fp32"), tmp_path / "bundle")
    manifest = read_manifest(folder)
    assert [engine.rank for engine in manifest.target.engines] == [0, 1]
    part = manifest.target.of_rank(1)
    assert (part.engines, part.weights) == (manifest.target.engines[1:], "target.rank-1.bin")
    assert [layer.heads for layer in part.cache] == [layer.heads // 2 for layer in manifest.target.cache]
    put(folder, "target.engines.1.rank", 2)
    with pytest.raises(BundleError, match="rank is 2, and the target has 2 ranks; compile the bundle again"):
        read_manifest(folder)


# --- running ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, split: Bundles) -> Iterator[TensorRT]:
    """Two imaginary GPUs, and a bundle with engines for them."""
    with installed(monkeypatch, tmp_path / "bundle") as module:
        module.cuda.devices = 2
        compiled(split("fp32"), module.folder, batches=(1, 2))
        followed(monkeypatch, tmp_path / "site", module.folder, module.cuda)
        yield module


@pytest.fixture(params=["tensorrt-rtx", "onnxruntime-cuda"])
def shared(request: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, split: Bundles) -> Any:
    """Such a bundle for TensorRT-RTX, or for ONNX Runtime on such GPUs."""
    if request.param == "tensorrt-rtx":
        yield request.getfixturevalue("gpus").folder
        return
    with onnxruntime_installed(monkeypatch) as module:
        module.cuda.devices = 2
        folder = shutil.copytree(split("fp32"), tmp_path / "bundle")
        compile_bundle(folder, CompileOptions(request.param))
        followed(monkeypatch, tmp_path / "site", folder, module.cuda)
        yield folder
        assert {f"target.rank-0.slots.cuda.fp32.{at:03}.onnx" for at in range(7)} < set(module.opened)


def test_split_targets_equal_the_cpu(shared, split):
    with (
        Engine.load(split("fp32"), threads=1, backend="onnxruntime") as cpu,
        Engine.load(shared, max_batch_size=2) as on_gpu,
    ):
        assert on_gpu.backend.device.endswith("2 ranks")
        assert on_gpu.backend.fallback == "the host takes the steps, as GPUs share the target"
        (process,) = [pid for pid in followers() if _environment(pid).get("CUDA_VISIBLE_DEVICES") == "1"]
        for prompt in PROMPTS:
            for speculative in (None, PLAIN):
                ours, theirs = (pid.generate(prompt, GREEDY, speculative) for pid in (on_gpu, cpu))
                assert ours.token_ids == theirs.token_ids
                assert ours.stats.execution == "graph per engine"
        texts = [tokens_of(stream) for stream in started(on_gpu.stream(prompt, GREEDY) for prompt in PROMPTS)]
        assert texts == [cpu.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]
    assert not Path(f"/proc/{process}").exists()


def test_the_target_s_engines_alone_meet(gpus):
    with Engine.load(gpus.folder):
        ours = [context for context in gpus.contexts if context.communicator is not None]
        assert {context._engine.file for context in ours} == {"target.rank-0.onnx"}
        assert len(ours) < len(gpus.contexts)  # the draft's have none


def test_a_gpu_s_rank_that_ends_ends_the_others(shared):
    with Engine.load(shared) as engine:
        stream = engine.stream(PROMPTS[1], GREEDY.replace(max_tokens=80))
        next(stream)
        (process,) = [pid for pid in followers() if _environment(pid).get("CUDA_VISIBLE_DEVICES") == "1"]
        os.kill(process, signal.SIGKILL)
        with pytest.raises(BackendError, match=r"rank 1 ended by signal 9 of the 2 processes"):
            list(stream)
        with pytest.raises(BackendError, match="rank 1 ended"):
            engine.generate(PROMPTS[0], GREEDY)


def test_features_missing_on_gpus_are_named(gpus, monkeypatch):
    gpus.cuda.devices = 1
    with pytest.raises(BackendError, match="2 ranks, each with a GPU of its own, and CUDA shows 1; see CUDA_VISIBLE"):
        Engine.load(gpus.folder)
    gpus.cuda.devices = 2
    harmed = gpus.folder / "target.rank-1.engine"
    harmed.write_bytes(b" " * harmed.stat().st_size)
    with pytest.raises(BackendError, match=r"rank 1 ended with status 1 of the 2 processes"):
        Engine.load(gpus.folder, check_hashes=False)
    monkeypatch.setattr(ctypes, "CDLL", _no_library)
    monkeypatch.setattr("specexport.runtime.backends.cuda.backend.Nccl", nccl.Nccl)
    words = r"libnccl\.so\.2 cannot be loaded \(not there\).*pip install nvidia-nccl-cu13"
    with pytest.raises(BackendError, match=words):
        Engine.load(gpus.folder, check_hashes=False)


def _no_library(name: str) -> Any:
    raise OSError("not there")


def _environment(process: int) -> dict[str, str]:
    content = Path(f"/proc/{process}/environ").read_text(encoding="utf-8")
    return dict(line.split("=", 1) for line in content.split("\0") if "=" in line)


NCCL = r"""
#include <string.h>
typedef struct { char internal[128]; } ncclUniqueId;
int aborted = 0;
int ncclGetUniqueId(ncclUniqueId *id) { memset(id->internal, 7, 128); return 0; }
int ncclCommInitRank(void **made, int ranks, ncclUniqueId id, int rank) {
    for (int at = 0; at < 128; at++) if (id.internal[at] != 7) return 4;
    if (rank >= ranks) return 5;
    *made = &aborted;
    return 0;
}
int ncclCommAbort(void *made) { ++*(int *)made; return 0; }
int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, void *made, void *stream) {
    if (made != &aborted || stream != (void *)5 || type != 6 || operation != 0) return 4;
    memcpy(to, from, 2 * count);
    return *(const short *)from == 3 ? 0 : 4;
}
int ncclAllGather(const void *from, void *to, size_t count, int type, void *made, void *stream) {
    if (made != &aborted || stream != (void *)5 || type != 9) return 4;
    for (int rank = 0; rank < 2; rank++) memcpy((char *)to + rank * 2 * count, from, 2 * count);
    return 0;
}
const char *ncclGetErrorString(int status) { return status == 5 ? "invalid usage" : "invalid argument"; }
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_nccl_is_called_as_its_header_says(tmp_path, monkeypatch):
    """A library with NCCL's signatures, which checks what it is given."""
    source, built = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text(NCCL, encoding="utf-8")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", built, source], check=True)
    real = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: real(str(built)))
    library = nccl.Nccl()
    unique_id = library.unique_id()
    assert unique_id == b"\7" * 128
    communicator = library.join(unique_id, 1, 2)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    count = ctypes.c_int.in_dll(real(str(built)), "aborted")
    assert pointer(communicator.capsule, b"ncclComm_t") == ctypes.addressof(count)
    part, whole = np.full(4, 3, np.uint16), np.zeros((2, 4), np.uint16)
    inputs = Tensor(part.ctypes.data, part.dtype, part.shape)
    communicator.all_gather(inputs, Tensor(whole.ctypes.data, whole.dtype, whole.shape), 5)
    np.testing.assert_array_equal(whole, 3)
    communicator.all_reduce(replace(inputs, dtype=np.dtype(np.float16)), 5)
    with pytest.raises(BackendError, match="ncclAllReduce failed with status 4"):
        communicator.all_reduce(inputs, 5)
    for _ in range(2):
        communicator.close()
    assert count.value == 1
    with pytest.raises(BackendError, match="ncclAllReduce: a rank ended, and with it the ranks' communicator"):
        communicator.all_reduce(inputs, 5)
    with pytest.raises(BackendError, match="ncclCommInitRank failed with status 5: invalid usage; NCCL_DEBUG=INFO"):
        library.join(unique_id, 2, 2)
    with pytest.raises(BackendError, match="status 4: invalid argument"):
        library.join(bytes(128), 0, 2)
