"""Token trees, each verified in one step. A chain is a tree with one leaf."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from specexport.contract.errors import UNREADABLE, SpecExportError, explained

MAX_NODES = 256
_MAX_FILE = 1 << 20
PRESETS: dict[str, str] = msgspec.json.decode(Path(__file__).with_name("trees.json").read_bytes())
"""Trees of 63 nodes and the root that Medusa's authors found for their models (FasterDecoding/Medusa): ``stage1`` for
heads on a frozen model, ``stage2`` for heads trained together with it. A word is a path of ranks."""


@dataclass(frozen=True)
class TokenTree:
    """A rooted tree over the tokens of a verify step, in an order where parents precede children.

    Node 0, the root, is the last committed token; every other node is a draft token.

    Attributes:
        parents: parent of each node; -1 for the root only.
        ranks: each node's rank among its parent's most probable continuations, from 0; 0 for the root. By default
            siblings are ranked in their order.

    Raises:
        SpecExportError: the parents do not describe such a tree, or it has more than ``MAX_NODES`` nodes.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.parents) <= MAX_NODES:
            raise SpecExportError(f"a token tree has 1 to {MAX_NODES} nodes; this one has {len(self.parents)}")
        for node, parent in enumerate(self.parents):
            if not (parent == -1 if node == 0 else 0 <= parent < node):
                raise SpecExportError(
                    f"node {node} of a token tree has parent {parent}; expected "
                    + ("-1, as node 0 is the root" if node == 0 else f"0 to {node - 1}: a parent precedes its children")
                )

        if not self.ranks:
            order = (0, *(self.children[parent].index(node) for node, parent in enumerate(self.parents[1:], start=1)))
            object.__setattr__(self, "ranks", order)
        if len(self.ranks) != len(self.parents):
            raise SpecExportError(f"a token tree of {len(self.parents)} nodes has {len(self.ranks)} ranks")

    @staticmethod
    @lru_cache(maxsize=256)
    def chain(nodes: int) -> TokenTree:
        """The root followed by ``nodes - 1`` draft tokens, each the child of the one before."""
        return TokenTree(tuple(range(-1, nodes - 1)))

    @classmethod
    def from_choices(cls, choices: Sequence[Sequence[int]]) -> TokenTree:
        """Builds a tree from Medusa choices: a path of ranks from the root for each node but the root.

        The path of the first choices comes first, as its nodes then lie side by side in the cache; the others follow by
        depth, siblings by rank.

        Raises:
            SpecExportError: a path is empty, given twice, has a negative rank, or the path before it is missing.
        """
        paths = [tuple(path) for path in choices]
        for path in paths:
            if not path or any(not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 for rank in path):
                raise SpecExportError(f"the choice {list(path)} is not a path of ranks; expected whole numbers >= 0")
        ordered = [(), *sorted(set(paths), key=lambda path: (any(path), len(path), path))]
        if len(ordered) != len(paths) + 1:
            twice = next(path for path in paths if paths.count(path) > 1)
            raise SpecExportError(f"the choice {list(twice)} is given twice")
        node_of = {path: node for node, path in enumerate(ordered)}
        for path in ordered[1:]:
            if path[:-1] not in node_of:
                raise SpecExportError(
                    f"the choice {list(path)} is listed without {list(path[:-1])}, which leads to it; add that"
                )
        return cls((-1, *(node_of[path[:-1]] for path in ordered[1:])), ranks=(0, *(path[-1] for path in ordered[1:])))

    @classmethod
    def best(cls, weight: Callable[[tuple[int, ...]], float], nodes: int, ranks: int, depth: int) -> TokenTree:
        """The tree with the greatest total weight, provided that no path outweighs the path to its parent.

        Args:
            weight: the weight of a path of ranks, such as the probability that its last token is accepted.
            nodes: the number of nodes, including the root; the tree has fewer if fewer paths have weight.
        """
        chosen: list[tuple[int, ...]] = []
        open_paths: list[tuple[float, int, tuple[int, ...]]]
        # Shorter paths and lower ranks first where weights are equal.
        open_paths = [(-weight((rank,)), 1, (rank,)) for rank in range(ranks)]
        heapq.heapify(open_paths)
        while open_paths and len(chosen) < nodes - 1:
            negative, length, path = heapq.heappop(open_paths)
            if negative >= 0:
                break
            chosen.append(path)
            if length < depth:
                for rank in range(ranks):
                    longer = (*path, rank)
                    heapq.heappush(open_paths, (-weight(longer), length + 1, longer))
        return cls.from_choices(chosen)

    @classmethod
    def load(cls, source: str | Path) -> TokenTree:
        """Reads a tree: the name of a preset, or a JSON file.

        The file holds Medusa choices (``[[0], [1], [0, 0]]``), or an object with either ``choices`` or ``parents``.

        Raises:
            SpecExportError: there is no such preset or file, or it describes no tree; names the file.
        """
        if str(source) in PRESETS:
            return cls.from_choices([[int(digit) for digit in word] for word in PRESETS[str(source)].split()])
        path = Path(source)
        if not path.is_file():
            raise SpecExportError(f"{source}: no such file, and no preset (there are: {', '.join(PRESETS)})")
        if path.stat().st_size > _MAX_FILE:
            raise SpecExportError(f"{path}: {path.stat().st_size} bytes; a token tree has at most {_MAX_FILE}")
        try:
            content: Any = msgspec.json.decode(path.read_bytes())
            if isinstance(content, dict) and content.keys() == {"parents"}:
                return cls(tuple(msgspec.convert(content["parents"], list[int])))
            choices = content["choices"] if isinstance(content, dict) and content.keys() == {"choices"} else content
            return cls.from_choices(msgspec.convert(choices, list[list[int]]))
        except (SpecExportError, *UNREADABLE) as error:
            raise SpecExportError(
                f"{path}: {explained(error)}; expected a list of choices such as [[0], [1], [0, 0]], or an object with "
                '"choices" or "parents"'
            ) from error

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
    def depth(self) -> int:
        """Distance of the deepest node from the root."""
        return int(self.depths.max())

    @property
    def is_chain(self) -> bool:
        """Whether it has one leaf."""
        return self.depth == len(self) - 1

    @property
    def has_spine(self) -> bool:
        """Whether only nodes of rank 0 have children: a chain with further leaves."""
        return all(rank == 0 or not below for rank, below in zip(self.ranks, self.children, strict=True))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of each node, in the order they are tried."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """The nodes with children, by depth: from the root to the parents of the deepest nodes."""
        return tuple(
            tuple(node for node, below in enumerate(self.children) if below and self.depths[node] == depth)
            for depth in range(self.depth)
        )

    @property
    def level_width(self) -> int:
        """The greatest number of nodes with children at any depth below the root; at least 1."""
        return max((len(level) for level in self.levels[1:]), default=1)

    @cached_property
    def choices(self) -> tuple[tuple[int, ...], ...]:
        """The path of ranks to each node but the root, as :meth:`from_choices` takes them."""
        paths: list[tuple[int, ...]] = [()]
        for node, parent in enumerate(self.parents[1:], start=1):
            paths.append((*paths[parent], self.ranks[node]))
        return tuple(paths[1:])

    @cached_property
    def leaf_paths(self) -> tuple[tuple[int, ...], ...]:
        """The nodes from the root to each leaf, both included."""
        paths: list[tuple[int, ...]] = [(0,)]
        for node, parent in enumerate(self.parents[1:], start=1):
            paths.append((*paths[parent], node))
        return tuple(path for node, path in enumerate(paths) if not self.children[node])

    @cached_property
    def mask(self) -> npt.NDArray[np.bool_]:
        """The nodes that each node sees, bool ``[T,T]``: its ancestors and itself."""
        mask = np.eye(len(self), dtype=np.bool_)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node] |= mask[parent]
        return mask
