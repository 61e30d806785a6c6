"""Measures the effect of quantization: KL divergence, perplexity and first choices over a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specexport.contract import tensors
from specexport.contract.model import LoweredAs, Model, Quality
from specexport.exporter.checkpoints.checkpoint import Checkpoint, plain_transformers
from specexport.exporter.checkpoints.quiet import quiet
from specexport.exporter.checkpoints.streamed import read_weights
from specexport.exporter.step_session import StepSession

Array = npt.NDArray[Any]

_WINDOW = 256
_TOKENS = 1024
_MAX_LOGITS = 1 << 27
"""Numbers of the model's logits that are held meanwhile: with large vocabularies fewer windows are read."""
_MAX_PRODUCTS = 1 << 42
"""Multiplications of the model's pass, some minutes on two cores: so are they with large models."""
_CHUNK = 64
_LARGEST = float(np.finfo(np.float32).max)


def default_text() -> str:
    """The text that is measured over where no other is named: English in several registers, and code."""
    return resources.files("specexport.exporter").joinpath("texts/measured.txt").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Reference:
    """Windows of a text and what the model says after each of their tokens, before anything was rounded.

    Attributes:
        tokens: int64 ``[W,T]``.
        logits: float32 ``[W,T,V]``.
    """

    tokens: Array
    logits: Array


def windows(tokens: Sequence[int], model: Model | Checkpoint, input_vocab: int) -> Array:
    """The start of a text in windows ``[W,T]`` of one length, as many as a model of this size is measured over."""
    length = min(_WINDOW, model.max_positions, len(tokens))
    most = min(_TOKENS, _MAX_LOGITS // model.vocab_size, _MAX_PRODUCTS // model.parameters)
    count = max(1, min(most, len(tokens)) // length) if length else 0
    return np.minimum(np.array(tokens[: count * length], np.int64), input_vocab - 1).reshape(count, length)


def reference(checkpoint: Checkpoint, tokens: Sequence[int]) -> Reference | None:
    """Runs a model over the windows of a text; None where one holds no token that another follows."""
    rows = windows(tokens, checkpoint, checkpoint.input_vocab)
    if rows.shape[1] < 2:
        return None
    model = checkpoint.model
    with torch.no_grad(), quiet(), plain_transformers(model), read_weights(model):
        logits = model(torch.from_numpy(rows), use_cache=False).logits.float().numpy()
    return Reference(rows, logits)


def measure(file: Callable[[str], Path], lowering: LoweredAs, model: Model, expected: Reference) -> Quality:
    """Runs a bundle's step graph over the same windows, in chunks over its cache as a prompt is read.

    Args:
        file: says where a file of the bundle is.
        lowering: of the bundle.
        model: its target.
        expected: what is compared with.

    Raises:
        BackendError: onnxruntime is missing, too old, or refuses the graph.
    """
    length = expected.tokens.shape[1]
    session = StepSession(file, lowering, model, -(-length // _CHUNK) * _CHUNK, 0.0)
    sums = _Sums()
    for window, tokens in enumerate(expected.tokens):
        for past in range(0, length, _CHUNK):
            part = tokens[past : past + _CHUNK]
            padded = np.pad(part, (0, _CHUNK - len(part)))
            logits = session.logits(
                {
                    tensors.INPUT_IDS: padded[None],
                    tensors.POSITION_IDS: np.minimum(past + np.arange(_CHUNK), model.max_positions - 1)[None],
                    tensors.TREE_MASK: np.tri(_CHUNK, dtype=np.bool_)[None],
                    tensors.PAST_LENGTH: np.array([past]),
                    tensors.LOGITS_ROWS: np.arange(len(part))[None],
                    tensors.KNOWN_TOKENS: np.array([len(part)]),
                }
            )
            sums.add(expected.logits[window, past : past + len(part)], logits, tokens[past + 1 : past + len(part) + 1])
    return sums.quality()


def compare(expected: Reference, logits: Array) -> Quality:
    """Compares what another reading of the model says after the tokens of the same windows, ``[W,T,V]``."""
    sums = _Sums()
    for tokens, exact, other in zip(expected.tokens, expected.logits, logits, strict=True):
        sums.add(exact, other, tokens[1:])
    return sums.quality()


class _Sums:
    """What is added up over the rows of a text."""

    def __init__(self) -> None:
        self._rows = self._followed = self._same = 0
        self._kl = self._loss = self._reference_loss = self._error = self._energy = 0.0

    def add(self, expected: Array, logits: Array, following: Array) -> None:
        """Adds rows ``[R,V]`` of both, and the tokens that follow them in the text; the last may have none."""
        p, q = _log_probabilities(expected), _log_probabilities(logits)
        at = np.arange(len(following)), np.minimum(following, logits.shape[-1] - 1)
        self._rows += len(p)
        self._followed += len(following)
        self._kl += float((np.exp(p) * (p - q)).sum(dtype=np.float64))
        self._same += int((p.argmax(-1) == q.argmax(-1)).sum())
        self._loss -= float(q[at].sum(dtype=np.float64))
        self._reference_loss -= float(p[at].sum(dtype=np.float64))
        self._error += energy(logits - expected)
        self._energy += energy(expected)

    def quality(self) -> Quality:
        """The figures; where logits are not finite the largest that JSON holds."""
        return Quality(
            tokens=self._rows,
            kl=max(0.0, _finite(self._kl / self._rows)),
            perplexity=_finite(np.exp(self._loss / self._followed)),
            reference_perplexity=_finite(np.exp(self._reference_loss / self._followed)),
            same_choice=self._same / self._rows,
            logits_rms_error=_finite(relative_rms(self._error, self._energy)),
        )


def _finite(value: float) -> float:
    return float(np.nan_to_num(value, nan=_LARGEST, posinf=_LARGEST))


def _log_probabilities(logits: Array) -> Array:
    moved = logits - logits.max(axis=-1, keepdims=True)
    result: Array = moved - np.log(np.exp(moved).sum(axis=-1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return result


def energy(logits: Array) -> float:
    """Sum of squares around each row's mean: a constant added to all logits of a row changes no probability."""
    return float(np.square(logits - logits.mean(axis=-1, keepdims=True), dtype=np.float64).sum())


def relative_rms(error: float, total: float) -> float:
    """Root-mean-square error relative to the root-mean-square of the logits, from the :func:`energy` of both."""
    return float(np.sqrt(error / total)) if total else 0.0
