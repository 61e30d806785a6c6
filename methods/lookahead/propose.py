"""Lookahead decoding: proposes n-grams from a Jacobi iteration within the target's steps (arXiv 2402.02057)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specexport.contract import tensors
from specexport.contract.tree import TokenTree
from specexport.methods.lookahead.spec import Lookahead
from specexport.runtime.backend import Array
from specexport.runtime.prompt import is_embedding
from specexport.runtime.proposal import Opening, Proposal, Proposer, SlotProposer, SlotView, WiderStep

_SEED = 0
"""Seed of the window's first tokens, drawn from the prompt. They affect only acceptance, so they do not depend on the
request's seed, and greedy requests always take the same steps."""
_SPARE = 0
"""The token in the window if a prompt has only embeddings; it affects only acceptance."""


class NgramPool:
    """N-grams by their first token, the G most recent ones for each."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # A dict keeps its keys in order of insertion.
        self._after: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        """Adds an n-gram, or makes it the most recent again."""
        kept = self._after.setdefault(first, {})
        kept.pop(rest, None)
        kept[rest] = None
        if len(kept) > self._limit:
            del kept[next(iter(kept))]

    def guesses(self, first: int, limit: int) -> list[tuple[int, ...]]:
        """The n-grams that follow a token, most recent first."""
        return list(reversed(self._after.get(first, {})))[:limit]


class Trajectory:
    """The window: N - 1 levels of a Jacobi iteration over the W next positions.

    Column 0 of level 0 is the step's root, so level 0 stores one column less than the others. Column i of level l is at
    position root + l + i. The window begins with one level of W + N - 3 tokens; each of the first N - 2 steps adds a
    level and drops a column, as the text advances by a position.
    """

    def __init__(self, window: int, ngram: int, first: Sequence[int]) -> None:
        self._full = ngram - 1
        self._levels = [list(first)]
        assert len(first) == window + ngram - 3

    def nodes(self) -> tuple[list[int], list[int]]:
        """The window's tokens and their parents: 0 for the root, i + 1 for token i.

        Level 0 is a chain below the root; each node of another level is a child of its column in the level above.
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
        """The number of last nodes that predict the next level, besides the root (:attr:`with_root`)."""
        return len(self._levels[-1])

    @property
    def with_root(self) -> bool:
        """Whether the root predicts a part of the next level."""
        return self._full == 1

    def advance(self, root: int, predicted: list[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Adds the predicted level, and advances by a position.

        Returns:
            The n-grams of the window's columns, each as its first token and the rest; none until all levels exist.
        """
        if len(self._levels) < self._full:
            self._levels = [
                *(level[1:] for level in self._levels),
                predicted if len(self._levels) == 1 else predicted[1:],
            ]
            return []
        firsts = [root, *self._levels[0]]
        rest = [*self._levels[1:], predicted]
        self._levels = [rest[0][1:], *rest[1:]]
        return list(zip(firsts, zip(*rest, strict=True), strict=True))


@dataclass
class _Slot:
    """The state of a slot.

    Attributes:
        pending: the root of the running step, and the rows of logits that predict the next level; None between steps.
    """

    pool: NgramPool
    trajectory: Trajectory
    pending: tuple[int, Array] | None = None


class LookaheadProposer(SlotProposer[_Slot]):
    """Proposes n-grams that begin with the root, and adds the window to each step, which collects n-grams.

    Guesses with a common prefix are merged, which changes neither attention nor acceptance. They are not drawn (q = 1),
    as the window always takes the most probable tokens, whatever the request's sampling parameters.
    """

    observes = frozenset({tensors.LOGITS})

    def __init__(self, method: Lookahead) -> None:
        super().__init__()
        self._method = method
        self._widths = sorted(method.widths())

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        return {view.slot: self._propose(view) for view in views}

    def _propose(self, view: SlotView) -> Proposal:
        slot = self._slots.get(view.slot)
        if slot is None:
            slot = self._slots[view.slot] = self._begin(view.tokens)
        root, guess_length = view.tokens[-1], self._method.ngram - 1
        guesses = slot.pool.guesses(root, (len(view.tree) - 1) // guess_length)
        tokens, parents = merge_guesses(guesses)
        tree = TokenTree((-1, *parents))
        drafted = np.array(tokens, np.int64)
        window, above = slot.trajectory.nodes()
        read = np.arange(len(tree) + len(window) - slot.trajectory.read, len(tree) + len(window))
        slot.pending = (root, np.concatenate([[0], read]) if slot.trajectory.with_root else read)
        parents += [0 if parent == 0 else parent + len(tokens) for parent in above]
        tokens += window
        width = next(width for width in self._widths if width > len(tokens))
        spare = width - 1 - len(tokens)
        tokens += [max(root, _SPARE)] * spare
        step = WiderStep(np.array(tokens, np.int64), TokenTree((-1, *parents, *[0] * spare)))
        ahead = np.full((tree.depth, max(1, len(guesses))), -1, np.int64)
        for rank, guess in enumerate(guesses):
            ahead[:, rank] = guess
        return Proposal(drafted, tree, None, ahead, step)

    def _begin(self, prompt: Sequence[int]) -> _Slot:
        method, random = self._method, np.random.default_rng(_SEED)
        W, N, G = method.window, method.ngram, method.guesses
        pool = NgramPool(G)
        if method.prompt_seeding:
            for end in range(N, len(prompt) + 1):
                first, *rest = prompt[end - N : end]
                if not any(map(is_embedding, rest)):
                    pool.add(first, tuple(rest))
        vocabulary = [token for token in prompt if not is_embedding(token)] or [_SPARE]
        first_level = random.choice(np.array(vocabulary), W + N - 3).tolist()
        return _Slot(pool, Trajectory(W, N, first_level))

    def observe(self, slot: int, outputs: Mapping[str, Array], row: int) -> None:
        state = self._slots.get(slot)
        if state is None or state.pending is None:  # a prefill, or a plain step
            return
        first_token, rows = state.pending
        state.pending = None
        predicted = outputs[tensors.LOGITS][rows].argmax(-1).tolist()
        for first, rest in state.trajectory.advance(first_token, predicted):
            state.pool.add(first, rest)


def merge_guesses(guesses: Iterable[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Merges guesses into a tree below the root: the tokens and the parents of its nodes 1, 2, ...."""
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
