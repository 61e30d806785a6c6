"""DFlash drafts are trained: by the formulas, and they learn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specexport.graphs.layers import recorded_states
from specexport.methods.dflash import DFlashTraining
from specexport.methods.dflash.export import save_dflash
from specexport.methods.dflash.train import draft_losses, new_draft, random_anchors
from specexport.training.data import Windows
from specexport.training.predictions import Losses, measure_accuracy, weighted_loss
from specexport.training.run import load_model
from tests.checkpoints import VOCAB
from tests.test_dflash import Paper
from tests.training import CPU, LANGUAGE, saying, train_on_language, training_options, windows_of

pytestmark = [pytest.mark.exporter, pytest.mark.slow]

STATES, BLOCK = (1, 2), 4


@pytest.fixture
def options(target: Path, tmp_path: Path) -> Callable[..., DFlashTraining]:
    return partial(training_options, "dflash", target, tmp_path)


def test_the_loss_is_that_of_blocks_by_the_formulas(
    target: Path, options: Callable[..., DFlashTraining], tmp_path: Path
) -> None:
    """Block after block against all of them at once, some of which reach past the text: logits, and their loss."""
    decay, length = 0.7, 9
    ids = torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))
    windows = windows_of(ids)
    torch.manual_seed(0)
    loaded = load_model(str(target), CPU, frozen=True)
    draft = new_draft(options(intermediate_size=48), loaded, STATES)
    save_dflash(tmp_path / "draft", draft, STATES, 2, dtype=torch.float32)
    anchors = torch.tensor([[0, 3, 6], [1, 5, 7]])
    texts: list[torch.Tensor] = []
    hook = draft.lm_head.register_forward_hook(lambda _module, _args, output: texts.append(output))
    loss, _ = weighted_loss(draft_losses(draft, loaded.model, STATES, windows.rows(torch.arange(2)), anchors), decay)
    hook.remove()

    plain = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager").eval()
    with torch.no_grad(), recorded_states(plain, STATES) as noted:
        logits = plain(ids, use_cache=False).logits
    states = torch.cat([noted[count] for count in STATES], -1)
    paper = Paper(tmp_path / "draft", target, theta=10000.0)
    losses: list[list[torch.Tensor]] = [[] for _ in range(BLOCK - 1)]
    drafted = [iter(text) for text in texts]
    for row in range(2):
        for anchor in anchors[row].tolist():
            expected_own = paper.logits(states[row, : anchor + 1], int(ids[row, anchor + 1]), BLOCK - 1)
            for ahead in range(min(BLOCK - 1, length - 2 - anchor)):
                torch.testing.assert_close(next(drafted[ahead]), expected_own[ahead], rtol=1e-4, atol=1e-4)
                wanted = logits[row, anchor + 1 + ahead].softmax(-1)
                losses[ahead].append(-(wanted * expected_own[ahead].log_softmax(-1)).sum())
    expected = torch.stack([decay**at * torch.stack(part).mean() for at, part in enumerate(losses)]).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)


def test_a_draft_learns_blocks(target: Path, options: Callable[..., DFlashTraining], tmp_path: Path) -> None:
    loaded = load_model(str(target), CPU, frozen=True)
    torch.manual_seed(0)
    draft = new_draft(options(), loaded, STATES)

    def losses_of(batch: Windows, number: int) -> Losses:
        return draft_losses(draft, loaded.model, STATES, batch, random_anchors(batch, 8, 0, number))

    trained = train_on_language(draft, loaded.model, losses_of, 100, tmp_path / "draft.pt")
    windows = windows_of(LANGUAGE[:8])
    with saying(loaded.model) as say:
        say(windows.rows(torch.arange(8)))
        accuracy = measure_accuracy(partial(draft_losses, draft, loaded.model, STATES), BLOCK - 1, windows, CPU)
    assert all(row[0] > 0.9 for row in accuracy.ranks), accuracy.ranks
    assert accuracy.paths[0, 0, 0] > 0.8
    assert len(trained.history[-1]["top-1"]) == BLOCK - 1


def test_anchors_are_drawn_where_something_is_learnt() -> None:
    windows = windows_of(torch.arange(40).view(2, 20))
    windows.learn[:, :10] = False
    batch = windows.rows(torch.arange(2))
    first, second = (random_anchors(batch, 5, 3, number) for number in (0, 1))
    assert first.tolist() != second.tolist()
    assert torch.equal(first, random_anchors(batch, 5, 3, 0))
    # Behind the anchor comes the root, and behind that a token that is learnt.
    assert all(8 <= at < 18 for at in (*first.flatten().tolist(), *second.flatten().tolist()))
    assert all(len(set(row)) == 5 for row in first.tolist())
