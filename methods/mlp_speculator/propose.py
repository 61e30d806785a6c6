"""Proposes with an MLP speculator, whose stages draft a whole tree in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from specexport.contract import tensors
from specexport.contract.shapes import window
from specexport.contract.tensors import Tensor
from specexport.contract.tree import TokenTree
from specexport.methods.mlp_speculator.spec import MlpSpeculator
from specexport.runtime.backend import Array, Graph, RunShape, write_sampling
from specexport.runtime.prompt import is_embedding
from specexport.runtime.proposal import DeviceDraft, Ints, Opening, Proposal, Proposer, SlotProposer, SlotView, drawn
from specexport.runtime.sampling import Floats


class MlpSpeculatorProposer(SlotProposer[Floats]):
    """Fills a tree from the target's hidden state at the last token in its cache, and from the next token, the root.

    A stage computes a row for every node with children, from its parent's state and its token. The first child of a
    node is drawn from q; in greedy decoding it is the most probable token.
    """

    observes = frozenset({tensors.HIDDEN})

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    @property
    def device_draft(self) -> DeviceDraft:
        return self

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        """See :class:`Proposer`; leaves out slots that are not ready."""
        ready = [view for view in views if self.is_ready(view)]
        if not ready:
            return {}
        deepest, widest = max(view.tree.depth for view in ready), max(view.tree.level_width for view in ready)
        slots = window([view.slot for view in ready], self.graph.sizes)
        drafts, tokens = next((k, w) for k, w in self.graph.drafts(len(slots)) if k >= deepest and w >= widest)
        self.write_inputs(ready, tokens, drafts)
        outputs = self.graph.run(RunShape(tokens, drafts=drafts, slots=slots))
        return {view.slot: _proposal(view, outputs, view.slot - slots.start) for view in ready}

    def is_ready(self, view: SlotView) -> bool:
        """See :class:`DeviceDraft`; whether the target has run in the slot, and the root is a token."""
        return view.slot in self._slots and not is_embedding(view.tokens[-1])

    def write_inputs(self, views: Sequence[SlotView], tokens: int, drafts: int) -> range:
        """See :class:`DeviceDraft`; K is the number of stages and T the nodes of a level."""
        slots = window([view.slot for view in views], self.graph.sizes)
        inputs = self.graph.inputs(RunShape(tokens, drafts=drafts, slots=slots))
        for view in views:
            at, levels = view.slot - slots.start, _levels(view.tree)
            depth, width = levels.parents.shape
            inputs[tensors.HIDDEN_STATE][at] = self._slots[view.slot]
            inputs[tensors.INPUT_IDS][at] = view.tokens[-1]
            for name, indices in ((tensors.LEVEL_PARENTS, levels.parents), (tensors.LEVEL_RANKS, levels.ranks)):
                inputs[name][at] = 0
                inputs[name][at, :depth, :width] = indices
            write_sampling(inputs, at, view.params)
            if not view.params.greedy:
                # As much noise as the tree needs, so that results of a seed do not depend on the rest of the batch.
                inputs[tensors.UNIFORM][at, :depth, :width] = view.random.random((depth, width), np.float32)
        return slots

    def rows(self, tree: TokenTree, tokens: int) -> Ints:
        """See :class:`DeviceDraft`; the first stage has one row, each other stage T."""
        place = {node: at for level in tree.levels for at, node in enumerate(level)}
        below = [(tree.depths[parent], place[parent]) for parent in tree.parents[1:]]
        return np.array([1 + (stage - 1) * tokens + at if stage else 0 for stage, at in below], np.int64)

    def commit(self, view: SlotView, drafted: Sequence[int]) -> None:
        """See :class:`DeviceDraft`; there is no cache."""

    def observe(self, slot: int, outputs: Mapping[str, Array], row: int) -> None:
        self._slots[slot] = outputs[tensors.HIDDEN][row].copy()


@dataclass(frozen=True)
class _Levels:
    """A tree in the form of the stages' inputs: D levels of at most W inner nodes.

    Attributes:
        parents: int64 ``[D,W]``, each inner node's parent, as an index into the inner nodes of the level above.
        ranks: int64 ``[D,W]``, its rank among its siblings.
        counts: number of inner nodes of each level.
        rows: int64 ``[K]``, for each node but the root, its parent's index among the inner nodes of all levels.
    """

    parents: Ints
    ranks: Ints
    counts: tuple[int, ...]
    rows: Ints


@lru_cache(maxsize=256)
def _levels(tree: TokenTree) -> _Levels:
    place = {node: at for level in tree.levels for at, node in enumerate(level)}
    parents, ranks = np.zeros((2, tree.depth, tree.level_width), np.int64)
    for depth, level in enumerate(tree.levels[1:], start=1):
        parents[depth, : len(level)] = [place[tree.parents[node]] for node in level]
        ranks[depth, : len(level)] = [tree.ranks[node] for node in level]
    row = {node: at for at, node in enumerate(node for level in tree.levels for node in level)}
    rows = np.array([row[parent] for parent in tree.parents[1:]], np.int64)
    return _Levels(parents, ranks, tuple(map(len, tree.levels)), rows)


def _proposal(view: SlotView, outputs: Mapping[str, Array], at: int) -> Proposal:
    tree = view.tree
    levels = _levels(tree)

    def rows(name: Tensor) -> Array:
        parts = [outputs[name.of_stage(stage)][at, :count] for stage, count in enumerate(levels.counts)]
        return np.concatenate(parts)

    # The first node of each level is on the path of rank 0.
    best = np.cumsum((0, *levels.counts[:-1]))
    ids: Ints = rows(tensors.DRAFT_IDS)
    if view.params.greedy:
        return Proposal(ids[levels.rows, np.asarray(tree.ranks[1:])], tree, None, ids[best])
    probs: Floats = rows(tensors.DRAFT_PROBS)
    tokens, q, candidates = drawn(tree, levels.rows, rows(tensors.DRAFT_TOKENS), ids, probs)
    return Proposal(tokens, tree, q, candidates[best])


def open_proposer(method: MlpSpeculator, opening: Opening) -> Proposer:
    return MlpSpeculatorProposer(opening.graph(method))
