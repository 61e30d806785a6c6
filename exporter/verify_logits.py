"""``specexport verify`` against the original models: the step graph's logits, and the draft's tokens.

The graph and the model it was traced from, as plain transformers runs it, are two Polygraphy runners on the same feeds;
Polygraphy's comparator runs and compares them. The graph works through prompts the way the engine does, chunk by chunk
over a cache. The model has no cache: it reads each text from its start, so that a mistake in positions, masks or cache
rows cannot hide in both.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from polygraphy.backend.base import BaseRunner
from polygraphy.backend.onnxrt import OnnxrtRunner
from polygraphy.common import TensorMetadata
from polygraphy.comparator import Comparator, SimpleCompareFunc
from polygraphy.datatype import DataType
from polygraphy.logger import G_LOGGER
from specexport.contract import manifest as mf
from specexport.contract import tensors
from specexport.contract.errors import BundleError
from specexport.contract.tree import TokenTree
from specexport.exporter.trace import quiet
from specexport.runtime.backend import open_graph, propose_buffers, step_buffers
from specexport.runtime.bundle import Bundle
from specexport.runtime.ort import OnnxRuntimeGraph, available_cores
from specexport.runtime.params import SamplingParams
from specexport.runtime.proposers import DraftModelProposer, SlotView
from transformers import AutoModelForCausalLM

Array = npt.NDArray[Any]
Feed = dict[str, Array]

COMMITTED = "committed_ids"
"""int64 ``[1,N]``, an input of the reference only: the text whose rows the graph has in its cache."""

_COMPARED_ROWS = 16
"""Rows of a prefill chunk that are compared; all of them would be megabytes of logits that say the same."""


@dataclass(frozen=True)
class Limits:
    """How far a graph may be from its model, by how the weights are stored.

    Attributes:
        largest: largest difference of a logit, relative to the largest logit; infinite where single logits say nothing.
        rms: root-mean-square difference of logits, relative to their spread. 1.4 is what two unrelated models have.
        tie: two tokens whose logits differ by at most this, relative to the largest logit, are a tie.
        agreement: least share of positions where graph and model prefer the same token; ties count as the same.
        rounding: as ``tie``, between two shapes of the same graph.
    """

    largest: float
    rms: float
    tie: float
    agreement: float
    rounding: float


LIMITS: dict[str, Limits] = {
    "fp32": Limits(largest=1e-3, rms=1e-3, tie=1e-3, agreement=1.0, rounding=1e-4),
    "fp16": Limits(largest=2e-2, rms=2e-2, tie=2e-2, agreement=1.0, rounding=1e-4),
    "int8": Limits(largest=np.inf, rms=0.1, tie=2e-2, agreement=0.9, rounding=2e-2),
    "int4": Limits(largest=np.inf, rms=0.7, tie=2e-2, agreement=0.5, rounding=2e-2),
}


@dataclass
class Agreement:
    """Positions at which a graph and a model both name the next token.

    Attributes:
        positions: how many.
        same: where they prefer the same token.
        ties: where they do not, but the model hardly prefers its own.
    """

    positions: int = 0
    same: int = 0
    ties: int = 0

    @property
    def share(self) -> float:
        """Of positions, same or tied."""
        return (self.same + self.ties) / self.positions if self.positions else 0.0

    def count(self, reference: Array, chosen: Array, tie: float) -> None:
        """Adds positions.

        Args:
            reference: the model's logits ``[N,V]``.
            chosen: the graph's tokens ``[N]``.
            tie: see :class:`Limits`.
        """
        gap = reference.max(axis=-1) - np.take_along_axis(reference, chosen[:, None], axis=-1)[:, 0]
        self.positions += len(gap)
        self.same += int((gap == 0).sum())
        self.ties += int(((gap > 0) & (gap <= tie * _scale(reference))).sum())


@dataclass(frozen=True)
class LogitsResult:
    """What :func:`compare_logits` found.

    Attributes:
        within: whether Polygraphy's comparison passed at ``Limits.largest``.
        finite: whether every logit of the graph is a finite number.
        largest: largest difference of a logit.
        scale: largest logit.
        rms: see :class:`Limits`.
        agreement: of the most probable tokens.
    """

    within: bool
    finite: bool
    largest: float
    scale: float
    rms: float
    agreement: Agreement


def _scale(logits: Array) -> float:
    return max(1.0, float(np.abs(logits).max()))


# --- feeds ------------------------------------------------------------------------------------------------------------


def prefill_feeds(manifest: mf.Manifest, text: Sequence[int]) -> Iterator[Feed]:
    """The step graph's inputs, caches aside, for reading a text in chunks as the engine does."""
    chunk = manifest.prefill_chunk
    for done in range(0, len(text), chunk):
        part = list(text[done : done + chunk])
        rows = np.arange(max(0, len(part) - _COMPARED_ROWS), len(part))
        yield _feed(text[:done], part + [0] * (chunk - len(part)), TokenTree.chain(chunk), rows)


def _feeds(manifest: mf.Manifest, text: Sequence[int]) -> Iterator[Feed]:
    """A prefill, then a chain of the verify step's width, a tree over the rows the chain left, and one plain token.

    The tree starts behind the chain's second token, as if the rest of the chain had been rejected, so rows that must no
    longer be seen are in the cache.
    """
    yield from prefill_feeds(manifest, text)
    width = manifest.method.num_speculative_tokens + 1 if isinstance(manifest.method, mf.DraftModel) else 2
    # Tokens from the text itself, so that models are asked about what they know.
    more = [text[i % len(text)] for i in range(2 * width + 1)]
    committed = list(text)
    binary = TokenTree(tuple((node - 1) // 2 if node else -1 for node in range(width)))
    for tokens, tree, kept in (
        (more[:width], TokenTree.chain(width), 2),
        (more[width : 2 * width], binary, 1),
        (more[2 * width :], TokenTree.chain(1), 1),
    ):
        if len(committed) + len(tree) > manifest.target.max_positions:
            return
        yield _feed(committed, tokens, tree, np.arange(len(tree)))
        committed += tokens[:kept]


def _feed(committed: Sequence[int], tokens: Sequence[int], tree: TokenTree, rows: Array) -> Feed:
    past = len(committed)
    return {
        COMMITTED: np.array([committed], np.int64).reshape(1, past),
        tensors.INPUT_IDS: np.array([tokens], np.int64),
        tensors.POSITION_IDS: past + tree.depths[None],
        tensors.TREE_MASK: tree.mask[None],
        tensors.PAST_LENGTH: np.array([past], np.int64),
        tensors.LOGITS_ROWS: rows[None].astype(np.int64),
    }


# --- runners ----------------------------------------------------------------------------------------------------------


class StepRunner(OnnxrtRunner):  # type: ignore[misc]
    """The step graph under onnxruntime, with the runtime's own session; it keeps its caches from feed to feed.

    Args:
        bundle: the bundle.
    """

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(lambda: _session(bundle), name="graph")
        model = bundle.manifest.target
        self._layers = model.cache
        self._rows = max(point.point.cache for point in model.graph.points)

    def activate_impl(self) -> None:
        super().activate_impl()
        self._caches: Feed = {}
        for layer, shape in enumerate(self._layers):
            for name, size in (
                (tensors.past_key(layer), shape.key_size),
                (tensors.past_value(layer), shape.value_size),
            ):
                # What was never written must never be read: it would show at once.
                self._caches[name] = np.full((1, shape.heads, self._rows, size), 1e6, np.float32)

    def get_input_metadata_impl(self) -> Any:
        given = super().get_input_metadata_impl()
        for name in self._caches:
            del given[name]
        return given

    def infer_impl(self, feed_dict: Feed) -> Feed:
        began = time.perf_counter()
        names = [output.name for output in self.sess.get_outputs()]
        outputs = dict(zip(names, self.sess.run(None, {**feed_dict, **self._caches}), strict=True))
        for name in self._caches:
            self._caches[name] = outputs[name.replace("past_", "present_", 1)]
        self.inference_time = time.perf_counter() - began
        return OrderedDict({tensors.LOGITS: outputs[tensors.LOGITS]})

    def deactivate_impl(self) -> None:
        super().deactivate_impl()
        del self._caches


def _session(bundle: Bundle) -> Any:
    manifest = bundle.manifest
    path = bundle.file(manifest.target.graph.master)
    return OnnxRuntimeGraph(path, manifest.target, 1, step_buffers(manifest), available_cores())._session


class ReferenceRunner(BaseRunner):  # type: ignore[misc]
    """The original model in plain transformers, eager attention, no cache: each path of a tree is a text of its own.

    Args:
        path: the checkpoint's folder.
        model: what the bundle says of it.
    """

    def __init__(self, path: Path, model: mf.Model) -> None:
        super().__init__(name="transformers")
        self._path, self._described = path, model

    def activate_impl(self) -> None:
        self._model = load_reference(self._path, self._described)

    def get_input_metadata_impl(self) -> Any:
        metadata = TensorMetadata()
        metadata.add(COMMITTED, DataType.INT64, (1, None))
        metadata.add(tensors.INPUT_IDS, DataType.INT64, (1, None))
        metadata.add(tensors.TREE_MASK, DataType.BOOL, (1, None, None))
        metadata.add(tensors.LOGITS_ROWS, DataType.INT64, (1, None))
        return metadata

    def infer_impl(self, feed_dict: Feed) -> Feed:
        began = time.perf_counter()
        committed, tokens = feed_dict[COMMITTED][0], feed_dict[tensors.INPUT_IDS][0]
        mask, rows = feed_dict[tensors.TREE_MASK][0], feed_dict[tensors.LOGITS_ROWS][0]
        found: dict[int, Array] = {}
        # Longest paths first: what they pass through need not be run again.
        for row in sorted(rows.tolist(), key=lambda row: -int(mask[row].sum())):
            if row not in found:
                path = np.flatnonzero(mask[row])
                logits = reference_logits(self._model, np.concatenate([committed, tokens[path]]))
                found.update(zip(path.tolist(), logits[len(committed) :], strict=True))
        self.inference_time = time.perf_counter() - began
        return OrderedDict({tensors.LOGITS: np.stack([found[row] for row in rows.tolist()])[None]})

    def deactivate_impl(self) -> None:
        del self._model


def load_reference(path: Path, described: mf.Model) -> Any:
    """Loads a checkpoint in fp32 as plain transformers runs it.

    Raises:
        BundleError: it is not the model that was described.
    """
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", use_safetensors=True
        ).eval()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    width = int(model.get_output_embeddings().weight.shape[0])
    if (parameters, width) != (described.parameters, described.vocab_size):
        raise BundleError(
            f"{path} is another model: {parameters:,} parameters and {width:,} logits, where the bundle was built from "
            f"{described.parameters:,} and {described.vocab_size:,}; pass the checkpoint the bundle was built from"
        )
    return model


def reference_logits(model: Any, text: Array) -> Array:
    """What a model says after each token of a text, float32 ``[N,V]``."""
    with torch.no_grad():
        logits: Array = model(torch.from_numpy(text)[None], use_cache=False).logits[0].float().numpy()
    return logits


# --- comparisons ------------------------------------------------------------------------------------------------------


def compare_logits(bundle: Bundle, checkpoint: Path, texts: Sequence[Sequence[int]], limits: Limits) -> LogitsResult:
    """Compares the step graph with the target it was built from.

    One model is in memory at a time: Polygraphy runs one runner to its end before it starts the other.

    Raises:
        BundleError: the checkpoint is another model.
    """
    feeds = [feed for text in texts for feed in _feeds(bundle.manifest, text)]
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        results = Comparator.run([ReferenceRunner(checkpoint, bundle.manifest.target), StepRunner(bundle)], feeds)
        (_, theirs), (_, ours) = results
        scale = _scale(np.concatenate([result[tensors.LOGITS][0] for result in theirs]))
        compare = SimpleCompareFunc(atol=limits.largest * scale, rtol=0.0, check_error_stat="max")
        accuracy = Comparator.compare_accuracy(results, comparisons=[(1, 0)], compare_func=compare)
        finite = bool(Comparator.validate(results, check_inf=True, check_nan=True))
    (compared,) = accuracy[0].values()
    agreement, error, energy = Agreement(), 0.0, 0.0
    for our, their in zip(ours, theirs, strict=True):
        graph, reference = our[tensors.LOGITS][0], their[tensors.LOGITS][0]
        agreement.count(reference, graph.argmax(axis=-1), limits.tie)
        error += _energy(graph - reference)
        energy += _energy(reference)
    return LogitsResult(
        within=bool(accuracy),
        finite=finite,
        largest=max(result[tensors.LOGITS].max_absdiff for result in compared),
        scale=scale,
        rms=float(np.sqrt(error / energy)) if energy else 0.0,
        agreement=agreement,
    )


def _energy(logits: Array) -> float:
    """Sum of squares around each row's mean: a constant added to all logits of a row changes no probability."""
    return float(np.square(logits - logits.mean(axis=-1, keepdims=True), dtype=np.float64).sum())


def logit_gap(bundle: Bundle, text: Sequence[int], first: int, second: int) -> float:
    """How far apart the step graph's logits of two tokens are after a text, relative to its largest logit there."""
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL), StepRunner(bundle) as runner:
        for feed in prefill_feeds(bundle.manifest, text):
            wanted = {name: array for name, array in feed.items() if name != COMMITTED}
            logits = runner.infer(wanted)[tensors.LOGITS][0, -1]
    return abs(float(logits[first] - logits[second])) / _scale(logits)


def propose(bundle: Bundle, method: mf.DraftModel, texts: Sequence[Sequence[int]]) -> list[tuple[list[int], list[int]]]:
    """Texts and the greedy draft tokens the propose graph continues them with, through the runtime's own proposer.

    Each text is continued three times, as if all, one and none of its draft tokens had been accepted: the draft's cache
    then holds rows that are right, rows that are stale, and lacks one.
    """
    graph = open_graph(bundle, method.draft, 1, propose_buffers(bundle.manifest, method), None)
    proposer = DraftModelProposer(graph, bundle.manifest, method)
    params, random = SamplingParams(temperature=0.0), np.random.default_rng(0)
    made = []
    for start in texts:
        text, first = list(start), start[0]
        for kept in (method.num_speculative_tokens, 1, 0):
            if len(text) + method.num_speculative_tokens > bundle.manifest.max_seq_len:
                break
            proposal = proposer.propose([SlotView(0, text, params, random)]).get(0)
            drafted = proposal.tokens.tolist() if proposal is not None else []
            if drafted:
                made.append((list(text), drafted))
            text += [*drafted[:kept], first]
        proposer.release(0)
    return made


def compare_draft(
    checkpoint: Path,
    manifest: mf.Manifest,
    draft: mf.Model,
    made: Sequence[tuple[list[int], list[int]]],
    limits: Limits,
) -> Agreement:
    """Compares draft tokens with the draft model's own: each must be its most probable one after those before it.

    Raises:
        BundleError: the checkpoint is another model.
    """
    model = load_reference(checkpoint, draft)
    vocab, rows = min(manifest.target.vocab_size, draft.vocab_size), model.get_input_embeddings().weight.shape[0]
    agreement = Agreement()
    for text, drafted in made:
        # A token that only the target has is read as the last one, as the graph does.
        tokens = np.minimum(np.array([*text, *drafted[:-1]]), rows - 1)
        logits = reference_logits(model, tokens)[len(text) - 1 :, :vocab]
        agreement.count(logits, np.array(drafted), limits.tie)
    return agreement
