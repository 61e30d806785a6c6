"""Code shared by EAGLE-3, DFlash and MTP, which draft over the target's hidden states; not a method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from specexport.contract import tensors
from specexport.contract.manifest import Manifest
from specexport.contract.methods.base import MethodOptions
from specexport.contract.shapes import Size, window
from specexport.contract.signature import GraphSignature
from specexport.contract.tensors import Dim, Tensor
from specexport.contract.tree import TokenTree
from specexport.methods.draft_model import ChainDraft, Dynamic, chain_proposal, chain_rows, write_drafting
from specexport.runtime.backend import Array, Graph, RunShape
from specexport.runtime.proposal import DeviceDraft, DraftProposer, Ints, Opening, Proposal, SlotView
from specexport.runtime.sampling import Floats
from specexport.runtime.text import common_prefix

MAX_STATES = 16


class StatesDraftOptions(MethodOptions, frozen=True, kw_only=True):
    """Options of a draft over the target's hidden states.

    Attributes:
        dynamic_tree: whether the nodes of a tree are chosen anew in each step, by how probable the draft finds the
            paths to them: at most as many, and at most as deep, as those of the chosen tree (EAGLE-2, arXiv
            2406.16858, section 4).
    """

    dynamic_tree: bool = False


class StatesCheckpointOptions(StatesDraftOptions, frozen=True, kw_only=True):
    """Options of such a draft with its own checkpoint.

    Attributes:
        model: its folder or hub id.
    """

    model: str

    main = "model"


class StatesDraft(ChainDraft, frozen=True, kw_only=True):
    """A draft that reads states between the target's layers.

    Attributes:
        states: the numbers of layers after which it reads the target's residual stream.
        rows: most rows of a text in a run that drafts: as many tokens as a step of its deepest tree can commit.
    """

    dynamic_tree: bool
    states: Annotated[tuple[Annotated[int, Meta(ge=0, le=4096)], ...], Meta(max_length=MAX_STATES)]
    hidden: Size
    rows: Size

    @property
    def target_outputs(self) -> tuple[Tensor, ...]:
        return tuple(tensors.LAYER_STATES.at(count).sized(H=self.hidden) for count in self.states)

    @property
    def catch_up(self) -> int:
        return self.rows

    def describe(self) -> str:
        dynamic = ", dynamic trees" if self.dynamic_tree else ""
        return f"{self.name}, states after {', '.join(map(str, self.states))} of the target's layers{dynamic}"


class OwnStateDraft(StatesDraft, frozen=True, kw_only=True):
    """A draft with a pass for each token, which reads its own state at tokens that the target has not read yet.

    Attributes:
        draft_hidden: H of the draft's own states.
    """

    draft_hidden: Size

    def validate(self) -> str | None:
        if self.dynamic_tree and self.trees and all(tree.is_chain for tree in self.token_trees()):
            return "dynamic_tree: its trees are chains, which leave nothing to choose; give trees of more nodes (trees)"
        return super().validate()

    @property
    def call_widths(self) -> frozenset[int]:
        return frozenset({self.rows, 1})  # later calls continue from its state and read one token

    @property
    def signature(self) -> GraphSignature:
        chain, inputs = super().signature, own_state_inputs(len(self.states) * self.hidden, self.draft_hidden)
        outputs = (*chain.outputs, tensors.NEXT_STATE.sized(H=self.draft_hidden))
        return GraphSignature((*chain.inputs, *inputs), outputs, chain.fed)


def own_state_inputs(states: Dim, hidden: Dim) -> tuple[Tensor, ...]:
    """The inputs for the target's concatenated states, of width ``states``, and for the draft's own state."""
    return tensors.LAYER_STATES.sized(H=states), tensors.OWN_STATE.sized(H=hidden), tensors.READS_OWN


# --- proposing --------------------------------------------------------------------------------------------------------
@dataclass
class _StateSpan:
    """The target's states at consecutive tokens of a slot's text.

    Attributes:
        start: position of the first token.
        states: float32 ``[N,n*H]``.
    """

    start: int
    states: Floats

    @property
    def end(self) -> int:
        return self.start + len(self.states)


class StatesProposer(DraftProposer):
    """Drafts from the target's states: its cache has a row for each token of a text but the last.

    A token's row may also depend on the next token. Rows that were computed from the draft's own output are dropped
    after each run.

    A DFlash draft drafts a block of tokens, whose q do not depend on the tokens drafted before them, so that all nodes
    of a depth may have the same children; acceptance remains exact.

    States are kept until the draft reads them, at the latest when a chunk is complete. If the target reused another
    request's cache, states are missing, and the target reads their tokens again: the last token of a shared prefix, or
    all tokens of a text that the draft has never read.
    """

    without_row = 1

    def __init__(self, graph: Graph, manifest: Manifest, method: StatesDraft) -> None:
        super().__init__(graph, manifest.prefill_chunk)
        self._width = method.catch_up
        self.reads_along = self._chunk if graph.any_width else self._width
        self._dynamic: Dynamic | None = None
        if method.dynamic_tree:
            self._dynamic = "any" if method.branching == 2 else "spine"
        self._names = [tensors.LAYER_STATES.at(count) for count in method.states]
        self.observes = frozenset(self._names)
        self._spans: dict[int, _StateSpan] = {}

    # --- the target's states ------------------------------------------------------------------------------------------
    def observe_text(self, view: SlotView, outputs: Mapping[str, Array], past: int, rows: Sequence[int]) -> None:
        states: Floats = np.concatenate([outputs[name][list(rows)] for name in self._names], 1)
        before = self._spans.get(view.slot)
        if before is not None and before.start <= past <= before.end:
            kept = before.states[: past - before.start]
            self._spans[view.slot] = _StateSpan(before.start, np.concatenate([kept, states]))
        else:
            self._spans[view.slot] = _StateSpan(past, states)
        # At most a chunk of states is kept, however long the request decodes without this method.
        while self._unread(view) >= self._chunk:
            self._read(view)

    def needs_from(self, view: SlotView) -> int:
        row, span = self._next_row(view), self._spans.get(view.slot)
        return span.end if span is not None and span.start <= row <= span.end else row

    def _next_row(self, view: SlotView) -> int:
        """The number of a text's valid rows in the cache; at most all but one, as a run computes at least one row."""
        shared = common_prefix(self._texts.get(view.slot, ()), view.tokens) - 1
        return max(0, min(shared, self.graph.filled(view.slot), len(view.tokens) - 2))

    def _unread(self, view: SlotView) -> int:
        """The number of rows that can be computed next, up to the first token without states."""
        row, span = self._next_row(view), self._spans.get(view.slot)
        if span is None or not span.start <= row:
            return 0
        return max(0, min(span.end, len(view.tokens) - 1) - row)

    @property
    def device_draft(self) -> DeviceDraft | None:
        # A step on the device needs its tree before drafting.
        return self if self._dynamic is None else None

    # --- the draft's runs ---------------------------------------------------------------------------------------------
    def prefill(self, view: SlotView, max_deferred: int = 0) -> bool:
        """See :class:`Proposer`; always leaves as many tokens as a run that drafts can read in each slot."""
        limit = max(max_deferred, self._width)
        if self._unread(view) > limit:
            self._read(view)
        return self._unread(view) > limit

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        """See :class:`Proposer`; leaves out texts of one token, and texts with missing states.

        It also leaves out slots whose draft lags far behind, as after plain steps, and reads a chunk in one of these.
        """
        unread = {view.slot: len(view.tokens) - 1 - self._next_row(view) for view in views}
        complete = [view for view in views if 0 < unread[view.slot] == self._unread(view)]
        limit = self.reads_along if len(views) == 1 else self._width  # all slots of a run are as wide as the widest
        behind = [view for view in complete if unread[view.slot] > limit]
        if behind:
            self._read(behind[0])
        ready = [view for view in complete if self._unread(view) <= limit]
        return self._draft(ready) if ready else {}

    def _draft(self, ready: Sequence[SlotView]) -> dict[int, Proposal]:
        K = max(view.tree.depth for view in ready)
        # A graph with a fixed width computes padding rows too.
        T = max(map(self._unread, ready)) if self.graph.any_width else self._width
        if self._width < T:  # keeps the number of shapes small
            T = self.graph.chunk(self._chunk, T)
        if self._rows(ready, T, K) > self.graph.cache_sizes[-1]:
            return {}
        slots = self.write_inputs(ready, T, K)
        outputs = self.graph.run(RunShape(T, drafts=K, slots=slots))
        for view in ready:
            self._keep(view, self._unread(view))
        return {view.slot: chain_proposal(view, outputs, view.slot - slots.start, self._dynamic) for view in ready}

    def _rows(self, ready: Sequence[SlotView], T: int, K: int) -> int:
        """The number of cache rows for a run that computes T rows of the texts and drafts K tokens."""
        return max(map(self._next_row, ready)) + T + K - 1

    def is_ready(self, view: SlotView) -> bool:
        """Whether one run can compute all missing rows and draft; see :class:`DeviceDraft`."""
        unread = len(view.tokens) - 1 - self._next_row(view)
        room = self._rows([view], self._width, view.tree.depth) <= self.graph.cache_sizes[-1]
        return 0 < unread == self._unread(view) <= self._width and room

    def write_inputs(self, views: Sequence[SlotView], tokens: int, drafts: int) -> range:
        slots = window([view.slot for view in views], self.graph.sizes)
        shape = RunShape(tokens, drafts=drafts, slots=slots)
        inputs = self._inputs(views, shape, self._rows(views, tokens, drafts))
        for view in views:
            at = view.slot - slots.start
            write_drafting(inputs, at, view, probabilities=self._dynamic is not None)
            if tensors.BLOCK_ROWS in inputs:  # as long as its tree requires, whatever the rest of the batch
                inputs[tensors.BLOCK_ROWS][at] = view.tree.depth + 1
        return slots

    def rows(self, tree: TokenTree, tokens: int) -> Ints:
        return chain_rows(tree)

    def commit(self, view: SlotView, drafted: Sequence[int]) -> None:
        """See :class:`DeviceDraft`; drops draft tokens' rows, which were not computed from the target's states."""
        self._keep(view, self._unread(view))

    def _read(self, view: SlotView) -> None:
        """Computes the next rows of a text, at most a chunk."""
        count = min(self._chunk, self._unread(view))
        T = self.graph.chunk(self._chunk, count)
        shape = RunShape(T, drafts=1, slots=range(view.slot, view.slot + 1))
        self._inputs([view], shape, self._next_row(view) + T)
        self.graph.run(shape)
        self._keep(view, count)

    def _inputs(self, views: Sequence[SlotView], shape: RunShape, rows: int) -> dict[str, Array]:
        """Writes and returns the inputs of a run, in a cache of ``rows`` rows."""
        inputs = self.graph.prepare(shape, rows)
        for view in views:
            at, row, span = view.slot - shape.slots.start, self._next_row(view), self._spans[view.slot]
            count = min(shape.tokens, self._unread(view))
            inputs[tensors.LAYER_STATES][at, :count] = span.states[row - span.start :][:count]
            inputs[tensors.PAST_LENGTH][at] = row
            inputs[tensors.LAST_ROW][at] = count - 1
            if tensors.BLOCK_ROWS in inputs:  # a block's first token
                inputs[tensors.INPUT_IDS][at] = view.tokens[-1]
            else:  # of each row the next token
                inputs[tensors.INPUT_IDS][at, :count] = view.tokens[row + 1 : row + count + 1]
        return inputs

    def _keep(self, view: SlotView, count: int) -> None:
        """Keeps a run's rows of a text, and the states that will be needed again."""
        row, span = self._next_row(view), self._spans[view.slot]
        self.graph.commit(view.slot, row, range(count))
        self._texts[view.slot] = view.tokens[: row + 1 + count]
        start = row + count - 1
        self._spans[view.slot] = _StateSpan(start, span.states[start - span.start :])

    # --- slots --------------------------------------------------------------------------------------------------------
    def move(self, source: int, to: int) -> None:
        super().move(source, to)
        self._spans.pop(to, None)
        if source in self._spans:
            self._spans[to] = self._spans.pop(source)

    def release(self, slot: int) -> None:
        self._spans.pop(slot, None)


def open_proposer(method: StatesDraft, opening: Opening) -> StatesProposer:
    return StatesProposer(opening.graph(method), opening.bundle.manifest, method)
