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
import torch
from polygraphy.backend.base import BaseRunner
from polygraphy.backend.onnxrt import OnnxrtRunner
from polygraphy.common import TensorMetadata
from polygraphy.datatype import DataType
from transformers import AutoModelForCausalLM

from specexport.checkpoints.medusa import load_medusa
from specexport.checkpoints.quiet import quiet
from specexport.contract import tensors
from specexport.contract.errors import BundleError
from specexport.contract.manifest import Manifest
from specexport.contract.model import Model
from specexport.contract.tree import TokenTree
from specexport.exporter.caches import after_call, new_caches, no_embeddings
from specexport.graphs.layers import keep_first_layers
from specexport.runtime.bundle import Bundle
from specexport.runtime.ort import available_cores, open_session

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
    """A feed of the step graph that says the same with embeddings in the place of every other token of the text.

    Args:
        feed: one of :func:`prefill_feeds`.
        embeds: float32 ``[P,H]``, the model's own embeddings of the whole text.
    """
    past, tokens = int(feed[tensors.PAST_LENGTH][0]), feed[tensors.INPUT_IDS].copy()
    given, mask = feed[tensors.INPUTS_EMBEDS].copy(), feed[tensors.EMBEDS_MASK].copy()
    at = np.arange(0, min(tokens.shape[1], len(embeds) - past), 2)
    given[0, at], mask[0, at], tokens[0, at] = embeds[past + at], True, 0
    return feed | {tensors.INPUT_IDS: tokens, tensors.INPUTS_EMBEDS: given, tensors.EMBEDS_MASK: mask}


# --- runners ----------------------------------------------------------------------------------------------------------


class StepRunner(OnnxrtRunner):  # type: ignore[misc]
    """The step graph under onnxruntime, with the runtime's own session; it keeps its caches from feed to feed.

    Args:
        bundle: the bundle.
        feeds: what it will be given; decides the size of the cache.
    """

    def __init__(self, bundle: Bundle, feeds: Sequence[Feed]) -> None:
        model = bundle.manifest.target
        lowering = bundle.manifest.lowering
        master = bundle.file(model.graph.master)
        super().__init__(
            lambda: open_session(master, available_cores(), lowering, model.precision.weights), name="graph"
        )
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
    """The original model in plain transformers, eager attention, no cache: each path of a tree is a text of its own.

    Args:
        path: the checkpoint's folder.
        model: what the bundle says of it.
    """

    def __init__(self, path: Path, model: Model) -> None:
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


def load_reference(path: Path, described: Model, layers: int | None = None) -> Any:
    """Loads a checkpoint in fp32 as plain transformers runs it.

    Args:
        path: the checkpoint.
        described: what it must be.
        layers: keep only so many of its first layers; None for all.

    Raises:
        BundleError: it is not the model that was described.
    """
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", use_safetensors=True
        ).eval()
    if layers is not None:
        keep_first_layers(model, layers)
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


def reference_states(model: Any, text: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """What a model says after each token of a text, ``[N,V]``, and what its head made that of, ``[N,H]``."""
    taken: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _module, args: taken.append(args[0]))
    try:
        logits = torch.from_numpy(reference_logits(model, text))
    finally:
        hook.remove()
    return logits, taken[0][0].float()


def reference_heads(model: Any, heads: Path, text: Array) -> Array:
    """What a model and Medusa heads on it say after the last token of a text, float32 ``[1+N,V]``."""
    head = model.get_output_embeddings()
    own, hidden = reference_states(model, text)
    loaded = load_medusa(heads, hidden=int(head.weight.shape[1]), vocab=int(head.weight.shape[0]))
    with torch.no_grad():
        logits: Array = torch.cat([own[-1:], loaded.logits(hidden[-1], head)]).numpy()
    return logits


def reference_embeds(model: Any, text: Array) -> Array:
    """The embeddings of a text's tokens, float32 ``[N,H]``, as the model takes them in their place."""
    with torch.no_grad():
        embeds: Array = model.get_input_embeddings()(torch.from_numpy(text)).float().numpy()
    return embeds
