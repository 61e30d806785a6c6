"""A smaller model drafts a chain; a tree adds its other likely tokens beside each token of the chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from specexport.contract import tensors
from specexport.contract.manifest import Manifest
from specexport.contract.shapes import CATCH_UP_TOKENS, window
from specexport.contract.tree import TokenTree
from specexport.methods.draft_model.spec import ChainDraft
from specexport.runtime.backend import Array, Graph
from specexport.runtime.buffers import write_sampling
from specexport.runtime.proposal import DeviceDraft, Ints, Proposal, SlotView, drawn, fill, most_probable_tree
from specexport.runtime.proposers import Opening
from specexport.runtime.reader import Reader, ReadingProposer

Dynamic = Literal["spine", "any"]
"""Which nodes of a dynamic tree may have children: those of a chain alone, or any."""
_TOGETHER = 8
"""Most tokens of a text that are read along in a run of several slots."""


class DraftModelProposer(ReadingProposer):
    """A smaller model drafts a chain of tokens in one graph call.

    The draft's cache holds rows for the tokens it was given and for the drafts it made, all committed at once; those of
    the drafts that are accepted are right, the rest are overwritten. Which are right is read off the slot's tokens.
    """

    def __init__(self, graph: Graph, manifest: Manifest) -> None:
        self.graph = graph
        self._chunk = manifest.prefill_chunk
        self.reads_along = self._chunk if graph.any_width else CATCH_UP_TOKENS
        super().__init__(Reader(graph, manifest.prefill_chunk, self._read))

    @property
    def device_draft(self) -> DeviceDraft:
        return self

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        """See :class:`Proposer`; a text of one token has nothing to catch up on and is left out.

        So are slots that the draft is far behind in, as after plain steps: it reads one chunk of one of them.
        """
        # All slots of a run are as wide as the one that misses most.
        most = self.reads_along if len(views) == 1 else min(self.reads_along, _TOGETHER)
        waiting = self._reader.catch_up({view.slot: view.tokens[:-most] for view in views})
        left = [view for view in views if len(view.tokens) >= CATCH_UP_TOKENS and view.slot not in waiting]
        proposals: dict[int, Proposal] = {}
        while left:  # once, but where a text is shorter than what is missing of another
            T = self._width(left)
            proposals |= self._draft([view for view in left if len(view.tokens) >= T], T)
            left = [view for view in left if len(view.tokens) < T]
        return proposals

    def _width(self, views: Sequence[SlotView]) -> int:
        """T of a run that reads what is missing of all texts: a power of 2, for there to be few shapes."""
        missing = max(map(self._missing, views))
        rounded = min(1 << (missing - 1).bit_length(), self.reads_along)
        return rounded if all(len(view.tokens) >= rounded for view in views) else missing

    def _missing(self, view: SlotView) -> int:
        return len(view.tokens) - self._reader.known(view.slot, view.tokens[:-CATCH_UP_TOKENS])

    def _draft(self, ready: Sequence[SlotView], T: int) -> dict[int, Proposal]:
        K = max(view.tree.depth for view in ready)
        slots = self.ask(ready, T, K)
        made = self.graph.run(T, drafts=K, slots=slots)
        proposals = {}
        for view in ready:
            at = view.slot - slots.start
            self._keep(view, T, made[tensors.DRAFT_TOKENS][: view.tree.depth - 1, at].tolist())
            proposals[view.slot] = chain_proposal(view, made, at)
        return proposals

    def is_ready(self, view: SlotView) -> bool:
        """Whether the draft has read all of a text that it needs to go on with it."""
        return self._missing(view) == CATCH_UP_TOKENS

    def ask(self, views: Sequence[SlotView], tokens: int, drafts: int) -> range:
        """See :class:`DeviceDraft`."""
        longest = max(len(view.tokens) for view in views)
        self.graph.reserve(longest + drafts - 1)
        slots = window([view.slot for view in views], self.graph.sizes)
        given = self.graph.inputs(tokens, drafts=drafts, slots=slots)
        self.graph.protect_rows(tokens, drafts=drafts, slots=slots)
        for view in views:
            at = view.slot - slots.start
            given[tensors.INPUT_IDS][at] = view.tokens[-tokens:]
            given[tensors.PAST_LENGTH][at] = len(view.tokens) - tokens
            given[tensors.LAST_ROW][at] = tokens - 1
            if tensors.KNOWN_TOKENS in given:
                given[tensors.KNOWN_TOKENS][at] = 0  # the last two come again
            write_sampling(given, at, view.params)
            if not view.params.greedy:
                # As much noise as its own tree takes, so that a seed means the same whatever else is in the batch.
                depth = view.tree.depth
                given[tensors.UNIFORM][at, :depth] = view.random.random(depth, np.float32)
        return slots

    def rows(self, tree: TokenTree, tokens: int) -> Ints:
        return chain_rows(tree)

    def keep(self, view: SlotView, drafted: Sequence[int]) -> None:
        """Keeps the rows of a run: those of the text, and of the tokens it drafted and was then given."""
        self._keep(view, CATCH_UP_TOKENS, drafted)

    def _keep(self, view: SlotView, T: int, drafted: Sequence[int]) -> None:
        self.graph.commit(view.slot, len(view.tokens) - T, range(T + len(drafted)))
        self._reader.note(view.slot, [*view.tokens, *drafted])

    def prefill(self, view: SlotView, max_deferred: int = 0) -> bool:
        """See :class:`Proposer`; all but the last two tokens are read."""
        return self._reader.read(view.slot, view.tokens[: -max(CATCH_UP_TOKENS, max_deferred)])

    def _read(self, slot: int, tokens: list[int], past: int) -> None:
        slots, T = range(slot, slot + 1), self.graph.chunk(self._chunk, len(tokens))
        self.graph.reserve(past + T)
        given = self.graph.inputs(T, drafts=1, slots=slots)
        given[tensors.INPUT_IDS][0, : len(tokens)] = tokens
        given[tensors.PAST_LENGTH][0] = past
        given[tensors.LAST_ROW][0] = len(tokens) - 1
        if tensors.KNOWN_TOKENS in given:
            given[tensors.KNOWN_TOKENS][0] = len(tokens)
        self.graph.run(T, drafts=1, slots=slots)
        self.graph.commit(slot, past, range(len(tokens)))


def chain_rows(tree: TokenTree) -> Ints:
    """Of each node but the root the row of a chain's draft that says its q, int64 ``[N-1]``: that of its depth."""
    rows: Ints = tree.depths[1:] - 1
    return rows


def chain_proposal(view: SlotView, made: Mapping[str, Array], at: int, dynamic: Dynamic | None = None) -> Proposal:
    """What a propose graph drafted for the slot at a place of the window, with other likely tokens beside the chain.

    Dynamic trees have nodes of their own in each step. Where any node may have children, which they are follows from q
    alone, and so not from what was drawn; beside a chain, which is whole, they have none. See docs/trees.md.
    """
    tree = view.tree
    ids = made[tensors.DRAFT_IDS][: tree.depth, at].astype(np.int64)
    probs = made[tensors.DRAFT_PROBS][: tree.depth, at].astype(np.float32)
    drafted = made[tensors.DRAFT_TOKENS][: tree.depth, at].astype(np.int64)
    if dynamic == "any":
        tree = most_probable_tree(tree, probs, spine=False)
        ids, probs, drafted = ids[: tree.depth], probs[: tree.depth], drafted[: tree.depth]
    elif dynamic == "spine":
        order = np.argsort(ids != drafted[:, None], axis=1, kind="stable")  # as drawn() ranks them
        tree = most_probable_tree(tree, np.take_along_axis(probs, order, 1), spine=True)
    if view.params.greedy:
        return Proposal(fill(tree, ids), tree, None, ids)
    tokens, q, candidates = drawn(tree, chain_rows(tree), drafted, ids, probs)
    return Proposal(tokens, tree, q, candidates)


def open_proposer(method: ChainDraft, opening: Opening) -> DraftModelProposer:
    return DraftModelProposer(opening.graph(method), opening.bundle.manifest)
