"""EAGLE-3 drafts are trained: by the formulas, they learn, and go on from drafts that are there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specexport.contract.errors import SpecExportError
from specexport.exporter.checkpoints.stored import save_head_tensors
from specexport.graphs.attention import lowering
from specexport.graphs.layers import recorded_states
from specexport.methods.eagle3 import Eagle3Training
from specexport.methods.eagle3.export import read_eagle3, save_eagle3
from specexport.methods.eagle3.train import _TrainingTimeTest, draft_losses, initial_draft, new_draft, train_eagle3
from specexport.training.predictions import measure_accuracy, weighted_loss
from specexport.training.run import load_model
from tests.checkpoints import GROUPED, VOCAB, make_eagle3
from tests.test_eagle3 import Paper
from tests.training import CPU, LANGUAGE, silent, train_on_language, training_options, windows_of

pytestmark = [pytest.mark.exporter, pytest.mark.slow]

STATES = (0, 1, 2)
HIDDEN, LAYERS = GROUPED["hidden_size"], GROUPED["num_hidden_layers"]


@pytest.fixture
def options(target: Path, tmp_path: Path) -> Callable[..., Eagle3Training]:
    return partial(training_options, "eagle3", target, tmp_path)


def test_the_loss_is_that_of_drafting_from_every_token_by_the_formulas(
    target: Path, options: Callable[..., Eagle3Training], tmp_path: Path
) -> None:
    """Draft after draft, token after token, against all of them at once: logits, and the loss made of them."""
    steps, kept, decay = 3, 200, 0.8
    settings = options(draft_vocab_size=kept, intermediate_size=48)
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    windows = windows_of(ids)
    torch.manual_seed(0)
    loaded = load_model(str(target), CPU, frozen=True)
    draft = new_draft(settings, loaded, STATES, windows)
    save_eagle3(tmp_path / "draft", draft, STATES, tied=False, dtype=torch.float32)
    texts: list[torch.Tensor] = []
    hook = draft.lm_head.register_forward_hook(lambda _module, _args, output: texts.append(output))
    loss, _ = weighted_loss(draft_losses(draft, loaded.model, STATES, windows.rows(torch.arange(2)), steps), decay)
    hook.remove()

    plain = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager").eval()
    with torch.no_grad(), recorded_states(plain, STATES) as noted:
        logits = plain(ids, use_cache=False).logits
    states = torch.cat([noted[count] for count in STATES], -1)
    expected = torch.zeros(())
    known = draft.target_ids
    for step in range(steps):
        drafted, losses = iter(texts[step]), []
        for row in range(2):
            for begin in range(ids.shape[1] - 2 - step):
                paper = Paper(tmp_path / "draft", target)
                for at in range(begin + 1):
                    state, expected_own = paper.row(paper.fused(states[row, at]), int(ids[row, at + 1]))
                for ahead in range(1, step + 1):
                    state, expected_own = paper.row(state, int(ids[row, begin + 1 + ahead]))
                torch.testing.assert_close(next(drafted), expected_own, rtol=1e-4, atol=1e-4)
                wanted = logits[row, begin + 1 + step]
                learnt = bool((known == wanted.argmax()).any())
                losses.append(
                    -(wanted[known].softmax(-1) * expected_own.log_softmax(-1)).sum() if learnt else torch.zeros(())
                )
        expected = expected + decay**step * torch.stack(losses).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)


def test_a_draft_learns_to_go_on_from_its_own_states(
    target: Path, options: Callable[..., Eagle3Training], tmp_path: Path
) -> None:
    loaded = load_model(str(target), CPU, frozen=True)
    windows = windows_of(LANGUAGE)
    torch.manual_seed(0)
    draft = new_draft(options(), loaded, STATES, windows)
    trained = train_on_language(
        draft, loaded.model, lambda batch, _: draft_losses(draft, loaded.model, STATES, batch, 3), 60,
        tmp_path / "draft.pt", [draft.lm_head],
    )  # fmt: skip
    accuracy = measure_accuracy(lambda batch: draft_losses(draft, loaded.model, STATES, batch, 3), 3, windows, CPU)
    assert all(row[0] > 0.9 for row in accuracy.ranks), accuracy.ranks
    assert accuracy.paths[0, 0, 0] > 0.8
    assert len(trained.history[-1]["top-1"]) == 3


def test_drafts_propose_the_most_frequent_tokens(options: Callable[..., Eagle3Training], target: Path) -> None:
    ids = torch.full((4, 8), 7)
    ids[:, :4] = torch.tensor([300, 9, 9, 300])
    windows = windows_of(ids)
    windows.learn[:, 0] = False
    loaded = load_model(str(target), CPU, frozen=True)
    draft = new_draft(options(draft_vocab_size=64), loaded, STATES, windows)
    # Those that are never learnt follow by their numbers.
    assert draft.target_ids.tolist() == [*range(63), 300]
    assert torch.equal(draft.lm_head.weight, loaded.model.get_output_embeddings().weight[draft.target_ids])


@pytest.mark.parametrize("kept", [None, 200])
def test_narrower_mlps_keep_the_strongest_units(
    options: Callable[..., Eagle3Training], target: Path, tmp_path: Path, kept: int | None
) -> None:
    """Those that write nothing can go, and it says the same."""
    folder = make_eagle3(tmp_path / "draft", target, draft_vocab=kept)
    state = load_file(folder / "model.safetensors")
    state["midlayer.mlp.down_proj.weight"][:, ::3] = 0.0
    save_file(state, folder / "model.safetensors")
    loaded = load_model(str(target), CPU, frozen=True)
    settings = options(draft=str(folder), states=None, intermediate_size=32)
    whole, states = initial_draft(msgspec.structs.replace(settings, intermediate_size=None), loaded)
    narrow, _ = initial_draft(settings, loaded)
    assert states == STATES
    assert narrow.layers[0].mlp.down_proj.weight.shape == (HIDDEN, 32)
    draw = torch.Generator().manual_seed(3)
    ids, hidden = torch.randint(0, VOCAB, (1, 6), generator=draw), torch.randn(1, 6, HIDDEN, generator=draw)
    texts = []
    for draft in (whole, narrow):
        with torch.no_grad(), lowering(_TrainingTimeTest()):
            texts.append(draft.lm_head(draft(ids, hidden, torch.arange(6)[None])[1]))
    torch.testing.assert_close(texts[1], texts[0])
    record = train_eagle3(settings, silent)
    written = read_eagle3(str(settings.output))
    assert (written.layer.intermediate_size, written.draft_vocab) == (32, kept or VOCAB)
    assert record["options"]["draft"] == str(folder)


def test_unsupported_drafts_cannot_be_continued(
    options: Callable[..., Eagle3Training], target: Path, tmp_path: Path
) -> None:
    folder = make_eagle3(tmp_path / "draft", target, published="speculators", model_type="qwen3", fc_norm=True)
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "has fc_norm, layers of a qwen3; expected one plain llama layer"),
        ({"states": STATES}, "--draft was given together with --states"),
        ({"draft_vocab_size": 100}, "--draft was given together with --draft-vocab-size"),
    )
    for changed, expected in refused:
        with pytest.raises(SpecExportError, match=expected):
            train_eagle3(options(**{"draft": str(folder), "states": None} | changed), silent)
    plain = make_eagle3(tmp_path / "plain", target)
    with pytest.raises(SpecExportError, match="--intermediate-size is 64; expected 16 to 48, that of --draft"):
        train_eagle3(options(draft=str(plain), states=None, intermediate_size=64), silent)


def test_those_who_may_read_the_configuration_may_read_the_weights(tmp_path: Path) -> None:
    save_head_tensors(tmp_path, {}, {"weight": torch.ones(1)})
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1
