"""What drafts have in common whose rows are made of the target's states at the tokens of the text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specexport.contract import tensors
from specexport.contract.manifest import Manifest
from specexport.contract.shapes import window
from specexport.contract.tree import TokenTree
from specexport.methods.draft_model.propose import Dynamic, chain_proposal, chain_rows
from specexport.methods.hidden_states.spec import StatesDraft
from specexport.runtime.backend import Array, Graph
from specexport.runtime.buffers import write_sampling
from specexport.runtime.params import SamplingParams
from specexport.runtime.proposal import DeviceDraft, Ints, Proposal, Proposer, SlotView
from specexport.runtime.reader import common_prefix
from specexport.runtime.sampling import Floats


@dataclass
class _Shown:
    """What the target said at some tokens of a slot's text.

    Attributes:
        start: position of the first.
        states: float32 ``[N,n*H]``.
    """

    start: int
    states: Floats

    @property
    def end(self) -> int:
        return self.start + len(self.states)


class StatesProposer(Proposer):
    """A draft that has a row of each token of a text but the last, made of the target's states there.

    The row of a token may depend on the token after it. So the rows of texts that begin alike are the same as far as
    both go, and which are right is read off the tokens.

    States are kept until the draft has read them, and it reads whenever a chunk of them is there. What it has not been
    shown, as another request's text was taken over by the target, the target reads once more: the last token of a text
    that begins alike, and all of one that the draft never saw.
    """

    def __init__(self, graph: Graph, manifest: Manifest, method: StatesDraft) -> None:
        self.graph = graph
        self._chunk = manifest.prefill_chunk
        self._width = method.catch_up
        self.reads_along = self._chunk if graph.any_width else self._width
        self._dynamic: Dynamic | None = None
        if method.dynamic_tree:
            self._dynamic = "any" if method.branching == 2 else "spine"
        self._names = [tensors.LAYER_STATES.at(count) for count in method.states]
        self.observes = frozenset(self._names)
        self._texts: dict[int, list[int]] = {}
        self._shown: dict[int, _Shown] = {}

    # --- what the target says -----------------------------------------------------------------------------------------
    def observe_text(self, view: SlotView, outputs: Mapping[str, Array], past: int, rows: Sequence[int]) -> None:
        states: Floats = np.concatenate([outputs[name][list(rows)] for name in self._names], 1)
        before = self._shown.get(view.slot)
        if before is not None and before.start <= past <= before.end:
            kept = before.states[: past - before.start]
            self._shown[view.slot] = _Shown(before.start, np.concatenate([kept, states]))
        else:
            self._shown[view.slot] = _Shown(past, states)
        # However long it is not asked to propose, no more than a chunk of states is kept.
        while self._unread(view) >= self._chunk:
            self._read(view)

    def needs_from(self, view: SlotView) -> int:
        row, shown = self._next_row(view), self._shown.get(view.slot)
        return shown.end if shown is not None and shown.start <= row <= shown.end else row

    def _next_row(self, view: SlotView) -> int:
        """How many rows of a text the draft has; the last one is made again, as a run makes one at least."""
        alike = common_prefix(self._texts.get(view.slot, ()), view.tokens) - 1
        return max(0, min(alike, self.graph.filled(view.slot), len(view.tokens) - 2))

    def _unread(self, view: SlotView) -> int:
        """How many rows can be made next, of those there are no states missing before."""
        row, shown = self._next_row(view), self._shown.get(view.slot)
        if shown is None or not shown.start <= row:
            return 0
        return max(0, min(shown.end, len(view.tokens) - 1) - row)

    @property
    def device_draft(self) -> DeviceDraft | None:
        # A device's step is laid out for a tree before it drafts.
        return self if self._dynamic is None else None

    # --- the draft's runs ---------------------------------------------------------------------------------------------
    def prefill(self, view: SlotView, max_deferred: int = 0) -> bool:
        """See :class:`Proposer`; what a call of any slot may take together with drafting is left in any case."""
        most = max(max_deferred, self._width)
        if self._unread(view) > most:
            self._read(view)
        return self._unread(view) > most

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        """See :class:`Proposer`; texts of one token, and those whose states were not all shown, are left out.

        So are slots that the draft is far behind in, as after plain steps: it reads one chunk of one of them.
        """
        left = {view.slot: len(view.tokens) - 1 - self._next_row(view) for view in views}
        known = [view for view in views if 0 < left[view.slot] == self._unread(view)]
        most = self.reads_along if len(views) == 1 else self._width  # all slots of a run are as wide as the widest
        behind = [view for view in known if left[view.slot] > most]
        if behind:
            self._read(behind[0])
        ready = [view for view in known if self._unread(view) <= most]
        return self._draft(ready) if ready else {}

    def _draft(self, ready: Sequence[SlotView]) -> dict[int, Proposal]:
        K = max(view.tree.depth for view in ready)
        # A run makes the rows of padding too, where its graph takes no other width.
        T = max(map(self._unread, ready)) if self.graph.any_width else self._width
        if self._width < T:  # for there to be few shapes
            T = self.graph.chunk(self._chunk, T)
        if self._rows(ready, T, K) > self.graph.cache_sizes[-1]:
            return {}
        slots = self.ask(ready, T, K)
        made = self.graph.run(T, drafts=K, slots=slots)
        for view in ready:
            self._keep(view, self._unread(view))
        return {view.slot: self._proposal(view, made, view.slot - slots.start) for view in ready}

    def _proposal(self, view: SlotView, made: Mapping[str, Array], at: int) -> Proposal:
        """What a run drafted for the slot at a place of its window."""
        return chain_proposal(view, made, at, self._dynamic)

    def _rows(self, ready: Sequence[SlotView], T: int, K: int) -> int:
        """Of a cache for a run that makes T rows of texts and drafts."""
        return max(map(self._next_row, ready)) + T + K - 1

    def is_ready(self, view: SlotView) -> bool:
        """Whether one run makes all rows that are missing, and drafts; see :class:`DeviceDraft`."""
        left = len(view.tokens) - 1 - self._next_row(view)
        room = self._rows([view], self._width, view.tree.depth) <= self.graph.cache_sizes[-1]
        return 0 < left == self._unread(view) <= self._width and room

    def ask(self, views: Sequence[SlotView], tokens: int, drafts: int) -> range:
        """See :class:`DeviceDraft`."""
        slots = window([view.slot for view in views], self.graph.sizes)
        given = self._inputs(views, tokens, drafts, slots, self._rows(views, tokens, drafts))
        for view in views:
            at = view.slot - slots.start
            write_sampling(given, at, view.params)
            if not view.params.greedy:
                # As much noise as its own tree takes, so that a seed means the same whatever else is in the batch.
                depth = view.tree.depth
                given[tensors.UNIFORM][at, :depth] = view.random.random(depth, np.float32)
            elif self._dynamic is not None:
                # The most probable token is drawn without noise, and top-k of 1 would hide how probable others are.
                write_sampling(given, at, SamplingParams())
                given[tensors.UNIFORM][at] = 0.0
        return slots

    def rows(self, tree: TokenTree, tokens: int) -> Ints:
        return chain_rows(tree)

    def keep(self, view: SlotView, drafted: Sequence[int]) -> None:
        """Keeps the rows of a run but those of drafted tokens, which were not made of the target's states."""
        self._keep(view, self._unread(view))

    def _read(self, view: SlotView) -> None:
        """Makes as many of a text's next rows as a chunk holds."""
        slots, count = range(view.slot, view.slot + 1), min(self._chunk, self._unread(view))
        T = self.graph.chunk(self._chunk, count)
        self._inputs([view], T, 1, slots, self._next_row(view) + T)
        self.graph.run(T, drafts=1, slots=slots)
        self._keep(view, count)

    def _inputs(self, views: Sequence[SlotView], width: int, K: int, slots: range, rows: int) -> dict[str, Array]:
        """Writes which rows a run is to make, at most ``width`` of each slot, into a cache of ``rows``; its inputs."""
        self.graph.reserve(rows)
        given = self.graph.inputs(width, drafts=K, slots=slots)
        self.graph.protect_rows(width, drafts=K, slots=slots)
        for view in views:
            at, row, shown = view.slot - slots.start, self._next_row(view), self._shown[view.slot]
            count = min(width, self._unread(view))
            given[tensors.LAYER_STATES][at, :count] = shown.states[row - shown.start :][:count]
            given[tensors.PAST_LENGTH][at] = row
            given[tensors.LAST_ROW][at] = count - 1
            self._write_tokens(given, at, view, range(row, row + count))
        return given

    @abstractmethod
    def _write_tokens(self, given: Mapping[str, Array], at: int, view: SlotView, rows: range) -> None:
        """Writes the tokens that a run is to see which makes these rows of a text, for the slot at a place."""

    def _keep(self, view: SlotView, count: int) -> None:
        """Keeps the rows that a run made of a text, and of the states those that are needed again."""
        row, shown = self._next_row(view), self._shown[view.slot]
        self.graph.commit(view.slot, row, range(count))
        self._texts[view.slot] = view.tokens[: row + 1 + count]
        start = row + count - 1
        self._shown[view.slot] = _Shown(start, shown.states[start - shown.start :])

    # --- slots --------------------------------------------------------------------------------------------------------
    def move(self, source: int, to: int) -> None:
        self.share(source, to, len(self._texts.get(source, ())))
        self._shown.pop(to, None)
        if source in self._shown:
            self._shown[to] = self._shown.pop(source)

    def share(self, source: int, to: int, tokens: int) -> None:
        text = self._texts.get(source, [])[:tokens]
        self.graph.copy(source, to, max(0, min(len(text) - 1, self.graph.filled(source))))
        self._texts[to] = text

    def shrink_cache(self, rows: int) -> None:
        self.graph.shrink_cache(rows)

    def release(self, slot: int) -> None:
        self._shown.pop(slot, None)
