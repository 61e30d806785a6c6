"""``specexport train medusa``: from a model and data to a folder with Medusa heads."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from specexport.checkpoints.checkpoint import load_checkpoint
from specexport.checkpoints.medusa import (
    COMPATIBLE,
    CONFIG,
    HeadAccuracy,
    accuracy_config,
    load_medusa,
    save_compatible,
    save_medusa,
)
from specexport.checkpoints.quiet import quiet
from specexport.contract.errors import TrainError
from specexport.contract.folders import written_beside
from specexport.graphs.medusa import MedusaHeads
from specexport.training.data import Windows
from specexport.training.distill import self_distilled
from specexport.training.heads import JointOptions, head_accuracy, new_heads, train_heads, train_jointly
from specexport.training.hidden import run_model
from specexport.training.loop import Trained
from specexport.training.options import HeadRunOptions, within
from specexport.training.setup import (
    Place,
    TrainingModel,
    Watch,
    choose_place,
    described,
    load_model,
    new_record,
    run_settings,
    save_model,
    told,
    work_folder,
    write_record,
)


@dataclass(frozen=True, kw_only=True)
class MedusaOptions(HeadRunOptions):
    """What ``specexport train medusa`` is asked for; each field is the flag of its name.

    Texts that the model is to say itself (``self_distill``) are learnt instead of the data.

    Attributes:
        heads: how many.
        layers: residual blocks a head.
        tie_lm_head: heads end in the model's own projection.
        stage: 1, heads alone, or 2, the model with them.
        tune: stage 2: ``lora`` or ``full``.
        lora_rank: stage 2: of the adapters.
        base_lr: stage 2: the model's learning rate; None is a quarter of lr with LoRA, and a fiftieth with full tuning.
        heads_weight: stage 2: λ.
        heads_first: stage 2: share of the steps in which the heads are trained alone.
        lm_loss: stage 2: ``ce`` or ``kl``; None is kl with self_distill and else ce.
    """

    heads: int = 4
    layers: int = 1
    tie_lm_head: bool = False
    stage: int = 1
    decay: float = 0.8
    tune: str = "lora"
    lora_rank: int = 16
    base_lr: float | None = None
    heads_weight: float = 0.2
    heads_first: float = 0.4
    lm_loss: str | None = None

    def check(self) -> None:
        super().check()
        within("heads", self.heads, 1, 16)
        within("layers", self.layers, 0, 16)
        within("lora_rank", self.lora_rank, 1)
        within("base_lr", self.base_lr, 0, 1, above=True)
        within("heads_weight", self.heads_weight, 0, above=True)
        within("heads_first", self.heads_first, 0, 0.95)
        if self.stage == 1:
            for flag in ("tune", "lora_rank", "base_lr", "heads_weight", "heads_first", "lm_loss"):
                if getattr(self, flag) != getattr(MedusaOptions, flag):
                    raise TrainError(f"--{flag.replace('_', '-')} was given without --stage 2, the only one to use it")


def train_medusa(options: MedusaOptions, watch: Watch) -> dict[str, Any]:
    """Trains heads, or a model with heads, and writes the output.

    A run that was interrupted goes on from its last checkpoint when it is started again with the same options.

    Returns:
        The record that the output holds as ``training.json``.

    Raises:
        SpecExportError: an option, the data or a checkpoint is wrong; says which.
    """
    options.check()
    place = choose_place(options.device, options.precision)
    base = load_model(options.target, place, frozen=options.stage == 1)
    window, prompt = options.lengths(base.max_positions)
    within("heads", options.heads, 1, window - 2, "two less than --seq-len")
    windows, held_out = options.read(base.tokenizer, window)
    settings = run_settings(options, base, windows, held_out, place)
    with work_folder(options.work, options.output, settings) as work:
        if options.self_distill:
            # Weights to train are in float32; sampling reads them a token at a time, twice as fast in bfloat16.
            sampling = base if options.stage == 1 else load_model(options.target, place, frozen=True)
            windows, held_out = self_distilled(sampling, windows, held_out, prompt, options, work=work, watch=watch)
            del sampling
        watch.log(described(windows, held_out))
        torch.manual_seed(options.seed)
        heads = new_heads(options.heads, options.layers, base.model, tied=options.tie_lm_head)
        total = options.total_steps(len(windows))
        stages = _Stages(options, base, heads, windows, place, work, watch)
        record = new_record("train medusa", options, place, windows, held_out)
        if options.stage == 1:
            record["heads"] = told(stages.alone(total))
        else:
            record["lm_loss_before"] = _lm_loss(base.model, held_out, place)
            first = round(options.heads_first * total)
            if first:
                record["heads"] = told(stages.alone(first))
            record["joint"] = told(stages.together(max(1, total - first)))
            record["lm_loss"] = _lm_loss(base.model, held_out, place)
        accuracy = head_accuracy(heads, base.model, held_out, place)
        record["head_accuracy"] = accuracy.ranks
        with written_beside(options.output) as folder:
            if options.stage == 1:
                weight = base.model.get_output_embeddings().weight.cpu()
                save_medusa(folder, heads.cpu(), weight, base=options.target, accuracy=accuracy)
            else:
                _save_together(folder, base, heads.cpu(), accuracy, str(options.output))
            write_record(folder, record)
    return record


@dataclass(frozen=True)
class _Stages:
    """The two stages over the same heads and data."""

    options: MedusaOptions
    base: TrainingModel
    heads: MedusaHeads
    windows: Windows
    place: Place
    work: Path
    watch: Watch

    def alone(self, steps: int) -> Trained:
        """Medusa-1."""
        return train_heads(
            self.heads,
            self.base.model,
            self.windows,
            self.options.head_options(steps, self.options.seed),
            place=self.place,
            checkpoint=self.work / "heads.pt",
            watch=self.watch,
            cache=self.work / "hidden.bin" if self.options.cache_hidden else None,
        )

    def together(self, steps: int) -> Trained:
        """Medusa-2; the base model has what was learnt, with adapters merged."""
        asked = self.options
        lm_loss = asked.lm_loss or ("kl" if asked.self_distill else "ce")
        rate = asked.base_lr or asked.rate / (4 if asked.tune == "lora" else 50)
        original: Callable[[], contextlib.AbstractContextManager[Any]]
        adapted = None
        if asked.tune == "lora":
            adapted = _with_adapters(self.base.model, asked.lora_rank, asked.seed)
            original = partial(_without_adapters, adapted, self.base.model)
        else:
            as_it_was = copy.deepcopy(self.base.model).requires_grad_(False) if lm_loss == "kl" else None
            original = partial(contextlib.nullcontext, as_it_was)
        trained = train_jointly(
            self.heads,
            self.base.model,
            self.windows,
            # Another seed, or the batches of the first stage would come again in the same order.
            asked.head_options(steps, asked.seed + 1),
            JointOptions(rate, asked.heads_weight, lm_loss),
            original=original,
            place=self.place,
            checkpoint=self.work / "joint.pt",
            watch=self.watch,
        )
        if adapted is not None:
            adapted.merge_and_unload()
        return trained


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
def _lm_loss(model: Any, windows: Windows, place: Place) -> float:
    """Mean cross-entropy of the next token, in nats, where it is to be learnt."""
    total, count = 0.0, 0
    for rows in windows.in_order(4):
        batch = windows.rows(rows).to(place.device)
        learnt = batch.learnt_from(1)
        if not bool(learnt.any()):
            continue
        with place.autocast():
            _, logits = run_model(model, batch.ids, learnt)
        total += F.cross_entropy(logits.float(), batch.ids.roll(-1, dims=1)[learnt], reduction="sum").item()
        count += int(learnt.sum())
    return total / max(1, count)


def _save_together(folder: Path, base: TrainingModel, heads: MedusaHeads, accuracy: HeadAccuracy, name: str) -> None:
    """A model folder whose weights hold the heads as well; read back, so that what is written can be used."""
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
        save_compatible(folder / COMPATIBLE, heads, lm_head, base=name)
    load_medusa(folder, hidden=heads.hidden, vocab=heads.vocab)
    load_checkpoint(str(folder))
