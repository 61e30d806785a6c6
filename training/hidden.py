"""Training and measuring what reads a model's hidden states: Medusa heads, and the stages of an MLP speculator.

The model itself stays as it is.
"""

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

from specexport.checkpoints.medusa import HeadAccuracy
from specexport.contract.errors import TrainError
from specexport.contract.tree import MAX_NODES
from specexport.graphs.medusa import MAX_TOP_K
from specexport.training.data import Windows
from specexport.training.loop import Loss, Trained, adamw, progress_bar, train
from specexport.training.options import HeadOptions
from specexport.training.setup import Place, Watch

_LOGITS_AT_ONCE = 1 << 27
"""Numbers of a head's logits that are kept for the backward pass; where there are more, they are computed again."""


def run_model(model: Any, ids: torch.Tensor, rows: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states heads read, and logits of some positions only: a vocabulary of logits each is most of the cost.

    Args:
        model: a causal LM.
        ids: int64 ``[B,L]``.
        rows: bool ``[B,L]``, the M positions whose logits are wanted; by default none are.

    Returns:
        Hidden states after the final norm, ``[B,L,H]``, and logits, ``[M,V]``.
    """
    hidden: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden.append(args[0])
        # Never no row at all: not every model's code bears that.
        return (args[0][:1, :1] if rows is None else args[0][rows][None], *args[1:])

    hook = model.get_output_embeddings().register_forward_pre_hook(keep)
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    return hidden[0], logits[0] if rows is not None else logits[:0, 0]


# ------------------------------------------------------------------------------------------------------------- the loss


def weighted(losses: Iterable[tuple[torch.Tensor, torch.Tensor]], decay: float) -> Loss:
    """Σ decay^i · the mean of loss i, and the shares that came first, and among the first five, of each.

    Args:
        losses: as :func:`summed_loss` gives them.
        decay: of the weights.
    """
    means: list[torch.Tensor] = []
    top: dict[str, list[torch.Tensor]] = {"top-1": [], "top-5": []}
    for total, ranks in losses:
        means.append(total / max(1, len(ranks)))
        top["top-1"].append((ranks < 1).float().sum() / max(1, len(ranks)))
        top["top-5"].append((ranks < 5).float().sum() / max(1, len(ranks)))
    loss = torch.stack([decay**at * mean for at, mean in enumerate(means)]).sum()
    return loss, {name: torch.stack(values) for name, values in top.items()}


def summed_loss(
    project: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor, labels: torch.Tensor, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross-entropy of M tokens, and the ranks these have, ``[M]``.

    Args:
        project: makes logits ``[N,V]`` of states ``[N,H]``.
        states: ``[M,H]``.
        labels: the tokens, int64 ``[M]``.
        vocab: V.
    """

    def part(states: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = project(states).float()
        return F.cross_entropy(logits, labels, reduction="sum"), _ranks(logits, labels)

    at_once = max(1, _LOGITS_AT_ONCE // vocab)
    if len(states) <= at_once:
        return part(states, labels)
    parts = [
        recomputed(part, states[start : start + at_once], labels[start : start + at_once], use_reentrant=False)
        for start in range(0, len(states), at_once)
    ]
    return torch.stack([total for total, _ in parts]).sum(), torch.cat([ranks for _, ranks in parts])


@torch.no_grad()
def _ranks(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """How many tokens are more probable than each label."""
    # Summing booleans as they are makes a 64-bit copy of the vocabulary first.
    return (logits > logits.gather(-1, labels[:, None])).to(torch.uint8).sum(dim=-1, dtype=torch.int32)


# ------------------------------------------------------------------------------------------------------------- training


def train_over(
    name: str,
    trained: torch.nn.Module,
    loss_of: Callable[[torch.Tensor, Windows], Loss],
    model: Any,
    windows: Windows,
    options: HeadOptions,
    *,
    place: Place,
    checkpoint: Path,
    watch: Watch,
    cache: Path | None = None,
) -> Trained:
    """Trains what reads a model's hidden states; the model stays as it is.

    Args:
        name: to show.
        trained: in place.
        loss_of: of hidden states after the final norm, ``[B,L,H]``, and a batch.
        model: a causal LM.
        windows: to learn.
        options: see there.
        place: where to compute.
        checkpoint: see :func:`specexport.training.loop.train`.
        watch: where to say how it goes.
        cache: file to keep the hidden states of all windows in; by default they are computed each time.

    Raises:
        TrainError: the disk has no room for the cache, or the checkpoint is of another training.
    """
    cached = None
    if cache is not None:
        cached = _cached_hidden(model, windows, cache, place=place, batch_size=options.batch_size, watch=watch)

    def loss_at(number: int) -> Loss:
        rows = windows.order(number, options.batch_size, options.seed)
        batch = windows.rows(rows).to(place.device)
        with place.autocast():
            if cached is None:
                with torch.no_grad():
                    hidden = run_model(model, batch.ids)[0].to(place.frozen_dtype)
            else:
                hidden = cached[rows].to(place.device)
            return loss_of(hidden, batch)

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # A head's weight that is shared would gather a gradient nobody uses.
    model.requires_grad_(False)
    try:
        return train(
            name,
            dict(trained.named_parameters()),
            [adamw([(list(trained.parameters()), options.lr)])],
            options.schedule,
            loss_at,
            checkpoint=checkpoint,
            log=watch.log,
            console=watch.console,
            every=options.save_every,
            accumulate=options.accumulate,
        )
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


@torch.no_grad()
def _cached_hidden(
    model: Any, windows: Windows, path: Path, *, place: Place, batch_size: int, watch: Watch
) -> torch.Tensor:
    """Hidden states of all windows, ``[N,L,H]``, in a file that is mapped, not read.

    Raises:
        TrainError: the disk has no room for them.
    """
    width = int(model.get_output_embeddings().weight.shape[1])
    shape = (*windows.ids.shape, width)
    size = math.prod(shape) * place.frozen_dtype.itemsize

    def mapped(file: Path) -> torch.Tensor:
        return torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=place.frozen_dtype).view(shape)

    if path.exists() and path.stat().st_size == size:
        return mapped(path)
    free = shutil.disk_usage(path.parent).free
    if size > 0.9 * free:
        raise TrainError(
            f"{path}: hidden states of {windows.ids.numel()} tokens are {size / 1e9:.1f} GB, and the disk has "
            f"{free / 1e9:.1f} GB free. Train without --cache-hidden, or choose a folder elsewhere with --work"
        )
    writing = path.with_suffix(".tmp")
    states = mapped(writing)
    with progress_bar(watch.console) as progress:
        task = progress.add_task("hidden states", total=len(windows))
        for rows in windows.in_order(batch_size):
            with place.autocast():
                found, _ = run_model(model, windows.rows(rows).ids.to(place.device))
            states[rows[0] : rows[-1] + 1] = found.to(place.frozen_dtype).cpu()
            progress.update(task, advance=len(rows))
    writing.replace(path)
    return states


# ------------------------------------------------------------------------------------------------------------ measuring


@torch.no_grad()
def measured(
    ranks_of: Callable[[torch.Tensor, Windows], Iterable[torch.Tensor]],
    count: int,
    model: Any,
    windows: Windows,
    place: Place,
    *,
    batch_size: int = 8,
) -> HeadAccuracy:
    """Measures what predicts several tokens ahead.

    Args:
        ranks_of: of hidden states ``[B,L,H]`` and a batch, for each of the predictions the ranks of the true tokens
            where ``learnt_from(2 + i)`` says.
        count: how many predictions there are.
        model: the causal LM that makes the hidden states.
        windows: not trained on.
        place: where to compute.
        batch_size: windows at once.
    """
    counts = torch.zeros(count, MAX_TOP_K + 1, dtype=torch.int64)
    paths: Counter[tuple[int, ...]] = Counter()
    positions = 0
    for rows in windows.in_order(batch_size):
        batch = windows.rows(rows).to(place.device)
        at = [batch.learnt_from(2 + ahead) for ahead in range(count)]
        found = torch.full((count, *batch.ids.shape), MAX_TOP_K, dtype=torch.int32, device=place.device)
        with place.autocast():
            hidden, _ = run_model(model, batch.ids)
            for ahead, ranks in enumerate(ranks_of(hidden, batch)):
                found[ahead][at[ahead]] = ranks.clamp(max=MAX_TOP_K)
                counts[ahead] += found[ahead][at[ahead]].bincount(minlength=MAX_TOP_K + 1).cpu()
        for path in found[:, torch.stack(at).all(0)].T.tolist():
            positions += 1
            right = path.index(MAX_TOP_K) if MAX_TOP_K in path else len(path)
            paths.update(tuple(path[:end]) for end in range(1, right + 1))
    shares: list[list[float]] = (counts[:, :MAX_TOP_K] / counts.sum(dim=1, keepdim=True).clamp(min=1)).tolist()
    return HeadAccuracy(shares, {path: count / positions for path, count in paths.most_common(MAX_NODES)})
