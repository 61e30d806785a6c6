"""``specexport train medusa``: trains heads alone, or together with their model (Cai et al., arXiv 2401.10774)."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from specexport.contract.errors import TrainError
from specexport.exporter.checkpoints.accuracy import HeadAccuracy, accuracy_config
from specexport.exporter.checkpoints.checkpoint import load_checkpoint
from specexport.exporter.checkpoints.documents import CONFIG
from specexport.exporter.checkpoints.quiet import quiet
from specexport.graphs.layers import hidden_and_logits
from specexport.methods.medusa import MedusaTraining
from specexport.methods.medusa.export import COMPATIBLE, read_medusa, save_compatible, save_medusa
from specexport.methods.medusa.graph import MedusaHeads
from specexport.training.data import Windows
from specexport.training.distill import divergence
from specexport.training.loop import Log, Loss, adamw
from specexport.training.options import within
from specexport.training.predictions import Losses, measure_over_hidden, summed_loss, train_over_hidden, weighted_loss
from specexport.training.run import Run, TrainingModel, load_target, open_run, save_model

_NOISE = 0.01
"""Standard deviation of the initial weights of heads with several blocks."""


def train_medusa(options: MedusaTraining, log: Log) -> dict[str, Any]:
    """Trains heads, or a model with heads."""
    base = load_target(options, frozen=options.stage == 1)
    with open_run("train medusa", options, base, log) as run:
        within("heads", options.heads, 1, run.window - 2, "two less than --seq-len")
        if options.self_distill:
            # Trained weights are in float32; sampling is twice as fast from a copy in bfloat16.
            run.self_distill(base if options.stage == 1 else load_target(options), options.self_distill)
        run.describe_data()
        torch.manual_seed(options.seed)
        heads = new_heads(options.heads, options.layers, base.model, tied=options.tie_lm_head)
        total = run.total_steps
        alone = total if options.stage == 1 else round(options.heads_first * total)
        if options.stage == 2:
            run.record["lm_loss_before"] = _lm_loss(run)
        losses = partial(head_losses, heads, lm_head=base.model.get_output_embeddings())
        if alone:
            train_over_hidden(run, "heads", heads, losses, alone, seed=options.seed)
        if options.stage == 2:
            _train_jointly(run, heads, max(1, total - alone))
            run.record["lm_loss"] = _lm_loss(run)
        accuracy = measure_over_hidden(losses, len(heads), base.model, run.held_out, run.place)
        run.record["head_accuracy"] = accuracy.ranks
        with run.output() as folder:
            if options.stage == 1:
                weight = base.model.get_output_embeddings().weight.cpu()
                save_medusa(folder, heads.cpu().half(), weight, base=options.target, accuracy=accuracy)
            else:
                _save_together(folder, base, heads.cpu(), accuracy, str(options.output))
    return run.record


def head_losses(heads: MedusaHeads, hidden: torch.Tensor, batch: Windows, lm_head: Any) -> Losses:
    """Head i's cross-entropy of the token 2 + i positions later (section 2.2).

    Hidden states are ``[B,L,H]``, windows ``[B,L]``; ``lm_head`` is the model's own, for heads that are tied to it.
    """
    for ahead, head in enumerate(heads):

        def project(states: torch.Tensor, head: Any = head) -> torch.Tensor:
            return lm_head(head(states)) if heads.tied else head(states)

        learnt = batch.learnt_from(2 + ahead)
        yield summed_loss(project, hidden[learnt], batch.ids.roll(-2 - ahead, dims=1)[learnt], heads.vocab)


def new_heads(count: int, layers: int, model: Any, *, tied: bool) -> MedusaHeads:
    """New heads that predict the model's next token: blocks change little, and projections equal the model's own.

    A single block starts at zero, as in the paper. Several blocks start with a little noise from torch's global
    generator, as blocks of zeros would all learn the same.
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


def _train_jointly(run: Run[MedusaTraining], heads: MedusaHeads, steps: int) -> None:
    """Medusa-2: the model and its heads learn L_LM + λ · L_heads (sections 2.2.2 and 2.3.2); adapters are merged."""
    options, model, place = run.options, run.target.model, run.place
    kind = options.lm_loss or ("kl" if options.self_distill else "ce")
    rate = options.base_lr or options.lr / (4 if options.tune == "lora" else 50)
    original: Callable[[], contextlib.AbstractContextManager[Any]]
    adapted = None
    if options.tune == "lora":
        adapted = _with_adapters(model, options.lora_rank, options.seed)
        original = partial(_without_adapters, adapted, model)
    else:
        original = partial(contextlib.nullcontext, copy.deepcopy(model) if kind == "kl" else None)
        model.requires_grad_(True)
    base = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    lm_head = model.get_output_embeddings()

    def loss_at(number: int) -> Loss:
        # Another seed, so that batches do not repeat in the order of the first stage.
        batch = run.batch(number, options.seed + 1)
        learnt = batch.learnt_from(1)
        with place.autocast():
            hidden, logits = hidden_and_logits(model, batch.ids, learnt)
            if kind == "kl":
                with torch.no_grad(), original() as teacher:
                    _, teacher_logits = hidden_and_logits(teacher, batch.ids, learnt)
                distillation = divergence(logits, teacher_logits, "forward_kl")
            else:
                distillation = F.cross_entropy(logits.float(), batch.ids.roll(-1, dims=1)[learnt])
            of_heads, figures = weighted_loss(head_losses(heads, hidden, batch, lm_head), options.decay)
        return distillation + options.heads_weight * of_heads, {f"lm {kind}": distillation.detach()} | figures

    optimizer = adamw([(list(heads.parameters()), options.lr), (list(base.values()), rate)])
    run.train("joint", dict(heads.named_parameters(prefix="heads")) | base, [optimizer], steps, loss_at)
    if adapted is not None:
        adapted.merge_and_unload()


def _with_adapters(model: Any, rank: int, seed: int) -> Any:
    """Puts LoRA adapters (Hu et al., arXiv 2106.09685) on every linear layer but the language-model head."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise TrainError(
            f"--tune lora needs the [train] extra ({error}); install it with: pip install 'specexport[train]', or pass "
            "--tune full"
        ) from error
    torch.manual_seed(seed)
    with quiet():
        adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    return adapted.eval()


@contextlib.contextmanager
def _without_adapters(adapted: Any, model: Any) -> Any:
    with adapted.disable_adapter():
        yield model


@torch.no_grad()
def _lm_loss(run: Run[MedusaTraining]) -> float:
    """The target's mean cross-entropy in nats over the held-out tokens to learn."""
    total, count = 0.0, 0
    for rows in run.held_out.in_order(4):
        batch = run.held_out.rows(rows).to(run.place.device)
        learnt = batch.learnt_from(1)
        if not bool(learnt.any()):
            continue
        with run.place.autocast():
            _, logits = hidden_and_logits(run.target.model, batch.ids, learnt)
        total += F.cross_entropy(logits.float(), batch.ids.roll(-1, dims=1)[learnt], reduction="sum").item()
        count += int(learnt.sum())
    return total / max(1, count)


def _save_together(folder: Path, base: TrainingModel, heads: MedusaHeads, accuracy: HeadAccuracy, name: str) -> None:
    """Writes a model folder whose weights include the heads, and loads them again as a check."""
    model = base.model.cpu().to(base.stored)
    state = {f"medusa_head.{key}": value.detach().to(base.stored) for key, value in heads.state_dict().items()}
    save_model(folder, model, base.tokenizer, state)
    path = folder / CONFIG
    config = json.loads(path.read_text(encoding="utf-8")) | {
        "medusa_num_heads": len(heads),
        "medusa_num_layers": heads.layers,
        "tie_lm_head": heads.tied,
        **accuracy_config(accuracy),
    }
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    lm_head = model.get_output_embeddings().weight
    if heads.tied:
        save_compatible(folder / COMPATIBLE, heads.half(), lm_head, base=name)
    read_medusa(folder).load(hidden=heads.hidden, vocab=heads.vocab)
    load_checkpoint(str(folder))
