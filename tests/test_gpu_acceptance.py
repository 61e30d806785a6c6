"""The acceptance script: it says so where there is no GPU, and its checks work on an imaginary one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from specexport.runtime.cuda import api, ort
from tests.cuda_stand_in import StandIn, real
from tests.onnxruntime_stand_in import OnnxRuntimeGpu

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_acceptance.py"

pytestmark = pytest.mark.exporter  # it builds bundles


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_acceptance", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_acceptance"] = module
    spec.loader.exec_module(module)
    return module


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
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "no GPU can be used here, so nothing was checked: no NVIDIA driver was found" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["llama-near", "gpt2-tree-portable"])
def test_checks_pass_where_the_gpu_is_right(
    name: str, script: ModuleType, bundle: Callable[[str], Path], gpu: OnnxRuntimeGpu
) -> None:
    folder, texts = bundle(name), ["t5 t6 t7 t8 t9", "t30 t31 t30 t31"]
    found = [
        *script.parity(folder, "onnxruntime-cuda", texts),
        *script.lossless(folder, "onnxruntime-cuda", texts, 60),
        *script.launches(folder, "onnxruntime-cuda", texts),
    ]
    judged = {check.name: check.passed for check in found if check.name != "host gaps a step"}
    assert len(judged) == 6
    assert all(judged.values()), found
    assert "captured" in str(next(check for check in found if check.name == "capture active").expected)


def test_checks_fail_where_it_is_wrong(
    script: ModuleType, bundle: Callable[[str], Path], gpu: OnnxRuntimeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that adds to every copy back, and one that is not captured."""
    download = script.CudaBackend.open.__globals__["DeviceGraph"].run

    def wrong(self: Any, tokens: int, rows: int = 0, drafts: int = 0, **more: Any) -> Any:
        made = download(self, tokens, rows, drafts, **more)
        if rows > 1 and "logits" in made:
            made["logits"][..., 7] += 30.0
        return made

    folder, texts = bundle("llama-near"), ["t5 t6 t7 t8 t9", "t30 t31 t30 t31"]
    gpu.refuse_capture = True
    assert script.launches(folder, "onnxruntime-cuda", texts)[0].passed is False
    monkeypatch.setattr(script.CudaBackend.open.__globals__["DeviceGraph"], "run", wrong)
    assert [check.passed for check in script.parity(folder, "onnxruntime-cuda", texts)] == [False, False, False]
    assert script.lossless(folder, "onnxruntime-cuda", texts, 10)[0].passed is False


def test_two_samples_of_one_distribution(script: ModuleType) -> None:
    random = np.random.default_rng(0)

    def sample(shares: list[float]) -> Counter[tuple[int, ...]]:
        return Counter((int(x),) for x in random.choice(len(shares), 3000, p=shares))

    same, other = [0.5, 0.3, 0.15, 0.05], [0.4, 0.4, 0.15, 0.05]
    assert script.same_distribution(sample(same), sample(same)) > 1e-3
    assert script.same_distribution(sample(same), sample(other)) < 1e-6


def test_bandwidth_counts_reads_and_writes(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = StandIn(total=1 << 24)
    monkeypatch.setattr(api.Cuda, "milliseconds", lambda *_: 2.0)
    bandwidth = script.copy_bandwidth(api.Cuda(cuda), rounds=2)
    assert bandwidth == pytest.approx(2 * ((1 << 23) // 4) / 2e-3)
    assert cuda.leaks == []
