"""A draft model with Medusa heads: a whole tree in one pass of the draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from specexport.contract import tensors
from specexport.contract.manifest import Manifest, MedusaDraft
from specexport.runtime.backend import Array, Graph
from specexport.runtime.proposers.base import Ints, Proposal, SlotView, fill


class MedusaDraftProposer:
    """Fills a tree with the candidates of a draft's own head (depth 1) and its Medusa heads (the depths after it).

    The draft sees committed tokens only, so its cache is always right. A step commits at most one token more than its
    tree is deep: that many tokens are given each time, some of them again.

    Args:
        graph: the draft's step graph.
        manifest: the bundle's.
        method: the method.
    """

    def __init__(self, graph: Graph, manifest: Manifest, method: MedusaDraft) -> None:
        self._graph = graph
        self._chunk = manifest.prefill_chunk
        self._last_position = method.draft.max_positions - 1
        self._width = catch_up(method)
        self._seen: dict[int, int] = {}

    def propose(self, sequences: Sequence[SlotView]) -> dict[int, Proposal]:
        """See :class:`Proposer`."""
        made = {}
        for sequence in sequences:
            candidates = self._read(sequence)
            made[sequence.slot] = Proposal(fill(sequence.tree, candidates), sequence.tree, None, candidates)
        return made

    def _read(self, sequence: SlotView) -> Ints:
        """Gives the draft what it has not seen of the text; what it proposes after it."""
        slot, tokens = sequence.slot, sequence.tokens
        done = self._seen.get(slot, 0)
        while len(tokens) - done > self._width:
            self._run(slot, tokens[done : done + self._chunk], done, self._chunk)
            done = min(done + self._chunk, len(tokens))
        if len(tokens) >= self._width:
            done = len(tokens) - self._width
            made = self._run(slot, tokens[done:], done, self._width)
        else:
            made = self._run(slot, tokens, 0, self._chunk)
        self._seen[slot] = len(tokens)
        return made

    def _run(self, slot: int, tokens: list[int], past: int, width: int) -> Ints:
        self._graph.reserve(past + width)
        given = self._graph.inputs(width, 1)
        given[tensors.INPUT_IDS][slot, : len(tokens)] = tokens
        given[tensors.POSITION_IDS][slot] = np.minimum(past + np.arange(width), self._last_position)
        given[tensors.PAST_LENGTH][slot] = past
        given[tensors.LOGITS_ROWS][slot] = len(tokens) - 1
        made: Ints = self._graph.run(width, 1)[tensors.CANDIDATES][slot, :, 0].copy()
        self._graph.commit(slot, past, range(len(tokens)))
        return made

    def observe(self, slot: int, outputs: Mapping[str, Array], row: int) -> None:
        """See :class:`Proposer`; nothing the target makes is needed."""

    def release(self, slot: int) -> None:
        """See :class:`Proposer`."""
        self._seen.pop(slot, None)


def catch_up(method: MedusaDraft) -> int:
    """Tokens the draft is given a step: the most a step can commit."""
    return 1 + max(tree.depth for tree in method.token_trees())
