"""The backend onnxruntime-cuda through the whole engine, with real graphs on the CPU in a GPU's place (the stand-ins).

What a step does on a device is tested in test_step_program.py, and is the same here.
"""

import re
import shutil
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from benchmarks.gpu.timing import LaunchTimer, on_device
from specexport.commands.run import describe
from specexport.contract import tensors
from specexport.contract.errors import BackendError, BuildError, RequestError
from specexport.contract.reading import read_manifest
from specexport.exporter.engines.bundle import compile_bundle
from specexport.exporter.options import CompileOptions
from specexport.exporter.passes import onnxruntime_cuda
from specexport.runtime import EmbedsPrompt, Engine
from specexport.runtime.backends.cuda import api, ort
from specexport.runtime.bundle import Bundle
from specexport.runtime.request import complete
from specexport.runtime.speculative import PLAIN
from specexport.verify.bundle import check_graphs
from tests.checkpoints import make_checkpoint
from tests.cuda_stand_in import StandIn, real
from tests.fixtures import Bundles
from tests.manifests import put
from tests.onnxruntime_stand_in import CUDA, OnnxRuntimeGpu
from tests.step_program import GREEDY, SAMPLED, TYPICAL, same
from tests.streams import started

pytestmark = pytest.mark.exporter  # the step program's graphs

WAYS = {
    "dice-near": ("draft_model",),
    "dice-mixed": ("draft_model", "ngram"),
    "dice-mixed-portable": ("draft_model", "ngram"),
    "dice-self": ("self_draft",),
    "dice-medusa": ("medusa",),
    "dice-medusa-draft": ("medusa_draft",),
    "dice-mlp": ("mlp_speculator",),
    "dice-eagle3": ("eagle3",),
    "dice-eagle3-portable": ("eagle3",),
    "dice-dflash": ("dflash",),
    "dice-dflash-portable": ("dflash",),
    "dice-mtp-cuda": ("mtp",),
}
"""Bundles, and the methods of theirs whose steps stay on the device."""


@pytest.fixture
def load(cuda_bundle: Bundles) -> Callable[..., Engine]:
    """Loads a copy of a bundle as one that was built for onnxruntime-cuda."""
    return lambda name, **options: Engine.load(cuda_bundle(name), check_hashes=False, **options)


# --- what it says -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WAYS)
def test_texts_equal_the_cpus(name, load, bundle, gpu):
    """Greedy, lossless and typical acceptance of chains and trees: the same noise, tokens and steps."""
    # Both new, as heads propose nothing where the whole prompt is in the cache.
    with load(name) as on_gpu, Engine.load(bundle(name), backend="onnxruntime", threads=1) as cpu, gpu.cuda.sealed():
        assert on_gpu.backend.execution == "graph per step", on_gpu.backend.fallback
        for params, prompt in (
            (GREEDY, [7, 9, 11]),
            (SAMPLED, list(range(12)) * 2),
            (TYPICAL, [5] * 20),
            (GREEDY, [5]),
        ):
            for method in (*WAYS[name], PLAIN):
                ours = on_gpu.generate(prompt, params, method)
                same(ours, cpu.generate(prompt, params, method))
                assert ours.stats.execution == "graph per step"
        for tree in on_gpu.methods[WAYS[name][0]].token_trees():
            way = {"method": WAYS[name][0], "num_speculative_tokens": len(tree) - 1}
            same(on_gpu.generate([7, 9, 11], SAMPLED, way), cpu.generate([7, 9, 11], SAMPLED, way))


@pytest.mark.parametrize("name", ["dice-near", "dice-self", "dice-eagle3", "dice-mtp-cuda"])
def test_texts_of_fused_attention_equal_the_cpus(name, load, bundle, monkeypatch, tmp_path):
    """It is for half precision, and here in fp32; the draft's pass and the target's have it."""
    monkeypatch.setattr(onnxruntime_cuda, "_HALF", (ir.DataType.FLOAT,))
    with load(name, max_batch_size=1) as on_gpu, Engine.load(bundle(name), backend="onnxruntime", threads=1) as cpu:
        graphs = [
            onnx.load(file, load_external_data=False).graph for file in (tmp_path / name).rglob("*.cuda.fp32.onnx")
        ]
        assert sum(any(node.op_type == "GroupQueryAttention" for node in graph.node) for graph in graphs) == 2
        for params, prompt in ((GREEDY, [7, 9, 11]), (SAMPLED, list(range(12)) * 2), (GREEDY, [5])):
            same(on_gpu.generate(prompt, params, WAYS[name][0]), cpu.generate(prompt, params, WAYS[name][0]))


@pytest.mark.parametrize("name", ["llama-near", "gpt2-tree-portable"])
def test_reads_prompts_in_chunks_and_lets_texts_grow(name, load, bundle):
    with load(name) as on_gpu, Engine.load(bundle(name), backend="onnxruntime", threads=1) as cpu:
        for params in (GREEDY, SAMPLED):
            for method in (None, PLAIN):
                prompt = list(range(3, 90))
                same(on_gpu.generate(prompt, params, method), cpu.generate(prompt, params, method))


def test_reads_embeddings(load, engine):
    """They go to the device like every other input, at every shape; tokens that come after them are read again."""
    rows = np.random.default_rng(0).standard_normal((70, 64))
    with load("granite-embeds") as on_gpu:
        for prompt in (EmbedsPrompt(rows[:1]), EmbedsPrompt([[5, 6], rows, [7]]), [5, 6, 7]):
            same(on_gpu.generate(prompt, GREEDY), engine("granite-embeds").generate(prompt, GREEDY))


@pytest.mark.parametrize(
    "name",
    [
        *(f"dice-{kind}-batch" for kind in ("near", "mixed", "medusa", "mlp", "dflash", "eagle3")),
        "dice-mixed-batch-portable",
    ],
)
def test_the_device_decides_for_several_at_once(name, load, bundle):
    with load(name, max_batch_size=4) as on_gpu, Engine.load(bundle(name), threads=1, max_batch_size=4) as cpu:
        texts = []
        for engine in (on_gpu, cpu):
            streams = started(
                engine.stream([7, 9, 11, at], params.replace(seed=at), None if speculation else PLAIN)
                for at, params in enumerate((GREEDY, SAMPLED) * 3)
                for speculation in (True, False)
            )
            texts.append([complete(stream) for stream in streams])
        for ours, theirs in zip(*texts, strict=True):
            same(ours, theirs)
        assert {ours.stats.accept for ours in texts[0]} == {0.0}


# --- how it runs ------------------------------------------------------------------------------------------------------


def test_logits_stay_on_the_device_unless_the_host_looks_into_them(load, gpu, spy):
    gpu.cuda.refuse_capture = True  # so that every copy can be seen
    with load("dice-mixed") as on_gpu:
        on_gpu.generate([5, 6, 7, 8], GREEDY)
        target: Any = on_gpu.backend.graphs[0]
        logits = {buffers.outputs.device[tensors.LOGITS].address for buffers in target._buffers.values()}
        copied = spy(api.CudaStream, "copy", lambda _, to, source, nbytes: source)
        on_gpu.generate([5, 6, 7, 8], GREEDY)  # nothing of the prompt is read again
        assert copied and not logits & set(copied)
        on_gpu.generate([5, 6, 7, 8], GREEDY.replace(logprobs=1))
        assert logits & set(copied)


def test_weights_are_opened_once_a_model(load, gpu):
    with load("llama-near-batch", max_batch_size=4):
        models = [path for path in gpu.opened if not path.startswith("accept") and not path.startswith("commit")]
        assert sorted(models) == ["draft.k1.slots.cuda.fp32.onnx", "target.slots.cuda.fp32.onnx"]


def test_sessions_stay_on_our_stream_within_our_memory(load, gpu):
    with load("llama-near"):
        assert {fields["use_tf32"] for fields in gpu.providers} == {"0"}
        assert {int(fields["user_compute_stream"]) for fields in gpu.providers} == set(gpu.cuda._streams)
        limits = [int(fields["gpu_mem_limit"]) for fields in gpu.providers]
        assert all(0 < limit < 0.9 * (1 << 30) for limit in limits)


def test_by_default_one_request_runs(load):
    with load("llama-near-batch") as on_gpu:
        assert on_gpu.slots == 1


def test_gaps_between_steps_are_measured(load):
    with load("dice-near") as on_gpu:
        on_gpu.generate([5, 6, 7, 8], GREEDY)
        watch = LaunchTimer(on_device(on_gpu))
        done = on_gpu.generate([5, 6, 7, 8], GREEDY)
        gaps = watch.gaps()
    assert (len(gaps.after_wait), gaps.queued) == (done.stats.steps - 1, [])


# --- what it refuses --------------------------------------------------------------------------------------------------


def test_graphs_that_need_the_cpu_leave_acceptance_to_the_host(load, engine, gpu):
    gpu.on_cpu = ("ArgMax",)
    with load("dice-near") as on_gpu:
        ours = on_gpu.generate([7, 9, 11], SAMPLED)
        assert ours.stats.execution == "graph per engine"
        text = describe(ours.stats, on_gpu)
        assert "device      graph per engine (the host decides what is accepted: " in text
        assert re.search(r"accept\.\w+\.onnx: onnxruntime would run \d nodes? on the CPU \(\d ArgMax\)", text)
        same(ours, engine("dice-near").generate([7, 9, 11], SAMPLED))


@pytest.mark.parametrize(
    ("fault", "value", "message"),
    [
        ("failing", True, r"onnxruntime did not run the graph at b1\.t1\S*: out of kernels"),
        (
            "on_cpu",
            ("TensorScatter",),
            r"target.*\.onnx: onnxruntime would run \d+ nodes on the CPU \(\d+ TensorScatter",
        ),
        ("without_libraries", True, "CUDAExecutionProvider could not be loaded"),  # no silent detour
    ],
)
def test_faults_of_onnxruntime_are_named(fault, value, message, load, gpu):
    setattr(gpu, fault, value)
    with pytest.raises(BackendError, match=message):
        load("llama-near")


def test_nonsense_from_the_device_is_an_error(load, monkeypatch):
    with load("dice-near") as on_gpu:
        backend: Any = on_gpu.backend
        synchronize = backend.stream.synchronize

        def spoilt() -> None:
            synchronize()
            for step in backend._steps._variants:
                step.outputs.host[tensors.NUM_ACCEPTED][:] = -1

        with monkeypatch.context() as patch, pytest.raises(BackendError, match=r"accepted -1 of \d draft tokens"):
            patch.setattr(backend.stream, "synchronize", spoilt)
            on_gpu.generate([5, 6, 7, 8], GREEDY)


def test_bundles_without_engines_for_it_say_what_to_do(bundle, gpu):
    with pytest.raises(BackendError, match="no engines for onnxruntime-cuda; compile it with: specexport compile"):
        Engine.load(bundle("dice-near"), backend="onnxruntime-cuda", check_hashes=False)


def test_bundles_for_the_gpu_run_on_the_cpu(load, engine):
    with load("dice-mixed", backend="onnxruntime", threads=1) as on_gpu:
        same(on_gpu.generate([7, 9, 11], SAMPLED), engine("dice-mixed").generate([7, 9, 11], SAMPLED))


def test_too_small_a_part_of_the_memory(load, gpu):
    with pytest.raises(BackendError, match=r"loading target.bin needs .* --gpu-memory-utilization"):
        load("llama-near", gpu_memory_utilization=1e-4)
    for wrong in (0.0, 1.5):
        with pytest.raises(RequestError, match=f"gpu_memory_utilization is {wrong}"):
            load("llama-near", gpu_memory_utilization=wrong)


def test_the_wrong_onnxruntime_is_named(monkeypatch):
    module = OnnxRuntimeGpu(StandIn())
    monkeypatch.setitem(sys.modules, "onnxruntime", module)
    monkeypatch.setattr(module, "__version__", "1.30.2", raising=False)
    with pytest.raises(BackendError, match=r"onnxruntime-gpu 1\.30\.2 is too old; expected 1\.31"):
        ort.import_onnxruntime()
    monkeypatch.setattr(module, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(BackendError, match="provide the same module, so install one: pip uninstall -y onnxruntime"):
        ort.import_onnxruntime()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(BackendError, match="onnxruntime-gpu is not installed"):
        ort.import_onnxruntime()
    assert CUDA == ort.PROVIDER


def test_machines_without_a_gpu_get_an_error(bundle, cli):
    status, count = real.cudaGetDeviceCount()
    if not int(status) and count:
        pytest.skip("there is a GPU here")
    printed = cli("run", bundle("llama-near"), "--backend", "onnxruntime-cuda", "-p", "x", status=1)
    assert "no NVIDIA driver was found" in printed.err and printed.err.count("\n") == 1


# --- building for it --------------------------------------------------------------------------------------------------


def test_building_for_it(shared_accept_graphs, gpu, tmp_path, cli):
    """The command's bundle holds a graph a model for it, and is opened on a GPU unless told otherwise."""
    target, folder = make_checkpoint(tmp_path / "target", "llama"), tmp_path / "bundle"
    line = ["build", "--target", str(target), "--ngram", "--max-seq-len", "128", "--max-batch-size", "1"]
    line += ["--backend", "onnxruntime-cuda", "-o", str(folder)]
    printed = cli(*line, "--plain-profile", status=2)
    assert "run on any device, any number of requests and one token at a time" in printed.err
    cli(*line)
    manifest = read_manifest(folder)
    (engine,) = manifest.target.engines
    assert (manifest.backend, engine.file, engine.compute) == ("onnxruntime-cuda", "target.cuda.fp32.onnx", "fp32")
    assert check_graphs(Bundle.open(folder), lambda *_: None) == 2  # the master, and what is opened in its place
    with Engine.load(folder) as on_gpu, Engine.load(folder, backend="onnxruntime", threads=1) as cpu:
        assert on_gpu.backend.device.startswith("onnxruntime-cuda")
        same(on_gpu.generate([7, 9, 11] * 4, SAMPLED), cpu.generate([7, 9, 11] * 4, SAMPLED))
    cli("compile", folder, "--backend", "onnxruntime-cuda", "--compute", "fp16")
    (engine,) = read_manifest(folder).target.engines
    assert (engine.file, engine.compute) == ("target.cuda.fp16.onnx", "fp16")


def test_bfloat16_beside_blocks_of_integers_is_refused(bundle, tmp_path):
    folder = shutil.copytree(bundle("llama-near"), tmp_path / "bundle")
    put(folder, "target.precision.weights", "int8")
    with pytest.raises(BuildError, match=r"compute is bf16, and .* for int8 matrices.*pass --compute fp16 or fp32"):
        compile_bundle(folder, CompileOptions("onnxruntime-cuda", compute="bf16"))
