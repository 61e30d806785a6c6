"""Medusa heads' loss, and the two ways to train them: alone, or with the model (Cai et al., arXiv 2401.10774)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from specexport.checkpoints.medusa import HeadAccuracy
from specexport.graphs.medusa import MedusaHeads
from specexport.training.data import Windows
from specexport.training.distill import divergence
from specexport.training.hidden import measured, run_model, summed_loss, train_over, weighted
from specexport.training.loop import Loss, Trained, adamw, train
from specexport.training.options import HeadOptions
from specexport.training.setup import Place, Watch

_NOISE = 0.01
"""Standard deviation of what deep heads start with."""


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


@torch.no_grad()
def head_accuracy(
    heads: MedusaHeads, model: Any, windows: Windows, place: Place, *, batch_size: int = 8
) -> HeadAccuracy:
    """Measures heads over windows they were not trained on."""
    lm_head = model.get_output_embeddings()

    def ranks(hidden: torch.Tensor, batch: Windows) -> Iterator[torch.Tensor]:
        return (_head_loss(heads, head, hidden, batch, lm_head)[1] for head in range(len(heads)))

    return measured(ranks, len(heads), model, windows, place, batch_size=batch_size)


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


def train_heads(
    heads: MedusaHeads,
    model: Any,
    windows: Windows,
    options: HeadOptions,
    *,
    place: Place,
    checkpoint: Path,
    watch: Watch,
    cache: Path | None = None,
) -> Trained:
    """Medusa-1: trains heads over a model that stays as it is; see :func:`train_over`."""
    lm_head = model.get_output_embeddings()

    def loss(hidden: torch.Tensor, batch: Windows) -> Loss:
        return heads_loss(heads, hidden, batch, lm_head, options.decay)

    return train_over(
        "heads", heads, loss, model, windows, options, place=place, checkpoint=checkpoint, watch=watch, cache=cache
    )


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
