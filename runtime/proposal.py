"""The interface of proposers, functions that they share, and their opening."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from specexport.contract.methods import Method, MethodOptions, module_of
from specexport.contract.tree import TokenTree
from specexport.runtime.backend import Array, Backend, Graph
from specexport.runtime.bundle import Bundle
from specexport.runtime.logits import LogitsProcessor, TokenLogprobs
from specexport.runtime.params import SamplingParams
from specexport.runtime.prompt import EncodedPrompt
from specexport.runtime.sampling import Distributions, Floats
from specexport.runtime.text import common_prefix

Ints = npt.NDArray[np.int64]
State = TypeVar("State")
PLAIN_TREE = TokenTree.chain(1)
"""The tree of a plain step."""


@dataclass
class SlotView:
    """The request in a slot, as step programs and proposers see it.

    Attributes:
        slot: the request's slot in every cache; it may change between steps.
        tokens: prompt and output so far; the last token, the step's root, is not in the target's cache yet.
        params: sampling parameters.
        random: source of the request's noise.
        tree: the tree to fill in this step; only the root for a plain step.
        hypothesis: the expected output; empty if there is none.
        method: the request's method; None decodes plainly.
        lookup: the look-up method that proposes in this step instead of the request's method.
        options: the request's options of its method, if they differ from the proposer's.
        processors: logits processors, in the order in which they apply.
        embeddings: the prompt if it has embeddings, whose tokens are negative numbers.
        prompt: number of prompt tokens.
        read_again: number of tokens that the target read again for the proposer although its cache held them.
        prompt_logprobs: those of the prompt's tokens read so far, from the second on, if requested.
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
    embeddings: EncodedPrompt | None = None
    prompt: int = field(init=False)
    read_again: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)


@dataclass(frozen=True)
class Proposal:
    """Draft tokens for one slot.

    Attributes:
        tokens: int64 ``[K]``, the tokens of the tree's nodes 1..K.
        tree: their tree; node 0 is the last committed token.
        q: the distributions they were drawn from; None if they were chosen without drawing (q = 1).
        candidates: int64 ``[D,M]``, the candidates at each depth that was drafted, most probable first.
        wider: the proposal with the step's extra nodes after its own, which are never accepted; None without any.
    """

    tokens: Ints
    tree: TokenTree
    q: Distributions | None
    candidates: Ints
    wider: Proposal | None = None


NOTHING = Proposal(np.empty(0, np.int64), PLAIN_TREE, None, np.empty((0, 1), np.int64))
"""The proposal of a slot that takes a plain step."""


class DeviceDraft(Protocol):
    """A draft that can run as part of a step on a device.

    Attributes:
        graph: the propose graph.
    """

    graph: Graph

    def is_ready(self, view: SlotView) -> bool:
        """Whether the draft has read enough of a text to draft after it."""

    def write_inputs(self, views: Sequence[SlotView], tokens: int, drafts: int) -> range:
        """Writes the inputs of a run with T = ``tokens`` and K = ``drafts`` for ready slots; returns the window."""

    def rows(self, tree: TokenTree, tokens: int) -> Ints:
        """The row with q of each node of a tree but the root, in a run with T = ``tokens``, int64 ``[N-1]``."""

    def commit(self, view: SlotView, drafted: Sequence[int]) -> None:
        """Commits a run's rows of the text and of the accepted draft tokens."""


class Proposer(ABC):
    """Proposes draft tokens for several slots together, with state for each slot.

    A proposer implements :meth:`propose`, and other methods that it needs; by default they do nothing.

    Attributes:
        method: the method that it was opened for, by :func:`open_proposer`.
        observes: the target's outputs that :meth:`observe` and :meth:`observe_text` read.
        reads_along: most unread tokens that a draft can read in the run in which it drafts.
    """

    method: Method
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
        """Reads up to one chunk of a slot's text; returns whether more must be read.

        The last ``max_deferred`` tokens may stay unread, for the run that drafts to read.
        """
        return False

    def observe(self, slot: int, outputs: Mapping[str, Array], row: int) -> None:
        """Called after the target ran for a slot.

        Args:
            slot: the slot.
            outputs: the target's outputs for the slot, without the batch dimension; copy them to keep them.
            row: their row at the text's last token but one, the token before the next root.
        """

    def observe_text(self, view: SlotView, outputs: Mapping[str, Array], past: int, rows: Sequence[int]) -> None:
        """Called after the target ran for a slot, if the host can see all its outputs; before the text grows.

        Args:
            view: the slot.
            outputs: as in :meth:`observe`.
            past: position of the first token that the target read.
            rows: the rows of these tokens among the run's T, in order; tokens after the text's end were just accepted.
        """

    def needs_from(self, view: SlotView) -> int:
        """The position from which the target must read the text, as the proposer has not observed the outputs there.

        The target's cache may hold the rows already, computed for another request.
        """
        return len(view.tokens)

    def move(self, source: int, to: int) -> None:
        """Moves a request's state to another slot, which was free."""

    def share(self, source: int, to: int, tokens: int) -> None:
        """Reuses state: the text in slot ``to`` begins with the first ``tokens`` tokens in slot ``source``."""

    def shrink_cache(self, rows: int) -> None:
        """Allows a cache to shrink, as running texts will have at most ``rows`` tokens."""

    def release(self, slot: int) -> None:
        """Drops the state of a slot whose request has ended; state that depends only on tokens may stay."""


class SlotProposer(Proposer, Generic[State]):
    """A proposer whose state for each slot, in ``_slots``, moves and ends with the slot's request."""

    def __init__(self) -> None:
        self._slots: dict[int, State] = {}

    def move(self, source: int, to: int) -> None:
        self._slots.pop(to, None)
        if source in self._slots:
            self._slots[to] = self._slots.pop(source)

    def release(self, slot: int) -> None:
        self._slots.pop(slot, None)


class DraftProposer(Proposer):
    """A proposer whose draft has a cache with rows of the texts of all slots.

    A comparison of tokens tells which rows are valid. So rejections need no notice, and the next request in a slot
    reuses the rows of a shared prefix.

    Attributes:
        graph: the draft's graph.
        without_row: number of a text's last tokens that have no row.
    """

    without_row: ClassVar[int] = 0

    def __init__(self, graph: Graph, chunk: int) -> None:
        self.graph = graph
        self._chunk = chunk
        self._texts: dict[int, list[int]] = {}

    def move(self, source: int, to: int) -> None:
        self.share(source, to, len(self._texts.get(source, ())))

    def share(self, source: int, to: int, tokens: int) -> None:
        text = self._texts.get(source, [])[:tokens]
        rows = max(0, min(len(text) - self.without_row, self.graph.filled(source)))
        self.graph.copy(source, to, rows)
        self._texts[to] = text[: rows + self.without_row]

    def shrink_cache(self, rows: int) -> None:
        self.graph.shrink_cache(rows)


class ReadingProposer(DraftProposer):
    """A proposer that keeps its draft's cache up to date with the texts of all slots."""

    @abstractmethod
    def _read_chunk(self, slot: int, tokens: list[int], past: int) -> None:
        """Runs the draft over a chunk of a slot's text, with ``past`` rows before it."""

    def _known(self, slot: int, tokens: Sequence[int]) -> int:
        """Number of a text's first tokens whose rows a slot holds."""
        return self.graph.reusable(slot, common_prefix(self._texts.get(slot, ()), tokens))

    def _read(self, slot: int, tokens: Sequence[int]) -> bool:
        """Reads at most a chunk of a text's unread tokens; returns whether tokens remain unread."""
        known = self._known(slot, tokens)
        part = list(tokens[known : known + self._chunk])
        if part:
            self._read_chunk(slot, part, known)
            self._texts[slot] = list(tokens[: known + len(part)])
        return known + len(part) < len(tokens)

    def _catch_up(self, texts: Mapping[int, Sequence[int]]) -> set[int]:
        """Reads a chunk of one of the texts with unread tokens; returns the slots that still have unread tokens."""
        unread = [slot for slot, text in texts.items() if self._known(slot, text) < len(text)]
        return {slot for at, slot in enumerate(unread) if at or self._read(slot, texts[slot])}


def longest_chain(chains: Sequence[TokenTree], tree: TokenTree, tokens: Sequence[int]) -> Proposal | None:
    """Proposes tokens that were chosen without drawing (q = 1) in the longest chain that they fill.

    Args:
        chains: those that the bundle verifies.
        tree: the slot's tree; longer chains are not proposed.
        tokens: the expected next tokens; None is returned if they fill no chain.
    """
    most = min(len(tokens), len(tree) - 1)
    chain = max((chain for chain in chains if len(chain) - 1 <= most), key=len, default=None)
    if chain is None:
        return None
    drafted = np.array(tokens[: len(chain) - 1], np.int64)
    return Proposal(drafted, chain, None, drafted[:, None])


class TextProposer(SlotProposer[State]):
    """Proposes the method's chains, with tokens looked up in text."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        self._trees = method.token_trees()

    @abstractmethod
    def ahead(self, view: SlotView) -> Sequence[int]:
        """The expected next tokens of a slot; empty for a plain step."""

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        proposals = {view.slot: longest_chain(self._trees, view.tree, self.ahead(view)) for view in views}
        return {slot: proposal for slot, proposal in proposals.items() if proposal is not None}


def fill(tree: TokenTree, candidates: Ints) -> Ints:
    """The tokens of a tree's nodes, int64 ``[K]``: each is the candidate, from ``[depth,M]``, of its depth and rank."""
    depths, ranks = tree.depths[1:], np.asarray(tree.ranks[1:])
    tokens: Ints = candidates[depths - 1, ranks]
    return tokens


def most_probable_tree(tree: TokenTree, weights: Floats, spine: bool) -> TokenTree:
    """The tree of the nodes with the most probable paths, at most as large and as deep as ``tree``.

    Args:
        tree: limits the number of nodes and the depth.
        weights: float32 ``[depth,M]``, the weight of a token by its depth and rank; the product along a path is its
            probability. Weights fall with the rank; for a spine only from rank 1 on.
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
    """Fills a tree: tokens of rank 0 were drawn from q, tokens of other ranks are the most probable alternatives.

    After a rejected drawn token, the next one is chosen without noise (q = 1), so multi-round rejection stays exact.

    Args:
        tree: the tree.
        rows: int64 ``[K]``, for each node but the root the index of its parent's distribution among R.
        tokens: int64 ``[R]``, the token drawn from each distribution.
        ids: int64 ``[R,M]``, the tokens with probability in each, most probable first.
        probs: float32 ``[R,M]``, their probabilities.

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
    """Resources for opening proposers: the bundle, the backend, and the number of slots."""

    bundle: Bundle
    backend: Backend
    slots: int

    def graph(self, method: Method) -> Graph:
        """Loads the graph of a method's own model."""
        assert method.signature is not None
        return self.backend.open(method.written_draft, self.slots, method.signature.buffers)


def open_proposer(method: Method, opening: Opening) -> Proposer:
    """Opens a method's proposer, with its graph if it has one, by ``open_proposer`` of the struct's module.

    A struct that extends another method's may leave that out.

    Raises:
        RequestError: an option of the method does not fit the bundle.
    """
    modules = map(module_of, type(method).__mro__)
    opens: Callable[[Method, Opening], Proposer] = next(m.open_proposer for m in modules if hasattr(m, "open_proposer"))
    proposer = opens(method, opening)
    proposer.method = method
    return proposer
