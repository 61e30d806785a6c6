"""``specexport train mlp-speculator``: trains an MLP speculator for a model (arXiv 2404.19124)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from specexport.methods.mlp_speculator import SpeculatorTraining
from specexport.methods.mlp_speculator.export import save_speculator
from specexport.methods.mlp_speculator.graph import SpeculatorStages
from specexport.training.data import Windows
from specexport.training.loop import Log
from specexport.training.options import within
from specexport.training.predictions import Losses, measure_over_hidden, summed_loss, train_over_hidden
from specexport.training.run import load_target, open_run


def train_mlp_speculator(options: SpeculatorTraining, log: Log) -> dict[str, Any]:
    """Trains a speculator and writes it in the layout of ``ibm-fms``.

    As with theirs, training has two stages: first on the data, then on texts sampled from the model.
    """
    target = load_target(options)
    with open_run("train mlp-speculator", options, target, log) as run:
        within("n_predict", options.n_predict, 1, run.window - 2, "two less than --seq-len")
        total = run.total_steps
        first = round(options.data_first * total) if options.self_distill else total
        torch.manual_seed(options.seed)
        speculator = new_speculator(options, target.model)
        losses = partial(stage_losses, speculator)

        def learn(name: str, steps: int, seed: int) -> None:
            run.describe_data()
            train_over_hidden(run, name, speculator, losses, steps, seed=seed)

        if first:
            learn("data", first, options.seed)
        if options.self_distill:
            run.self_distill(target, options.self_distill)
            # Another seed, so that batches do not repeat in the order of the first stage.
            learn("texts", max(1, total - first), options.seed + 1)
        accuracy = measure_over_hidden(losses, len(speculator), target.model, run.held_out, run.place)
        run.record["stage_accuracy"] = accuracy.ranks
        run.record["acceptance_length"] = accuracy.chain_length
        with run.output() as folder:
            save_speculator(folder, speculator.cpu().half(), accuracy=accuracy)
    return run.record


def new_speculator(options: SpeculatorTraining, model: Any) -> SpeculatorStages:
    """New stages for a model, initialized as in ``fms-extras`` from torch's global generator."""
    vocab, hidden = model.get_output_embeddings().weight.shape
    inner = options.inner_dim or hidden
    stages = SpeculatorStages(
        vocab, hidden, inner, options.n_predict, scale_input=options.scale_input, tied=options.tie_weights
    )
    for parameter in stages.parameters():
        if parameter.ndim == 2:
            torch.nn.init.trunc_normal_(parameter, 0.0, 1 / math.sqrt(inner))
    return stages.to(model.device)


def stage_losses(speculator: SpeculatorStages, hidden: torch.Tensor, batch: Windows) -> Losses:
    """Stage i's cross-entropy of the token 2 + i positions later, after the true tokens (arXiv 2404.19124).

    Hidden states are ``[B,L,H]``, windows ``[B,L]``.
    """
    state = speculator.first_state(hidden)
    for stage, head in enumerate(speculator.head):
        state = speculator.advance(stage, state, batch.ids.roll(-1 - stage, dims=1))
        learnt = batch.learnt_from(2 + stage)
        labels = batch.ids.roll(-2 - stage, dims=1)[learnt]
        yield summed_loss(head, state[learnt], labels, speculator.vocab)
