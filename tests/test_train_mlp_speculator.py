"""MLP speculators are trained: they learn, and the command prints its record."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from specexport.cli import main
from specexport.methods.mlp_speculator import SpeculatorTraining
from specexport.methods.mlp_speculator.train import new_speculator, stage_losses
from specexport.training.predictions import measure_over_hidden
from tests.checkpoints import make_model
from tests.training import CPU, train_over, training_options, windows_of, write_words

pytestmark = [pytest.mark.exporter, pytest.mark.slow]


@pytest.fixture
def options(target: Path, tmp_path: Path) -> Callable[..., SpeculatorTraining]:
    return partial(training_options, "mlp_speculator", target, tmp_path)


def test_stages_learn_the_next_token(tmp_path: Path, options: Callable[..., SpeculatorTraining]) -> None:
    """In a language in which either of two tokens follows each: who does not see it must guess among four, or eight."""
    model: Any = make_model("llama")
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(40, (96, 24), generator=generator)
    for at in range(1, 24):
        ids[:, at] = (ids[:, at - 1] + 7 + 12 * torch.randint(2, (96,), generator=generator)) % 40
    ids += 100
    windows = windows_of(ids)
    torch.manual_seed(0)
    speculator = new_speculator(options(n_predict=3, inner_dim=64, tie_weights=True, scale_input=True), model)
    trained = train_over(
        speculator, partial(stage_losses, speculator), model, windows,
        tmp_path / "stages.pt", steps=120, batch_size=24, lr=5e-3,
    )  # fmt: skip
    losses = partial(stage_losses, speculator)
    accuracy = measure_over_hidden(losses, len(speculator), model, windows, CPU)
    assert all(sum(row[:2]) > 0.9 for row in accuracy.ranks), accuracy.ranks
    chain = sum(accuracy.paths[(0,) * depth] for depth in (1, 2, 3))
    assert accuracy.chain_length == pytest.approx(1 + chain)
    assert chain > 0.7
    assert len(trained.history[-1]["top-1"]) == 3


def test_the_command_prints_the_record(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "mlp-speculator", "--target", str(target), "--data", str(write_words(tmp_path))]
    assert (
        main([*words, "--seq-len", "32", "--steps", "3", "--n-predict", "2", "-o", str(tmp_path / "o"), "--json"]) == 0
    )
    record = json.loads(capsys.readouterr().out)
    assert [entry["step"] for entry in record["data"]["history"]] == [3]
    assert len(record["stage_accuracy"]) == 2
