"""The interface of proposers, and how they are opened."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from specexport.contract.methods import Method, MethodOptions, part
from specexport.contract.tree import TokenTree
from specexport.runtime.backend import Array, Backend, Graph
from specexport.runtime.bundle import Bundle
from specexport.runtime.logits import LogitsProcessor, TokenLogprobs
from specexport.runtime.params import SamplingParams
from specexport.runtime.prompt import Embeddings
from specexport.runtime.sampling import Distributions, Floats

Ints = npt.NDArray[np.int64]
State = TypeVar("State")


@dataclass
class SlotView:
    """The request in a slot, as a proposer sees it.

    Attributes:
        slot: the request's slot in every cache; it may change between steps.
        tokens: prompt and output so far; the last one, the step's root, is not in the target's cache yet.
        params: sampling parameters.
        random: the request's noise.
        tree: the tree to fill in this step; the root alone for a plain step.
        hypothesis: the expected output; empty if the request has none.
        method: the request's method; None decodes plainly.
        lookup: the look-up method that proposes in this step instead of the request's own.
        options: the request's options of its method, if they differ from the proposer's.
        processors: logits processors, in this order.
        embeddings: the prompt's embeddings, whose tokens are negative numbers; None for none.
        prompt: number of prompt tokens.
        read_again: tokens that the target read again for the proposer though its cache held them.
        prompt_logprobs: those of the prompt's read tokens from the second on, if requested.
    """

    slot: int
    tokens: list[int]
    params: SamplingParams
    random: np.random.Generator
    tree: TokenTree
    hypothesis: Sequence[int] = ()
    method: str | None = None
    lookup: str | None = field(default=None, kw_only=True)
    options: MethodOptions | None = None
    processors: Sequence[LogitsProcessor] = ()
    embeddings: Embeddings | None = None
    prompt: int = field(init=False)
    read_again: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)


@dataclass(frozen=True)
class Window:
    """A step's tokens, if it runs more than the draft tokens.

    Attributes:
        tokens: int64 ``[T-1]``, those of the nodes 1..T-1: the draft tokens, then further ones.
        tree: their tree; its first nodes are the proposal's tree.
    """

    tokens: Ints
    tree: TokenTree


@dataclass(frozen=True)
class Proposal:
    """Draft tokens for one slot.

    Attributes:
        tokens: int64 ``[K]``, those of the tree's nodes 1..K.
        tree: their tree; node 0 is the last committed token.
        q: the distributions they were drawn from; None if they were chosen without drawing (q = 1).
        candidates: int64 ``[depths,M]``, the candidates at each depth of the tree, most probable first.
        window: further tokens of the step, which are never accepted; None for none.
    """

    tokens: Ints
    tree: TokenTree
    q: Distributions | None
    candidates: Ints
    window: Window | None = None


class DeviceDraft(Protocol):
    """A draft that can run within a step on a device.

    Attributes:
        graph: the propose graph.
    """

    graph: Graph

    def is_ready(self, view: SlotView) -> bool:
        """Whether the draft has read enough of a text to draft after it."""

    def ask(self, views: Sequence[SlotView], tokens: int, drafts: int) -> range:
        """Writes the inputs of a run of T tokens and K drafts for ready slots; returns the window."""

    def rows(self, tree: TokenTree, tokens: int) -> Ints:
        """The row with q of each node of a tree but the root, in a run of T tokens, int64 ``[N-1]``."""

    def keep(self, view: SlotView, drafted: Sequence[int]) -> None:
        """Commits a run's rows: those of the text and of the accepted draft tokens."""


class Proposer(ABC):
    """Proposes draft tokens for several slots at once, with state for each slot.

    A proposer implements :meth:`propose`, and any other methods that it needs; by default they do nothing.

    Attributes:
        observes: the target's outputs that :meth:`observe` and :meth:`observe_text` read.
        reads_along: most unread tokens that a draft can read in a run that drafts; more need further runs.
    """

    observes: frozenset[str] = frozenset()
    reads_along: int = 0

    @property
    def device_draft(self) -> DeviceDraft | None:
        """The draft that proposes on a device as part of the step; None if the host proposes."""
        return None

    @abstractmethod
    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        """Proposals by slot; a slot without one takes a plain step."""

    def prefill(self, view: SlotView, max_deferred: int = 0) -> bool:
        """Reads up to one chunk of a slot's text; returns whether tokens are unread.

        Args:
            view: the slot.
            max_deferred: trailing tokens that may stay unread, if a run that drafts can read them along.
        """
        return False

    def observe(self, slot: int, outputs: Mapping[str, Array], row: int) -> None:
        """Called after the target ran for a slot.

        Args:
            slot: the slot.
            outputs: the target's outputs for the slot, without the batch dimension; copy what is kept.
            row: their row at the text's last token but one, which precedes the next proposal.
        """

    def observe_text(self, view: SlotView, outputs: Mapping[str, Array], past: int, rows: Sequence[int]) -> None:
        """Called after the target ran for a slot, if the host can see all its outputs; before the text grows.

        Args:
            view: the slot.
            outputs: the target's outputs for the slot, without the batch dimension; copy what is kept.
            past: position of the first token of the text that the target read.
            rows: rows of these tokens among the T of the run, in order; those after the text's end were accepted.
        """

    def needs_from(self, view: SlotView) -> int:
        """The position from which the target must read the text again, as the proposer has not observed its outputs.

        The target's cache may hold rows that it computed for another request.
        """
        return len(view.tokens)

    def move(self, source: int, to: int) -> None:
        """Moves a request to another slot, which was free."""

    def share(self, source: int, to: int, tokens: int) -> None:
        """Tells that the texts in ``source`` and ``to`` share their first ``tokens`` tokens."""

    def shrink_cache(self, rows: int) -> None:
        """Allows a cache to shrink: the longest running text will have at most ``rows`` tokens."""

    def release(self, slot: int) -> None:
        """Drops the state of a slot whose request has ended. State that depends on tokens alone may stay."""


class SlotProposer(Proposer, Generic[State]):
    """A proposer with state for each slot, in ``_slots``, which moves and ends with the slot's request."""

    def __init__(self) -> None:
        self._slots: dict[int, State] = {}

    def move(self, source: int, to: int) -> None:
        self._slots.pop(to, None)
        if source in self._slots:
            self._slots[to] = self._slots.pop(source)

    def release(self, slot: int) -> None:
        self._slots.pop(slot, None)


class Chains:
    """The chains a bundle verifies, for proposers that find varying numbers of tokens."""

    def __init__(self, trees: Sequence[TokenTree]) -> None:
        self._longest_first = sorted(trees, key=len, reverse=True)

    def proposal(self, tree: TokenTree, matches: Sequence[int]) -> Proposal | None:
        """The first matching tokens, in the longest chain that they fill and that is not longer than the tree.

        Tokens are chosen without drawing (q = 1). None if no chain is short enough.
        """
        most = min(len(matches), len(tree) - 1)
        chain = next((chain for chain in self._longest_first if len(chain) - 1 <= most), None)
        if chain is None:
            return None
        tokens = np.array(matches[: len(chain) - 1], np.int64)
        return Proposal(tokens, chain, None, tokens[:, None])


class TextProposer(SlotProposer[State]):
    """Proposes the method's chains, with tokens from look-ups in text."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        self._chains = Chains(method.token_trees())

    @abstractmethod
    def ahead(self, view: SlotView) -> Sequence[int]:
        """The expected next tokens of a slot; empty for a plain step."""

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        proposals = {view.slot: self._chains.proposal(view.tree, self.ahead(view)) for view in views}
        return {slot: proposal for slot, proposal in proposals.items() if proposal is not None}


def fill(tree: TokenTree, candidates: Ints) -> Ints:
    """The tokens ``[K]`` of a tree's nodes: for each, the candidate ``[depths,M]`` of its depth and rank."""
    depths, ranks = tree.depths[1:], np.asarray(tree.ranks[1:])
    tokens: Ints = candidates[depths - 1, ranks]
    return tokens


def most_probable_tree(tree: TokenTree, weights: Floats, spine: bool) -> TokenTree:
    """The tree of the nodes with the most probable paths, at most as large and as deep as ``tree``.

    Args:
        tree: limits the number of nodes and the depth.
        weights: float32 ``[depth,M]``, of a token by its depth and rank; a path's probability is their product. They
            fall with the rank; on a spine only from rank 1 on.
        spine: whether the path of ranks 0 is in the tree whatever its probability, and no other node has children.
    """
    by_rank, deepest = weights[: tree.depth].tolist(), tree.depth
    chosen: list[tuple[int, ...]] = []
    reached: list[tuple[float, tuple[int, ...], float]] = []  # -probability, path, its parent's probability

    def reach(path: tuple[int, ...], before: float) -> None:
        ranked = by_rank[len(path) - 1]
        if path[-1] < len(ranked) and before * ranked[path[-1]] > 0.0:
            heapq.heappush(reached, (-before * ranked[path[-1]], path, before))

    if spine:
        before = 1.0
        for depth in range(deepest):
            reach((*chosen[-1:][0], 1) if chosen else (1,), before)
            chosen.append((0,) * (depth + 1))
            before *= by_rank[depth][0]
    else:
        reach((0,), 1.0)
    while reached and len(chosen) < len(tree) - 1:
        negative, path, before = heapq.heappop(reached)
        chosen.append(path)
        reach((*path[:-1], path[-1] + 1), before)
        if not spine and len(path) < deepest:
            reach((*path, 0), -negative)
    return _tree_of(tuple(chosen))


@lru_cache(maxsize=1024)
def _tree_of(choices: tuple[tuple[int, ...], ...]) -> TokenTree:
    return TokenTree.from_choices(choices)


def drawn(tree: TokenTree, rows: Ints, tokens: Ints, ids: Ints, probs: Floats) -> tuple[Ints, Distributions, Ints]:
    """The tokens of a tree in which those of rank 0 were drawn from q; others are the most probable alternatives.

    After a rejected drawn token the next is chosen without noise (q = 1), so multi-round rejection stays exact.

    Args:
        tree: the tree.
        rows: int64 ``[K]``, for each node but the root the index of its parent's distribution among the R.
        tokens: int64 ``[R]``, the token drawn from each distribution.
        ids: int64 ``[R,M]``, the tokens with probability in each, most probable first.
        probs: float32 ``[R,M]``.

    Returns:
        The tokens of the nodes, int64 ``[K]``; q of each; and the candidates by their ranks, int64 ``[R,M]``.
    """
    is_drawn = ids == tokens[:, None]
    # The drawn token takes rank 0, those before it move back by one.
    order = np.argsort(~is_drawn, axis=1, kind="stable")
    candidates = np.take_along_axis(ids, order, 1)
    if tree.is_chain and not any(tree.ranks):
        return tokens, Distributions(ids, probs), candidates
    ranks = np.asarray(tree.ranks[1:])
    nodes: Ints = candidates[rows, ranks]
    chosen = (candidates[rows] == nodes[:, None]).astype(np.float32)
    q = np.where(ranks[:, None] == 0, np.take_along_axis(probs, order, 1)[rows], chosen)
    return nodes, Distributions(candidates[rows], q), candidates


@dataclass(frozen=True)
class Opening:
    """The resources from which proposers are opened."""

    bundle: Bundle
    backend: Backend
    slots: int

    def graph(self, method: Method) -> Graph:
        """Loads the graph of a method's own model.

        Raises:
            BackendError: the backend refuses it.
        """
        ((role, model),) = method.models.items()
        return self.backend.open(model, self.slots, method.signatures[role].buffers)


def open_proposer(method: Method, opening: Opening) -> Proposer:
    """Opens a method's proposer, with its graph if it has one.

    Raises:
        BackendError: the backend refuses a graph.
        RequestError: an option of the method does not fit the bundle.
    """
    module = part(method, "propose", inherited=True)
    assert module is not None, f"method {method.name!r} has no module propose"
    proposer: Proposer = module.open_proposer(method, opening)
    return proposer
