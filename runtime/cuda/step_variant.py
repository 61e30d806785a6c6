"""What steps have in common that one CUDA graph runs: their shapes, who proposes, and what they are given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specexport.contract import tensors
from specexport.contract.engines import Accept, Fill
from specexport.contract.shapes import CATCH_UP_TOKENS
from specexport.contract.tree import TokenTree
from specexport.runtime.cuda.graph import DeviceGraph, Width
from specexport.runtime.graph import Array


@dataclass(frozen=True, eq=False)
class Drafting:
    """How a draft proposes on the device.

    Attributes:
        graph: the draft's.
        tree: what it fills.
        fill: the graph that does; None for chains, which need none.
    """

    graph: DeviceGraph
    tree: TokenTree
    fill: Fill | None

    @property
    def width(self) -> Width:
        """What runs the draft, for all slots."""
        return self.graph.width(CATCH_UP_TOKENS, drafts=self.tree.depth, batch=self.graph.sizes[-1])

    @property
    def candidates(self) -> int:
        """M of q."""
        return self.width.outputs.device[tensors.DRAFT_IDS].shape[-1]

    def holds(self, tree: TokenTree) -> bool:
        """Whether it can fill a tree too, which may be smaller: what it proposes beyond that never stays."""
        fits = len(tree) <= len(self.tree) and tree.depth <= self.tree.depth
        return fits and (tree.is_chain or self.fill is not None)


@dataclass(frozen=True, eq=False)
class StepVariant:
    """What steps have in common that one CUDA graph runs, but for the size of the cache.

    Attributes:
        accept: the accept graph.
        tokens: T, what the target sees.
        nodes: N, of the tree; of a smaller one the rest never stays.
        drafting: how a draft proposes on the device; None where the host writes the draft tokens and q.
    """

    accept: Accept
    tokens: int
    nodes: int
    drafting: Drafting | None = None

    def inputs(self) -> dict[str, Array]:
        """What the accept and fill graphs take of a slot from the host; at first a chain of greedy tokens.

        Slots without a part in a step keep what they had in an earlier one: all of it are trees that there may be.
        """
        nodes, drafts, lossless = self.nodes, self.nodes - 1, self.accept.rule == "lossless"
        arrays: dict[str, Array] = {
            tensors.PARENTS: np.arange(-1, drafts)[None],
            tensors.TREE_MASK: np.tri(nodes, dtype=np.bool_)[None],
            tensors.UNIFORM: np.zeros((1, nodes if lossless else 1), np.float32),
            tensors.TEMPERATURE: np.ones(1, np.float32),
            tensors.TOP_K: np.ones(1, np.int64),
            tensors.TOP_P: np.ones(1, np.float32),
            tensors.MIN_P: np.zeros(1, np.float32),
        }
        if not lossless:
            arrays |= {name: np.zeros(1, np.float32) for name in (tensors.THRESHOLD, tensors.ALPHA)}
        if self.drafting is None:
            arrays[tensors.DRAFT_TOKENS] = np.zeros((1, drafts), np.int64)
            if lossless:
                support = (1, drafts, self.accept.candidates)
                arrays[tensors.DRAFT_IDS] = np.broadcast_to(np.arange(support[-1]), support).copy()
                arrays[tensors.DRAFT_PROBS] = np.broadcast_to(np.eye(1, support[-1], dtype=np.float32), support).copy()
        elif self.drafting.fill is not None:
            arrays[tensors.TREE_DEPTHS] = self.drafting.tree.depths[None, 1:]
            arrays[tensors.TREE_RANKS] = np.array([self.drafting.tree.ranks[1:]], np.int64)
        return arrays

    def outputs(self) -> dict[str, Array]:
        """What the accept graph says of a slot."""
        return {
            tensors.NUM_ACCEPTED: np.zeros(1, np.int64),
            tensors.TOKENS: np.zeros((1, self.nodes), np.int64),
            tensors.PATH: np.zeros((1, self.nodes), np.int64),
        }

    def between(self) -> dict[str, Array]:
        """What was drafted for one slot, which stays on the device: as the fill graph makes it, or a chain's."""
        if self.drafting is None:
            return {}
        drafts, support = self.nodes - 1, self.drafting.candidates
        filled = (tensors.TREE_TOKENS, tensors.TREE_IDS, tensors.TREE_PROBS)
        tokens, ids, probs = tensors.DRAFTED if self.drafting.fill is None else filled
        return {
            tokens: np.zeros((1, drafts), np.int64),
            ids: np.zeros((1, drafts, support), np.int64),
            probs: np.zeros((1, drafts, support), np.float32),
        }
