"""Training of drafts over the target's hidden states: EAGLE-3 and DFlash."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from specexport.exporter.checkpoints.accuracy import HeadAccuracy
from specexport.methods.hidden_states.checkpoint import DraftOutline
from specexport.training.data import Windows
from specexport.training.loop import Loss, optimizers
from specexport.training.run import Run

_WATCHED_WINDOWS = 16
"""The number of held-out windows to evaluate a draft on at every checkpoint."""


def train_draft(
    run: Run[Any],
    draft: torch.nn.Module,
    outer: Iterable[torch.nn.Module],
    loss_of: Callable[[Windows, int], Loss],
    accuracy_of: Callable[[Windows], HeadAccuracy] | None = None,
) -> None:
    """Trains the parameters of a draft that require a gradient.

    ``outer`` is as in :func:`~specexport.training.loop.optimizers`; ``loss_of`` takes a batch and its number.
    ``accuracy_of`` evaluates the draft on a few held-out windows at every checkpoint.
    """
    options = run.options
    parameters = {name: parameter for name, parameter in draft.named_parameters() if parameter.requires_grad}
    chosen = optimizers(options.optimizer, parameters.values(), outer, options.lr)

    def loss_at(number: int) -> Loss:
        with run.place.autocast():
            return loss_of(run.batch(number, options.seed), number)

    evaluate = None
    if accuracy_of is not None:
        few = run.held_out.part(torch.arange(len(run.held_out)) < _WATCHED_WINDOWS)
        measure = accuracy_of

        def evaluate() -> str:
            return f"held-out acceptance {measure(few).chain_length:.2f}"

    run.train("draft", parameters, chosen, options.total_steps(len(run.windows)), loss_at, evaluate)


def write_draft(
    run: Run[Any],
    accuracy: HeadAccuracy,
    layers: int,
    save: Callable[[Path], None],
    read: Callable[[str], DraftOutline],
) -> None:
    """Records a draft's accuracy, writes it for a target of so many layers, and reads it, so that it can be used.

    Raises:
        BuildError: it does not.
    """
    run.record |= {"accuracy": accuracy.ranks, "acceptance_length": accuracy.chain_length}
    vocab, hidden = run.target.model.get_output_embeddings().weight.shape
    with run.output() as folder:
        save(folder)
        outline = read(str(folder))
        outline.require_fit(hidden=hidden, vocab=vocab, layers=layers)
        outline.load(run.target.path, layers, run.target.max_positions)
