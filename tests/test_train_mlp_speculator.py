"""MLP speculators are trained: they learn, go on where they stopped, and bundles are built of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specexport.cli import main
from specexport.contract.errors import SpecExportError
from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions
from specexport.methods.mlp_speculator.checkpoint import read_speculator
from specexport.methods.mlp_speculator.train import (
    new_speculator,
    speculator_loss,
    stage_accuracy,
    train_mlp_speculator,
)
from specexport.methods.mlp_speculator.train_options import SpeculatorOptions
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.speculative import PLAIN
from specexport.training.data import Windows
from tests.checkpoints import make_checkpoint, make_model
from tests.training import CPU, SAVE_EVERY, silent, train_over, train_whole_and_parted, write_words

pytestmark = [pytest.mark.exporter, pytest.mark.slow]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("text"))


@pytest.fixture
def options(target: Path, text: Path, tmp_path: Path) -> Callable[..., SpeculatorOptions]:
    def make(name: str = "out", **changed: Any) -> SpeculatorOptions:
        fields = {
            "target": str(target), "data": [text], "output": tmp_path / name, "n_predict": 2, "seq_len": 32,
            "inner_dim": 32, "batch_size": 4, "steps": 8, "save_every": SAVE_EVERY, "precision": "fp32",
        }  # fmt: skip
        return SpeculatorOptions(**(fields | changed))  # type: ignore[arg-type]

    return make


def test_stages_learn_the_next_token(tmp_path: Path, options: Callable[..., SpeculatorOptions]) -> None:
    """In a language in which either of two tokens follows each: who does not see it must guess among four, or eight."""
    model: Any = make_model("llama")
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(40, (96, 24), generator=generator)
    for at in range(1, 24):
        ids[:, at] = (ids[:, at - 1] + 7 + 12 * torch.randint(2, (96,), generator=generator)) % 40
    ids += 100
    windows = Windows(ids.int(), torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids).int())
    torch.manual_seed(0)
    speculator = new_speculator(options(n_predict=3, inner_dim=64, tie_weights=True, scale_input=True), model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = train_over(
        speculator, lambda hidden, batch: speculator_loss(speculator, hidden, batch, 1.0), model, windows,
        tmp_path / "stages.pt", steps=120, batch_size=24, lr=5e-3,
    )  # fmt: skip
    accuracy = stage_accuracy(speculator, model, windows, CPU)
    assert all(sum(row[:2]) > 0.9 for row in accuracy.ranks), accuracy.ranks
    chain = sum(accuracy.paths[(0,) * depth] for depth in (1, 2, 3))
    assert accuracy.chain_length == pytest.approx(1 + chain)
    assert chain > 0.7
    assert len(trained.history[-1]["top-1"]) == 3
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "stopped_at"),
    [
        ({"self_distill": 16, "cache_hidden": True}, "texts: step 4"),
        ({"tie_weights": True, "scale_input": True, "accumulate": 2}, "data: step 6"),
    ],
    ids=["texts", "data"],
)
def test_resumed_runs_equal_uninterrupted_ones(
    options: Callable[..., SpeculatorOptions], settings: dict[str, Any], stopped_at: str
) -> None:
    record, whole, parted = train_whole_and_parted(train_mlp_speculator, options, settings, stopped_at)
    outline = read_speculator(str(parted))
    assert (outline.stages, outline.inner, outline.tied, outline.scale_input) == (
        2, 32, "tie_weights" in settings, "scale_input" in settings
    )  # fmt: skip
    assert outline.accuracy is not None
    assert json.loads((whole / "training.json").read_text()) == record


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"n_predict": 0}, "n_predict is 0; expected a whole number from 1 to 16"),
        ({"n_predict": 15, "seq_len": 16}, r"--n-predict is 15; expected 1 to 14, two less than --seq-len"),
        ({"inner_dim": 8}, "inner_dim is 8; expected a whole number >= 16"),
        ({"data_first": 1.5}, r"data_first is 1.5; expected a number in \[0, 1\]"),
        ({"target": "/nowhere"}, "/nowhere: no such folder"),
    ],
)
def test_options_out_of_range_are_refused_by_name(
    options: Callable[..., SpeculatorOptions], changed: dict[str, Any], expected: str
) -> None:
    with pytest.raises(SpecExportError, match=expected):
        train_mlp_speculator(options(**changed), silent)


def test_trained_folders_are_built(
    target: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "speculator"
    words = ["train", "mlp-speculator", "--target", str(target), "--data", str(text), "--seq-len", "32", "-o", str(out)]
    assert main([*words, "--steps", "3"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "3 drafted tokens; share of held-out tokens" in shown
    assert "a chain of 3 would commit" in shown
    assert main([*words, "--steps", "3", "--n-predict", "2", "--overwrite", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [entry["step"] for entry in record["data"]["history"]] == [3]
    assert len(record["stage_accuracy"]) == 2
    bundle = build(
        BuildOptions(
            target=str(target),
            output=tmp_path / "bundle",
            methods=({"method": "mlp_speculator", "model": str(out)},),
            precision="int4",
            max_seq_len=64,
            max_batch_size=1,
        )
    )
    with Engine.load(bundle, threads=1) as engine:
        greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        done = engine.generate([5, 6, 7], greedy)
        assert done.stats.drafted > 0
        assert done.token_ids == engine.generate([5, 6, 7], greedy, PLAIN).token_ids
