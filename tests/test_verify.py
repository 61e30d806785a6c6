"""``specexport verify`` passes what is right and says what is wrong, and where."""

import dataclasses
import io
import json
import shutil
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.torch import load_file

from specexport.commands.inspect import summary as inspected
from specexport.contract.errors import BuildError, BundleError, RequestError
from specexport.contract.reading import read_manifest
from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions
from specexport.runtime import Completion, Engine, SamplingParams
from specexport.runtime.bundle import Bundle
from specexport.runtime.speculative import Speculative
from specexport.tables import show
from specexport.verify import bundle as module
from specexport.verify.bundle import Check, VerifyReport, check_graphs, render, verify
from specexport.verify.logits import LIMITS, TokenAgreement, rounds
from tests.checkpoints import changed, make_checkpoint
from tests.manifests import cached_as_the_hub_does, put, relist

pytestmark = pytest.mark.exporter

NAMES = ["files", "graphs", "logits", "quality", "draft_model", "speculation"]
PROMPTS = ("people went back home and thought", "3, 14, 15, 92, 65")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        "target": make_checkpoint(folder / "target", "llama"),
        "draft": make_checkpoint(folder / "draft", "llama", seed=1, num_hidden_layers=1),
        "other": make_checkpoint(folder / "other", "llama", seed=2),
    }


def _build(checkpoints: dict[str, Path], output: Path, sizes: tuple[int, ...], **options: Any) -> Path:
    draft = {"model": str(checkpoints["draft"]), "num_speculative_tokens": sizes}
    return build(BuildOptions(str(checkpoints["target"]), output, draft, max_seq_len=128, **options))


@pytest.fixture(scope="module")
def fp32(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("fp32") / "bundle"
    return _build(checkpoints, output, (3, 1), draft_precision="fp32")


@pytest.fixture(scope="module")
def int8(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(checkpoints, tmp_path_factory.mktemp("int8") / "bundle", (2,), precision="int8")


@pytest.fixture
def copy(fp32: Path, tmp_path: Path) -> Path:
    """A copy of the fp32 bundle, to be spoilt."""
    return Path(shutil.copytree(fp32, tmp_path / "bundle"))


def _results(report: VerifyReport) -> dict[str, str]:
    return {check.name: check.result for check in report.checks}


def _check(report: VerifyReport, name: str) -> Check:
    return next(check for check in report.checks if check.name == name)


def _shown(report: VerifyReport) -> str:
    shown = io.StringIO()
    with redirect_stdout(shown):
        show(*render(report))
    return shown.getvalue()


def test_a_right_bundle_passes_every_check(fp32):
    seen: list[str] = []
    report = verify(fp32, max_tokens=12, progress=lambda name, done, total: seen.append(name))
    assert report.passed
    assert report.verdict == "passed"
    assert _results(report) == dict.fromkeys(NAMES, "passed")
    assert list(dict.fromkeys(seen)) == NAMES
    logits = _check(report, "logits").numbers
    assert logits["largest_difference_relative"] < 1e-5
    assert logits["agreement"] == 1.0
    assert logits["positions"] > 100
    assert _check(report, "draft_model").numbers["same"] == 3 * (3 + 1 + 3 + 1 + 3)
    speculation = _check(report, "speculation").numbers
    assert (speculation["tokens"], speculation["differences"]) == (12 * len(module.DEFAULT_PROMPTS), 0)
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False))["checks"][5]["result"] == "passed"
    assert "verdict: passed" in _shown(report)


def test_an_int8_bundle_passes_with_its_own_limits(int8):
    report = verify(int8, max_tokens=12)
    assert report.verdict == "passed", _shown(report)
    logits = _check(report, "logits").numbers
    assert 1e-3 < logits["rms_difference_relative"] < LIMITS["int8"].rms


def test_an_altered_byte_is_found_and_nothing_else_is_run(copy):
    path = copy / "target.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    report = verify(copy)
    assert not report.passed
    others = dict.fromkeys(["graphs", "logits", "quality", "speculation"], "not run")
    assert _results(report) == {"files": "failed", **others}
    assert "target.bin" in report.checks[0].sentence
    assert "altered" in report.checks[0].sentence
    assert "verdict: failed" in _shown(report)


def test_a_folder_that_is_no_bundle_fails(tmp_path):
    report = verify(tmp_path)
    assert report.verdict == "failed"
    assert "specexport.json" in report.checks[0].sentence


def _halved(weights: np.ndarray) -> None:
    weights[weights.size // 2 :] *= 0.5


def _no_numbers(weights: np.ndarray) -> None:
    weights[:] = np.nan


@pytest.mark.parametrize(
    ("model", "spoil", "failed", "words"),
    [
        # The draft is as it was, and speculation gives what plain decoding gives, whatever that is.
        ("target", _halved, {"logits", "quality"}, "limit 0.001"),
        ("target", _no_numbers, {"logits", "quality", "speculation"}, "not finite"),
        ("draft", _halved, {"draft_model"}, "own token"),
    ],
)
def test_other_weights_with_fitting_hashes_are_found(copy, model, spoil, failed, words):
    path = copy / f"{model}.bin"
    weights = np.fromfile(path, np.float32)
    spoil(weights)
    weights.tofile(path)
    relist(copy)
    report = verify(copy, prompts=PROMPTS, max_tokens=6)
    assert _results(report) == {**dict.fromkeys(NAMES, "passed"), **dict.fromkeys(failed, "failed")}
    assert any(words in check.sentence for check in report.checks if check.name in failed)
    assert report.verdict == "failed"
    json.dumps(report.as_dict(), allow_nan=False)


def test_a_model_that_its_precision_broke_is_refused(checkpoints, tmp_path):
    """Weights eight times as large: the same rounding turns nearly every choice."""
    weights = load_file(checkpoints["target"] / "model.safetensors")
    larger = {name: tensor * 8 for name, tensor in weights.items() if tensor.ndim > 1}
    broken = changed(shutil.copytree(checkpoints["target"], tmp_path / "target"), larger)
    folder = build(BuildOptions(broken, tmp_path / "bundle", precision="int4", max_seq_len=128))
    report = verify(folder, prompts=PROMPTS[:1], max_tokens=2)
    quality = _check(report, "quality")
    assert (quality.result, report.passed) == ("failed", False)
    assert quality.numbers["kl"] > LIMITS["int4"].kl
    assert "int4 broke the model; build it again in more bits" in quality.sentence
    # The build measured the same over the same text, and inspect says so.
    measured = read_manifest(folder).target.precision.quality
    assert measured is not None and measured.tokens == quality.numbers["tokens"] > 100
    assert measured.kl == pytest.approx(quality.numbers["kl"], rel=1e-3)
    assert str(measured) in " ".join(str(row) for row in inspected(folder, read_manifest(folder))[0].rows)


@pytest.mark.parametrize("role, reason", [("other", "limit 0.001"), ("draft", "is another model")])
def test_changed_targets_are_detected(fp32, checkpoints, role, reason):
    report = verify(fp32, target=str(checkpoints[role]), prompts=PROMPTS[:1], max_tokens=2)
    assert _results(report) == {**dict.fromkeys(NAMES, "passed"), **dict.fromkeys(["logits", "quality"], "failed")}
    assert reason in _check(report, "logits").sentence


def test_models_that_are_not_there_are_not_run(copy, checkpoints, tmp_path):
    for place in ("target.source", "methods.0.draft.source", "methods.0.model"):
        put(copy, place, str(tmp_path / "gone"))
    report = verify(copy, prompts=PROMPTS[:1], max_tokens=2)
    expected = dict.fromkeys(NAMES, "passed") | dict.fromkeys(["logits", "quality", "draft_model"], "not run")
    assert _results(report) == expected
    assert report.passed
    assert report.verdict == "passed what could be checked"
    assert "--target DIR" in _check(report, "logits").sentence
    assert "--source draft_model.model=DIR" in _check(report, "draft_model").sentence

    target, sources = str(checkpoints["target"]), {"draft_model.model": str(checkpoints["draft"])}
    checks = verify(copy, target=target, sources=sources, prompts=PROMPTS[:1], max_tokens=2)
    assert checks.verdict == "passed"


def test_graphs_in_the_hubs_cache_are_checked(copy, tmp_path):
    folder = cached_as_the_hub_does(copy, tmp_path / "models--owner--name")
    assert check_graphs(Bundle.open(folder), lambda *_: None) == check_graphs(Bundle.open(copy), lambda *_: None) > 0


def test_a_bundle_without_a_draft(copy, checkpoints):
    put(copy, "methods", [])
    report = verify(copy, prompts=("a",), max_tokens=2)
    assert _results(report) == dict.fromkeys(["files", "graphs", "logits", "quality", "speculation"], "passed")
    assert "the same with speculation and without, 18 tokens" in _check(report, "speculation").sentence  # look-ups
    with pytest.raises(RequestError, match=r"draft_model\.model was given, but .* without it"):
        verify(copy, sources={"draft_model.model": str(checkpoints["draft"])})


def test_wrong_arguments(fp32, tmp_path, cli):
    with pytest.raises(BuildError, match="no such folder"):
        verify(fp32, target=str(tmp_path / "gone"))
    with pytest.raises(RequestError, match=r"draft\.model was given, .* expected one of draft_model\.model"):
        verify(fp32, sources={"draft.model": "x"})
    assert "expected METHOD.KEY=DIR" in cli("verify", fp32, "--source", "draft_model", status=2).err
    assert "--max-tokens is 0" in cli("verify", fp32, "-n", "0", status=2).err
    with pytest.raises(RequestError, match="prompt 2 has no tokens"):
        verify(fp32, prompts=["a", ""])


# --- speculation ------------------------------------------------------------------------------------------------------


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes speculative greedy decoding put another token in fourth place."""
    honest = Engine.generate

    def generate(self: Engine, prompt: Sequence[int], params: SamplingParams, arguments: Any = None) -> Completion:
        completion = honest(self, prompt, params, arguments)
        if Speculative.of(arguments).num_speculative_tokens and len(completion.token_ids) > 3:
            tokens = list(completion.token_ids)
            tokens[3] ^= 1
            return dataclasses.replace(completion, token_ids=tuple(tokens))
        return completion

    monkeypatch.setattr(Engine, "generate", generate)


def _speculation(folder: Path) -> tuple[bool, str, dict[str, float]]:
    bundle = Bundle.open(folder, check_hashes=False)
    return module.compare_decoding(bundle, [[5, 6, 7, 8]], 10, lambda *_: None)


@pytest.mark.usefixtures("lying")
def test_speculation_that_changes_the_text_fails(fp32):
    passed, sentence, numbers = _speculation(fp32)
    assert not passed
    # Two numbers of draft tokens; each run goes on behind a difference and meets the next one four tokens later.
    assert (numbers["differences"], numbers["tokens"]) == (4, 20)
    assert "after 7 tokens" in sentence


def test_every_number_of_draft_tokens_and_every_text_is_tried(fp32):
    manifest = read_manifest(fp32)
    assert rounds(manifest, [[1], [2], [3]]) == [([1], 1), ([2], 3), ([3], 1)]
    assert rounds(manifest, [[1]]) == [([1], 1), ([1], 3)]


def test_agreement_counts_small_preferences_as_ties():
    reference = np.zeros((3, 100), np.float32)
    reference[:, 0], reference[:, 1], reference[:, 2] = 4.0, 3.99, 3.0
    agreement = TokenAgreement(LIMITS["fp16"])
    agreement.count(reference, np.array([0, 1, 2]))
    assert (agreement.positions, agreement.same, agreement.ties) == (3, 1, 1)
    assert agreement.share == pytest.approx(2 / 3)


# --- graphs -----------------------------------------------------------------------------------------------------------


def _foreign(model: onnx.ModelProto) -> None:
    model.graph.node[0].domain = "com.example"
    model.opset_import.append(onnx.helper.make_opsetid("com.example", 1))


def _pinned(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 4


def _elsewhere(model: onnx.ModelProto) -> None:
    weight = next(tensor for tensor in model.graph.initializer if tensor.external_data)
    next(entry for entry in weight.external_data if entry.key == "offset").value = str(2**30)


def _invalid(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "nowhere"


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (_foreign, "outside the ONNX standard: com.example"),
        (_pinned, r"input input_ids is int64\[B, 4\], expected int64\[B, T\]"),
        (_elsewhere, "is not inside target.bin"),
        (_invalid, "not a valid ONNX graph"),
    ],
)
def test_a_wrong_graph_is_named(copy, spoil, reason):
    path = copy / "target.onnx"
    model = onnx.load(path, load_external_data=False)
    spoil(model)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match=reason) as caught:
        check_graphs(Bundle(copy, read_manifest(copy)), lambda *_: None)
    assert path.name in str(caught.value)
