"""``specexport train mlp-speculator``: from a model and data to a folder with an MLP speculator."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specexport.checkpoints.medusa import HeadAccuracy
from specexport.checkpoints.mlp_speculator import save_speculator
from specexport.contract.folders import written_beside
from specexport.contract.methods import MAX_STAGES
from specexport.graphs.mlp_speculator import SpeculatorStages
from specexport.training.data import Windows
from specexport.training.distill import self_distilled
from specexport.training.hidden import measured, summed_loss, train_over, weighted
from specexport.training.loop import Loss, Trained
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
    told,
    work_folder,
    write_record,
)


@dataclass(frozen=True, kw_only=True)
class SpeculatorOptions(HeadRunOptions):
    """What ``specexport train mlp-speculator`` is asked for; each field is the flag of its name.

    Texts that the model is to say itself (``self_distill``) are learnt after the data.

    Attributes:
        n_predict: stages, a token each.
        inner_dim: width of the states between them; None is the model's hidden size.
        tie_weights: stages share embedding, head and norm, and all but the first their projection.
        scale_input: norm the model's hidden state first.
        data_first: with self_distill: share of the steps in which the data is learnt.
    """

    n_predict: int = 3
    inner_dim: int | None = None
    tie_weights: bool = False
    scale_input: bool = False
    decay: float = 1.0
    data_first: float = 0.5

    def check(self) -> None:
        super().check()
        within("n_predict", self.n_predict, 1, MAX_STAGES)
        within("inner_dim", self.inner_dim, 16)
        within("data_first", self.data_first, 0, 1)


def train_mlp_speculator(options: SpeculatorOptions, watch: Watch) -> dict[str, Any]:
    """Trains a speculator and writes it as ``ibm-fms`` publishes them.

    In two stages, as theirs were (arXiv 2404.19124): the data as they are, then texts of the model itself. A
    run that was interrupted goes on from its last checkpoint when it is started again with the same options.

    Returns:
        The record that the output holds as ``training.json``.

    Raises:
        SpecExportError: an option, the data or a checkpoint is wrong; says which.
    """
    options.check()
    place = choose_place(options.device, options.precision)
    base = load_model(options.target, place, frozen=True)
    window, prompt = options.lengths(base.max_positions)
    within("n_predict", options.n_predict, 1, window - 2, "two less than --seq-len")
    windows, held_out = options.read(base.tokenizer, window)
    settings = run_settings(options, base, windows, held_out, place)
    with work_folder(options.work, options.output, settings) as work:
        total = options.total_steps(len(windows))
        first = round(options.data_first * total) if options.self_distill else total
        torch.manual_seed(options.seed)
        speculator = new_speculator(options, base.model)
        record = new_record("train mlp-speculator", options, place, windows, held_out)
        learn = _Stage(options, base, speculator, place, work, watch)
        if first:
            watch.log(described(windows, held_out))
            record["data"] = told(learn("data", windows, first, options.seed))
        if options.self_distill:
            windows, held_out = self_distilled(base, windows, held_out, prompt, options, work=work, watch=watch)
            watch.log(described(windows, held_out))
            # Another seed, or the batches of the first stage would come again in the same order.
            record["texts"] = told(learn("texts", windows, max(1, total - first), options.seed + 1))
        accuracy = stage_accuracy(speculator, base.model, held_out, place)
        record["stage_accuracy"] = accuracy.ranks
        record["acceptance_length"] = chain_length(accuracy)
        with written_beside(options.output) as folder:
            save_speculator(folder, speculator.cpu(), accuracy=accuracy)
            write_record(folder, record)
    return record


@dataclass(frozen=True)
class _Stage:
    """Learns some windows for some steps."""

    options: SpeculatorOptions
    base: TrainingModel
    speculator: SpeculatorStages
    place: Place
    work: Path
    watch: Watch

    def __call__(self, name: str, windows: Windows, steps: int, seed: int) -> Trained:
        asked = self.options
        return train_over(
            name,
            self.speculator,
            lambda hidden, batch: speculator_loss(self.speculator, hidden, batch, asked.decay),
            self.base.model,
            windows,
            asked.head_options(steps, seed),
            place=self.place,
            checkpoint=self.work / f"{name}.pt",
            watch=self.watch,
            cache=self.work / f"hidden-{name}.bin" if asked.cache_hidden else None,
        )


def new_speculator(options: SpeculatorOptions, model: Any) -> SpeculatorStages:
    """Stages for a model, drawn from torch's global generator as ``fms-extras`` draws them."""
    vocab, hidden = model.get_output_embeddings().weight.shape
    inner = options.inner_dim or hidden
    made = SpeculatorStages(
        vocab, hidden, inner, options.n_predict, scale_input=options.scale_input, tied=options.tie_weights
    )
    for parameter in made.parameters():
        if parameter.ndim == 2:
            torch.nn.init.trunc_normal_(parameter, 0.0, 1 / math.sqrt(inner))
    return made.to(model.device)


def speculator_loss(speculator: SpeculatorStages, hidden: torch.Tensor, batch: Windows, decay: float) -> Loss:
    """Σ decay^i · CE_i, where CE_i is stage i's mean cross-entropy of the token 2 + i positions on.

    Each stage is given the true token before its own (arXiv 2404.19124).

    Args:
        speculator: the stages.
        hidden: after the model's final norm, ``[B,L,H]``.
        batch: the same windows, ``[B,L]``.
        decay: of the weights; 1 in the paper.
    """
    return weighted(_losses(speculator, hidden, batch), decay)


def _losses(
    speculator: SpeculatorStages, hidden: torch.Tensor, batch: Windows
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    state = speculator.first_state(hidden)
    for stage, head in enumerate(speculator.head):
        state = speculator.advance(stage, state, batch.ids.roll(-1 - stage, dims=1))
        learnt = batch.learnt_from(2 + stage)
        labels = batch.ids.roll(-2 - stage, dims=1)[learnt]
        yield summed_loss(head, state[learnt], labels, speculator.vocab)


def stage_accuracy(speculator: SpeculatorStages, model: Any, windows: Windows, place: Place) -> HeadAccuracy:
    """Measures each stage, after true tokens, over windows it was not trained on."""

    def ranks(hidden: torch.Tensor, batch: Windows) -> Iterator[torch.Tensor]:
        return (found for _, found in _losses(speculator, hidden, batch))

    return measured(ranks, len(speculator), model, windows, place)


def chain_length(accuracy: HeadAccuracy) -> float:
    """Tokens a step of the longest chain is expected to commit, the bonus token included, over texts like the measured.

    Of greedy texts of the model itself it is what decoding will find; in other texts the model may have said otherwise.
    """
    return 1 + sum(accuracy.paths.get((0,) * depth, 0.0) for depth in range(1, len(accuracy.ranks) + 1))
