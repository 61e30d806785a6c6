"""What storing a model's matrices in few bits did to its logits: measured by the build on a sample of text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specexport.checkpoints.checkpoint import Checkpoint, plain_transformers
from specexport.checkpoints.quiet import quiet
from specexport.checkpoints.streamed import read_weights
from specexport.contract import tensors
from specexport.contract.errors import BackendError
from specexport.contract.model import LoweredAs, Model
from specexport.exporter.step_session import StepSession

Array = npt.NDArray[Any]

SAMPLE = """\
The river rises in the hills to the north, runs past three small towns, and reaches the sea after ninety miles. In
spring it floods the meadows; by August a child can wade across.

def mean(values):
    if not values:
        raise ValueError("mean of no values")
    return sum(values) / len(values)
"""
_TOKENS = 96


@dataclass(frozen=True)
class Reference:
    """A text and what the model says after each of its tokens, before anything was rounded.

    Attributes:
        tokens: int64 ``[T]``.
        logits: float32 ``[T,V]``.
    """

    tokens: Array
    logits: Array


def reference(checkpoint: Checkpoint, tokens: list[int]) -> Reference:
    """Runs the model over the start of a text."""
    ids = torch.tensor([tokens[:_TOKENS]]).clamp(max=checkpoint.input_vocab - 1)
    model = checkpoint.model
    with torch.no_grad(), quiet(), plain_transformers(model), read_weights(model):
        logits = model(ids, use_cache=False).logits[0].float()
    return Reference(ids[0].numpy(), logits.numpy())


def logits_error(folder: Path, lowering: LoweredAs, model: Model, expected: Reference) -> tuple[float, float] | None:
    """Runs a bundle's step graph over the same text, one token a step, as decoding does.

    Returns:
        Root-mean-square error of the logits relative to their spread, and the share of tokens after which graph and
        model prefer the same one; None where onnxruntime is not installed.
    """
    try:
        session = StepSession(folder.joinpath, lowering, model, len(expected.tokens), 0.0)
    except BackendError:
        return None
    found = []
    for position, token in enumerate(expected.tokens.tolist()):
        given = {
            tensors.INPUT_IDS: np.array([[token]]),
            tensors.POSITION_IDS: np.array([[position]]),
            tensors.TREE_MASK: np.ones((1, 1, 1), np.bool_),
            tensors.PAST_LENGTH: np.array([position]),
            tensors.LOGITS_ROWS: np.array([[0]]),
            tensors.KNOWN_TOKENS: np.array([1]),
        }
        found.append(session.logits(given)[0])
    logits = np.stack(found)
    same = float((logits.argmax(-1) == expected.logits.argmax(-1)).mean())
    return relative_rms(energy(logits - expected.logits), energy(expected.logits)), same


def energy(logits: Array) -> float:
    """Sum of squares around each row's mean: a constant added to all logits of a row changes no probability."""
    return float(np.square(logits - logits.mean(axis=-1, keepdims=True), dtype=np.float64).sum())


def relative_rms(error: float, total: float) -> float:
    """Root-mean-square error relative to the root-mean-square of the logits, from the :func:`energy` of both."""
    return float(np.sqrt(error / total)) if total else 0.0
