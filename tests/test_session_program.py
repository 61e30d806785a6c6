"""Steps that stay on the device over onnxruntime's sessions, through the whole engine (see the stand-ins)."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.timing import Gaps, Watch, on_device
from specexport.cli import main
from specexport.commands.run import describe
from specexport.contract import tensors
from specexport.contract.reading import read_manifest
from specexport.exporter.engines import program
from specexport.runtime import EmbedsPrompt, Engine
from specexport.runtime.cuda import api
from specexport.runtime.cuda.executor import Enqueue
from specexport.runtime.speculative import PLAIN
from specexport.runtime.stream import completed
from tests.checkpoints import make_checkpoint
from tests.onnxruntime_stand_in import OnnxRuntimeGpu, installed
from tests.step_program import GREEDY, SAMPLED, TYPICAL, WAYS, same, says_what_it_says, with_program

pytestmark = pytest.mark.exporter  # it traces the step program's graphs


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnnxRuntimeGpu]:
    with installed(monkeypatch) as module:
        yield module


@pytest.fixture
def load(
    bundle: Callable[[str], Path],
    accept_graph: Callable[[str, int], bytes],
    gpu: OnnxRuntimeGpu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Engine]:
    """Loads a copy of a bundle as one that was built for onnxruntime-cuda."""
    monkeypatch.setattr(program, "_accept", lambda rule, children, candidates: accept_graph(rule, candidates))

    def get(name: str, **options: Any) -> Engine:
        folder = tmp_path / name
        if not folder.exists():
            with_program(Path(shutil.copytree(bundle(name), folder)), "onnxruntime-cuda")
        return Engine.load(folder, check_hashes=False, **options)

    return get


@pytest.mark.parametrize("name", WAYS)
def test_says_what_the_cpu_says(
    name: str, load: Callable[[str], Engine], bundle: Callable[[str], Path], gpu: OnnxRuntimeGpu
) -> None:
    # Both new, as heads propose nothing where the whole prompt is in the cache.
    with load(name) as there, Engine.load(bundle(name), threads=1, exactness="fast") as cpu:
        assert there.backend.execution == "graph per engine"
        assert "onnxruntime captures its own runs" in there.backend.fallback
        with gpu.cuda.sealed():
            says_what_it_says(there, cpu, WAYS[name], "graph per engine")


@pytest.mark.parametrize("name", ["dice-mixed-batch", "dice-mixed-batch-portable", "dice-mlp-batch"])
def test_several_requests_say_what_they_say_on_the_cpu(
    name: str, load: Callable[..., Engine], bundle: Callable[[str], Path], gpu: OnnxRuntimeGpu
) -> None:
    """All at once; the device decides what is accepted."""
    with (
        load(name, max_batch_size=4) as there,
        Engine.load(bundle(name), threads=1, exactness="fast", max_batch_size=4) as cpu,
    ):
        said = []
        for one in (there, cpu):
            streams = [
                one.stream([7, 9, 11, at], params.replace(seed=at), None if speculation else PLAIN)
                for at, params in enumerate((GREEDY, SAMPLED) * 3)
                for speculation in (True, False)
            ]
            for stream in streams:
                stream.start()
            said.append([completed(stream) for stream in streams])
        for ours, theirs in zip(*said, strict=True):
            same(ours, theirs)
        assert {ours.stats.accept for ours in said[0]} == {0.0}


@pytest.mark.parametrize("name", ["dice-near", "dice-mixed", "dice-mixed-portable", "dice-medusa"])
def test_a_step_waits_once_and_reads_back_no_logits(
    name: str, load: Callable[[str], Engine], gpu: OnnxRuntimeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    copy = api.Cuda.copy

    def noted(self: api.Cuda, to: int, source: int, nbytes: int, stream: int) -> None:
        copied.append(source)
        copy(self, to, source, nbytes, stream)

    with load(name) as there:
        there.generate([5, 6, 7, 8], GREEDY)
        target: Any = there.backend.graphs[0]  # type: ignore[attr-defined]
        logits = {width.outputs.device[tensors.LOGITS].address for width in target._widths.values()}
        monkeypatch.setattr(api.Cuda, "copy", noted)
        for speculation in (True, False):
            gpu.cuda.calls.clear()
            copied.clear()
            done = there.generate(
                [5, 6, 7, 8], GREEDY, None if speculation else PLAIN
            )  # nothing of the prompt is read again
            assert gpu.cuda.calls.count("cudaStreamSynchronize") == done.stats.steps
            assert copied and not logits & set(copied)
        there.generate([5, 6, 7, 8], GREEDY.replace(logprobs=1))
        assert logits & set(copied), "the host looks into the logits of such requests"


@pytest.mark.parametrize("name", ["dice-near", "dice-mixed-portable"])
def test_a_draft_is_one_run(name: str, load: Callable[[str], Engine], gpu: OnnxRuntimeGpu) -> None:
    """However many tokens it drafts, and lowered portably too: nothing is copied between its tokens."""
    with load(name) as there:
        there.generate([5, 6, 7, 8], GREEDY)
        gpu.runs = 0
        done = there.generate([5, 6, 7, 8], GREEDY)
        drafted, filled = done.stats.steps_with_draft, name != "dice-near"
        assert gpu.runs == drafted * (3 + filled) + (done.stats.steps - drafted) * 2


def test_a_speculator_is_a_run_of_its_own(load: Callable[..., Engine], gpu: OnnxRuntimeGpu) -> None:
    """One session is enough for all its stages, whatever the tree, however many requests."""
    with load("dice-mlp-batch", max_batch_size=4) as there:
        there.generate([5, 6, 7, 8], GREEDY)
        gpu.cuda.calls.clear()
        done = there.generate([5, 6, 7, 8], GREEDY)
        drafted = done.stats.steps_with_draft
        assert drafted > 1
        assert gpu.cuda.calls.count("cudaStreamSynchronize") == done.stats.steps + drafted
        speculator: Any = there.backend.graphs[1]  # type: ignore[attr-defined]
        assert speculator.drafts(4) == ((3, 3),)


def test_gaps_within_a_step_are_told_from_those_between(load: Callable[[str], Engine], gpu: OnnxRuntimeGpu) -> None:
    with load("dice-near") as there:
        there.generate([5, 6, 7, 8], GREEDY)
        watch = Watch(on_device(there))
        done = there.generate([5, 6, 7, 8], GREEDY)
        gaps = watch.gaps()
    steps, drafted = done.stats.steps, done.stats.steps_with_draft
    assert len(gaps.after_wait) == steps - 1
    assert len(gaps.queued) == 2 * drafted + (steps - drafted)  # draft, target, accept; target, accept
    assert Gaps([5.0, 7.0, 900.0], [1.0] * 8).per_step(4) == (3 * 7.0 + 8 * 1.0) / 4


def test_nothing_is_left_over_from_the_step_before(
    load: Callable[[str], Engine], engine: Callable[[str], Engine], gpu: OnnxRuntimeGpu
) -> None:
    """Every input, output and scratch byte on the device is poisoned before each step, the caches alone are kept."""
    with load("dice-mixed") as there:
        backend: Any = there.backend
        memories = [*(graph._memory for graph in backend.graphs), backend._steps._memory]
        regions = [
            memory._regions[name] for memory in memories for name in memory._regions if not name.startswith("cache")
        ]
        poisoned_at = -1

        def poisoned(launch: Enqueue) -> None:
            nonlocal poisoned_at
            if poisoned_at != backend.stream.waits:  # the first run of a step
                poisoned_at = backend.stream.waits
                for region in regions:
                    backend.cuda.fill(region.address, 0xA5, region.nbytes, backend.stream.handle)
            launch()

        backend.watch(poisoned)
        for params in (GREEDY, SAMPLED):
            same(there.generate([7, 9, 11], params), engine("dice-mixed").generate([7, 9, 11], params))


def test_requests_that_the_host_looks_into_share_graphs_and_caches(
    load: Callable[[str], Engine], engine: Callable[[str], Engine], gpu: OnnxRuntimeGpu
) -> None:
    """One after another in the same slot, each going on from what the last one's steps left in the caches."""
    cpu = engine("dice-mixed-portable")
    with load("dice-mixed-portable") as there:
        texts: list[list[int]] = [[7, 9, 11], [7, 9, 11]]
        for params in (SAMPLED, GREEDY.replace(logprobs=2), GREEDY, SAMPLED.replace(logprobs=0), TYPICAL):
            for method in ("draft_model", "ngram"):
                found = [
                    one.generate(text, params.replace(max_tokens=5), method)
                    for one, text in zip((there, cpu), texts, strict=True)
                ]
                assert found[0].token_ids == found[1].token_ids
                texts = [[*text, *done.token_ids] for text, done in zip(texts, found, strict=True)]


def test_reads_embeddings(load: Callable[[str], Engine], engine: Callable[[str], Engine], gpu: OnnxRuntimeGpu) -> None:
    rows = np.random.default_rng(0).standard_normal((9, 64))
    with load("granite-embeds") as there:
        for prompt in (EmbedsPrompt(rows[:1]), EmbedsPrompt([[5, 6], rows, [7]]), [5, 6, 7]):
            same(there.generate(prompt, GREEDY), engine("granite-embeds").generate(prompt, GREEDY))


def test_graphs_that_need_the_cpu_leave_acceptance_to_the_host(
    load: Callable[[str], Engine], engine: Callable[[str], Engine], gpu: OnnxRuntimeGpu
) -> None:
    gpu.on_cpu = ("ArgMax",)
    with load("dice-near") as there:
        ours = there.generate([7, 9, 11], SAMPLED)
        assert ours.stats.execution == "graph per engine"
        said = describe(ours.stats, there.backend.fallback)
        assert "device      graph per engine (the host decides what is accepted: " in said
        assert re.search(r"accept\.m\d+\.onnx: onnxruntime would run 1 nodes on the CPU \(1 ArgMax\)", said)
        same(ours, engine("dice-near").generate([7, 9, 11], SAMPLED))


def test_without_capture_it_runs_plainly_and_says_so(
    load: Callable[[str], Engine], engine: Callable[[str], Engine], gpu: OnnxRuntimeGpu
) -> None:
    gpu.refuse_capture = True
    with load("dice-near") as there:
        ours = there.generate([7, 9, 11], SAMPLED)
        assert ours.stats.execution == there.backend.execution == "plain"
        assert "cannot use the CUDA Graph feature" in there.backend.fallback
        same(ours, engine("dice-near").generate([7, 9, 11], SAMPLED))


def test_bundles_for_the_cpu_say_what_they_lack(
    bundle: Callable[[str], Path], load: Callable[[str], Engine], gpu: OnnxRuntimeGpu
) -> None:
    with Engine.load(bundle("dice-near"), backend="onnxruntime-cuda", check_hashes=False) as there:
        assert "was built for onnxruntime, so the host decides" in there.backend.fallback
        assert "build it with --backend onnxruntime-cuda" in there.backend.fallback


def test_bundles_for_the_gpu_run_on_the_cpu(load: Callable[..., Engine], engine: Callable[[str], Engine]) -> None:
    with load("dice-mixed", backend="onnxruntime", threads=1) as there:
        same(there.generate([7, 9, 11], SAMPLED), engine("dice-mixed").generate([7, 9, 11], SAMPLED))


def test_building_for_it(
    accept_graph: Callable[[str, int], bytes],
    gpu: OnnxRuntimeGpu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command's bundle holds the graphs, no engines, and is opened on a GPU unless told otherwise."""
    monkeypatch.setattr(program, "_accept", lambda rule, children, candidates: accept_graph(rule, candidates))
    target, folder = make_checkpoint(tmp_path / "target", "llama"), tmp_path / "bundle"
    line = ["build", "--target", str(target), "--ngram", "--max-seq-len", "128", "--max-batch-size", "1"]
    assert main([*line, "--backend", "onnxruntime-cuda", "--compute", "fp16", "-o", str(folder)]) == 1
    assert "--compute was given without --backend tensorrt or tensorrt-rtx" in capsys.readouterr().err
    assert main([*line, "--backend", "onnxruntime-cuda", "-o", str(folder)]) == 0
    manifest = read_manifest(folder)
    assert (manifest.backend, manifest.engines) == ("onnxruntime-cuda", ())
    assert {graph.file for graph in manifest.program} == {"program/accept.m1.onnx", "program/accept.typical.onnx"}
    with Engine.load(folder) as there, Engine.load(folder, backend="onnxruntime", threads=1, exactness="fast") as cpu:
        assert there.backend.device.startswith("onnxruntime-cuda")
        same(there.generate([7, 9, 11] * 4, SAMPLED), cpu.generate([7, 9, 11] * 4, SAMPLED))
