"""The acceptance script: it says so where there is no GPU, and its checks work on an imaginary one."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import pair
from benchmarks.gpu import __main__ as script
from benchmarks.gpu import checks, machine, timing
from benchmarks.gpu.machine import Found
from specexport.contract import tensors
from specexport.contract.errors import BackendError
from specexport.contract.reading import read_manifest
from specexport.runtime.cuda import api, graph, ort, trt
from tests.compiled import compiled
from tests.cuda_stand_in import StandIn, real
from tests.onnxruntime_stand_in import OnnxRuntimeGpu
from tests.tensorrt_stand_in import TensorRT

TEXT = " ".join(f"t{5 + n % 30}" for n in range(90))

pytestmark = pytest.mark.exporter  # it builds bundles


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> OnnxRuntimeGpu:
    cuda = StandIn()
    module = OnnxRuntimeGpu(cuda)
    monkeypatch.setattr(api.Cuda, "load", lambda: api.Cuda(cuda))
    monkeypatch.setattr(ort, "import_onnxruntime", lambda: module)
    return module


def test_without_a_gpu_it_says_so_and_checks_nothing(tmp_path: Path) -> None:
    status, count = real.cudaGetDeviceCount()
    if not int(status) and count:
        pytest.skip("there is a GPU here")
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "no GPU can be used here, so nothing was checked: no NVIDIA driver was found" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["llama-near", "gpt2-tree-portable"])
def test_checks_pass_where_the_gpu_is_right(name: str, bundle: Callable[[str], Path], gpu: OnnxRuntimeGpu) -> None:
    folder, texts = bundle(name), ["t5 t6 t7 t8 t9", "t30 t31 t30 t31"]
    found = [
        *checks.parity(folder, "onnxruntime-cuda", "fp32", texts),
        *checks.lossless(folder, "onnxruntime-cuda", texts, 60),
        *checks.tree_commit(folder, "onnxruntime-cuda", "fp32", TEXT),
        *checks.launches(folder, "onnxruntime-cuda", texts),
        *checks.together(bundle("llama-near-batch"), "onnxruntime-cuda", 4, "fp32", texts),
    ]
    judged = {check.name: check.passed for check in found if check.name != "host gaps a step"}
    assert len(judged) == 8
    assert all(judged.values()), found
    assert "captured" in str(next(check for check in found if check.name == "capture active").expected)


def test_checks_fail_where_it_is_wrong(
    bundle: Callable[[str], Path], gpu: OnnxRuntimeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that adds to every copy back, and one that is not captured."""
    download = graph.DeviceGraph.run

    def wrong(self: Any, tokens: int, rows: int = 0, drafts: int = 0, **more: Any) -> Any:
        made = download(self, tokens, rows, drafts, **more)
        if rows > 1 and "logits" in made:
            made["logits"][..., 7] += 30.0
        return made

    folder, texts = bundle("llama-near"), ["t5 t6 t7 t8 t9", "t30 t31 t30 t31"]
    gpu.refuse_capture = True
    assert checks.launches(folder, "onnxruntime-cuda", texts)[0].passed is False
    monkeypatch.setattr(graph.DeviceGraph, "run", wrong)
    assert [check.passed for check in checks.parity(folder, "onnxruntime-cuda", "fp32", texts)] == [False, False, False]
    assert checks.lossless(folder, "onnxruntime-cuda", texts, 10)[0].passed is False


def test_slots_that_spoil_each_other_are_found(
    bundle: Callable[[str], Path], gpu: OnnxRuntimeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step writes over the first rows of a slot that it has no part in, as its prompt is just being read."""

    def spoiling(self: Any, *shape: Any, **more: Any) -> None:
        self.inputs(*shape, **more)[tensors.PAST_LENGTH][:] = 0

    folder, texts = bundle("llama-near-batch"), [TEXT, " ".join(reversed(TEXT.split()))]
    assert checks.together(folder, "onnxruntime-cuda", 4, "fp32", texts)[0].passed
    monkeypatch.setattr(graph.DeviceGraph, "protect_rows", spoiling)
    assert checks.together(folder, "onnxruntime-cuda", 4, "fp32", texts)[0].passed is False


def test_two_samples_of_one_distribution() -> None:
    random = np.random.default_rng(0)

    def sample(shares: list[float]) -> Counter[tuple[int, ...]]:
        return Counter((int(x),) for x in random.choice(len(shares), 3000, p=shares))

    same, other = [0.5, 0.3, 0.15, 0.05], [0.4, 0.4, 0.15, 0.05]
    assert checks.same_distribution(sample(same), sample(same)) > 1e-3
    assert checks.same_distribution(sample(same), sample(other)) < 1e-6


def test_bandwidth_counts_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = StandIn(total=1 << 24)
    monkeypatch.setattr(StandIn, "cudaEventElapsedTime", lambda *_: (real.cudaError_t.cudaSuccess, 2.0))
    bandwidth = timing.copy_bandwidth(api.Cuda(cuda), rounds=2)
    assert bandwidth == pytest.approx(2 * ((1 << 23) // 4) / 2e-3)
    assert cuda.leaks == []


def test_a_commit_that_moves_the_wrong_rows_is_found(
    bundle: Callable[[str], Path], gpu: OnnxRuntimeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = graph.DeviceCache.move
    folder = bundle("gpt2-tree-portable")

    def stay(self: Any, slot: int, past: int, nodes: Any, *rest: Any) -> None:
        move(self, slot, past, range(len(nodes)), *rest)

    assert checks.tree_commit(folder, "onnxruntime-cuda", "fp32", TEXT)[0].passed
    monkeypatch.setattr(graph.DeviceCache, "move", stay)
    assert checks.tree_commit(folder, "onnxruntime-cuda", "fp32", TEXT)[0].passed is False


# --- libraries --------------------------------------------------------------------------------------------------------


def _tensorrt_rtx(*members: str) -> Any:
    kinds = type("ComputeCapability", (), {"__members__": dict.fromkeys(members)})
    return type("Module", (), {"__version__": "1.7.1", "ComputeCapability": kinds})


def test_every_library_that_is_there_is_found(monkeypatch: pytest.MonkeyPatch, gpu: OnnxRuntimeGpu) -> None:
    def import_tensorrt(runtime: str) -> Any:
        if runtime == "tensorrt":
            raise BackendError("tensorrt is not installed")
        return _tensorrt_rtx("SM86", "SM89", "CURRENT")

    monkeypatch.setattr(trt, "import_tensorrt", import_tensorrt)
    found, missing = machine.find(api.Cuda.load())
    assert [(there.backend, there.engines, there.computes) for there in found] == [
        ("onnxruntime-cuda", None, ("fp32",)),
        ("tensorrt-rtx", "tensorrt-rtx", ("fp32", "fp16")),
    ]
    assert missing == {"tensorrt": "tensorrt is not installed"}
    monkeypatch.setattr(trt, "import_tensorrt", lambda *_, **__: _tensorrt_rtx("SM86", "SM120"))
    found, missing = machine.find(api.Cuda.load())
    assert [there.backend for there in found] == ["onnxruntime-cuda", "tensorrt"]
    assert "tensorrt-rtx 1.7.1 compiles for no Stand-in" in missing["tensorrt-rtx"]


def test_engines_are_compiled_once(uncompiled: Callable[[str], Path], tmp_path: Path) -> None:
    """With the real TensorRT-RTX, in a process of its own."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    folder = Path(shutil.copytree(uncompiled("fp16-portable-plain"), tmp_path / "bundle"))
    device = api.CudaDevice(0, "GPU", (8, 9), 1 << 30)
    found = Found("tensorrt-rtx", "1.7.1.116", ("fp32", "fp16"), "tensorrt-rtx")
    assert machine.compiled(lambda: folder, Found("onnxruntime-cuda", "1", ("fp32",)), device, "fp32") == folder
    assert read_manifest(folder).engines == ()
    machine.compiled(lambda: folder, found, device, "fp16")
    (engine,) = read_manifest(folder).target.engines
    assert (engine.compute_capabilities, engine.compute) == (("8.9",), "fp16")
    found = dataclasses.replace(found, version=engine.version)
    written = (folder / engine.file).stat().st_mtime_ns
    machine.compiled(lambda: folder, found, device, "fp16")
    assert (folder / engine.file).stat().st_mtime_ns == written
    with pytest.raises(RuntimeError, match=r"specexport compile .*: .*does not know"):
        machine.compiled(lambda: folder, found, dataclasses.replace(device, capability=(8, 7)), "fp16")


def test_one_table_of_every_library(
    bundle: Callable[[str], Path],
    gpu: OnnxRuntimeGpu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The whole script, over ready bundles; TensorRT's engines cannot be compiled, which hides nothing of the rest."""
    engines_run = TensorRT(gpu.cuda, tmp_path)
    engines_run.ComputeCapability = _tensorrt_rtx("SM89").ComputeCapability  # type: ignore[attr-defined]
    monkeypatch.setattr(trt, "import_tensorrt", lambda _: engines_run)
    monkeypatch.setattr(
        pair,
        "built",
        lambda out, *_, **__: bundle(
            "llama-near-batch" if "batch" in out.name else "llama-near" if "draft" in out.name else "qwen3-medusa"
        ),
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"text": TEXT}) + "\n", encoding="utf-8")

    def engines(made: Callable[[], Path], found: Found, _device: Any, _compute: Any, slots: int) -> Path:
        if found.engines == "tensorrt":
            raise RuntimeError("specexport compile: no")
        if found.engines is None:
            return made()
        engines_run.folder = tmp_path / made().name
        return (
            engines_run.folder
            if engines_run.folder.exists()
            else compiled(made(), engines_run.folder, batches=(slots,))
        )

    monkeypatch.setattr(script, "compiled", engines)
    monkeypatch.setattr(script, "copy_bandwidth", lambda _: 1e12)
    monkeypatch.setattr(script, "QUICK_SAMPLES", 30)
    line = [
        "--quick",
        "--lowerings",
        "native",
        "--prompts",
        str(prompts),
        "--out",
        str(tmp_path),
        "--work",
        str(tmp_path),
    ]
    assert script.main(line) == 1
    (written,) = tmp_path.glob("*.json")
    report = json.loads(written.read_text())
    assert report["backends"].keys() == {"onnxruntime-cuda", "tensorrt", "tensorrt-rtx"}
    by_backend = Counter((check["backend"], check["passed"]) for check in report["checks"])
    assert by_backend["tensorrt", False] == 12  # six things in two types
    for name, count in (("onnxruntime-cuda", 11), ("tensorrt-rtx", 22)):
        judged = {c["name"]: c["passed"] for c in report["checks"] if c["backend"] == name}
        assert len(judged) == count
        assert all(passed is not False for what, passed in judged.items() if "host gaps" not in what), judged
    assert "GPU acceptance" in capsys.readouterr().out
