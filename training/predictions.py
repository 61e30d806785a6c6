"""Losses and accuracy of predictions of several tokens by heads, stages or drafts over a model's hidden states."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as recomputed

from specexport.contract.errors import TrainError
from specexport.contract.tree import MAX_NODES
from specexport.exporter.checkpoints.accuracy import HeadAccuracy
from specexport.graphs.layers import hidden_and_logits
from specexport.graphs.propose import MAX_TOP_K
from specexport.training.data import Windows
from specexport.training.loop import Loss, adamw, progress_bar
from specexport.training.run import Place, Run

Losses = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""The result of :func:`summed_loss` for each prediction i, over the positions ``learnt_from(2 + i)`` of a batch."""
_MEASURED_AT_ONCE = 8
"""Number of windows in a batch that is measured."""
_LOGITS_AT_ONCE = 1 << 27
"""Maximum number of logits that a head keeps for the backward pass; more are recomputed."""


def weighted_loss(losses: Losses, decay: float) -> Loss:
    """The sum of decay^i times the mean of loss i, and the top-1 and top-5 accuracy of each prediction."""
    means: list[torch.Tensor] = []
    top: dict[str, list[torch.Tensor]] = {"top-1": [], "top-5": []}
    for total, ranks in losses:
        means.append(total / max(1, len(ranks)))
        top["top-1"].append((ranks < 1).float().sum() / max(1, len(ranks)))
        top["top-5"].append((ranks < 5).float().sum() / max(1, len(ranks)))
    loss = torch.stack([decay**at * mean for at, mean in enumerate(means)]).sum()
    return loss, {name: torch.stack(values) for name, values in top.items()}


def summed_loss(
    project: Callable[[torch.Tensor], torch.Tensor],
    states: torch.Tensor,
    labels: torch.Tensor,
    vocab: int,
    soft_targets: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed cross-entropy of M tokens, and their ranks, int32 ``[M]``.

    Args:
        project: maps states ``[N,H]`` to logits ``[N,V]``.
        states: ``[M,H]``.
        labels: the tokens, int64 ``[M]``.
        soft_targets: returns the distributions to learn, ``[N,V]``, given the indices of N rows; by default, the tokens
            are learned.
    """

    def part(rows: torch.Tensor, states: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = project(states).float()
        targets = labels if soft_targets is None else soft_targets(rows)
        return F.cross_entropy(logits, targets, reduction="sum"), _ranks(logits, labels)

    # The distributions of all draft tokens are kept as well.
    at_once = max(1, _LOGITS_AT_ONCE // (vocab if soft_targets is None else 8 * vocab))
    rows = torch.arange(len(states), device=states.device)
    if len(states) <= at_once:
        return part(rows, states, labels)
    parts = [
        recomputed(part, *(of[start : start + at_once] for of in (rows, states, labels)), use_reentrant=False)
        for start in range(0, len(states), at_once)
    ]
    return torch.stack([total for total, _ in parts]).sum(), torch.cat([ranks for _, ranks in parts])


@torch.no_grad()
def _ranks(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The number of tokens that are more probable than each label."""
    # Summing booleans directly would make a 64-bit copy first.
    return (logits > logits.gather(-1, labels[:, None])).to(torch.uint8).sum(dim=-1, dtype=torch.int32)


def train_over_hidden(
    run: Run[Any],
    name: str,
    trained: torch.nn.Module,
    losses_of: Callable[[torch.Tensor, Windows], Losses],
    steps: int,
    *,
    seed: int,
) -> None:
    """Trains a module on the hidden states of a frozen target over the run's windows.

    ``losses_of`` takes hidden states after the final norm, ``[B,L,H]``, and a batch; ``seed`` determines the batches.
    """
    options, model, place = run.options, run.target.model, run.place
    cached = _cached_hidden(run, run.work / f"hidden-{name}.bin") if options.cache_hidden else None

    def loss_at(number: int) -> Loss:
        batch = run.batch(number, seed)
        with place.autocast():
            if cached is not None:
                hidden = cached[run.windows.order(number, options.batch_size, seed)].to(place.device)
            else:
                with torch.no_grad():
                    hidden = hidden_and_logits(model, batch.ids)[0].to(place.frozen_dtype)
            return weighted_loss(losses_of(hidden, batch), options.decay)

    optimizer = adamw([(list(trained.parameters()), options.lr)])
    run.train(name, dict(trained.named_parameters()), [optimizer], steps, loss_at)


@torch.no_grad()
def _cached_hidden(run: Run[Any], path: Path) -> torch.Tensor:
    """The hidden states of all windows, ``[N,L,H]``, in a memory-mapped file."""
    model, windows, place = run.target.model, run.windows, run.place
    shape = (*windows.ids.shape, int(model.get_output_embeddings().weight.shape[1]))
    size = math.prod(shape) * place.frozen_dtype.itemsize

    def mapped(file: Path) -> torch.Tensor:
        return torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=place.frozen_dtype).view(shape)

    if path.exists() and path.stat().st_size == size:
        return mapped(path)
    free = shutil.disk_usage(path.parent).free
    if size > 0.9 * free:
        raise TrainError(
            f"{path}: hidden states of {windows.ids.numel()} tokens take {size / 1e9:.1f} GB, but the disk has only "
            f"{free / 1e9:.1f} GB left. Train without --cache-hidden, or choose a folder elsewhere with --work"
        )
    writing = path.with_suffix(".tmp")
    states = mapped(writing)
    with progress_bar("hidden states", len(windows)) as bar:
        for rows in windows.in_order(run.options.batch_size):
            with place.autocast():
                hidden, _ = hidden_and_logits(model, windows.rows(rows).ids.to(place.device))
            states[rows[0] : rows[-1] + 1] = hidden.to(place.frozen_dtype).cpu()
            bar.update(len(rows))
    writing.replace(path)
    return states


def measure_over_hidden(
    losses_of: Callable[[torch.Tensor, Windows], Losses], count: int, model: Any, windows: Windows, place: Place
) -> HeadAccuracy:
    """:func:`measure_accuracy` of heads or stages; ``losses_of`` is as for :func:`train_over_hidden`."""
    return measure_accuracy(
        lambda batch: losses_of(hidden_and_logits(model, batch.ids)[0], batch), count, windows, place
    )


@torch.no_grad()
def measure_accuracy(
    losses_of: Callable[[Windows], Losses], count: int, windows: Windows, place: Place
) -> HeadAccuracy:
    """Measures the accuracy of ``count`` predictions on held-out windows."""
    counts = torch.zeros(count, MAX_TOP_K + 1, dtype=torch.int64)
    paths: Counter[tuple[int, ...]] = Counter()
    positions = 0
    for rows in windows.in_order(_MEASURED_AT_ONCE):
        batch = windows.rows(rows).to(place.device)
        at = [batch.learnt_from(2 + ahead) for ahead in range(count)]
        true_ranks = torch.full((count, *batch.ids.shape), MAX_TOP_K, dtype=torch.int32, device=place.device)
        with place.autocast():
            for ahead, (_, ranks) in enumerate(losses_of(batch)):
                true_ranks[ahead][at[ahead]] = ranks.clamp(max=MAX_TOP_K)
                counts[ahead] += true_ranks[ahead][at[ahead]].bincount(minlength=MAX_TOP_K + 1).cpu()
        for path in true_ranks[:, torch.stack(at).all(0)].T.tolist():
            positions += 1
            right = path.index(MAX_TOP_K) if MAX_TOP_K in path else len(path)
            paths.update(tuple(path[:end]) for end in range(1, right + 1))
    shares: list[list[float]] = (counts[:, :MAX_TOP_K] / counts.sum(dim=1, keepdim=True).clamp(min=1)).tolist()
    return HeadAccuracy(shares, {path: count / positions for path, count in paths.most_common(MAX_NODES)})
