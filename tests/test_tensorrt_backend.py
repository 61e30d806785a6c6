"""Engines through the whole engine, with real graphs on the CPU in place of a GPU's (see the stand-ins)."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specexport.contract import engines as ce
from specexport.contract.errors import BackendError
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.cuda import api, library, trt
from specexport.runtime.speculative import PLAIN
from tests import tensorrt_stand_in
from tests.compiled import compiled
from tests.device import require_same_as_alone
from tests.tensorrt_stand_in import TensorRT, installed

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=5, ignore_eos=True)
RUN = ("llama-near", "llama-near-portable", "gpt2-tree", "gemma2-self", "qwen3-medusa", "qwen3-medusa-draft-portable")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TensorRT]:
    with installed(monkeypatch, tmp_path / "bundle") as module:
        yield module


@pytest.mark.parametrize("name", RUN)
def test_says_what_the_cpu_says(name: str, bundle: Callable[[str], Path], gpu: TensorRT) -> None:
    """Also where the cache grows while a text does: every size has graphs captured when the bundle was loaded."""
    fast = Engine.load(bundle(name), threads=1, exactness="fast")
    with fast as cpu, Engine.load(compiled(bundle(name), gpu.folder)) as there:
        loaded = len(gpu.cuda.allocations)
        for params, prompt in ((GREEDY, [7, 9, 11]), (SAMPLED, list(range(3, 90))), (GREEDY, [5] * 245)):
            for speculation in (True, False):
                ours = there.generate(prompt, params, None if speculation else PLAIN)
                theirs = cpu.generate(prompt, params, None if speculation else PLAIN)
                assert ours.token_ids == theirs.token_ids
                assert ours.stats.accepted == theirs.stats.accepted
                assert ours.stats.execution == "graph per engine"
        assert len(gpu.cuda.allocations) == loaded
        assert gpu.cuda.launches > 0
        workspaces = {context.memory for context in gpu.contexts}
        assert len(workspaces) == len(there.manifest.models)  # contexts of a model share theirs


@pytest.mark.parametrize("name", ["llama-near", "llama-near-portable"])
def test_the_calls_of_a_proposal_are_given_at_once(name: str, bundle: Callable[[str], Path], gpu: TensorRT) -> None:
    """A draft is called for each of its four tokens; the host waits for all of them together, then for the target."""
    with Engine.load(compiled(bundle(name), gpu.folder)) as there:
        gpu.cuda.calls.clear()
        done = there.generate([5, 6, 7, 8], GREEDY)
        assert done.stats.drafted >= 4
        prefills = 2  # the target's and the draft's
        assert (
            gpu.cuda.calls.count("cudaStreamSynchronize") == done.stats.steps + done.stats.steps_with_draft + prefills
        )
        assert not {"cudaMalloc", "cudaHostAlloc", "cudaFree", "cudaFreeHost"} & set(gpu.cuda.calls)


def test_plain_decoding_runs_without_a_profile_of_one_token(bundle: Callable[[str], Path], gpu: TensorRT) -> None:
    with Engine.load(compiled(bundle("llama-near"), gpu.folder, plain=True)) as there:
        assert there.backend.graphs[0].widths(1) == (1, 2, 3, 5, 8, 9)
        alone = there.generate([5, 6, 7], GREEDY, PLAIN).token_ids
    with Engine.load(compiled(bundle("llama-near"), gpu.folder)) as there:
        assert there.backend.graphs[0].widths(1) == (2, 3, 5, 8, 9)
        assert there.generate([5, 6, 7], GREEDY, PLAIN).token_ids == alone


@pytest.mark.parametrize("name", ["llama-near", "llama-near-portable", "qwen3-medusa"])
def test_without_capture_it_runs_plainly_and_says_so(
    name: str, bundle: Callable[[str], Path], engine: Callable[[str], Engine], gpu: TensorRT
) -> None:
    gpu.cuda.refuse_capture = True
    with Engine.load(compiled(bundle(name), gpu.folder)) as there:
        done = there.generate([5, 6, 7], SAMPLED)
        assert done.stats.execution == "plain"
        assert done.token_ids == engine(name).generate([5, 6, 7], SAMPLED).token_ids
        assert "cudaErrorStreamCaptureInvalidated" in there.backend.fallback
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
def test_engines_that_do_not_run_here(
    changes: dict[str, Any], message: str, bundle: Callable[[str], Path], gpu: TensorRT
) -> None:
    with pytest.raises(BackendError, match=message):
        Engine.load(compiled(bundle("qwen3-medusa"), gpu.folder, **changes))


def test_an_unreadable_engine_is_named(bundle: Callable[[str], Path], gpu: TensorRT) -> None:
    gpu.cannot_load = True
    with pytest.raises(BackendError, match=r"target/step\.engine: tensorrt-rtx 1\.7\.1\.116 cannot load the engine"):
        Engine.load(compiled(bundle("qwen3-medusa"), gpu.folder))


def test_a_missing_library_is_named() -> None:
    if importlib.util.find_spec("tensorrt") is None:
        with pytest.raises(BackendError, match=r"tensorrt is not installed.*specexport\[tensorrt\]"):
            trt.import_tensorrt("tensorrt")


WITHOUT_ONNXRUNTIME = """
import sys
sys.modules["onnxruntime"] = None  # importing it is an error
from specexport.contract.errors import BackendError
from specexport.runtime import Engine
from specexport.runtime.cuda import backend, program, trt
try:
    Engine.load(sys.argv[1])
except BackendError as error:
    print(error)
"""


def test_engines_need_no_onnxruntime(bundle: Callable[[str], Path], gpu: TensorRT) -> None:
    """A process in which it cannot be imported comes as far as the missing driver, or the engines' version."""
    folder = compiled(bundle("llama-near"), gpu.folder)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ONNXRUNTIME, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search("no NVIDIA driver was found|tensorrt_rtx|TensorRT", done.stdout), done.stdout


def test_engines_are_chosen_by_device() -> None:
    device = api.CudaDevice(0, "x", (8, 9), 1)
    base: dict[str, Any] = {"source": "s", "runtime": "tensorrt", "version": "10.3", "compute": "fp16"}
    base["profiles"] = (ce.ShapePoint(1, 1, 256, 1),)
    ada = ce.CompiledEngine(file="b", compute_capabilities=("8.9",), **base)
    hopper = ce.CompiledEngine(file="c", compute_capabilities=("9.0",), **base)
    assert library.choose((hopper, ada), "tensorrt", device) == [ada]


def test_stand_in_has_the_names_of_the_real_package() -> None:
    real = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    pairs = {"Runtime": "Runtime", "CudaEngine": "ICudaEngine", "ExecutionContext": "IExecutionContext"}
    for ours, theirs in pairs.items():
        names = [name for name in vars(getattr(tensorrt_stand_in, ours)) if not name.startswith("_")]
        assert [name for name in names if not hasattr(getattr(real, theirs), name)] == []
    assert real.ExecutionContextAllocationStrategy.USER_MANAGED
    assert real.TensorIOMode.INPUT
    assert real.DataType.INT64.itemsize == 8


@pytest.mark.parametrize(
    "name", ["llama-near-batch", "llama-near-batch-portable", "gpt2-tree-batch", "qwen3-medusa-draft-batch"]
)
def test_several_requests_at_once_say_what_each_says_alone(
    name: str, bundle: Callable[[str], Path], engine: Callable[[str], Engine], gpu: TensorRT
) -> None:
    """Joining and leaving, prompts that begin alike, growing caches, more requests than slots; plain ones too."""
    alone = engine(name.replace("-batch", ""))
    prompts = [[7, 9, 11], list(range(3, 90)), [5] * 40, [*range(3, 80), 5], [21], [5] * 240, [7, 9, 11, 13, 15]]
    with Engine.load(compiled(bundle(name), gpu.folder, batches=(1, 4)), max_batch_size=4) as there:
        require_same_as_alone(there, alone, prompts, gpu.cuda)


def test_engines_run_as_many_requests_as_they_are_compiled_for(bundle: Callable[[str], Path], gpu: TensorRT) -> None:
    folder = compiled(bundle("llama-near-batch"), gpu.folder, batches=(4,))
    with Engine.load(folder) as there:
        assert there.slots == 4
    with pytest.raises(BackendError, match=r"2 requests at once .* engines run 4; compile .*--engine-batch-sizes 2"):
        Engine.load(folder, max_batch_size=2)


def test_prompts_are_scored_in_the_window_of_all_slots(
    bundle: Callable[[str], Path], engine: Callable[[str], Engine], gpu: TensorRT
) -> None:
    """There are no logits of every token at one slot; other texts are left as they are meanwhile."""
    params, scored = GREEDY.replace(max_tokens=30), GREEDY.replace(max_tokens=1, prompt_logprobs=2)
    prompt = list(range(3, 60))
    with Engine.load(compiled(bundle("llama-near-batch"), gpu.folder, batches=(4,))) as there:
        running = there.stream([5] * 30, params)
        said = list(next(running).token_ids)
        ours = there.generate(prompt, scored, PLAIN).prompt_logprobs
        said += [token for chunk in running for token in chunk.token_ids]
    theirs = engine("llama-near").generate(prompt, scored, PLAIN).prompt_logprobs
    assert said == list(engine("llama-near").generate([5] * 30, params, PLAIN).token_ids)
    assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs], abs=1e-4)
