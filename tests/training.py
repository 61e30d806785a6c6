"""What tests of trainings share: small options of each, texts, and a run that is interrupted and goes on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from specexport.graphs.layers import hidden_and_logits
from specexport.methods.dflash import DFlashTraining
from specexport.methods.dflash.train import train_dflash
from specexport.methods.eagle3 import Eagle3Training
from specexport.methods.eagle3.train import train_eagle3
from specexport.methods.medusa import MedusaTraining
from specexport.methods.medusa.train import train_medusa
from specexport.methods.mlp_speculator import SpeculatorTraining
from specexport.methods.mlp_speculator.train import train_mlp_speculator
from specexport.training.data import Windows
from specexport.training.loop import Log, Loss, Schedule, Trained, adamw, optimizers, train
from specexport.training.predictions import Losses, weighted_loss
from specexport.training.run import Place
from tests.checkpoints import VOCAB

CPU = Place(torch.device("cpu"), bf16=False)
SAVE_EVERY = 2
"""Steps from a checkpoint to the next in :func:`train_whole_and_parted`."""
_WORDS = "the of and to in is that it was for on are as with his they at be this from have or by one had not but what"


class Training(NamedTuple):
    """A training of what reads the target's hidden states.

    Attributes:
        train: the training.
        options: the type of its options.
        fields: of its options, as small as a test can do with.
    """

    train: Callable[[Any, Log], dict[str, Any]]
    options: Callable[..., Any]
    fields: dict[str, Any]


TRAININGS = {
    "dflash": Training(train_dflash, DFlashTraining, {"states": (1, 2), "layers": 2, "draft_block": 4, "anchors": 6}),
    "eagle3": Training(train_eagle3, Eagle3Training, {"states": (0, 1, 2), "ttt_steps": 3}),
    "medusa": Training(train_medusa, MedusaTraining, {"heads": 2}),
    "mlp_speculator": Training(train_mlp_speculator, SpeculatorTraining, {"n_predict": 2, "inner_dim": 32, "steps": 8}),
}


def training_options(method: str, target: Path, folder: Path, /, **changed: Any) -> Any:
    """Options of a method's training on a few words; by default its output is ``folder / "out"``."""
    _, options, fields = TRAININGS[method]
    common = {
        "target": str(target), "data": [write_words(folder)], "output": folder / "out", "seq_len": 32, "batch_size": 4,
        "steps": 6, "save_every": SAVE_EVERY, "precision": "fp32",
    }  # fmt: skip
    return options(**(common | fields | changed))


def silent(line: str) -> None:
    """A log that throws everything away."""


def write_words(folder: Path) -> Path:
    """A file of text to train on."""
    file = folder / "words.txt"
    file.write_text(f"{_WORDS} " * 40, encoding="utf-8")
    return file


def windows_of(ids: torch.Tensor) -> Windows:
    """Windows of one document, all of it learnt."""
    return Windows(ids.int(), torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids).int())


LANGUAGE = (torch.arange(64)[:, None] * 7 + torch.arange(24)) % 50 + 100
"""Texts of a language in which a token says all that follow."""


@contextmanager
def saying(model: Any) -> Iterator[Callable[[Windows], None]]:
    """Lets a model predict, almost for certain, the tokens that follow in the batch last handed to the function."""
    following = torch.zeros(0, dtype=torch.int64)

    def say(batch: Windows) -> None:
        nonlocal following
        following = batch.ids.roll(-1, dims=1)[batch.learnt_from(1)]

    hook = model.get_output_embeddings().register_forward_hook(
        lambda _module, _args, output: 20 * torch.nn.functional.one_hot(following, VOCAB)[None].float()
    )
    try:
        yield say
    finally:
        hook.remove()


def train_on_language(
    draft: Any,
    model: Any,
    losses_of: Callable[[Windows, int], Losses],
    steps: int,
    checkpoint: Path,
    heads: Sequence[torch.nn.Module] = (),
) -> Trained:
    """Trains a draft on :data:`LANGUAGE`, which its target does not speak and is made to: it stays as it was.

    Args:
        draft: of ``methods``, for the model.
        model: the target.
        losses_of: the losses of a batch and its number.
        steps: of the training.
        checkpoint: where it is kept.
        heads: modules that AdamW trains; the rest is Muon's.
    """
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    windows = windows_of(LANGUAGE)
    parameters = {name: tensor for name, tensor in draft.named_parameters() if tensor.requires_grad}
    muon = optimizers("muon", parameters.values(), heads, 1e-2)
    with saying(model) as say:

        def loss_at(number: int) -> Loss:
            batch = windows.rows(windows.order(number, 16, 0))
            say(batch)
            return weighted_loss(losses_of(batch, number), 0.8)

        schedule = Schedule(steps, steps // 10)
        record = train("test", parameters, muon, schedule, loss_at, checkpoint=checkpoint, log=silent)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(draft.embed_tokens.weight, before["model.embed_tokens.weight"])
    return record


def train_over(
    trained: torch.nn.Module,
    losses_of: Callable[[torch.Tensor, Windows], Losses],
    model: Any,
    windows: Windows,
    checkpoint: Path,
    *,
    steps: int,
    batch_size: int,
    lr: float,
) -> Trained:
    """Trains what reads a model's hidden states, which leaves the model as it was."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def loss_at(number: int) -> Loss:
        batch = windows.rows(windows.order(number, batch_size, 0))
        with torch.no_grad():
            hidden, _ = hidden_and_logits(model, batch.ids)
        return weighted_loss(losses_of(hidden, batch), 0.8)

    schedule = Schedule(steps, steps // 10)
    parameters = dict(trained.named_parameters())
    record = train(
        "test",
        parameters,
        [adamw([(list(trained.parameters()), lr)])],
        schedule,
        loss_at,
        checkpoint=checkpoint,
        log=silent,
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    return record


def train_whole_and_parted(
    method: str, options: Callable[..., Any], settings: dict[str, Any], stopped_at: str
) -> tuple[dict[str, Any], Path, Path]:
    """Trains twice with the same options, the second time with an interruption, and compares the weights.

    Args:
        method: whose training.
        options: makes its options from changed fields.
        settings: changed fields of both.
        stopped_at: how the line begins at which the second run is interrupted, ``STAGE: step N``.

    Returns:
        The whole run's record, its output and that of the interrupted run.
    """
    train = TRAININGS[method].train
    whole = options(**settings)
    parted = options(**settings, output=whole.output.with_name("parted"))
    record = train(whole, silent)

    def stop(line: str) -> None:
        # A checkpoint is written after its line.
        if line.startswith(stopped_at):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(parted, stop)
    assert not parted.output.exists()
    lines: list[str] = []
    train(parted, lines.append)
    stage, _, step = stopped_at.partition(": step ")
    assert f"{stage}: resuming from step {(int(step) - 1) // SAVE_EVERY * SAVE_EVERY}" in lines
    weights = sorted(path.name for path in parted.output.glob("*.safetensors"))
    assert weights
    for name in weights:
        ours, theirs = (load_file(folder / name) for folder in (whole.output, parted.output))
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert not parted.output.with_name("parted.work").exists()
    return record, whole.output, parted.output
