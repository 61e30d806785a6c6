"""A smaller model drafts a chain; a tree adds its other likely tokens beside each token of the chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from specexport.contract import tensors
from specexport.contract.manifest import Manifest
from specexport.contract.shapes import CATCH_UP_TOKENS
from specexport.contract.tree import TokenTree
from specexport.runtime.backend import Array, Graph
from specexport.runtime.proposers.base import Ints, Proposal, SlotView, fill
from specexport.runtime.sampling import Distributions, Floats


class DraftModelProposer:
    """A smaller model drafts a chain of tokens in one graph call.

    The draft's cache holds rows for the tokens it was given and for the drafts it made, all committed at once; those of
    the drafts that are accepted are right, the rest are overwritten. Which are right is read off the slot's tokens.

    Args:
        graph: the propose graph.
        manifest: the bundle's.
    """

    def __init__(self, graph: Graph, manifest: Manifest) -> None:
        self._graph = graph
        self._chunk = manifest.prefill_chunk
        self._seen: dict[int, list[int]] = {}

    def propose(self, sequences: Sequence[SlotView]) -> dict[int, Proposal]:
        """See :class:`Proposer`; a text of one token has nothing to catch up on and is left out."""
        ready = [sequence for sequence in sequences if len(sequence.tokens) >= CATCH_UP_TOKENS]
        if not ready:
            return {}
        for sequence in ready:
            self._prefill(sequence)
        K = max(sequence.tree.depth for sequence in ready)
        longest = max(len(sequence.tokens) for sequence in ready)
        self._graph.reserve(longest + K - 1)
        given = self._graph.inputs(CATCH_UP_TOKENS, drafts=K)
        for sequence in ready:
            slot, params = sequence.slot, sequence.params
            given[tensors.INPUT_IDS][slot] = sequence.tokens[-CATCH_UP_TOKENS:]
            given[tensors.PAST_LENGTH][slot] = len(sequence.tokens) - CATCH_UP_TOKENS
            given[tensors.TEMPERATURE][slot] = params.temperature or 1.0
            given[tensors.TOP_K][slot] = 1 if params.greedy else min(max(params.top_k, 0), 2**31)
            given[tensors.TOP_P][slot] = params.top_p
            given[tensors.MIN_P][slot] = params.min_p
            if not params.greedy:
                given[tensors.UNIFORM][slot] = sequence.random.random(K, np.float32)
        made = self._graph.run(CATCH_UP_TOKENS, drafts=K)
        for sequence in ready:
            fed = range(CATCH_UP_TOKENS + sequence.tree.depth - 1)
            self._graph.commit(sequence.slot, len(sequence.tokens) - CATCH_UP_TOKENS, fed)
        return {sequence.slot: self._take(sequence, made) for sequence in ready}

    def _take(self, sequence: SlotView, made: Mapping[str, Array]) -> Proposal:
        slot, tree = sequence.slot, sequence.tree
        drafted = made[tensors.DRAFT_TOKENS][: tree.depth, slot].astype(np.int64)
        ids = made[tensors.DRAFT_IDS][: tree.depth, slot].astype(np.int64)
        self._seen[slot] = [*sequence.tokens, *drafted[:-1].tolist()]
        if sequence.params.greedy:
            return Proposal(fill(tree, ids), tree, None, ids)
        probs = made[tensors.DRAFT_PROBS][: tree.depth, slot].astype(np.float32)
        return _drawn(tree, drafted, ids, probs)

    def _prefill(self, sequence: SlotView) -> None:
        """Gives the draft whatever it has not seen of the text, all but its last two tokens, in chunks."""
        slot, tokens = sequence.slot, sequence.tokens
        done, stop = _common_prefix(self._seen.get(slot, []), tokens), len(tokens) - CATCH_UP_TOKENS
        while done < stop:
            chunk = tokens[done : min(done + self._chunk, stop)]
            self._graph.reserve(done + self._chunk)
            given = self._graph.inputs(self._chunk, drafts=1)
            given[tensors.INPUT_IDS][slot, : len(chunk)] = chunk
            given[tensors.PAST_LENGTH][slot] = done
            given[tensors.LAST_ROW][slot] = len(chunk) - 1
            self._graph.run(self._chunk, drafts=1)
            self._graph.commit(slot, done, range(len(chunk)))
            done += len(chunk)

    def observe(self, slot: int, outputs: Mapping[str, Array], row: int) -> None:
        """See :class:`Proposer`; nothing the target makes is needed."""

    def release(self, slot: int) -> None:
        """See :class:`Proposer`."""
        self._seen.pop(slot, None)


def _drawn(tree: TokenTree, drafted: Ints, ids: Ints, probs: Floats) -> Proposal:
    """A tree whose chain was drawn from q; beside each of its tokens are the most probable others, chosen (q = 1).

    Given that the chain's token was rejected, the next is chosen without noise, so multi-round rejection stays exact.

    Args:
        tree: only its nodes of rank 0 have children.
        drafted: int64 ``[depth]``, the chain.
        ids: int64 ``[depth,M]``, the tokens q gives probability to, most probable first.
        probs: float32 ``[depth,M]``.
    """
    is_drawn = ids == drafted[:, None]
    # The drawn token takes rank 0, those before it move back by one.
    order = np.argsort(~is_drawn, axis=1, kind="stable")
    candidates = np.take_along_axis(ids, order, 1)
    if tree.is_chain:
        return Proposal(drafted, tree, Distributions(ids, probs), candidates)
    tokens = fill(tree, candidates)
    rows = tree.depths[1:] - 1
    chosen = (candidates[rows] == tokens[:, None]).astype(np.float32)
    on_chain = np.asarray(tree.ranks[1:])[:, None] == 0
    q = np.where(on_chain, np.take_along_axis(probs, order, 1)[rows], chosen)
    return Proposal(tokens, tree, Distributions(candidates[rows], q), candidates)


def _common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens two texts share. Texts grow at the end, so the search runs from there."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    low, high = 0, length
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low
