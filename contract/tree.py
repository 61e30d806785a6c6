"""Token trees: what one verify step looks at. A chain is the tree with one leaf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from specexport.contract.errors import SpecExportError

MAX_NODES = 128


@dataclass(frozen=True)
class TokenTree:
    """A rooted tree over the tokens of a verify step, in an order where parents precede children.

    Node 0, the root, is the last committed token; every other node is a draft token.

    Attributes:
        parents: parent of each node; -1 for the root only.

    Raises:
        SpecExportError: the parents do not describe such a tree, or it has more than ``MAX_NODES`` nodes.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.parents) <= MAX_NODES:
            raise SpecExportError(f"a token tree has 1 to {MAX_NODES} nodes; this one has {len(self.parents)}")
        for node, parent in enumerate(self.parents):
            if not (parent == -1 if node == 0 else 0 <= parent < node):
                raise SpecExportError(
                    f"node {node} of a token tree has parent {parent}; expected "
                    + ("-1, as node 0 is the root" if node == 0 else f"0 to {node - 1}: a parent precedes its children")
                )

    @staticmethod
    @lru_cache(maxsize=256)
    def chain(nodes: int) -> TokenTree:
        """The root followed by ``nodes - 1`` draft tokens, each the child of the one before."""
        return TokenTree(tuple(range(-1, nodes - 1)))

    @classmethod
    def from_parents(cls, parents: Sequence[int]) -> TokenTree:
        """Builds a tree from any sequence of parents."""
        return cls(tuple(int(p) for p in parents))

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> npt.NDArray[np.int64]:
        """Distance of each node from the root, int64 ``[T]``: a node's position is the root's plus its depth."""
        depths = np.zeros(len(self), np.int64)
        for node, parent in enumerate(self.parents[1:], start=1):
            depths[node] = depths[parent] + 1
        return depths

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of each node, in the order they are tried."""
        found: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            found[parent].append(node)
        return tuple(map(tuple, found))

    @cached_property
    def mask(self) -> npt.NDArray[np.bool_]:
        """Which nodes each node sees, bool ``[T,T]``: its ancestors and itself."""
        mask = np.eye(len(self), dtype=np.bool_)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node] |= mask[parent]
        return mask
