"""Training of drafts over the target's hidden states: EAGLE-3 and DFlash."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from specexport.exporter.checkpoints.accuracy import HeadAccuracy
from specexport.graphs.layers import recorded_states
from specexport.methods.hidden_states.checkpoint import DraftOutline
from specexport.training.data import Windows
from specexport.training.hidden import run_model
from specexport.training.loop import Loss, optimizers
from specexport.training.run import Run

_WATCHED_WINDOWS = 16
"""The number of held-out windows to evaluate a draft on at every checkpoint."""


def train_and_write(
    run: Run[Any],
    draft: torch.nn.Module,
    outer: Iterable[torch.nn.Module],
    loss_of: Callable[[Windows, int], Loss],
    accuracy_of: Callable[[Windows], HeadAccuracy],
    save: Callable[[Path], None],
    read: Callable[[str], DraftOutline],
    *,
    watch: bool = False,
) -> None:
    """Trains the parameters of a draft that require a gradient, measures it over held-out windows, and writes it.

    ``outer`` is as in :func:`~specexport.training.loop.optimizers`; ``loss_of`` takes a batch and its number. With
    ``watch`` the draft is measured on a few held-out windows at every checkpoint too. What ``save`` has written is read
    again, so that it can be used.

    Raises:
        BuildError: what was written does not fit the target.
    """
    options, target = run.options, run.target
    parameters = {name: parameter for name, parameter in draft.named_parameters() if parameter.requires_grad}
    optimizer_list = optimizers(options.optimizer, parameters.values(), outer, options.lr)

    def loss_at(number: int) -> Loss:
        with run.place.autocast():
            return loss_of(run.batch(number, options.seed), number)

    def evaluate() -> str:
        watched = run.held_out.part(torch.arange(len(run.held_out)) < _WATCHED_WINDOWS)
        return f"held-out acceptance {accuracy_of(watched).chain_length:.2f}"

    steps = options.total_steps(len(run.windows))
    run.train("draft", parameters, optimizer_list, steps, loss_at, evaluate if watch else None)
    accuracy = accuracy_of(run.held_out)
    run.record |= {"accuracy": accuracy.ranks, "acceptance_length": accuracy.chain_length}
    (vocab, hidden), layers = target.model.get_output_embeddings().weight.shape, layers_of(target.model)
    with run.output() as folder:
        save(folder)
        outline = read(str(folder))
        outline.require_fit(hidden=hidden, vocab=vocab, layers=layers)
        outline.load(target.path, layers, target.max_positions)


def layers_of(model: Any) -> int:
    """The number of a model's decoder layers."""
    return int(model.config.num_hidden_layers)


def frozen(weight: torch.Tensor) -> torch.nn.Parameter:
    """A target's weight as a parameter of a draft that is not trained."""
    return torch.nn.Parameter(weight.detach(), requires_grad=False)


def run_target(model: Any, states: Sequence[int], batch: Windows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs the target over a batch ``[B,L]``.

    Returns:
        Its states after each of the layer counts, concatenated, ``[B,L,n*H]``; its logits ``[M,V]`` at the positions
        before tokens to learn; and the index of each position among those, int64 ``[B,L]``.
    """
    rows = batch.learnt_from(1)
    with torch.no_grad(), recorded_states(model, states) as noted:
        _, logits = run_model(model, batch.ids, rows)
    return torch.cat([noted[count] for count in states], -1), logits, rows.flatten().cumsum(0).view_as(rows) - 1
