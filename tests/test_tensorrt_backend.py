"""Engines through the whole engine, with real graphs on the CPU in place of a GPU's (see the stand-ins)."""

import base64
import hashlib
import importlib.util
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specexport.contract import engines as ce
from specexport.contract.errors import BackendError
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.backends.cuda import api, library, trt
from specexport.runtime.speculative import PLAIN
from tests import tensorrt_stand_in
from tests.compiled import compiled
from tests.streams import started, tokens_of
from tests.tensorrt_stand_in import TensorRT, installed
from tests.threads import python

pytestmark = pytest.mark.exporter  # which compiles their engines
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=5, ignore_eos=True)
TAKING = {"cudaMalloc", "cudaHostAlloc", "cudaFree", "cudaFreeHost"}
RUN = ("llama-near", "llama-near-portable", "gpt2-tree", "gemma2-self", "qwen3-medusa", "qwen3-medusa-draft-portable")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TensorRT]:
    with installed(monkeypatch, tmp_path / "bundle") as module:
        yield module


@pytest.mark.parametrize("name", RUN)
def test_texts_equal_the_cpus(name, bundle, gpu):
    """Also where the cache grows while a text does: every size has graphs captured when the bundle was loaded."""
    fast = Engine.load(bundle(name), threads=1)
    with fast as cpu, Engine.load(compiled(bundle(name), gpu.folder)) as on_gpu:
        loaded = len(gpu.cuda.allocations)
        for params, prompt in ((GREEDY, [7, 9, 11]), (SAMPLED, list(range(3, 90))), (GREEDY, [5] * 245)):
            for speculation in (True, False):
                ours = on_gpu.generate(prompt, params, None if speculation else PLAIN)
                theirs = cpu.generate(prompt, params, None if speculation else PLAIN)
                assert ours.token_ids == theirs.token_ids
                assert ours.stats.accepted == theirs.stats.accepted
                assert ours.stats.execution == "graph per engine"
        assert len(gpu.cuda.allocations) == loaded
        assert gpu.cuda.launches > 0
        workspaces = {context.memory for context in gpu.contexts}
        assert len(workspaces) == len(on_gpu.manifest.models)  # contexts of a model share theirs


@pytest.mark.parametrize("name", ["llama-near", "llama-near-portable"])
def test_the_calls_of_a_proposal_are_enqueued_together(name, bundle, gpu):
    """A draft is called for each of its four tokens; the host waits for all of them together, then for the target."""
    with Engine.load(compiled(bundle(name), gpu.folder)) as on_gpu:
        gpu.cuda.calls.clear()
        done = on_gpu.generate([5, 6, 7, 8], GREEDY)
        assert done.stats.drafted >= 4
        prefills = 2  # the target's and the draft's
        assert (
            gpu.cuda.calls.count("cudaStreamSynchronize") == done.stats.steps + done.stats.steps_with_draft + prefills
        )
        assert not TAKING & set(gpu.cuda.calls)


def test_plain_decoding_runs_without_a_profile_of_one_token(bundle, gpu):
    with Engine.load(compiled(bundle("llama-near"), gpu.folder, plain=True)) as on_gpu:
        assert on_gpu.backend.graphs[0].widths(1) == (1, 2, 3, 5, 8, 9)
        alone = on_gpu.generate([5, 6, 7], GREEDY, PLAIN).token_ids
    with Engine.load(compiled(bundle("llama-near"), gpu.folder)) as on_gpu:
        assert on_gpu.backend.graphs[0].widths(1) == (2, 3, 5, 8, 9)
        assert on_gpu.generate([5, 6, 7], GREEDY, PLAIN).token_ids == alone


REFUSED = "cudaErrorStreamCaptureInvalidated"
UNABLE = r"target\.engine: tensorrt-rtx says that .* cannot be captured"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("llama-near", REFUSED), ("llama-near-portable", REFUSED), ("qwen3-medusa", REFUSED), ("llama-near", UNABLE)],
)
def test_without_capture_it_runs_plainly_and_says_so(name, reason, bundle, engine, gpu):
    gpu.cuda.refuse_capture, gpu.capturable = reason == REFUSED, reason != UNABLE
    with Engine.load(compiled(bundle(name), gpu.folder)) as on_gpu:
        done = on_gpu.generate([5, 6, 7], SAMPLED)
        assert done.stats.execution == "plain"
        assert done.token_ids == engine(name).generate([5, 6, 7], SAMPLED).token_ids
        assert re.search(reason, on_gpu.backend.fallback)
        assert gpu.cuda.launches == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compute_capabilities": ("8.6", "12.0")}, r"capability 12\.0, 8\.6, and this GPU is Stand-in.*y 89"),
        ({"runtime": "tensorrt"}, "holds no engines for tensorrt-rtx; compile it with"),
        ({"version": "1.6.0.1"}, r"compiled by tensorrt-rtx 1\.6\.0\.1, and 1\.7\.1\.116 is installed"),
        ({"compute": "fp16"}, r"element of past_key\.0 takes 4 bytes, expected 2|element of present"),
    ],
)  # fmt: skip
def test_engines_that_do_not_run_here(changes, message, bundle, gpu):
    with pytest.raises(BackendError, match=message):
        Engine.load(compiled(bundle("qwen3-medusa"), gpu.folder, **changes))


def test_an_unreadable_engine_is_named(bundle, gpu):
    gpu.cannot_load = True
    with pytest.raises(BackendError, match=r"target\.engine: tensorrt-rtx 1\.7\.1\.116 cannot load the engine"):
        Engine.load(compiled(bundle("qwen3-medusa"), gpu.folder))


def test_a_missing_library_is_named():
    if importlib.util.find_spec("tensorrt") is None:
        with pytest.raises(BackendError, match=r"tensorrt is not installed.*specexport\[tensorrt\]"):
            trt.import_tensorrt("tensorrt")


WITHOUT_ONNXRUNTIME = """
import sys
sys.modules["onnxruntime"] = None  # importing it is an error
from specexport.contract.errors import BackendError
from specexport.runtime import Engine
from specexport.runtime.backends.cuda import backend, device_program, trt
try:
    Engine.load(sys.argv[1])
except BackendError as error:
    print(error)
"""


def test_engines_need_no_onnxruntime(bundle, gpu):
    """A process in which it cannot be imported comes as far as the missing driver, or the engines' version."""
    printed = python(WITHOUT_ONNXRUNTIME, compiled(bundle("llama-near"), gpu.folder))
    assert re.search("no NVIDIA driver was found|tensorrt_rtx|TensorRT", printed), printed


def test_engines_are_chosen_by_device():
    device = api.CudaDevice("x", (8, 9), 1)
    base: dict[str, Any] = {"source": "s", "runtime": "tensorrt", "version": "10.3", "compute": "fp16"}
    base["profiles"] = (ce.ShapePoint(1, 1, 256, 1),)
    ada = ce.CompiledEngine(file="b", compute_capabilities=("8.9",), **base)
    hopper = ce.CompiledEngine(file="c", compute_capabilities=("9.0",), **base)
    assert library.choose((hopper, ada), "tensorrt", device) == [ada]


def test_contexts_share_kernels_that_are_compiled_before_anything_is_captured(bundle, gpu):
    with Engine.load(compiled(bundle("llama-near"), gpu.folder)) as on_gpu:
        assert on_gpu.generate([5, 6, 7], GREEDY).stats.execution == "graph per engine"
    settings = [context.config for context in gpu.contexts]
    assert len({id(setting.cache) for setting in settings}) == 1 and settings[0].cache is not None
    eager = tensorrt_stand_in.DynamicShapesKernelSpecializationStrategy.EAGER
    assert {setting.dynamic_shapes_kernel_specialization_strategy for setting in settings} == {eager}
    assert {setting.cuda_graph_strategy for setting in settings} == {tensorrt_stand_in.CudaGraphStrategy.DISABLED}


@pytest.mark.parametrize("damage", [None, "cut", "other bytes", "not ours", "huge", "another version"])
def test_kernels_are_compiled_once(damage, bundle, gpu, monkeypatch, tmp_path):
    """What the cache folder holds is used by the next process, unless it is damaged: then it is replaced."""
    monkeypatch.setenv("SPECEXPORT_CACHE", str(tmp_path / "cache"))
    folder = compiled(bundle("llama-near"), gpu.folder)

    def load() -> list[str]:
        gpu.compiled.clear()
        Engine.load(folder).close()
        return list(gpu.compiled)

    first = load()
    assert len(first) == len(set(first)) > 2
    (file,) = (tmp_path / "cache" / "kernels").iterdir()
    whole = file.read_bytes()
    assert load() == [] and file.read_bytes() == whole
    if damage is None:
        return
    if damage == "cut":
        file.write_bytes(whole[:-9])
    elif damage == "other bytes":
        other = base64.b64encode(b"kernels of the stand-in: [").decode()
        file.write_text(json.dumps(json.loads(whole) | {"data": other}))
    elif damage == "not ours":
        foreign = b"kernels of something else"
        kept = {"sha256": hashlib.sha256(foreign).hexdigest(), "data": base64.b64encode(foreign).decode()}
        file.write_text(json.dumps(kept))
    elif damage == "huge":
        with file.open("r+b") as sparse:
            sparse.truncate((1 << 28) + 1)
    else:
        monkeypatch.setattr(TensorRT, "__version__", "1.7.2.0")
        compiled(bundle("llama-near"), gpu.folder)
    assert load() == first
    assert load() == []
    assert file.read_bytes() == whole


def test_engines_of_tensorrt_compile_nothing_on_the_device(bundle, gpu):
    with Engine.load(compiled(bundle("llama-near"), gpu.folder, runtime="tensorrt"), backend="tensorrt") as on_gpu:
        assert on_gpu.generate([5, 6, 7], GREEDY).stats.execution == "graph per engine"
    assert gpu.compiled == []


def test_stand_in_has_the_interface_of_the_real_package():
    """Every method with the parameters of one of its overloads, every attribute, every member of an enumeration."""
    real = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    pairs = {
        "Runtime": "Runtime",
        "CudaEngine": "ICudaEngine",
        "ExecutionContext": "IExecutionContext",
        "RuntimeConfig": "IRuntimeConfig",
        "RuntimeCache": "IRuntimeCache",
    }
    for ours, theirs in pairs.items():
        for name, value in vars(getattr(tensorrt_stand_in, ours)).items():
            if name.startswith("_"):
                continue
            actual = getattr(getattr(real, theirs), name)
            if inspect.isfunction(value):
                signatures = re.findall(rf"{name}\((self: .*)\) ->", actual.__doc__)
                overloads = [re.findall(r"(?:^|, )(\w+): ", signature) for signature in signatures]
                assert list(inspect.signature(value).parameters) in overloads, (theirs, name, overloads)
    for kind in (
        tensorrt_stand_in.TensorIOMode,
        tensorrt_stand_in.ExecutionContextAllocationStrategy,
        tensorrt_stand_in.DynamicShapesKernelSpecializationStrategy,
        tensorrt_stand_in.CudaGraphStrategy,
    ):
        members = getattr(real, kind.__name__).__members__
        assert {member.name: member.value for member in kind}.items() <= {
            n: m.value for n, m in members.items()
        }.items()
    assert real.DataType.INT64.itemsize == 8


@pytest.mark.parametrize(
    "name", ["llama-near-batch", "llama-near-batch-portable", "gpt2-tree-batch", "qwen3-medusa-draft-batch"]
)
def test_concurrent_requests_equal_single_ones(name, bundle, engine, gpu):
    """Joining and leaving, prompts that begin alike, growing caches, more requests than slots; plain ones too."""
    alone = engine(name.replace("-batch", ""))
    prompts = [[7, 9, 11], list(range(3, 90)), [5] * 40, [*range(3, 80), 5], [21], [5] * 240, [7, 9, 11, 13, 15]]
    params = [GREEDY.replace(max_tokens=8 + 4 * at) for at in range(len(prompts))]
    ways = [PLAIN if at == 2 else None for at in range(len(prompts))]
    with Engine.load(compiled(bundle(name), gpu.folder, batches=(1, 4)), max_batch_size=4) as on_gpu:
        assert on_gpu.slots == 4
        gpu.cuda.calls.clear()
        streams = started(map(on_gpu.stream, prompts, params, ways))
        for at, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
            assert tokens_of(stream) == alone.generate(prompt, params[at], PLAIN).token_ids, at
        assert not TAKING & set(gpu.cuda.calls)


def test_engines_run_as_many_requests_as_they_are_compiled_for(bundle, gpu):
    folder = compiled(bundle("llama-near-batch"), gpu.folder, batches=(4,))
    with Engine.load(folder) as on_gpu:
        assert on_gpu.slots == 4
    with pytest.raises(BackendError, match=r"2 requests at once .* engines run 4; compile .*--engine-batch-sizes 2"):
        Engine.load(folder, max_batch_size=2)


def test_prompts_are_scored_in_the_window_of_all_slots(bundle, engine, gpu):
    """There are no logits of every token at one slot; other texts are left as they are meanwhile."""
    params, scored = GREEDY.replace(max_tokens=30), GREEDY.replace(max_tokens=1, prompt_logprobs=2)
    prompt = list(range(3, 60))
    with Engine.load(compiled(bundle("llama-near-batch"), gpu.folder, batches=(4,))) as on_gpu:
        running = on_gpu.stream([5] * 30, params)
        tokens = list(next(running).token_ids)
        ours = on_gpu.generate(prompt, scored, PLAIN).prompt_logprobs
        tokens += tokens_of(running)
    theirs = engine("llama-near").generate(prompt, scored, PLAIN).prompt_logprobs
    assert tokens == list(engine("llama-near").generate([5] * 30, params, PLAIN).token_ids)
    assert [our.logprob for our in ours] == pytest.approx([our.logprob for our in theirs], abs=1e-4)
