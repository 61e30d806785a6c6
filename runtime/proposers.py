"""Ways to propose draft tokens. One protocol, so that the engine's loop does not know which one it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specexport.contract import tensors
from specexport.contract.manifest import Manifest
from specexport.contract.tree import TokenTree
from specexport.runtime.backend import Graph
from specexport.runtime.params import SamplingParams
from specexport.runtime.sampling import Distributions


@dataclass
class SlotView:
    """What a proposer sees of one slot.

    Attributes:
        slot: index into the batch.
        tokens: prompt and output so far; the last one is not in the target's cache yet.
        params: how it samples.
        random: its own noise.
        num_speculative_tokens: K, how many draft tokens it wants a step.
    """

    slot: int
    tokens: list[int]
    params: SamplingParams
    random: np.random.Generator
    num_speculative_tokens: int


@dataclass(frozen=True)
class Proposal:
    """Draft tokens for one slot.

    Attributes:
        tokens: int64 ``[K]``, in the order of the tree's nodes 1..K.
        tree: their shape; node 0 is the last committed token.
        q: the distributions they were drawn from; None where they were chosen without drawing (q = 1).
    """

    tokens: npt.NDArray[np.int64]
    tree: TokenTree
    q: Distributions | None


class Proposer(Protocol):
    """Proposes draft tokens for several slots at once. Its state is per slot and follows from the slot's tokens."""

    def propose(self, sequences: Sequence[SlotView]) -> dict[int, Proposal]:
        """Proposals by slot; a slot it has nothing for is left out and decodes plainly this step."""

    def release(self, slot: int) -> None:
        """Forgets a slot: its request ended."""


class DraftModelProposer:
    """A smaller model drafts a chain of K tokens in one graph call.

    The draft's cache needs no commits. It holds rows for the tokens it was given and for the drafts it made; those of
    the drafts that were accepted are right, the rest are overwritten. Which are right is read off the slot's tokens.

    Args:
        graph: the propose graph.
        manifest: the bundle's.
    """

    catch_up = 2
    """Tokens the first pass sees. Of K accepted drafts the last was never fed to the draft, so the last two tokens are
    given each time; when the first of them was seen before, its row is written again with the same content."""

    def __init__(self, graph: Graph, manifest: Manifest) -> None:
        self._graph = graph
        self._chunk = manifest.prefill_chunk
        self._seen: dict[int, list[int]] = {}

    def propose(self, sequences: Sequence[SlotView]) -> dict[int, Proposal]:
        """See :class:`Proposer`; a text of one token has nothing to catch up on and is left out."""
        ready = [sequence for sequence in sequences if len(sequence.tokens) >= self.catch_up]
        if not ready:
            return {}
        for sequence in ready:
            self._prefill(sequence)
        K = max(sequence.num_speculative_tokens for sequence in ready)
        longest = max(len(sequence.tokens) for sequence in ready)
        self._graph.reserve(longest + K - 1)
        given = self._graph.inputs(self.catch_up, K)
        for sequence in ready:
            slot, params = sequence.slot, sequence.params
            given[tensors.INPUT_IDS][slot] = sequence.tokens[-self.catch_up :]
            given[tensors.PAST_LENGTH][slot] = len(sequence.tokens) - self.catch_up
            given[tensors.TEMPERATURE][slot] = params.temperature or 1.0
            given[tensors.TOP_K][slot] = 1 if params.greedy else min(max(params.top_k, 0), 2**31)
            given[tensors.TOP_P][slot] = params.top_p
            given[tensors.MIN_P][slot] = params.min_p
            if not params.greedy:
                given[tensors.UNIFORM][slot] = sequence.random.random(K, np.float32)
        made = self._graph.run(self.catch_up, K)
        return {sequence.slot: self._take(sequence, made) for sequence in ready}

    def _take(self, sequence: SlotView, made: dict[str, npt.NDArray[np.generic]]) -> Proposal:
        slot = sequence.slot
        K = sequence.num_speculative_tokens
        drafted = made[tensors.DRAFT_TOKENS][:K, slot].astype(np.int64)
        self._seen[slot] = [*sequence.tokens, *drafted[:-1].tolist()]
        q = None
        if not sequence.params.greedy:
            ids, probs = made[tensors.DRAFT_IDS][:K, slot], made[tensors.DRAFT_PROBS][:K, slot]
            q = Distributions(ids.astype(np.int64), probs.astype(np.float32))
        return Proposal(drafted, TokenTree.chain(K + 1), q)

    def _prefill(self, sequence: SlotView) -> None:
        """Gives the draft whatever it has not seen of the text, all but its last two tokens, in chunks."""
        slot, tokens = sequence.slot, sequence.tokens
        done, stop = _common_prefix(self._seen.get(slot, []), tokens), len(tokens) - self.catch_up
        while done < stop:
            chunk = tokens[done : min(done + self._chunk, stop)]
            self._graph.reserve(done + self._chunk)
            given = self._graph.inputs(self._chunk, 1)
            given[tensors.INPUT_IDS][slot, : len(chunk)] = chunk
            given[tensors.PAST_LENGTH][slot] = done
            given[tensors.LAST_ROW][slot] = len(chunk) - 1
            self._graph.run(self._chunk, 1)
            done += len(chunk)

    def release(self, slot: int) -> None:
        """See :class:`Proposer`."""
        self._seen.pop(slot, None)


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
