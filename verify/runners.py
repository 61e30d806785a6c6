"""The two sides of ``specexport verify``'s comparison: the step graph and the model it was traced from, on one feed.

The graph works through a text the way the engine does, chunk by chunk over a cache. The model has no cache: it reads
each text from its start, so that a mistake in positions, masks or cache rows cannot hide in both.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from polygraphy.backend.base import BaseRunner
from polygraphy.backend.onnxrt import OnnxrtRunner
from polygraphy.common import TensorMetadata
from polygraphy.datatype import DataType

from specexport.checkpoints.reference import load_reference, reference_logits
from specexport.contract import tensors
from specexport.contract.manifest import Manifest
from specexport.contract.model import Model
from specexport.contract.tree import TokenTree
from specexport.exporter.caches import after_call, new_caches, no_embeddings
from specexport.runtime.bundle import Bundle
from specexport.runtime.machine import available_cores
from specexport.runtime.ort import open_session

Array = npt.NDArray[Any]
Feed = dict[str, Array]

COMMITTED = "committed_ids"
"""int64 ``[1,N]``, an input of the model only: the text whose rows the graph has in its cache."""

_COMPARED_ROWS = 16
"""Rows of a prefill chunk that are compared; all of them would be megabytes of logits that say the same."""

# --- feeds ------------------------------------------------------------------------------------------------------------


def prefill_feeds(manifest: Manifest, text: Sequence[int]) -> Iterator[Feed]:
    """The step graph's inputs, caches aside, for reading a text in chunks as the engine does."""
    chunk = manifest.prefill_chunk
    for done in range(0, len(text), chunk):
        part = list(text[done : done + chunk])
        rows = np.arange(max(0, len(part) - _COMPARED_ROWS), len(part))
        yield _feed(manifest, text[:done], part + [0] * (chunk - len(part)), TokenTree.chain(chunk), rows)


def feeds(manifest: Manifest, text: Sequence[int], K: int) -> Iterator[Feed]:
    """A prefill, then a chain of the verify step's width, a tree over the rows the chain left, and one plain token.

    The tree starts behind the chain's second token, as if the rest of the chain had been rejected, so rows that must no
    longer be seen are in the cache.
    """
    yield from prefill_feeds(manifest, text)
    width = K + 1
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
        yield _feed(manifest, committed, tokens, tree, np.arange(len(tree)))
        committed += tokens[:kept]


def _feed(manifest: Manifest, committed: Sequence[int], tokens: Sequence[int], tree: TokenTree, rows: Array) -> Feed:
    past = len(committed)
    # As in the engine: a chunk's padding may reach past the positions the model has.
    positions = np.minimum(past + tree.depths, manifest.target.max_positions - 1)
    return {
        COMMITTED: np.array([committed], np.int64).reshape(1, past),
        tensors.INPUT_IDS: np.array([tokens], np.int64),
        tensors.POSITION_IDS: positions[None],
        tensors.TREE_MASK: tree.mask[None],
        tensors.PAST_LENGTH: np.array([past], np.int64),
        tensors.LOGITS_ROWS: rows[None].astype(np.int64),
        **no_embeddings(manifest.target, len(tokens)),
    }


def half_embedded(feed: Feed, embeds: Array) -> Feed:
    """A prefill feed that says the same with embeddings ``[P,H]`` of the text in the place of every other token."""
    past, tokens = int(feed[tensors.PAST_LENGTH][0]), feed[tensors.INPUT_IDS].copy()
    given, mask = feed[tensors.INPUTS_EMBEDS].copy(), feed[tensors.EMBEDS_MASK].copy()
    at = np.arange(0, min(tokens.shape[1], len(embeds) - past), 2)
    given[0, at], mask[0, at], tokens[0, at] = embeds[past + at], True, 0
    return feed | {tensors.INPUT_IDS: tokens, tensors.INPUTS_EMBEDS: given, tensors.EMBEDS_MASK: mask}


# --- runners ----------------------------------------------------------------------------------------------------------


class StepRunner(OnnxrtRunner):  # type: ignore[misc]
    """The step graph under onnxruntime, with the runtime's own session; it keeps its caches from feed to feed.

    What it will be given decides the size of the cache.
    """

    def __init__(self, bundle: Bundle, feeds: Sequence[Feed]) -> None:
        model, lowering = bundle.manifest.target, bundle.manifest.lowering
        master, stored = bundle.file(model.graph.master), model.precision.weights
        super().__init__(lambda: open_session(master, available_cores(), lowering, stored), name="graph")
        needed = max(feed[COMMITTED].shape[1] + feed[tensors.INPUT_IDS].shape[1] for feed in feeds)
        self._layers = model.cache
        self._rows = min(at.point.cache for at in model.graph.points if at.point.cache >= needed)

    def activate_impl(self) -> None:
        super().activate_impl()
        # What was never written must never be read: it would show at once.
        self._caches = new_caches(self._layers, self._rows, 1e6)

    def get_input_metadata_impl(self) -> Any:
        metadata = TensorMetadata()
        for name, given in super().get_input_metadata_impl().items():
            if name not in self._caches:
                metadata.add(name, given.dtype, given.shape)
        return metadata

    def infer_impl(self, feed_dict: Feed) -> Feed:
        began = time.perf_counter()
        names = [output.name for output in self.sess.get_outputs()]
        outputs = dict(zip(names, self.sess.run(None, {**feed_dict, **self._caches}), strict=True))
        self._caches = after_call(self._caches, outputs, int(feed_dict[tensors.PAST_LENGTH][0]))
        self.inference_time = time.perf_counter() - began
        return OrderedDict({tensors.LOGITS: outputs[tensors.LOGITS]})

    def deactivate_impl(self) -> None:
        super().deactivate_impl()
        del self._caches


class ReferenceRunner(BaseRunner):  # type: ignore[misc]
    """The original model in plain transformers, eager attention, no cache: each path of a tree is a text of its own."""

    def __init__(self, path: Path, model: Model) -> None:
        super().__init__(name="transformers")
        self._path, self._described = path, model

    def activate_impl(self) -> None:
        self._model = load_reference(self._path, self._described)

    def get_input_metadata_impl(self) -> Any:
        metadata = TensorMetadata().add(tensors.TREE_MASK, DataType.BOOL, (1, None, None))
        for name in (COMMITTED, tensors.INPUT_IDS, tensors.LOGITS_ROWS):
            metadata.add(name, DataType.INT64, (1, None))
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
