"""The acceptance script: it says so where there is no GPU, and its checks work on an imaginary one."""

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.gpu import __main__ as script
from benchmarks.gpu import checks, prepared, timing
from specexport.contract import tensors
from specexport.contract.reading import read_manifest
from specexport.runtime.backend import RunShape
from specexport.runtime.backends.cuda import api
from specexport.runtime.backends.cuda.cache import DeviceCache
from specexport.runtime.backends.cuda.graph import DeviceGraph
from tests.cuda_stand_in import StandIn, real
from tests.onnxruntime_stand_in import Binding, Session

pytestmark = pytest.mark.exporter  # bundles for onnxruntime-cuda are made here

ROOT = Path(__file__).resolve().parents[1]


def test_without_a_gpu_it_says_so_and_checks_nothing(tmp_path):
    status, count = real.cudaGetDeviceCount()
    if not int(status) and count:
        pytest.skip("there is a GPU here")
    command = [sys.executable, str(ROOT / "scripts" / "gpu_acceptance.py"), "--bundles", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "no GPU can be used here, so nothing was checked: no NVIDIA driver was found" in done.stdout
    assert list(tmp_path.iterdir()) == []


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two small folders in several parts; a file of both is in them once."""
    monkeypatch.setattr(prepared, "PART_BYTES", 3000)
    content = np.random.default_rng(0).bytes(8000)
    for name in ("one", "two"):
        folder = tmp_path / "built" / name
        folder.mkdir(parents=True)
        (folder / "target.bin").write_bytes(content)
        (folder / "name").write_text(name)
    prepared._pack(tmp_path / "built", ["one", "two"], tmp_path)
    return tmp_path


def test_parts_are_joined(packed):
    index = json.loads((packed / prepared.INDEX).read_text())
    assert 3 <= len(index["parts"]) <= 4
    assert all(part["nbytes"] <= 3000 for part in index["parts"])
    folder = prepared.unpacked(packed)
    assert [(folder / name / "name").read_text() for name in ("one", "two")] == ["one", "two"]
    weights = [folder / name / "target.bin" for name in ("one", "two")]
    assert [path.read_bytes() for path in weights] == [np.random.default_rng(0).bytes(8000)] * 2
    assert [path.stat().st_nlink for path in weights] == [1, 1]  # onnxruntime refuses weights that have two names


def test_a_part_that_changed_is_named(packed):
    (packed / "part-01").write_bytes(b"other")
    with pytest.raises(ValueError, match="part-01: another content; expected SHA-256"):
        prepared.unpacked(packed)
    (packed / "part-01").unlink()
    with pytest.raises(ValueError, match="part-01: no such file"):
        prepared.unpacked(packed)


def test_a_folder_without_bundles_is_named(tmp_path, gpu, capsys):
    assert script.main(["--bundles", str(tmp_path)]) == 2
    assert f"nothing was checked: {tmp_path / 'index.json'}: no such file" in capsys.readouterr().out


def test_weights_that_were_left_out_are_filled_in(tmp_path):
    tensors = [
        {"offset": 0, "nbytes": 4, "values": "AAECAw==", "shape": [4]},
        {"offset": 64, "nbytes": 200_000, "dtype": "float16", "mean": 1.0, "std": 0.02, "shape": [100_000]},
        {"offset": 200_064, "nbytes": 50_000, "shape": [50_000]},
    ]
    (tmp_path / prepared.WEIGHTS).write_text(json.dumps({"w.bin": {"nbytes": 250_064, "tensors": tensors}}))
    assert prepared.filled(tmp_path) == 250_064
    content = (tmp_path / "w.bin").read_bytes()
    assert len(content) == 250_064
    assert content[:4] == bytes([0, 1, 2, 3])
    numbers = np.frombuffer(content[64:200_064], np.float16).astype(np.float32)
    assert numbers.mean() == pytest.approx(1.0, abs=1e-3)
    assert numbers.std() == pytest.approx(0.02, rel=0.02)
    assert len(set(content[200_064:])) == 256
    assert prepared.filled(tmp_path) == 0


# --- checks -----------------------------------------------------------------------------------------------------------

TEXTS = ["def add(first, second): return " * 4, "import json from pathlib import Path " * 4]
Disturb = Callable[[Session, Binding], None]


@pytest.fixture
def after_runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Disturb], None]:
    """Lets the GPU do something after every run of a session, captured ones included."""
    run = Session.run_with_iobinding

    def install(disturb: Disturb) -> None:
        def disturbed(self: Session, binding: Binding, options: Any) -> None:
            run(self, binding, options)
            disturb(self, binding)

        monkeypatch.setattr(Session, "run_with_iobinding", disturbed)

    return install


def _raise_a_logit(session: Session, binding: Binding) -> None:
    """Of every token of a run but of one: as kernels for several rows that are wrong would."""
    address, dtype, shape = binding.outputs.get(tensors.LOGITS, (0, np.float32, (0, 0, 0)))
    if shape[1] > 1:

        def work() -> None:
            session.cuda.array(address, dtype, shape)[..., 7] += 30.0

        session.cuda.give(session.stream, work)


def _verdicts(findings: list[checks.Finding]) -> list[bool | None]:
    return [finding.passed for finding in findings]


@pytest.mark.parametrize("name", ["llama-near", "gpt2-tree-portable"])
def test_checks_pass_on_a_correct_gpu(name, cuda_bundle):
    folder = cuda_bundle(name)
    assert _verdicts(checks.loads(folder)) == [None, True, True]
    assert _verdicts(checks.parity(folder, TEXTS)) == [True] * 4
    assert _verdicts(checks.tree_commit(folder, TEXTS)) == [True]
    assert _verdicts(checks.capture(folder, TEXTS, 20)) == [True] * 4


def test_wrong_logits_are_found(cuda_bundle, after_runs):
    folder = cuda_bundle("llama-near")
    assert _verdicts(checks.sampled(folder, TEXTS, 150)) == [True]
    after_runs(_raise_a_logit)
    assert _verdicts(checks.parity(folder, TEXTS)) == [False, False, True, False]
    assert _verdicts(checks.sampled(folder, TEXTS, 150)) == [False]


def test_a_mixture_may_choose_other_experts_rarely(cuda_bundle):
    theirs = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32)
    ours = theirs + np.float32(1e-3)
    for wrong, passed in ((0, [True, True]), (1, [False, True]), (2, [False, True]), (3, [False, False])):
        ours[:wrong] = -theirs[:wrong]
        assert [checks.largest_difference(ours, theirs, share) < 0.05 for share in (1.0, 0.95)] == passed
    ours[0, 3] = np.nan
    assert checks.largest_difference(ours, theirs, 0.5) == math.inf
    target = read_manifest(cuda_bundle("llama-near")).target
    for family, compute, positions in (("llama", "fp16", 1.0), ("glm4_moe", "fp16", 0.95), ("glm4_moe", "fp32", 1.0)):
        (engine,) = target.engines
        engines = (msgspec.structs.replace(engine, compute=compute),)
        allowed = checks.tolerance(msgspec.structs.replace(target, family=family, engines=engines))
        assert allowed.positions == positions


def test_rows_committed_at_wrong_places_are_found(cuda_bundle, monkeypatch):
    """By the host's copies: the rows of the tree's first nodes instead of the path's."""
    move = DeviceCache.move

    def stay(self: Any, slot: int, past: int, nodes: Any, checkpoint: Any) -> None:
        move(self, slot, past, range(len(nodes)), checkpoint)

    monkeypatch.setattr(DeviceCache, "move", stay)
    for name in ("gpt2-tree", "gpt2-tree-portable"):
        assert _verdicts(checks.tree_commit(cuda_bundle(name), TEXTS)) == [False]


def test_a_commit_graph_that_moves_nothing_is_found(cuda_bundle, monkeypatch):
    run = Session.run_with_iobinding

    def without_commits(self: Session, binding: Binding, options: Any) -> None:
        if tensors.PATH not in (value.name for value in self.get_inputs()):
            run(self, binding, options)

    monkeypatch.setattr(Session, "run_with_iobinding", without_commits)
    assert _verdicts(checks.parity(cuda_bundle("gpt2-tree"), TEXTS)) == [True, True, True, False]


def test_slots_that_spoil_each_other_are_found(cuda_bundle, monkeypatch):
    """A step writes over the first rows of a slot that it has no part in, as its prompt is just being read."""

    def spoiling(self: Any, shape: RunShape, rows: int = 0) -> dict[str, Any]:
        self.reserve(rows)
        inputs: dict[str, Any] = self.inputs(shape)
        inputs[tensors.PAST_LENGTH][:] = 0
        return inputs

    folder = cuda_bundle("llama-near-batch")
    assert _verdicts(checks.together(folder, TEXTS)) == [True]
    monkeypatch.setattr(DeviceGraph, "prepare", spoiling)
    assert _verdicts(checks.together(folder, TEXTS)) == [False]


def test_captures_that_say_something_else_are_found(cuda_bundle, gpu, after_runs):
    def only_captured(session: Session, binding: Binding) -> None:
        if gpu.cuda.capturing:
            _raise_a_logit(session, binding)

    after_runs(only_captured)
    assert _verdicts(checks.capture(cuda_bundle("llama-near"), TEXTS, 20)) == [True, False, False, True]


def test_refused_captures_and_leaks_are_found(cuda_bundle, gpu, monkeypatch):
    launch = StandIn.cudaGraphLaunch

    def leaking(self: StandIn, graph: int, stream: int) -> Any:
        self.cudaMalloc(checks.LEAKED // 8)
        return launch(self, graph, stream)

    with monkeypatch.context() as patch:
        patch.setattr(StandIn, "cudaGraphLaunch", leaking)
        assert _verdicts(checks.capture(cuda_bundle("llama-near"), TEXTS, 20)) == [True, True, True, False]
    gpu.cuda.allocations.clear()  # of which some were leaked
    gpu.cuda.refuse_capture = True
    assert _verdicts(checks.capture(cuda_bundle("llama-near"), TEXTS, 20)) == [False, True, True, True]
    assert _verdicts(checks.loads(cuda_bundle("llama-near"))) == [None, False, True]


def test_wrong_distributions_are_detected():
    random, exact = np.random.default_rng(0), {(0,): 0.5, (1,): 0.3, (2,): 0.15, (3,): 0.05}

    def sample(shares: list[float]) -> Counter[tuple[int, ...]]:
        return Counter((int(x),) for x in random.choice(len(shares), 3000, p=shares))

    assert checks.chi_square_p(sample([0.5, 0.3, 0.15, 0.05]), exact) > 1e-3
    assert checks.chi_square_p(sample([0.45, 0.35, 0.15, 0.05]), exact) < 1e-6
    assert checks.chi_square_p(Counter({(7,): 1}), exact) == 0.0


def test_bandwidth_counts_reads_and_writes(monkeypatch):
    cuda = StandIn(total=1 << 24)
    monkeypatch.setattr(StandIn, "cudaEventElapsedTime", lambda *_: (real.cudaError_t.cudaSuccess, 2.0))
    bandwidth = timing.copy_bandwidth(api.Cuda(cuda), rounds=2)
    assert bandwidth == pytest.approx(2 * ((1 << 23) // 4) / 2e-3)
    assert cuda.leaks == []


def _check(name: str, *findings: checks.Finding) -> script.DeviceCheck:
    return script.DeviceCheck(f"loads:{name}", 10, lambda: list(findings))


def test_results_are_stored_and_resumed(tmp_path, gpu, monkeypatch, capsys):
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.json"
    prompts.write_text('{"text": "a"}\n', encoding="utf-8")
    monkeypatch.setattr(script, "unpacked", lambda folder: folder / "bundles")
    for name in ("right", "wrong", "killed"):
        (tmp_path / "bundles" / name).mkdir(parents=True)
    ran: list[str] = []

    def killed() -> list[checks.Finding]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def right() -> list[checks.Finding]:
        ran.append("right")
        return [checks.Finding("number", None, "3 us")]

    planned = [
        _check("wrong", checks.Finding("bar", False, "2", "1")),
        script.DeviceCheck("loads:killed", 10, killed),
        script.DeviceCheck("loads:right", 10, right),
        _check("absent"),
    ]
    monkeypatch.setattr(script, "plan", lambda *_: planned)
    line = ["--bundles", str(tmp_path), "--json", str(results), "--prompts", str(prompts)]

    def statuses() -> dict[str, Any]:
        return {name.partition(":")[2]: result["status"] for name, result in json.loads(results.read_text()).items()}

    assert script.main([*line, "--budget", "5"]) == 0
    assert set(statuses().values()) == {"not measured"}
    process = multiprocessing.get_context("fork").Process(target=script.main, args=(line,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert statuses() == {"wrong": "fail", "killed": "fail", "right": "not measured", "absent": "not measured"}
    written = json.loads(results.read_text())["loads:wrong"]
    assert script.main(line) == 1
    assert statuses() == {"wrong": "fail", "killed": "fail", "right": "pass", "absent": "not measured"}
    assert script.main(line) == 1
    assert ran == ["right"]
    assert json.loads(results.read_text())["loads:wrong"] == written
    document = json.loads(results.read_text())
    assert document["loads:killed"]["reason"] == "the run ended in this check"
    assert document["loads:absent"]["reason"] == "bundle absent was not prepared"
    assert document["loads:right"].keys() >= {"date", "gpu", "cuda", "libraries", "cpu", "seconds"}
    assert "1 pass, 2 fail, 1 not measured" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--only names 'nothing'"):
        script.main([*line, "--only", "nothing"])
