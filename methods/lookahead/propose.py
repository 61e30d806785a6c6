"""Lookahead decoding: n-grams from a Jacobi trajectory that the target's own steps carry along (arXiv 2402.02057)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specexport.contract import tensors
from specexport.contract.tree import TokenTree
from specexport.methods.lookahead.spec import Lookahead
from specexport.runtime.backend import Array
from specexport.runtime.embeds import is_embedding
from specexport.runtime.proposal import Proposal, Proposer, SlotProposer, SlotView, Window
from specexport.runtime.proposers import Opening

_SEED = 0
"""The window begins with tokens drawn from the prompt. What they are costs nothing but acceptance, so that they need
not depend on the request's seed, and greedy requests take the same steps each time."""
_SPARE = 0
"""Stands for a token where a prompt has only embeddings; what it is costs nothing either."""


class NgramPool:
    """N-grams by their first token, of each token the latest few: G, the least recently seen goes first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # A dict keeps the order in which its keys were entered.
        self._after: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        """Enters an n-gram, or makes it the latest again."""
        kept = self._after.setdefault(first, {})
        kept.pop(rest, None)
        kept[rest] = None
        if len(kept) > self._limit:
            del kept[next(iter(kept))]

    def guesses(self, first: int, limit: int) -> list[tuple[int, ...]]:
        """What followed a token, the latest first."""
        return list(reversed(self._after.get(first, {})))[:limit]


class Trajectory:
    """The window: N - 1 levels of a Jacobi iteration over the W next positions.

    Level 0, column 0 is the step's root, which is why level 0 holds a column less than the others. Column i of level l
    stands at position root + l + i. It begins with one level of W + N - 3 tokens; each of the first N - 2 steps adds a
    level and leaves a column behind, as the text moves on by a position.
    """

    def __init__(self, window: int, ngram: int, first: Sequence[int]) -> None:
        self._full = ngram - 1
        self._levels = [list(first)]
        assert len(first) == window + ngram - 3

    def nodes(self) -> tuple[list[int], list[int]]:
        """Tokens of the window, and of each its parent: 0 for the root, i + 1 for the i-th token here.

        Level 0 is a chain off the root; every other level hangs on the one before, column by column.
        """
        tokens, parents = list(self._levels[0]), list(range(len(self._levels[0])))
        above = [0, *range(1, len(tokens) + 1)]
        for level in self._levels[1:]:
            here = range(len(tokens) + 1, len(tokens) + 1 + len(level))
            tokens += level
            parents += above[: len(level)]
            above = list(here)
        return tokens, parents

    @property
    def read(self) -> int:
        """How many nodes at the window's end say the next level; with one level only, the root is the first of them."""
        return len(self._levels[-1])

    @property
    def with_root(self) -> bool:
        """Whether what the root says is part of the next level too."""
        return self._full == 1

    def advance(self, root: int, said: list[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Takes in what the last level said, and moves on by a position.

        Returns:
            The n-grams of the window's columns once all levels are there: first token and the rest.
        """
        if len(self._levels) < self._full:
            self._levels = [*(level[1:] for level in self._levels), said if len(self._levels) == 1 else said[1:]]
            return []
        firsts = [root, *self._levels[0]]
        rest = [*self._levels[1:], said]
        self._levels = [rest[0][1:], *rest[1:]]
        return list(zip(firsts, zip(*rest, strict=True), strict=True))


@dataclass
class _Slot:
    """What is known of a slot.

    Attributes:
        asked: of the step that runs: its root, and the rows of the logits that say the next level. None between steps.
    """

    pool: NgramPool
    trajectory: Trajectory
    asked: tuple[int, Array] | None = None


class LookaheadProposer(SlotProposer[_Slot]):
    """Proposes n-grams that begin with the root, and lets the step carry on the window that finds them.

    Guesses are merged where they begin alike, which changes neither what they see nor what is accepted. They are chosen
    without drawing (q = 1): the window always takes the most probable token, whatever the request samples.
    """

    observes = frozenset({tensors.LOGITS})

    def __init__(self, method: Lookahead, pool: Callable[[int], NgramPool] = NgramPool) -> None:
        super().__init__()
        self._method = method
        self._widths = sorted(method.widths())
        self._pool = pool

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        return {view.slot: self._propose(view) for view in views}

    def _propose(self, view: SlotView) -> Proposal:
        slot = self._slots.get(view.slot)
        if slot is None:
            slot = self._slots[view.slot] = self._begin(view.tokens)
        root, each = view.tokens[-1], self._method.ngram - 1
        guesses = slot.pool.guesses(root, (len(view.tree) - 1) // each)
        tokens, parents = merged(guesses)
        tree = TokenTree((-1, *parents))
        drafted = np.array(tokens, np.int64)
        window, above = slot.trajectory.nodes()
        read = np.arange(len(tree) + len(window) - slot.trajectory.read, len(tree) + len(window))
        slot.asked = (root, np.concatenate([[0], read]) if slot.trajectory.with_root else read)
        parents += [0 if parent == 0 else parent + len(tokens) for parent in above]
        tokens += window
        width = next(width for width in self._widths if width > len(tokens))
        spare = width - 1 - len(tokens)
        tokens += [max(root, _SPARE)] * spare
        step = Window(np.array(tokens, np.int64), TokenTree((-1, *parents, *[0] * spare)))
        ahead = np.full((tree.depth, max(1, len(guesses))), -1, np.int64)
        for rank, guess in enumerate(guesses):
            ahead[:, rank] = guess
        return Proposal(drafted, tree, None, ahead, step)

    def _begin(self, prompt: Sequence[int]) -> _Slot:
        method, random = self._method, np.random.default_rng(_SEED)
        W, N, G = method.window, method.ngram, method.guesses
        pool = self._pool(G)
        if method.prompt_seeding:
            for end in range(N, len(prompt) + 1):
                first, *rest = prompt[end - N : end]
                if not any(map(is_embedding, rest)):
                    pool.add(first, tuple(rest))
        known = [token for token in prompt if not is_embedding(token)] or [_SPARE]
        first_level = random.choice(np.array(known), W + N - 3).tolist()
        return _Slot(pool, Trajectory(W, N, first_level))

    def observe(self, slot: int, outputs: Mapping[str, Array], row: int) -> None:
        known = self._slots.get(slot)
        if known is None or known.asked is None:  # prefill, or a step of the root alone
            return
        first_token, rows = known.asked
        known.asked = None
        said = outputs[tensors.LOGITS][rows].argmax(-1).tolist()
        for first, rest in known.trajectory.advance(first_token, said):
            known.pool.add(first, rest)


def merged(guesses: Iterable[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Guesses as a tree below the root: the tokens of its nodes 1, 2, ..., and of each its parent."""
    tokens: list[int] = []
    parents: list[int] = []
    nodes: dict[tuple[int, ...], int] = {(): 0}
    for guess in guesses:
        for end in range(1, len(guess) + 1):
            path = tuple(guess[:end])
            if path not in nodes:
                tokens.append(path[-1])
                parents.append(nodes[path[:-1]])
                nodes[path] = len(tokens)
    return tokens, parents


def open_proposer(method: Lookahead, opening: Opening) -> Proposer:
    return LookaheadProposer(method)
