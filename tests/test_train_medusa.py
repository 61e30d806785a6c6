"""Medusa heads are trained, alone and with the model: they learn, and are read back."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specexport.cli import main
from specexport.contract.errors import SpecExportError, TrainError
from specexport.exporter.checkpoints.checkpoint import load_checkpoint
from specexport.graphs.layers import hidden_and_logits
from specexport.methods.medusa import MedusaTraining
from specexport.methods.medusa.export import COMPATIBLE, read_medusa
from specexport.methods.medusa.train import head_losses, new_heads, train_medusa
from specexport.training.predictions import measure_over_hidden
from tests.checkpoints import FAMILIES, VOCAB, make_model
from tests.training import CPU, LANGUAGE, silent, train_over, training_options, windows_of, write_words

pytestmark = [pytest.mark.exporter, pytest.mark.slow]


@pytest.fixture
def options(target: Path, tmp_path: Path) -> Callable[..., MedusaTraining]:
    return partial(training_options, "medusa", target, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_read_the_language_model_heads_input(family: str) -> None:
    model: Any = make_model(family)
    ids = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    rows = torch.rand(2, 12, generator=torch.Generator().manual_seed(1)) < 0.5
    with torch.no_grad():
        hidden, logits = hidden_and_logits(model, ids, rows)
        whole = model(input_ids=ids, use_cache=False).logits
        alone, _ = hidden_and_logits(model, ids)
    assert hidden.shape == (2, 12, model.get_output_embeddings().weight.shape[1])
    torch.testing.assert_close(logits, whole[rows], rtol=1e-4, atol=1e-4)
    assert torch.equal(hidden, alone)


@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
def test_heads_learn_a_language_over_a_model_that_stays_as_it_was(tmp_path: Path, tied: bool) -> None:
    model: Any = make_model("llama")
    windows = windows_of(LANGUAGE)
    heads = new_heads(4, 1, model, tied=tied)
    lm_head = model.get_output_embeddings()
    trained = train_over(
        heads, lambda hidden, batch: head_losses(heads, hidden, batch, lm_head), model, windows,
        tmp_path / "heads.pt", steps=150, batch_size=8, lr=1e-2,
    )  # fmt: skip
    losses = partial(head_losses, heads, lm_head=lm_head)
    accuracy = measure_over_hidden(losses, len(heads), model, windows, CPU)
    assert all(row[0] > 0.9 for row in accuracy.ranks), accuracy
    assert all(len(row) == 10 and sum(row) <= 1 + 1e-6 for row in accuracy.ranks)
    assert accuracy.paths[0, 0, 0, 0] > 0.8
    for path, share in accuracy.paths.items():
        assert share <= accuracy.ranks[len(path) - 1][path[-1]] * 1.2
        assert len(path) == 1 or share <= accuracy.paths[path[:-1]]
    assert len(trained.history[-1]["top-1"]) == 4


def test_work_of_another_training_and_what_is_not_a_checkpoint_are_refused(
    options: Callable[..., MedusaTraining], tmp_path: Path
) -> None:
    work = tmp_path / "kept"
    train_medusa(options(work=work), silent)
    with pytest.raises(TrainError, match=r"kept: .* with lr 0\.001, not 0\.002.*--work"):
        train_medusa(options(output=tmp_path / "second", work=work, lr=2e-3), silent)
    checkpoint = work / "heads.pt"
    whole = torch.load(checkpoint, weights_only=True)
    whole["parameters"]["0.0.linear.bias"] = torch.zeros(3)
    for content, expected in (
        (pickle.dumps(print, protocol=2), r"heads\.pt: no checkpoint of a training .*delete it"),
        (checkpoint.read_bytes()[:1000], r"heads\.pt: no checkpoint of a training"),
        (whole, r"heads\.pt: '0\.0\.linear\.bias' is \[3\], expected \[64\]"),
        ({**whole, "step": 999}, r"heads\.pt: 6 parameters after 999 steps; expected 6, and at most 6"),
        ({**whole, "optimizers": "x"}, r"heads\.pt: optimizers is str, expected list"),
    ):
        if isinstance(content, bytes):
            checkpoint.write_bytes(content)
        else:
            torch.save(content, checkpoint)
        with pytest.raises(TrainError, match=expected):
            train_medusa(options(output=tmp_path / "second", work=work), silent)
    assert not (tmp_path / "second").exists()
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(TrainError, match="stranger: exists and is no work folder"):
        train_medusa(options(output=tmp_path / "second", work=stranger), silent)


@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
def test_cached_states_train_the_same_heads_which_read_back_the_same_in_both_forms(
    options: Callable[..., MedusaTraining], tmp_path: Path, tied: bool
) -> None:
    streamed = options(tie_lm_head=tied)
    cached = options(tie_lm_head=tied, output=tmp_path / "cached", cache_hidden=True)
    record = train_medusa(streamed, silent)
    train_medusa(cached, silent)
    name = "medusa_lm_head.safetensors"
    assert (streamed.output / name).read_bytes() == (cached.output / name).read_bytes()

    base = load_checkpoint(streamed.target)
    native = read_medusa(streamed.output).load(hidden=64, vocab=VOCAB)
    theirs = read_medusa(streamed.output / COMPATIBLE).load(hidden=64, vocab=VOCAB)
    assert (native.tied, theirs.tied) == (tied, False)
    hidden, head = torch.randn(5, 64), base.model.get_output_embeddings()
    torch.testing.assert_close(native.logits(hidden, head), theirs.logits(hidden, head), rtol=1e-2, atol=2e-2)
    outline = read_medusa(streamed.output)
    torch.testing.assert_close(
        torch.tensor(outline.accuracy.ranks), torch.tensor(record["head_accuracy"]), atol=1e-5, rtol=0
    )
    assert json.loads((streamed.output / "training.json").read_text()) == record


@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
@pytest.mark.parametrize("tune", ["lora", "full"])
def test_a_model_trained_with_its_heads_is_read_as_model_and_as_heads(
    options: Callable[..., MedusaTraining], tune: str, tied: bool
) -> None:
    settings = {"stage": 2, "tune": tune, "tie_lm_head": tied, "self_distill": 16, "base_lr": 1e-3, "steps": 8}
    changed_options = options(**settings)
    record = train_medusa(changed_options, silent)
    before, after = load_checkpoint(changed_options.target), load_checkpoint(str(changed_options.output))
    pairs = zip(before.model.named_parameters(), after.model.parameters(), strict=True)
    moved = [name for (name, old), new in pairs if not torch.equal(old, new)]
    assert moved
    # The model is held to what it said before.
    divergences = [entry["lm kl"][0] for entry in record["joint"]["history"]]
    assert all(0 <= value < 0.05 for value in divergences), divergences
    heads = read_medusa(changed_options.output).load(hidden=64, vocab=VOCAB)
    assert len(heads) == 2
    assert heads.tied is tied
    assert (changed_options.output / COMPATIBLE).exists() is tied


def test_the_command_prints_accuracies_or_the_record(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(write_words(tmp_path))
    words = ["train", "medusa", "--target", str(target), "--data", data, "--steps", "2", "--seq-len", "32"]
    assert main([*words, "--tie-lm-head", "-o", str(tmp_path / "a"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["options"]["tie_lm_head"] is True
    assert len(record["head_accuracy"]) == 4
    assert [entry["step"] for entry in record["heads"]["history"]] == [2]
    assert main([*words, "-o", str(tmp_path / "a")]) == 1
    assert "exists already; choose another folder or pass --overwrite" in capsys.readouterr().err
    assert main([*words, "-o", str(tmp_path / "a"), "--overwrite"]) == 0
    assert "4 heads" in " ".join(capsys.readouterr().out.split())


def test_heads_of_another_shape_are_refused_by_name(options: Callable[..., MedusaTraining]) -> None:
    settings = options()
    train_medusa(settings, silent)
    file = settings.output / "medusa_lm_head.safetensors"
    save_file(load_file(file) | {"1.0.linear.bias": torch.zeros(7)}, file)
    with pytest.raises(SpecExportError, match=r"medusa_lm_head\.safetensors: tensor '1\.0\.linear\.bias' is \[7\]"):
        read_medusa(settings.output).load(hidden=64, vocab=VOCAB)
