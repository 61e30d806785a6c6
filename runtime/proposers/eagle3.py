"""EAGLE-3: a draft whose rows are made of the target's states at the tokens of the text."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from specexport.contract import tensors
from specexport.contract.methods.draft_model import OwnStateDraft
from specexport.contract.tree import TokenTree
from specexport.runtime.graph import Array
from specexport.runtime.proposal import Ints, Proposal, SlotView
from specexport.runtime.proposers.opening import Opening
from specexport.runtime.proposers.states import StatesProposer


class Eagle3Proposer(StatesProposer):
    """Drafts a chain from what the target said at each token of the text; see :mod:`specexport.graphs.states`.

    The draft's row of a token is made of the target's states there and of the token after it. Rows that the draft makes
    of its own output are dropped after each call.
    """

    def _write_tokens(self, given: Mapping[str, Array], at: int, view: SlotView, rows: range) -> None:
        given[tensors.INPUT_IDS][at, : len(rows)] = view.tokens[rows.start + 1 : rows.stop + 1]


class LevelsProposer(Eagle3Proposer):
    """Drafts the most probable nodes of each depth, and of all that may follow them takes the most probable."""

    def _proposal(self, view: SlotView, made: Mapping[str, Array], at: int) -> Proposal:
        """See :class:`StatesProposer`; tokens are chosen without drawing, whatever the temperature."""
        depth = view.tree.depth
        tokens, parents = made[tensors.DRAFT_TOKENS][:depth, at], made[tensors.DRAFT_PARENTS][:depth, at]
        ids, probs = made[tensors.DRAFT_IDS][:depth, at], made[tensors.DRAFT_PROBS][:depth, at]
        tree, rows = best_of_levels(view.tree, tokens, parents, ids, probs)
        drafted: Ints = np.array([ids[row][path[-1]] for path, row in zip(tree.choices, rows, strict=True)], np.int64)
        first = [row for path, row in zip(tree.choices, rows, strict=True) if not any(path)]
        return Proposal(drafted, tree, None, np.array([ids[row] for row in first], np.int64))


Row = tuple[int, int]
"""The pass that made it, and its place in the level."""


def best_of_levels(
    tree: TokenTree, tokens: Array, parents: Array, ids: Array, probs: Array
) -> tuple[TokenTree, list[Row]]:
    """The nodes of expanded levels whose paths are most probable: at most as many as a tree has, and at most as deep.

    Args:
        tree: says how many nodes, and how deep.
        tokens: int64 ``[K,W]``, of the level after each pass.
        parents: int64 ``[K,W]``, the row of that pass that each comes after; the first pass has the root in row 0.
        ids: int64 ``[K,W,M]``, what may come after each row of a pass, most probable first.
        probs: float32 ``[K,W,M]``.

    Returns:
        The tree, and of each node but the root the row that proposed it.
    """
    row_of: dict[tuple[int, ...], Row] = {(): (0, 0)}
    level = {0: tuple[int, ...]()}
    for at in range(len(tokens) - 1):
        following: dict[int, tuple[int, ...]] = {}
        for place, (token, parent) in enumerate(zip(tokens[at].tolist(), parents[at].tolist(), strict=True)):
            if parent in level:
                path = (*level[parent], int(np.flatnonzero(ids[at, parent] == token)[0]))
                row_of[path], following[place] = (at + 1, place), path
        level = following
    weights: dict[tuple[int, ...], float] = {(): 1.0}

    def weight(path: tuple[int, ...]) -> float:
        if path not in weights:
            row = row_of.get(path[:-1])
            weights[path] = weight(path[:-1]) * float(probs[row][path[-1]]) if row is not None else 0.0
        return weights[path]

    ranks = min(tokens.shape[1], ids.shape[2])
    best = TokenTree.best(weight, len(tree), ranks, tree.depth)
    return best, [row_of[path[:-1]] for path in best.choices]


def open_proposer(method: OwnStateDraft, opening: Opening) -> Eagle3Proposer:
    kind = LevelsProposer if method.expand > 1 else Eagle3Proposer
    return kind(opening.graph(method), opening.bundle.manifest, method)
