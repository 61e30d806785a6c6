"""Medusa heads' loss, and the two ways to train them: alone, or with the model (Cai et al., arXiv 2401.10774)."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.checkpoint import checkpoint as recomputed

from specexport.contract.errors import TrainError
from specexport.contract.tree import MAX_NODES
from specexport.exporter.medusa import HeadAccuracy
from specexport.graphs.medusa import MAX_TOP_K, MedusaHeads
from specexport.training.data import Windows
from specexport.training.distill import divergence
from specexport.training.loop import Loss, Schedule, Trained, adamw, train
from specexport.training.setup import Place, Watch

_NOISE = 0.01
"""Standard deviation of what deep heads start with."""

_LOGITS_AT_ONCE = 1 << 27
"""Numbers of a head's logits that are kept for the backward pass; where there are more, they are computed again."""


@dataclass(frozen=True)
class HeadOptions:
    """How heads are trained; the defaults are the paper's.

    Attributes:
        steps: of the optimizer.
        batch_size: windows a batch.
        accumulate: batches a step.
        lr: the heads' learning rate, after the warm-up and before a cosine to zero.
        warmup: share of the steps that is the warm-up.
        decay: head i counts ``decay ** i``.
        seed: of the batches.
        save_every: steps from a checkpoint to the next.
    """

    steps: int
    batch_size: int = 8
    accumulate: int = 1
    lr: float = 1e-3
    warmup: float = 0.1
    decay: float = 0.8
    seed: int = 0
    save_every: int | None = None

    @property
    def schedule(self) -> Schedule:
        """The schedule of every learning rate."""
        return Schedule(self.steps, round(self.warmup * self.steps))


@dataclass(frozen=True)
class JointOptions:
    """How a model is trained together with its heads (Medusa-2).

    Attributes:
        lr: the model's learning rate.
        heads_weight: λ; the loss is that of the model plus λ times that of the heads.
        lm_loss: ``ce``, the cross-entropy of the next token, or ``kl``, the divergence from the model as it was.
    """

    lr: float
    heads_weight: float = 0.2
    lm_loss: str = "ce"


# ------------------------------------------------------------------------------------------------------------ the loss


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


def heads_loss(heads: MedusaHeads, hidden: torch.Tensor, batch: Windows, lm_head: Any, decay: float) -> Loss:
    """Σ decay^i · CE_i, where CE_i is head i's mean cross-entropy of the token 2 + i positions on (arXiv 2401.10774,
    section 2.2).

    Args:
        heads: the heads.
        hidden: ``[B,L,H]``.
        batch: the same windows, ``[B,L]``.
        lm_head: the model's own, where heads are tied to it.
        decay: of the weights.

    Returns:
        The loss, and as ``top-1`` and ``top-5`` each head's share of tokens among its first and first five candidates.
    """
    return weighted((_head_loss(heads, head, hidden, batch, lm_head) for head in range(len(heads))), decay)


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


def _head_loss(
    heads: MedusaHeads, head: int, hidden: torch.Tensor, batch: Windows, lm_head: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`summed_loss`, of the tokens a head is to learn."""

    def project(states: torch.Tensor) -> torch.Tensor:
        out = heads[head](states)
        logits: torch.Tensor = lm_head(out) if heads.tied else out
        return logits

    learnt = batch.learnt_from(2 + head)
    return summed_loss(project, hidden[learnt], batch.ids.roll(-2 - head, dims=1)[learnt], heads.vocab)


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


@torch.no_grad()
def head_accuracy(
    heads: MedusaHeads, model: Any, windows: Windows, place: Place, *, batch_size: int = 8
) -> HeadAccuracy:
    """Measures heads over windows they were not trained on."""
    lm_head = model.get_output_embeddings()

    def ranks(hidden: torch.Tensor, batch: Windows) -> Iterator[torch.Tensor]:
        return (_head_loss(heads, head, hidden, batch, lm_head)[1] for head in range(len(heads)))

    return measured(ranks, len(heads), model, windows, place, batch_size=batch_size)


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


def new_heads(count: int, layers: int, model: Any, *, tied: bool) -> MedusaHeads:
    """Heads that at first predict what the model does: blocks change little, projections are the model's own.

    A single block starts at zero, as in the paper. Several, all at zero, would learn the same thing, so theirs start
    with a little noise from torch's global generator.
    """
    lm_head = model.get_output_embeddings().weight
    vocab, hidden = lm_head.shape
    heads = MedusaHeads(count, layers, hidden, vocab, tied=tied)
    if layers > 1:
        with torch.no_grad():
            for name, parameter in heads.named_parameters():
                if name.endswith("linear.weight"):
                    parameter.normal_(0.0, _NOISE)
    if not tied:
        with torch.no_grad():
            for name, parameter in heads.named_parameters():
                if name.endswith(f".{layers}.weight"):
                    parameter.copy_(lm_head)
    return heads.to(lm_head.device)


# --------------------------------------------------------------------------------------------------------- the stages


def train_heads(
    heads: MedusaHeads,
    model: Any,
    windows: Windows,
    options: HeadOptions,
    *,
    place: Place,
    checkpoint: Path,
    watch: Watch,
    cached: torch.Tensor | None = None,
) -> Trained:
    """Medusa-1: trains heads over a model that stays as it is; see :func:`train_over`."""
    lm_head = model.get_output_embeddings()

    def loss(hidden: torch.Tensor, batch: Windows) -> Loss:
        return heads_loss(heads, hidden, batch, lm_head, options.decay)

    return train_over(
        "heads", heads, loss, model, windows, options, place=place, checkpoint=checkpoint, watch=watch, cached=cached
    )


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
    cached: torch.Tensor | None = None,
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
        cached: hidden states of all windows, ``[N,L,H]``, see :func:`cache_hidden`; computed each time if not given.
    """

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
def cache_hidden(
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
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=watch.console) as progress:
        task = progress.add_task("hidden states", total=len(windows))
        for rows in windows.in_order(batch_size):
            with place.autocast():
                found, _ = run_model(model, windows.rows(rows).ids.to(place.device))
            states[rows[0] : rows[-1] + 1] = found.to(place.frozen_dtype).cpu()
            progress.update(task, advance=len(rows))
    writing.replace(path)
    return states


def train_jointly(
    heads: MedusaHeads,
    model: Any,
    windows: Windows,
    options: HeadOptions,
    joint: JointOptions,
    *,
    original: Callable[[], contextlib.AbstractContextManager[Any]],
    place: Place,
    checkpoint: Path,
    watch: Watch,
) -> Trained:
    """Medusa-2: trains a model and its heads with L_LM + λ · L_heads (arXiv 2401.10774, sections 2.2.2 and 2.3.2).

    Args:
        heads: trained in place.
        model: the causal LM, whose parameters that require a gradient are trained in place.
        windows: to learn.
        options: see there.
        joint: see there.
        original: a context that gives the model as it was, for ``lm_loss`` ``kl``.
        place: where to compute.
        checkpoint: see :func:`specexport.training.loop.train`.
        watch: where to say how it goes.
    """
    lm_head = model.get_output_embeddings()
    base = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    def loss_at(number: int) -> Loss:
        batch = windows.rows(windows.order(number, options.batch_size, options.seed)).to(place.device)
        learnt = batch.learnt_from(1)
        with place.autocast():
            hidden, logits = run_model(model, batch.ids, learnt)
            if joint.lm_loss == "kl":
                with torch.no_grad(), original() as teacher:
                    _, wanted = run_model(teacher, batch.ids, learnt)
                own = divergence(logits, wanted, "forward_kl")
            else:
                own = F.cross_entropy(logits.float(), batch.ids.roll(-1, dims=1)[learnt])
            of_heads, figures = heads_loss(heads, hidden, batch, lm_head, options.decay)
        return own + joint.heads_weight * of_heads, {f"lm {joint.lm_loss}": own.detach()} | figures

    return train(
        "joint",
        dict(heads.named_parameters(prefix="heads")) | base,
        [adamw([(list(heads.parameters()), options.lr), (list(base.values()), joint.lr)])],
        options.schedule,
        loss_at,
        checkpoint=checkpoint,
        log=watch.log,
        console=watch.console,
        every=options.save_every,
        accumulate=options.accumulate,
    )
