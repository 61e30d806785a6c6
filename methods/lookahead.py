"""Speculation by lookahead decoding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from specexport.contract import tensors
from specexport.contract.methods.base import BuiltMethod, Flag, MethodOptions
from specexport.contract.methods.suggestion import Suggestion, TargetProfile
from specexport.contract.tree import MAX_NODES, TokenTree
from specexport.runtime.backend import Array
from specexport.runtime.prompt import is_embedding
from specexport.runtime.proposal import Opening, Proposal, Proposer, SlotProposer, SlotView

Window = Annotated[int, Meta(ge=1, le=MAX_NODES)]
NgramSize = Annotated[int, Meta(ge=2, le=32)]
Guesses = Annotated[int, Meta(ge=1, le=MAX_NODES)]

PRESETS = {"cpu": (4, 3, 4), "small": (7, 5, 7), "medium": (10, 5, 10), "large": (15, 5, 15)}
"""W, N and G. The larger presets are the paper's (arXiv 2402.02057) for models of 33B, 13B and 7B parameters: the
larger the model, the fewer extra tokens are free on a GPU. ``cpu`` is for devices on which every node costs time."""


class LookaheadOptions(MethodOptions, frozen=True, kw_only=True, tag="lookahead"):
    """Options of lookahead decoding.

    Attributes:
        preset: names W, N and G: one of ``PRESETS``, or ``gpu`` for the one that suits the target's size.
        window: W, columns.
        ngram: N, tokens of an n-gram; a guess is one without its first.
        guesses: G, most guesses a step.
        prompt_seeding: whether the pool starts with the prompt's n-grams.
    """

    preset: str | None = None
    window: Window | None = None
    ngram: NgramSize | None = None
    guesses: Guesses | None = None
    prompt_seeding: bool = True

    main = "preset"
    flag = Flag(
        "--lookahead",
        "preset",
        "lookahead decoding: columns of the window, tokens of an n-gram, guesses a step; or gpu for the paper's sizes "
        "(alone: 4,3,4, for CPUs)",
        "W,N,G",
        const="cpu",
    )

    def __post_init__(self) -> None:
        if self.num_speculative_tokens is not None:
            raise ValueError("num_speculative_tokens was given; its steps follow from window, ngram and guesses")
        sizes = [size for size in (self.window, self.ngram, self.guesses) if size is not None]
        if sizes and (len(sizes) < 3 or self.preset is not None):
            raise ValueError("window, ngram and guesses belong together, and exclude a preset; give all three or none")
        if self.preset is not None and self.preset not in (*PRESETS, "gpu"):
            _parsed(self.preset)

    def for_target(self, parameters: int) -> Lookahead:
        """See :class:`MethodOptions`; a step may also verify half as many guesses, a quarter, and so on."""
        if self.window is not None and self.ngram is not None and self.guesses is not None:
            W, N, G = self.window, self.ngram, self.guesses
        else:
            preset = gpu_preset(parameters) if self.preset == "gpu" else self.preset or "cpu"
            W, N, G = PRESETS.get(preset) or _parsed(preset)
        trees = tuple(guess_tree(G >> halved, N).choices for halved in range(G.bit_length()))
        return Lookahead(trees=trees, window=W, ngram=N, guesses=G, prompt_seeding=self.prompt_seeding)


class Lookahead(BuiltMethod, frozen=True, kw_only=True, tag="lookahead"):
    """Jacobi iteration within the target's own steps yields n-grams, which are verified as guesses (arXiv 2402.02057).

    A step runs the window, W columns by N - 1 levels whose first node is the root, together with the guesses. A
    request's tree is the maximum number of guesses, chains of N - 1 tokens; if there are fewer guesses, or they have a
    common prefix, steps take the smallest width that suffices. The fields are those of :class:`LookaheadOptions`.
    """

    window: Window
    ngram: NgramSize
    guesses: Guesses
    prompt_seeding: bool

    options = LookaheadOptions
    own_widths = True

    @classmethod
    def suggest(cls, target: TargetProfile) -> Suggestion | None:
        gpu = target.device == "gpu"
        W, N, G = PRESETS[gpu_preset(target.parameters) if gpu else "cpu"]
        return Suggestion(
            "lookahead",
            f"W,N,G = {W},{N},{G}: {(N - 1) * (W + G)} nodes a step",
            "needs nothing but arithmetic to spare" + (", which a GPU has at batch 1" if gpu else "; a CPU has little"),
            5,
            ("--lookahead", f"{W},{N},{G}") if gpu else (),
        )

    @property
    def window_nodes(self) -> int:
        """The number of the window's nodes, including the root."""
        return self.window * (self.ngram - 1)

    @property
    def extra_nodes(self) -> int:
        return self.window_nodes - 1

    def describe(self) -> str:
        seeded = ", seeded from the prompt" if self.prompt_seeding else ""
        return f"lookahead, window {self.window}, n-grams of {self.ngram}{seeded}"

    def validate_tree(self, tree: TokenTree) -> str | None:
        W, N = self.window, self.ngram
        guesses = (len(tree) - 1) // (N - 1)
        if tree.choices != guess_tree(guesses, N).choices:
            return f"the one of {len(tree) - 1} draft tokens does not consist of chains of {N - 1} below the root"
        if W < N - 2:
            return f"window {W}, with n-grams of {N}; the window fills only with {N - 2}"
        if self.window_nodes + len(tree) - 1 > MAX_NODES:
            return f"{self.window_nodes + len(tree) - 1} nodes a step, at most {MAX_NODES} are verified"
        return None


def _parsed(preset: str) -> tuple[int, int, int]:
    try:
        return msgspec.convert(preset.split(","), tuple[Window, NgramSize, Guesses], strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"preset is {preset!r}; expected W,N,G or one of gpu, {', '.join(PRESETS)}. W and G are at least 1, N is "
            "2 to 32"
        ) from error


def gpu_preset(parameters: int) -> str:
    """The preset for a target with this many parameters on a GPU."""
    return "large" if parameters < 10e9 else "medium" if parameters < 20e9 else "small"


def guess_tree(guesses: int, ngram: int) -> TokenTree:
    """The tree of G guesses: chains of N - 1 tokens below the root."""
    return TokenTree.from_choices([(guess, *[0] * at) for guess in range(guesses) for at in range(ngram - 1)])


# --- proposing --------------------------------------------------------------------------------------------------------
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

        Returns the n-grams of the window's columns, each as its first token and the rest; none until all levels exist.
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
        ahead = np.full((tree.depth, max(1, len(guesses))), -1, np.int64)
        for rank, guess in enumerate(guesses):
            ahead[:, rank] = guess
        step = Proposal(np.array(tokens, np.int64), TokenTree((-1, *parents, *[0] * spare)), None, ahead)
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
