"""``specexport verify`` on engines: which are compared, what it says where none can be, and that a wrong one fails.

There is no GPU, so in the place of TensorRT's runner stands one that runs the ONNX graphs engines are compiled from, in
half precision on the CPU: other graphs than those they are compared with, and of an engine's interface.
"""

import dataclasses
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from polygraphy.backend.base import BaseRunner
from polygraphy.common import FormattedArray, TensorMetadata

from specexport.contract import tensors
from specexport.contract.engines import CompiledEngine
from specexport.contract.errors import BackendError
from specexport.contract.reading import read_manifest
from specexport.exporter.engines import bundle as bundle_module
from specexport.exporter.engines.bundle import compile_bundle
from specexport.exporter.engines.compiler import EngineReport
from specexport.exporter.options import CompileOptions
from specexport.runtime.backends.cuda.api import Cuda
from specexport.runtime.bundle import Bundle
from specexport.verify import bundle as module
from specexport.verify import engines as verify_engines
from specexport.verify.bundle import verify
from specexport.verify.engines import Subject, compare_engines, runnable
from tests.cuda_stand_in import StandIn
from tests.fixtures import Bundles
from tests.make_bundles import RECIPES
from tests.reference import plain_session

pytestmark = pytest.mark.exporter

BATCHED = ("fp16-native-batch", "qwen3-mlp")
"""These get engines of several batch sizes."""
_TYPES = {
    "tensor(float16)": np.float16,
    "tensor(float)": np.float32,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}


class SourceRunner(BaseRunner):
    """Polygraphy's ``TrtRunner``, as far as it is used, over the ONNX graph of an engine."""

    def __init__(self, folder: Path, engine: CompiledEngine, spoil: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(name="stand-in")
        self._path, self._engine, self._spoil = folder / engine.source, engine, spoil

    def activate_impl(self) -> None:
        self._session = plain_session(self._path)
        self._profile = 0

    def get_input_metadata_impl(self) -> Any:
        return TensorMetadata()

    def set_profile(self, index: int) -> None:
        self._profile = index

    def infer_impl(self, feed_dict: dict[str, FormattedArray], return_raw_buffers: bool) -> Any:
        assert return_raw_buffers
        point = self._engine.profiles[self._profile]
        types = {value.name: _TYPES[value.type] for value in self._session.get_inputs()}
        inputs = {name: np.frombuffer(raw.array, types[name]).reshape(raw.shape) for name, raw in feed_dict.items()}
        assert inputs.keys() == types.keys()
        if tensors.LEVEL_RANKS in inputs:
            assert inputs[tensors.LEVEL_RANKS].shape == (point.batch, point.drafts, point.tokens)
        elif tensors.INPUT_IDS in inputs:
            tokens = 1 if tensors.BLOCK_ROWS in inputs else point.tokens
            assert inputs[tensors.INPUT_IDS].shape == (point.batch, tokens)
        names = [value.name for value in self._session.get_outputs()]
        outputs = dict(zip(names, self._session.run(names, inputs), strict=True))
        self._spoil(outputs)
        self.inference_time = 0.0
        raw = {name: FormattedArray(array.view(np.uint8).reshape(-1), array.shape) for name, array in outputs.items()}
        return OrderedDict(raw)

    def deactivate_impl(self) -> None:
        del self._session


def _right(_outputs: dict[str, Any]) -> None:
    """Leaves an engine's outputs as they are."""


@pytest.fixture
def compiled(
    uncompiled: Bundles, bundle: Bundles, shared_accept_graphs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Bundles:
    """Gives bundles that list engines; their files say nothing."""

    def write(source: Path, output: Path, *_: Any) -> EngineReport:
        output.write_bytes(b"engine")
        return EngineReport(output.name, 1, 1, 0, None, 6, 0.0)

    monkeypatch.setattr(bundle_module, "compile_graph", write)

    def get(name: str) -> Path:
        ready = name in RECIPES
        folder = Path(shutil.copytree((bundle if ready else uncompiled)(name), tmp_path / name))
        batches = (1, 4) if name in BATCHED else (1,)
        options = {"compute_capability": ((8, 6), (8, 9)), "engine_batch_sizes": batches}
        compile_bundle(folder, CompileOptions("tensorrt-rtx", "fp16", **options))
        return folder

    return get


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Puts an imaginary GPU of a capability into the machine."""
    return lambda capability: monkeypatch.setattr(Cuda, "load", lambda: Cuda(StandIn(capability=capability)))


@pytest.mark.parametrize("name", ["fp16-native-both", "int8-portable-draft", "fp16-native-batch", "qwen3-mlp"])
def test_every_engine_is_compared_and_a_wrong_one_is_found(name, compiled, gpu, monkeypatch):
    folder = compiled(name)
    manifest = read_manifest(folder)
    gpu((8, 9))
    _, subjects = runnable(manifest)
    assert [subject.engine for subject in subjects] == list(manifest.engines)
    opened = Bundle.open(folder)

    def compare(which: list[Subject], spoil: Callable[[dict[str, Any]], None]) -> list[tuple[float, str]]:
        return compare_engines(opened, which, lambda engine: SourceRunner(folder, engine, spoil), lambda *_: None)

    def wrong(which: list[Subject], spoil: Callable[[dict[str, Any]], None]) -> list[str]:
        return [where for size, where in compare(which, spoil) if size > 1]

    right = compare(subjects, _right)
    assert len(right) == sum(len(subject.engine.profiles) for subject in subjects)
    assert max(size for size, _ in right) < 0.5

    def spoiled(output: str, change: Callable[[np.ndarray], None]) -> Callable[[dict[str, Any]], None]:
        def spoil(outputs: dict[str, Any]) -> None:
            outputs[output] = outputs[output].copy()
            change(outputs[output])

        return spoil

    def roll(array: np.ndarray) -> None:
        array[...] = np.roll(array, 1, axis=-1)

    def add(array: np.ndarray) -> None:
        array += 1

    def touch(array: np.ndarray) -> None:
        array[..., 0, 0] += 1  # a row that the run must not write

    mixed = [subject for subject in subjects if any(point.batch > 1 for point in subject.engine.profiles)]
    assert bool(mixed) == (name in BATCHED)

    def swap(outputs: dict[str, Any]) -> None:
        for output, array in outputs.items():
            outputs[output] = np.flip(array, int(output in tensors.DRAFTED)).copy()  # B of a draft is second

    for subject in mixed:
        last = msgspec.structs.replace(subject.engine, profiles=subject.engine.profiles[-1:])
        assert wrong([dataclasses.replace(subject, engine=last)], swap), "slots were mistaken for one another"

    for subject in subjects:
        single = msgspec.structs.replace(subject.engine, profiles=subject.engine.profiles[:1])
        first = dataclasses.replace(subject, engine=single)
        outputs = {value.name for value in plain_session(folder / subject.engine.source).get_outputs()}
        row = "present_value.0"
        changes = {tensors.LOGITS: roll, tensors.CANDIDATES: add, row: roll, tensors.DRAFT_PROBS: roll}
        changes |= {tensors.DRAFT_TOKENS: add, tensors.TOKENS: add, tensors.TREE_IDS: add, "new_key.0": roll}
        changes |= {f"{tensors.DRAFT_PROBS}.0": roll, f"{tensors.DRAFT_TOKENS}.1": add, f"{tensors.DRAFT_IDS}.2": add}
        tried = {output: change for output, change in changes.items() if output in outputs}
        assert tried
        for output, change in tried.items():
            (where,) = wrong([first], spoiled(output, change))
            assert subject.engine.file in where and output in where
        if row in outputs:
            assert f"{row} before" in wrong([first], spoiled(row, touch))[0]


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_a_draft_over_the_target_s_states_is_compared(method, compiled, gpu):
    folder = compiled(f"dice-{method}")
    gpu((8, 9))
    subjects = runnable(read_manifest(folder))[1]
    run = lambda engine: SourceRunner(folder, engine, _right)  # noqa: E731
    assert max(size for size, _ in compare_engines(Bundle.open(folder), subjects, run, lambda *_: None)) < 1
    assert any(subject.master.startswith(f"{method}.") for subject in subjects)


def test_a_wrong_engine_fails_the_verdict(compiled, gpu, monkeypatch):
    folder = compiled("fp16-portable-ngram")
    gpu((8, 9))

    def run_with(spoil: Callable[[dict[str, Any]], None]) -> None:
        runner = lambda _library, folder, engine: SourceRunner(folder, engine, spoil)  # noqa: E731
        monkeypatch.setattr(verify_engines, "tensorrt_runner", runner)

    run_with(_right)
    passed, sentence, numbers = module._engines(Bundle.open(folder), lambda *_: None)
    assert passed and "compared with their ONNX graphs" in sentence
    assert numbers["engines"] == len(read_manifest(folder).engines)

    def nothing(outputs: dict[str, Any]) -> None:
        if tensors.LOGITS in outputs:
            outputs[tensors.LOGITS][:] = np.nan

    run_with(nothing)
    report = verify(folder, max_tokens=1)
    assert not report.passed
    wrong = next(check for check in report.checks if check.name == "engines")
    assert wrong.passed is False
    assert re.search(r"ONNX graphs: \d+ differences?; target\.fp16\.tensorrt-rtx", wrong.sentence)


def test_where_engines_cannot_run_it_says_that_they_were_not_compared(compiled, gpu, monkeypatch):
    folder = compiled("fp16-portable-plain")

    def no_driver() -> Cuda:
        raise BackendError("no NVIDIA driver was found")

    monkeypatch.setattr(Cuda, "load", no_driver)
    report = verify(folder, max_tokens=1)
    assert report.passed and report.verdict == "passed what could be checked"
    (check,) = (check for check in report.checks if check.name == "engines")
    assert check.passed is None
    assert check.sentence == "the engines were not compared with their ONNX graphs: no NVIDIA driver was found"
    manifest = read_manifest(folder)
    gpu((9, 0))
    with pytest.raises(BackendError, match=r"were compiled for compute capability 8\.6, 8\.9, and this GPU is"):
        runnable(manifest)
    gpu((8, 9))
    old = tuple(msgspec.structs.replace(engine, version="1.2.0") for engine in manifest.target.engines)
    target = msgspec.structs.replace(manifest.target, engines=old)
    with pytest.raises(BackendError, match=r"compiled by tensorrt-rtx 1\.2\.0"):
        runnable(msgspec.structs.replace(manifest, target=target))


def test_bfloat16_goes_in_and_out_as_bytes():
    """Polygraphy's NumPy has no bfloat16: caches are given and read as bytes of it."""
    import onnx

    text = "g (float[1,1,4,2] past_key.0) => (float[1,1,4,2] present_key.0) { present_key.0 = Identity(past_key.0) }"
    model = onnx.parser.parse_graph(text.replace("past_key.0", "past_key").replace("present_key.0", "present_key"))
    model.input[0].name, model.output[0].name = "past_key.0", "present_key.0"

    class Echo(BaseRunner):
        def infer_impl(self, feed_dict: Any, return_raw_buffers: bool) -> Any:
            self.inference_time = 0.0
            inputs = feed_dict["past_key.0"]
            doubled = 2 * inputs.array.view(ml_dtypes.bfloat16)
            return {"present_key.0": FormattedArray(doubled.view(np.uint8), inputs.shape)}

        def set_profile(self, index: int) -> None: ...

    rows = np.arange(8, dtype=np.float32).reshape(1, 1, 4, 2)
    with Echo() as runner:
        outputs = verify_engines.run_engine(runner, "bf16", model, 0, {"past_key.0": rows})
    np.testing.assert_array_equal(outputs["present_key.0"], 2 * rows)
