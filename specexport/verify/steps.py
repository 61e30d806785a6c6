"""The calls in which ``specexport verify`` compares the step graph with the model it was traced from.

The graph reads a text like the engine, in chunks with a cache. The model has no cache: it reads each text from its
start, so that a mistake in positions, masks or cache rows cannot hide in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specexport.contract import tensors
from specexport.contract.manifest import Manifest
from specexport.contract.model import Model
from specexport.contract.tree import TokenTree
from specexport.exporter.checkpoints.checkpoint import reference_logits
from specexport.exporter.graph_checks import StepSession
from specexport.runtime.bundle import Bundle

Array = npt.NDArray[Any]
Feed = dict[str, Array]

_COMPARED_ROWS = 16
"""Rows of a prefill chunk that are compared; all of them would be megabytes of logits."""


@dataclass(frozen=True)
class StepCall:
    """One call of the step graph.

    Attributes:
        committed: the text in the cache.
        tokens: the T tokens of the call.
        tree: their tree.
        rows: the R tokens whose logits are compared.
        known: how many of the tokens are text and not draft tokens.
    """

    committed: list[int]
    tokens: list[int]
    tree: TokenTree
    rows: range
    known: int = 1

    def feed(self, model: Model) -> Feed:
        """The graph's inputs, without caches and embeddings."""
        past = len(self.committed)
        # As in the engine: a chunk's padding may reach past the model's last position.
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
        """The model's logits, float32 ``[R,V]``; each path of a tree is run as a text."""
        logits: dict[int, Array] = {}
        # Longest paths first: their prefixes need not be run again.
        for row in sorted(self.rows, key=lambda row: -int(self.tree.mask[row].sum())):
            if row not in logits:
                path = np.flatnonzero(self.tree.mask[row]).tolist()
                text = np.array([*self.committed, *(self.tokens[node] for node in path)], np.int64)
                logits.update(zip(path, reference_logits(model, text)[len(self.committed) :], strict=True))
        return np.stack([logits[row] for row in self.rows])


def prefill_calls(manifest: Manifest, text: Sequence[int]) -> Iterator[StepCall]:
    """Reads a text in chunks as the engine does."""
    chunk = manifest.prefill_chunk
    for start in range(0, len(text), chunk):
        part = list(text[start : start + chunk])
        rows = range(max(0, len(part) - _COMPARED_ROWS), len(part))
        yield StepCall(list(text[:start]), part + [0] * (chunk - len(part)), TokenTree.chain(chunk), rows, len(part))


def step_calls(manifest: Manifest, text: Sequence[int], K: int) -> Iterator[StepCall]:
    """A prefill, then a chain of the verify step's width, a tree over the rows the chain left, and one plain token.

    The tree starts after the chain's second token, as if the rest of the chain had been rejected, so the cache holds
    rows that must not be visible.
    """
    yield from prefill_calls(manifest, text)
    width = K + 1
    # Tokens from the text itself, as models know it.
    following = [text[i % len(text)] for i in range(2 * width + 1)]
    committed = list(text)
    tree = TokenTree(tuple((node - 1) // 2 if node else -1 for node in range(width)))
    if manifest.target.states:
        tree = TokenTree.chain(width)
    for tokens, shape, accepted in (
        (following[:width], TokenTree.chain(width), 2),
        (following[width : 2 * width], tree, 1),
        (following[2 * width :], TokenTree.chain(1), 1),
    ):
        if len(committed) + len(shape) > manifest.target.max_positions:
            return
        yield StepCall(list(committed), tokens, shape, range(len(shape)))
        committed += tokens[:accepted]


def open_step(bundle: Bundle, calls: Sequence[StepCall]) -> StepSession:
    """The step graph, with a cache for these calls."""
    model = bundle.manifest.target
    least = max(len(call.committed) + len(call.tokens) for call in calls)
    rows = min(point.cache for point in model.graph.points if point.cache >= least)
    # Rows that were never written hold 1e6, so that reading them shows at once.
    return StepSession(bundle.file, bundle.manifest.lowering, model, rows, 1e6)


def half_embedded(feed: Feed, embeds: Array) -> Feed:
    """A prefill feed with embeddings ``[P,H]`` of the text in place of every other token."""
    past, tokens = int(feed[tensors.PAST_LENGTH][0]), feed[tensors.INPUT_IDS].copy()
    rows, mask = np.zeros((*tokens.shape, embeds.shape[1]), np.float32), np.zeros(tokens.shape, np.bool_)
    at = np.arange(0, min(tokens.shape[1], len(embeds) - past), 2)
    rows[0, at], mask[0, at], tokens[0, at] = embeds[past + at], True, 0
    return feed | {tensors.INPUT_IDS: tokens, tensors.INPUTS_EMBEDS: rows, tensors.EMBEDS_MASK: mask}
