"""GPU backends through the whole engine, with real graphs on the CPU in place of the GPU's (see the stand-ins)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.contract.errors import BackendError, RequestError
from specexport.runtime import EmbedsPrompt, Engine, SamplingParams
from specexport.runtime.cuda import ort
from specexport.runtime.speculative import PLAIN
from tests.cuda_stand_in import StandIn
from tests.device import require_same_as_alone
from tests.onnxruntime_stand_in import CUDA, OnnxRuntimeGpu, installed

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=5, ignore_eos=True)
BUNDLES = ("llama-near", "llama-near-portable", "gpt2-tree", "gpt2-tree-portable", "qwen3-medusa", "qwen3-medusa-draft")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnnxRuntimeGpu]:
    with installed(monkeypatch) as module:
        yield module


def _load(folder: Path, **options: Any) -> Engine:
    return Engine.load(folder, backend="onnxruntime-cuda", check_hashes=False, **options)


@pytest.mark.parametrize("name", BUNDLES)
def test_says_what_the_cpu_says(name: str, bundle: Callable[[str], Path], gpu: OnnxRuntimeGpu) -> None:
    """Prefill in chunks, steps, growing texts, commits of chains and trees: the same tokens and the same acceptance."""
    with _load(bundle(name)) as there, Engine.load(bundle(name), threads=1, exactness="fast") as cpu:
        for params in (GREEDY, SAMPLED):
            for prompt in ([5], [7, 9, 11], list(range(3, 90))):
                for speculation in (True, False):
                    ours = there.generate(prompt, params, None if speculation else PLAIN)
                    theirs = cpu.generate(prompt, params, None if speculation else PLAIN)
                    assert ours.token_ids == theirs.token_ids
                    assert (ours.stats.steps, ours.stats.accepted) == (theirs.stats.steps, theirs.stats.accepted)
                    assert ours.stats.execution == "graph per engine"


def test_reads_embeddings(bundle: Callable[[str], Path], engine: Callable[[str], Engine], gpu: OnnxRuntimeGpu) -> None:
    """They go to the device like every other input, at every shape; tokens that come after them are read again."""
    rows = np.random.default_rng(0).standard_normal((70, 64))
    prompts: list[Any] = [EmbedsPrompt(rows[:1]), EmbedsPrompt([[5, 6], rows, [7]]), [5, 6, 7]]
    with _load(bundle("granite-embeds")) as there:
        for prompt in prompts:
            ours, theirs = there.generate(prompt, GREEDY), engine("granite-embeds").generate(prompt, GREEDY)
            assert (ours.token_ids, ours.stats.accepted) == (theirs.token_ids, theirs.stats.accepted)


@pytest.mark.parametrize(
    "name", ["llama-near-batch", "llama-near-batch-portable", "gpt2-tree-batch", "qwen3-medusa-draft-batch"]
)
def test_several_requests_at_once_say_what_each_says_alone(
    name: str, bundle: Callable[[str], Path], engine: Callable[[str], Engine], gpu: OnnxRuntimeGpu
) -> None:
    """Joining and leaving, prompts that begin alike, more requests than slots; plain ones among them."""
    alone = engine(name.replace("-batch", ""))
    prompts = [[7, 9, 11], list(range(3, 90)), [5] * 40, [*range(3, 80), 5], [21], [7, 9, 11, 13, 15]]
    with _load(bundle(name), max_batch_size=4) as there:
        require_same_as_alone(there, alone, prompts, gpu.cuda)


def test_by_default_one_request_runs(bundle: Callable[[str], Path], gpu: OnnxRuntimeGpu) -> None:
    with _load(bundle("llama-near-batch")) as there:
        assert there.slots == 1


def test_loop_neither_allocates_nor_waits_but_for_its_results(
    bundle: Callable[[str], Path], gpu: OnnxRuntimeGpu
) -> None:
    with _load(bundle("llama-near")) as there:
        gpu.cuda.calls.clear()
        done = there.generate([5, 6, 7, 8], GREEDY.replace(max_tokens=20))
        calls = gpu.cuda.calls
        assert not {"cudaMalloc", "cudaHostAlloc", "cudaFree", "cudaFreeHost"} & set(calls)
        prefills = 2  # the target's and the draft's
        assert calls.count("cudaStreamSynchronize") == 2 * done.stats.steps + prefills
        assert calls.count("cudaMemcpyAsync") == 2 * calls.count("cudaStreamSynchronize")


def test_sessions_are_told_to_stay_on_our_stream_and_capture(
    bundle: Callable[[str], Path], gpu: OnnxRuntimeGpu
) -> None:
    with _load(bundle("llama-near")):
        assert {given["enable_cuda_graph"] for given in gpu.providers} == {"1"}
        assert {int(given["user_compute_stream"]) for given in gpu.providers} == set(gpu.cuda._streams)
        limits = [int(given["gpu_mem_limit"]) for given in gpu.providers]
        assert all(0 < limit < 0.9 * (1 << 30) for limit in limits)


def test_without_capture_it_runs_plainly_and_says_so(bundle: Callable[[str], Path], gpu: OnnxRuntimeGpu) -> None:
    gpu.refuse_capture = True
    with _load(bundle("llama-near")) as there:
        assert there.generate([5, 6, 7], GREEDY).stats.execution == "plain"
        assert "cannot use the CUDA Graph feature" in there.backend.fallback


def test_nodes_on_the_cpu_are_refused_by_name(bundle: Callable[[str], Path], gpu: OnnxRuntimeGpu) -> None:
    gpu.on_cpu = ("TensorScatter",)
    with pytest.raises(
        BackendError, match=r"step.*\.onnx: onnxruntime would run \d+ nodes on the CPU \(\d+ TensorScatter"
    ):
        _load(bundle("llama-near"))


def test_missing_libraries_are_no_silent_detour(bundle: Callable[[str], Path], gpu: OnnxRuntimeGpu) -> None:
    gpu.without_libraries = True
    with pytest.raises(BackendError, match="CUDAExecutionProvider could not be loaded"):
        _load(bundle("llama-near"))


def test_too_small_a_part_of_the_memory(bundle: Callable[[str], Path], gpu: OnnxRuntimeGpu) -> None:
    with pytest.raises(BackendError, match=r"target's cache and buffers needs .* --gpu-memory-utilization"):
        _load(bundle("llama-near"), gpu_memory_utilization=1e-4)
    for wrong in (0.0, 1.5):
        with pytest.raises(RequestError, match=f"gpu_memory_utilization is {wrong}"):
            _load(bundle("llama-near"), gpu_memory_utilization=wrong)


def test_unknown_backend_is_named(bundle: Callable[[str], Path]) -> None:
    with pytest.raises(BackendError, match="no backend 'cuda'; expected one of onnxruntime, onnxruntime-cuda"):
        Engine.load(bundle("llama-near"), backend="cuda")


def test_the_wrong_onnxruntime_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = OnnxRuntimeGpu(StandIn())
    monkeypatch.setitem(sys.modules, "onnxruntime", module)  # type: ignore[arg-type]
    monkeypatch.setattr(module, "__version__", "1.30.2", raising=False)
    with pytest.raises(BackendError, match=r"onnxruntime-gpu 1\.30\.2 is too old; expected 1\.31"):
        ort.import_onnxruntime()
    monkeypatch.setattr(module, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(BackendError, match="provide the same module, so install one: pip uninstall -y onnxruntime"):
        ort.import_onnxruntime()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # type: ignore[arg-type]
    with pytest.raises(BackendError, match="onnxruntime-gpu is not installed"):
        ort.import_onnxruntime()
    assert CUDA == ort.PROVIDER


def test_a_machine_without_a_gpu_is_told_so(bundle: Callable[[str], Path]) -> None:
    from cuda.bindings import runtime

    status, count = runtime.cudaGetDeviceCount()
    if not int(status) and count:
        pytest.skip("there is a GPU here")
    command = [sys.executable, "-m", "specexport", "run", str(bundle("llama-near")), "--backend", "onnxruntime-cuda"]
    done = subprocess.run([*command, "-p", "x"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "no NVIDIA driver was found" in done.stderr
    assert "Traceback" not in done.stderr
