"""Trains drafts over the target's hidden states: EAGLE-3 and DFlash."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from specexport.contract.errors import TrainError
from specexport.exporter.checkpoints.accuracy import HeadAccuracy
from specexport.exporter.checkpoints.config import text_sizes
from specexport.graphs.attention import ATTENTION_NAME
from specexport.graphs.layers import hidden_and_logits, recorded_states
from specexport.methods.hidden_states.checkpoint import DraftOutline
from specexport.training.data import Windows
from specexport.training.loop import Loss, optimizers
from specexport.training.predictions import Losses, measure_accuracy, weighted_loss
from specexport.training.run import Run, TrainingModel

_WATCHED_WINDOWS = 16
"""Held-out windows on which a draft is evaluated at every checkpoint."""


def train_and_write(
    run: Run[Any],
    draft: torch.nn.Module,
    outer: Iterable[torch.nn.Module],
    losses_of: Callable[[Windows, int | None], Losses],
    count: int,
    save: Callable[[Path], None],
    read: Callable[[str], DraftOutline],
    *,
    watch: bool = False,
) -> None:
    """Trains the parameters of a draft that require a gradient, measures it over held-out windows, and writes it.

    Args:
        outer: see :func:`~specexport.training.loop.optimizers`.
        losses_of: computes the losses of a batch, given its number; None when the draft is measured.
        save: writes the draft into a folder, which is read again as a check.
        watch: whether to measure the draft on a few held-out windows at every checkpoint, too.
    """
    options, target = run.options, run.target
    parameters = {name: parameter for name, parameter in draft.named_parameters() if parameter.requires_grad}
    optimizer_list = optimizers(options.optimizer, parameters.values(), outer, options.lr)

    def loss_at(number: int) -> Loss:
        with run.place.autocast():
            return weighted_loss(losses_of(run.batch(number, options.seed), number), options.decay)

    def accuracy_of(windows: Windows) -> HeadAccuracy:
        return measure_accuracy(lambda batch: losses_of(batch, None), count, windows, run.place)

    def evaluate() -> str:
        watched = run.held_out.part(torch.arange(len(run.held_out)) < _WATCHED_WINDOWS)
        return f"held-out acceptance {accuracy_of(watched).chain_length:.2f}"

    run.train("draft", parameters, optimizer_list, run.total_steps, loss_at, evaluate if watch else None)
    accuracy = accuracy_of(run.held_out)
    run.record |= {"accuracy": accuracy.ranks, "acceptance_length": accuracy.chain_length}
    vocab, hidden = target.model.get_output_embeddings().weight.shape
    with run.output() as folder:
        save(folder)
        outline = read(str(folder))
        outline.require_fit(hidden=hidden, vocab=vocab, layers=target.layers)
        outline.load(target.path, target.layers, target.max_positions)


def frozen(weight: torch.Tensor) -> torch.nn.Parameter:
    """A target's weight as an untrained parameter of a draft."""
    return torch.nn.Parameter(weight.detach(), requires_grad=False)


def checked_states(states: Sequence[int] | None, default: Sequence[int], layers: int) -> tuple[int, ...]:
    """The numbers of layers after which a draft reads the residual stream of a target with ``layers`` layers."""
    chosen = default if states is None else states
    if not all(0 <= count <= layers for count in chosen) or len(set(chosen)) != len(chosen):
        reason = " by default, as the target has few layers" if states is None else ""
        spread = sorted({max(1, count) for count in (layers // 3, 2 * layers // 3, layers - 1)})
        raise TrainError(
            f"--states is {' '.join(map(str, chosen))}{reason}; expected one number of layers or several different "
            f"ones, from 0 to the target's {layers}, such as --states {' '.join(map(str, spread))}"
        )
    return tuple(chosen)


def layer_sizes(target: TrainingModel, intermediate_size: int | None) -> dict[str, Any]:
    """Configuration fields of layers with a target's attention heads and, by default, its MLP width."""
    config, (vocab, hidden) = target.model.config, target.tables()[1].shape
    sizes, rotary = text_sizes(config), getattr(config, "rope_parameters", None) or {}
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate_size or sizes.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": sizes.key_value_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": min(target.max_positions, 1 << 17),
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(rotary.get("rope_theta", 10000.0))},
        "attn_implementation": ATTENTION_NAME,
    }


def run_target(model: Any, states: Sequence[int], batch: Windows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs the target over a batch ``[B,L]``.

    Returns:
        Its states after these numbers of layers, concatenated, ``[B,L,n*H]``; its logits ``[M,V]`` at the M positions
        before tokens to learn; and each position's index among these, int64 ``[B,L]``.
    """
    rows = batch.learnt_from(1)
    with torch.no_grad(), recorded_states(model, states) as by_layer:
        _, logits = hidden_and_logits(model, batch.ids, rows)
    return torch.cat([by_layer[count] for count in states], -1), logits, rows.flatten().cumsum(0).view_as(rows) - 1
