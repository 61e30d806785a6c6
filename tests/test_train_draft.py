"""Drafts are distilled: the divergences, what is sampled, and the command."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from specexport.contract.errors import SpecExportError, TrainError
from specexport.exporter.checkpoints.checkpoint import load_checkpoint
from specexport.exporter.checkpoints.tokenizer import load_tokenizer, require_same_tokenizer
from specexport.methods.draft_model import DraftTraining
from specexport.methods.draft_model.train import train_draft
from specexport.training.data import seeded
from specexport.training.distill import (
    acceptance_length,
    accepted_positions,
    continue_text,
    distillation_loss,
    divergence,
    mixed_temperatures,
)
from specexport.training.loop import Schedule, adamw, load_tensors, train
from tests.checkpoints import VOCAB, make_checkpoint, make_model, with_swapped_tokens
from tests.training import silent

pytestmark = [pytest.mark.exporter, pytest.mark.slow]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("pair")
    return make_checkpoint(base / "target", "llama"), make_checkpoint(
        base / "draft", "qwen3", seed=1, hidden_size=32, num_hidden_layers=1
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "words.jsonl"
    rows = [{"text": f"number {n} is good and the old way is long " * 3} for n in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_divergences_are_those_of_the_formulas():
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(size=(2, 6, 11)) * 3
    log_q, log_p = log_softmax(student, axis=-1), log_softmax(teacher, axis=-1)
    p, q = np.exp(log_p), np.exp(log_q)
    log_m = np.log((p + q) / 2)
    expected = {
        "forward_kl": (p * (log_p - log_q)).sum(-1),
        "reverse_kl": (q * (log_q - log_p)).sum(-1),
        "jsd": 0.5 * ((p * (log_p - log_m)).sum(-1) + (q * (log_q - log_m)).sum(-1)),
        "tvd": 1 - np.minimum(p, q).sum(-1),
    }
    for kind, values in expected.items():
        measured = divergence(torch.tensor(student), torch.tensor(teacher), kind).item()
        assert measured == pytest.approx(values.mean(), rel=1e-5), kind


def test_the_loss_counts_the_positions_asked_for_and_bears_another_padding():
    draft: Any = make_model("llama", seed=1)
    teacher: Any = make_model("llama", vocab_size=VOCAB + 16)
    ids = torch.randint(3, VOCAB, (2, 10), generator=seeded(0, 0))
    learnt = torch.rand(2, 4, generator=seeded(0, 1)) < 0.5
    loss = distillation_loss(draft, teacher, ids, 4, "tvd", learnt=learnt, bf16=False)
    with torch.no_grad():
        q, p = (m(input_ids=ids[:, :-1]).logits[:, -4:, :VOCAB][learnt] for m in (draft, teacher))
    torch.testing.assert_close(loss, divergence(q, p, "tvd"))


def test_texts_are_the_models_own_and_a_copy_of_it_is_always_accepted():
    model: Any = make_model("llama")
    prompts = torch.randint(3, VOCAB, (6, 5), generator=seeded(0, 0))
    temperatures = mixed_temperatures(6, seeded(0, 1))
    assert temperatures[::2].eq(0).all()
    assert ((temperatures[1::2] >= 0.5) & (temperatures[1::2] <= 1)).all()
    texts = continue_text(model, prompts, 12, temperatures, seeded(0, 2))
    assert torch.equal(texts, continue_text(model, prompts, 12, temperatures, seeded(0, 2)))
    greedy = model.generate(prompts[:1], max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert torch.equal(texts[:1], greedy)
    for temperature in (0.0, 1.0):
        same = continue_text(model, prompts, 12, torch.full((6,), temperature), seeded(0, 3))
        accepted = accepted_positions(model, model, same, 5, temperature, seed=0)
        assert accepted.all()
        assert acceptance_length(accepted, 3) == 4.0
    assert acceptance_length(torch.tensor([[True, False, True, True, False, False]]), 2) == pytest.approx(5 / 2)


def test_schedules_rise_and_fall():
    cosine = [Schedule(100, 10)(step) for step in range(100)]
    assert cosine[0] == pytest.approx(0.1)
    assert max(cosine) == pytest.approx(1.0)
    assert cosine[55] == pytest.approx(0.5, abs=0.01)
    assert cosine[-1] < 0.001
    constant = [Schedule(100, 10, decay=0.5)(step) for step in range(100)]
    assert constant[10:50] == [1.0] * 40
    assert constant[75] == pytest.approx(0.5)


def test_a_loss_that_is_not_finite_ends_the_training_and_leaves_the_last_checkpoint(tmp_path):
    weight = torch.nn.Parameter(torch.ones(2))
    checkpoint = tmp_path / "run.pt"
    with pytest.raises(TrainError, match=r"run: the loss is inf at step 4; try a smaller learning rate \(--lr\)"):
        train(
            "run", {"weight": weight}, [adamw([([weight], 0.1)])], Schedule(9, 1),
            lambda step: ((weight * (torch.inf if step == 3 else 1)).sum(), {}),
            checkpoint=checkpoint, log=silent, every=2,
        )  # fmt: skip
    assert load_tensors(checkpoint)["step"] == 2


@pytest.mark.parametrize(
    ("kind", "samples"), [("forward_kl", "target"), ("tvd", "draft"), ("reverse_kl", "data"), ("jsd", "data")]
)
def test_a_draft_comes_nearer_to_its_target(pair, text, tmp_path, kind, samples):
    target, draft = pair
    options = DraftTraining(
        target=str(target), draft=str(draft), data=[text], output=tmp_path / "out", divergence=kind, samples=samples,
        steps=40, batch_size=4, seq_len=32, lr=1e-2, save_every=5, precision="fp32",
        **({"texts": 48} if samples == "target" else {}),
    )  # fmt: skip
    record = train_draft(options, silent)
    losses = [entry["loss"][0] for entry in record["draft"]["history"]]
    assert losses[-1] < 0.95 * losses[0], losses
    loaded = load_checkpoint(str(options.output))
    assert loaded.family == "qwen3"
    require_same_tokenizer(
        load_tokenizer(target).tokenizer, load_tokenizer(options.output).tokenizer, str(options.output)
    )


def test_the_command_makes_a_new_draft(pair, text, tmp_path, cli):
    words = ["train", "draft", "--target", str(pair[0]), "--data", str(text), "--seq-len", "32", "--steps", "3"]
    new = [*words, "--layers", "1", "--hidden", "32", "--optimizer", "muon", "--texts", "8", "-o", str(tmp_path / "a")]
    record = cli(*new, "--json").json
    assert len(record["acceptance"]["after"]["greedy"]) == 6
    assert load_checkpoint(str(tmp_path / "a")).family == "llama"
    assert "acceptance length" in cli(*new, "--overwrite").words


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"draft": None}, "no draft to train; expected --draft, or --layers and --hidden"),
        ({"layers": 2}, "--draft was given together with --layers"),
        ({"samples": "data", "texts": 5}, "--texts was given with --samples data"),
        ({"divergence": "kl"}, "divergence is 'kl'; expected one of forward_kl"),
    ],
)
def test_options_that_do_not_fit_are_refused(pair, text, tmp_path, changed, expected):
    fields = {"target": str(pair[0]), "draft": str(pair[1]), "data": [text], "output": tmp_path / "out"}
    with pytest.raises(SpecExportError, match=expected):
        train_draft(DraftTraining(**(fields | changed)), silent)


def test_a_draft_of_another_tokenizer_is_refused(pair, text, tmp_path):
    other = with_swapped_tokens(make_checkpoint(tmp_path / "other", "llama", seed=2))
    options = DraftTraining(target=str(pair[0]), draft=str(other), data=[text], output=tmp_path / "out")
    with pytest.raises(SpecExportError, match="different tokenizers: token 'a' is"):
        train_draft(options, silent)
