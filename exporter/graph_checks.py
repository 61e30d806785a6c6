"""Runs written graphs: once to find numbers that are not finite, and over a text to measure quantization."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specexport.contract import tensors
from specexport.contract.errors import BackendError, BuildError
from specexport.contract.model import LoweredAs, Model, Quality
from specexport.contract.signature import GraphSignature, cache_inputs, caches, embedding_inputs
from specexport.contract.tree import TokenTree
from specexport.exporter.checkpoints.checkpoint import Checkpoint, plain_transformers, reference_logits
from specexport.exporter.checkpoints.quiet import quiet
from specexport.exporter.checkpoints.stored import read_weights
from specexport.runtime.backends.onnxruntime.segments import open_whole
from specexport.runtime.backends.onnxruntime.session import import_onnxruntime
from specexport.runtime.states import KeptStates, cell_rows

Array = npt.NDArray[Any]
_PROBED_TOKENS = 16
"""More than a few, as a vocabulary begins with special tokens such as padding, whose embeddings are often zero."""
_PROBED_SIZES = {"B": 1, "T": _PROBED_TOKENS, "R": _PROBED_TOKENS, "K": 1, "S": 24, "C": 1}
_WINDOW = 256
_TOKENS = 1024
_MAX_LOGITS = 1 << 27
"""Maximum number of reference logits in memory; with large vocabularies, fewer windows are read."""
_MAX_PRODUCTS = 1 << 42
"""Maximum number of multiplications of the model's run, a few minutes on two cores; large models read fewer windows."""
_CHUNK = 64
_LARGEST = float(np.finfo(np.float32).max)


def require_finite(folder: Path, model: Model, signature: GraphSignature, lowering: LoweredAs) -> None:
    """Runs a model's master graph over the first tokens of its vocabulary with an empty cache.

    Without an onnxruntime that can run such graphs nothing is checked.

    Raises:
        BuildError: an output has numbers that are not finite; names the graph and the output.
        BackendError: onnxruntime refuses the graph.
    """
    try:
        import_onnxruntime(lowering)
    except BackendError:
        return
    session = open_whole(folder.joinpath, model, lowering)
    inputs = {str(tensor): tensor.array(_PROBED_SIZES) for tensor in (*signature.inputs, *cache_inputs(model))}
    for name, limit in ((tensors.INPUT_IDS, model.vocab_size), (tensors.POSITION_IDS, _PROBED_TOKENS)):
        if name in inputs:
            inputs[name][:] = np.arange(inputs[name].shape[1]) % limit
    if tensors.TOP_K in inputs:
        inputs[tensors.TOP_K][:] = 0
    for layer in model.states:
        if layer.recurrence is not None:
            inputs[tensors.CELL_ROWS] = cell_rows([0], [0], _PROBED_TOKENS, layer.recurrence.rows)
    names = [output.name for output in session.get_outputs()]
    for name, output in zip(names, session.run(names, inputs), strict=True):
        wrong = int((~np.isfinite(output)).sum()) if output.dtype == np.float32 else 0
        if wrong:
            raise BuildError(
                f"{model.source}: model family '{model.family}': {model.graph.master}: {wrong} of {output.size} "
                f"numbers of its output '{name}' are not finite; expected finite numbers. Check the checkpoint's "
                "weights with transformers; if they are sound there, this model family is not supported"
            )


@dataclass(frozen=True)
class StepCall:
    """A call of the step graph.

    Attributes:
        committed: the text in the cache.
        rows: the R tokens whose logits are compared.
        known: number of tokens that are text, not draft tokens.
    """

    committed: list[int]
    tokens: list[int]
    tree: TokenTree
    rows: range
    known: int = 1

    def feed(self, model: Model) -> dict[str, Array]:
        """The graph's inputs, without caches and embeddings."""
        past = len(self.committed)
        # As in the engine: the padding of a chunk may reach past the last position.
        positions = np.minimum(past + self.tree.depths, model.max_positions - 1)
        return {
            tensors.INPUT_IDS: np.array([self.tokens], np.int64),
            tensors.POSITION_IDS: positions[None],
            tensors.TREE_MASK: self.tree.mask[None],
            tensors.PAST_LENGTH: np.array([past], np.int64),
            tensors.LOGITS_ROWS: np.array([self.rows], np.int64),
            tensors.KNOWN_TOKENS: np.array([self.known]),
        }

    def expected(self, model: Any) -> Array:
        """The model's logits, float32 ``[R,V]``; the model reads each path of the tree as a text."""
        logits: dict[int, Array] = {}
        # Longest paths first, so that their prefixes are not run again.
        for row in sorted(self.rows, key=lambda row: -int(self.tree.mask[row].sum())):
            if row not in logits:
                path = np.flatnonzero(self.tree.mask[row]).tolist()
                text = np.array([*self.committed, *(self.tokens[node] for node in path)], np.int64)
                logits.update(zip(path, reference_logits(model, text)[len(self.committed) :], strict=True))
        return np.stack([logits[row] for row in self.rows])


class StepSession:
    """A step graph in onnxruntime, which is run as the engine runs it, with the cache of a single slot.

    ``file`` returns the path of a file of the bundle. The cache has S = ``rows`` rows, which are initially ``fill``.

    Raises:
        BackendError: onnxruntime is missing, too old, or refuses the graph.
    """

    def __init__(self, file: Callable[[str], Path], lowering: LoweredAs, model: Model, rows: int, fill: float) -> None:
        self._session = open_whole(file, model, lowering)
        self._names = [output.name for output in self._session.get_outputs()]
        self._embeddings = embedding_inputs(model.embedding_size)
        self._caches = {
            str(cache): np.full(cache.shape({"B": 1, "S": rows}), fill, np.float32) for cache in caches(model.cache)
        }
        self._states = KeptStates(model.states, 1)
        self._last: tuple[int, list[Array]] = (0, [])  # number of cache rows before the last call, and its new rows

    def logits(self, inputs: Mapping[str, Array]) -> Array:
        """The logits ``[R,V]`` of a run; the next call finds its rows in the cache.

        The inputs are the graph's, without caches; embeddings are optional, and ``known_tokens`` is ignored for models
        without recurrent layers.
        """
        tokens = inputs[tensors.INPUT_IDS].shape[1]
        embeddings = {str(tensor): tensor.zeros({"B": 1, "T": tokens}) for tensor in self._embeddings}
        past = int(inputs[tensors.PAST_LENGTH][0])
        states, blocks, parts = self._state_inputs(past, tokens)
        feed = {**embeddings, **inputs, **states, **self._caches}
        if tensors.CELL_ROWS not in states:
            feed.pop(tensors.KNOWN_TOKENS, None)
        outputs = dict(zip(self._names, self._session.run(None, feed), strict=True))
        for name, part in parts.items():
            part[:] = outputs[name]
        if tensors.CELL_ROWS in states:
            self._states.advance(range(1), [past], inputs[tensors.KNOWN_TOKENS].tolist())
        self._last = past, blocks
        for name, cache in self._caches.items():
            if (updated := outputs.get(name.replace("past_", "present_", 1))) is not None:
                self._caches[name] = updated
            else:  # a portable graph returns only the new rows
                rows = outputs[name.replace("past_", "new_", 1)]
                cache[:, :, past : past + rows.shape[2]] = rows
        return outputs[tensors.LOGITS][0]

    def _state_inputs(self, past: int, tokens: int) -> tuple[dict[str, Array], list[Array], dict[str, Array]]:
        """Inputs of layers without attention, and buffers for their new rows.

        First commits the rows of the last call, as ``past`` tells how many of its tokens became text.
        """
        before, rows = self._last
        if past == 0:
            self._states.clear(0)
        elif past > before:
            self._states.commit(0, before, range(past - before), rows, 0)
        blocks, parts = self._states.outputs(1, tokens)
        return {**self._states.arrays, **self._states.cells(range(1), [past], tokens)}, blocks, parts


def default_text() -> str:
    """The default text to measure quantization on: English in several registers, and code."""
    return resources.files("specexport.exporter").joinpath("texts/measured.txt").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Reference:
    """Windows of a text, with the unquantized model's logits after each token.

    Attributes:
        tokens: int64 ``[W,T]``.
        logits: float32 ``[W,T,V]``.
    """

    tokens: Array
    logits: Array


def windows(tokens: Sequence[int], model: Model | Checkpoint, input_vocab: int) -> Array:
    """The beginning of a text as windows ``[W,T]``; W is smaller for larger models."""
    length = min(_WINDOW, model.max_positions, len(tokens))
    most = min(_TOKENS, _MAX_LOGITS // model.vocab_size, _MAX_PRODUCTS // model.parameters)
    count = max(1, min(most, len(tokens)) // length) if length else 0
    return np.minimum(np.array(tokens[: count * length], np.int64), input_vocab - 1).reshape(count, length)


def reference(checkpoint: Checkpoint, tokens: Sequence[int]) -> Reference | None:
    """Runs a model over the windows of a text; None if windows are shorter than two tokens."""
    rows = windows(tokens, checkpoint, checkpoint.input_vocab)
    if rows.shape[1] < 2:
        return None
    model = checkpoint.model
    with torch.no_grad(), quiet(), plain_transformers(model), read_weights(model):
        logits = model(torch.from_numpy(rows), use_cache=False).logits.float().numpy()
    return Reference(rows, logits)


def measure(file: Callable[[str], Path], lowering: LoweredAs, model: Model, expected: Reference) -> Quality:
    """Runs a bundle's step graph over the windows of a reference, in chunks, like prompts.

    ``file`` returns the path of a file of the bundle.
    """
    length = expected.tokens.shape[1]
    session = StepSession(file, lowering, model, -(-length // _CHUNK) * _CHUNK, 0.0)
    sums = _Sums()
    for window, tokens in enumerate(expected.tokens):
        for past in range(0, length, _CHUNK):
            part = tokens[past : past + _CHUNK]
            padded = np.pad(part, (0, _CHUNK - len(part))).tolist()
            call = StepCall(tokens[:past].tolist(), padded, TokenTree.chain(_CHUNK), range(len(part)), len(part))
            logits = session.logits(call.feed(model))
            sums.add(expected.logits[window, past : past + len(part)], logits, tokens[past + 1 : past + len(part) + 1])
    return sums.quality()


def compare(expected: Reference, logits: Array) -> Quality:
    """Compares logits ``[W,T,V]`` over the windows of a reference with its own."""
    sums = _Sums()
    for tokens, exact, other in zip(expected.tokens, expected.logits, logits, strict=True):
        sums.add(exact, other, tokens[1:])
    return sums.quality()


class _Sums:
    """Accumulates the figures of :class:`Quality` over the rows of a text."""

    def __init__(self) -> None:
        self._rows = self._followed = self._same = 0
        self._kl = self._loss = self._reference_loss = self._error = self._energy = 0.0

    def add(self, expected: Array, logits: Array, following: Array) -> None:
        """Adds rows ``[R,V]`` of both models, and the tokens that follow them; the last row may have no such token."""
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
        """The figures; those that are not finite become the largest float32."""
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
    return moved - np.log(np.exp(moved).sum(axis=-1, keepdims=True, dtype=np.float64)).astype(np.float32)


def energy(logits: Array) -> float:
    """Sum of squares around each row's mean; the mean does not count, as it does not affect probabilities."""
    return float(np.square(logits - logits.mean(axis=-1, keepdims=True), dtype=np.float64).sum())


def relative_rms(error: float, total: float) -> float:
    """Root-mean-square error relative to the root-mean-square of the logits, from the :func:`energy` of both."""
    return float(np.sqrt(error / total)) if total else 0.0
