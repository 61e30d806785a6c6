"""What tests of trainings share: a place, a text, and a run that is interrupted and goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specexport.training.data import Windows
from specexport.training.hidden import hidden_loss
from specexport.training.loop import Log, Loss, Schedule, Trained, adamw, train
from specexport.training.run import Place

CPU = Place(torch.device("cpu"), bf16=False)
SAVE_EVERY = 2
"""Steps from a checkpoint to the next in :func:`train_whole_and_parted`."""
_WORDS = "the of and to in is that it was for on are as with his they at be this from have or by one had not but what"

Train = Callable[[Any, Log], dict[str, Any]]


def silent(line: str) -> None:
    """A log that throws everything away."""


def write_words(folder: Path) -> Path:
    """A file of text to train on."""
    file = folder / "words.txt"
    file.write_text(f"{_WORDS} " * 40, encoding="utf-8")
    return file


def train_over(
    trained: torch.nn.Module,
    loss_of: Callable[[torch.Tensor, Windows], Loss],
    model: Any,
    windows: Windows,
    checkpoint: Path,
    *,
    steps: int,
    batch_size: int,
    lr: float,
) -> Trained:
    """Trains what reads a model's hidden states."""
    loss_at = hidden_loss(model, lambda number: windows.rows(windows.order(number, batch_size, 0)), loss_of, CPU)
    optimizers = [adamw([(list(trained.parameters()), lr)])]
    schedule = Schedule(steps, steps // 10)
    parameters = dict(trained.named_parameters())
    return train("test", parameters, optimizers, schedule, loss_at, checkpoint=checkpoint, log=silent)


def train_whole_and_parted(
    train: Train, options: Callable[..., Any], settings: dict[str, Any], stopped_at: str
) -> tuple[dict[str, Any], Path, Path]:
    """Trains twice with the same options, the second time with an interruption, and compares the weights.

    Args:
        train: the training.
        options: makes its options, whose ``save_every`` is ``SAVE_EVERY``, for an output of a name.
        settings: more options.
        stopped_at: how the line begins at which the second run is interrupted, ``STAGE: step N``.

    Returns:
        The whole run's record, its output and that of the interrupted run.
    """
    whole, parted = options("whole", **settings), options("parted", **settings)
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
    assert f"{stage}: going on from step {(int(step) - 1) // SAVE_EVERY * SAVE_EVERY}" in lines
    weights = sorted(path.name for path in parted.output.glob("*.safetensors"))
    assert weights
    for name in weights:
        ours, theirs = (load_file(folder / name) for folder in (whole.output, parted.output))
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert not parted.output.with_name("parted.work").exists()
    return record, whole.output, parted.output
