"""One step for the requests in the slots, propose -> verify -> accept -> commit, and its outcome."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from specexport.contract import tensors
from specexport.contract.manifest import Manifest
from specexport.contract.shapes import window
from specexport.contract.tree import TokenTree
from specexport.runtime.backend import Array, Graph, RunShape
from specexport.runtime.logits import TokenLogprobs, token_logprobs
from specexport.runtime.prompt import is_embedding
from specexport.runtime.proposal import NOTHING, Ints, Proposal, Proposer, SlotView
from specexport.runtime.sampling import Floats, accept_greedy, accept_relaxed, accept_sampled, accept_typical


class StepProgram:
    """Takes steps for the scheduler: one graph call to propose, one to verify, and NumPy for the rest.

    One thread at a time calls it. Between two steps a slot's cache holds all tokens of its text but the last.

    Attributes:
        fuses: whether drafts may propose in the target's run, so that only whole steps can be timed.
        sizes: batch sizes, ascending; the last is the number of slots.
    """

    fuses = False

    def __init__(
        self, manifest: Manifest, target: Graph, proposers: Mapping[str, Proposer], execution: str = "host"
    ) -> None:
        self.sizes = target.sizes
        self._execution = execution
        self._chunk = manifest.prefill_chunk
        self._longest = manifest.max_seq_len
        self._last_position = manifest.target.max_positions - 1
        self._target = target
        self._proposers = proposers

    def step(self, views: Sequence[SlotView]) -> StepResult:
        """Proposes, verifies, accepts and commits for slots whose prompts are read; does not change their texts."""
        start = time.perf_counter()
        proposals = self.propose(views)
        proposed = time.perf_counter()
        outputs = self._verify(views, proposals)
        verified = time.perf_counter()
        accepted = [self._accept(view, proposals[view.slot], outputs[view.slot][tensors.LOGITS]) for view in views]
        decided = time.perf_counter()
        outcomes = [
            self._commit(view, proposals[view.slot], outputs[view.slot], path, bonus)
            for view, (path, bonus) in zip(views, accepted, strict=True)
        ]
        return StepResult(outcomes, proposed - start, verified - proposed, decided - verified, self._execution)

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        """A proposal for each slot, perhaps nothing; each method proposes for all its slots in one call."""
        by_method: dict[str, list[SlotView]] = {}
        for view in views:
            if view.method is not None and len(view.tree) > 1:
                by_method.setdefault(view.lookup or view.method, []).append(view)
        proposals = dict.fromkeys((view.slot for view in views), NOTHING)
        for method, members in by_method.items():
            if len(views) == 1:  # a single request stalls no others
                self.catch_up(method, members[0])
            proposals |= self._proposers[method].propose(members)
        return proposals

    def _verify(self, views: Sequence[SlotView], proposals: Mapping[int, Proposal]) -> dict[int, dict[str, Array]]:
        """The target's outputs at the root and every draft token, by slot; it writes their rows into its cache.

        All slots run as many tokens as the widest tree; the nodes of a smaller tree do not see the padding.
        """
        to_verify = {slot: proposal.wider or proposal for slot, proposal in proposals.items()}
        slots = window([view.slot for view in views], self.sizes)
        width = self._target.step_width(len(slots), max(len(step.tree) for step in to_verify.values()))
        shape = RunShape(width, width, slots=slots)
        inputs = self._target.prepare(shape, max(len(view.tokens) for view in views) - 1 + width)
        for view in views:
            step, past = to_verify[view.slot], len(view.tokens) - 1
            self.write_nodes(inputs, view.slot - slots.start, view, step.tree, past, 1, step.tokens)
        outputs = self._target.run(shape)
        return {view.slot: {name: array[view.slot - slots.start] for name, array in outputs.items()} for view in views}

    @staticmethod
    def _accept(view: SlotView, proposal: Proposal, logits: Floats) -> tuple[list[int], int]:
        """The accepted nodes of the proposal's tree, and the token after them.

        ``logits``, float32 ``[T,V]``, may have further rows after the tree's.
        """
        tree, drafted = proposal.tree, proposal.tokens
        logits = logits[: len(tree)]
        for processor in view.processors:
            logits = processor.apply(logits, tree, drafted)
        if view.params.acceptance == "relaxed":
            return accept_relaxed(logits, tree, drafted, view.params, view.random.random())
        if view.params.greedy:
            return accept_greedy(logits, tree, drafted)
        if view.params.acceptance == "typical":
            return accept_typical(logits, tree, drafted, view.params, view.random.random())
        return accept_sampled(logits, tree, drafted, proposal.q, view.params, view.random.random(len(tree)))

    def _commit(
        self, view: SlotView, proposal: Proposal, outputs: Mapping[str, Array], path: list[int], bonus: int
    ) -> Outcome:
        """Commits the rows of an accepted path, and informs the proposer and the logits processors."""
        new = [*(int(proposal.tokens[node - 1]) for node in path), bonus]
        rows, past = [0, *path], len(view.tokens) - 1
        self.inform(view, outputs, rows[-1], past, rows)
        # Nothing is accepted after a row that is not finite, so only the last row can be.
        finite = bool(np.isfinite(outputs[tensors.LOGITS][rows[-1]].max()))
        self._target.commit(view.slot, past, rows)
        for processor in view.processors:
            processor.advance(new)
        top = view.params.logprobs
        logprobs = token_logprobs(outputs[tensors.LOGITS], rows, new, top) if top is not None else ()
        verified = None if proposal is NOTHING else Verified(proposal.tree, proposal.tokens.tolist(), path)
        return Outcome(new, logprobs, finite, verified)

    def write_nodes(
        self,
        inputs: Mapping[str, Array],
        at: int,
        view: SlotView,
        tree: TokenTree,
        past: int,
        known: int,
        drafted: Ints | None = None,
    ) -> None:
        """Writes the target's inputs for a tree whose root is at position ``past`` of a text.

        The slot is at index ``at`` of the window. The first ``known`` nodes are tokens of the text; ``drafted``, int64
        ``[K]``, are the tokens of nodes 1..K, None if they are text too, or if the host does not know them.
        """
        tokens, mask = view.tokens[past : past + known], inputs.get(tensors.EMBEDS_MASK)
        if mask is not None:
            mask[at] = False
            if view.embeddings is not None and past < view.prompt:
                view.embeddings.put(past, inputs[tensors.INPUTS_EMBEDS][at], mask[at])
                tokens = [0 if is_embedding(token) else token for token in tokens]
        inputs[tensors.INPUT_IDS][at, :known] = tokens
        if drafted is not None and len(drafted):
            inputs[tensors.INPUT_IDS][at, 1 : len(tree)] = drafted
        # A step may extend beyond the end of the context; its tokens there are cut off.
        inputs[tensors.POSITION_IDS][at, : len(tree)] = np.minimum(past + tree.depths, self._last_position)
        inputs[tensors.TREE_MASK][at] = padded_mask(tree, inputs[tensors.INPUT_IDS].shape[1])
        inputs[tensors.PAST_LENGTH][at] = past
        if tensors.KNOWN_TOKENS in inputs:
            inputs[tensors.KNOWN_TOKENS][at] = known

    def inform(self, view: SlotView, outputs: Mapping[str, Array], row: int, past: int, rows: Sequence[int]) -> None:
        """Shows the target's outputs to a slot's proposer; see its ``observe`` and ``observe_text``."""
        if view.method is not None:
            self._proposers[view.method].observe(view.slot, outputs, row)
            self._proposers[view.method].observe_text(view, outputs, past, rows)

    def with_proposers(self, proposers: Mapping[str, Proposer]) -> StepProgram:
        """The program of the same steps, in the same memory, with other proposers, whose models stay off the device."""
        program = copy(self)
        program._proposers = proposers
        return program

    def filled(self, slot: int) -> int:
        """The number of tokens of a slot's last text that its cache holds."""
        return self._target.filled(slot)

    def reusable(self, slot: int, tokens: int) -> int:
        """The number of the first ``tokens`` tokens of a slot's last text that another text may reuse."""
        return self._target.reusable(slot, tokens)

    def prefill(self, view: SlotView, alone: bool = False) -> bool:
        """Reads up to one chunk of a prompt after its cached part; returns whether tokens remain unread.

        The last token is not read, as it is the first step's root. If the slot speculates, its proposer reads a chunk
        too. A chunk may be longer if ``alone``: if no other request waits meanwhile.
        """
        unread = self._read(view, alone)
        # The proposer reads its chunk in the same turn: in separate turns it would stall the batch twice.
        if view.method is not None and len(view.tree) > 1 and view.lookup is None:
            unread |= self._proposers[view.method].prefill(view)
        return unread

    def catch_up(self, method: str, view: SlotView) -> None:
        """Has a proposer read the text that it missed, except the last tokens, which it can read as it proposes."""
        proposer, unread = self._proposers[method], True
        while unread:
            unread = proposer.prefill(view, proposer.reads_along)

    def _read(self, view: SlotView, alone: bool) -> bool:
        """Has the target read a chunk of a prompt; returns whether tokens remain unread."""
        past, end, top = self._first_unread(view), len(view.tokens) - 1, view.params.prompt_logprobs
        if past >= end:
            return False
        if top is None:
            slots = range(view.slot, view.slot + 1)
            width, rows = self._target.chunk(self._chunk, end - past, alone), 1
        else:  # a prefill chunk has logits only after its last token
            slots = window([view.slot], self.sizes)
            width = rows = self._target.widths(len(slots))[-1]
        # The run writes into every slot of its window. Rows beyond the context do not belong to a text.
        written = [past, *(min(self._target.filled(slot), self._longest - 1) for slot in slots if slot != view.slot)]
        # Growing copies the cache, so it grows once for the whole prompt and the first tokens after it.
        room = min(end + self._chunk, self._target.cache_sizes[-1])
        shape = RunShape(width, rows, slots=slots)
        inputs = self._target.prepare(shape, max(max(written) + width, room))
        at, read = view.slot - slots.start, range(min(width, end - past))
        self.write_nodes(inputs, at, view, TokenTree.chain(width), past, len(read))
        if top is None:
            inputs[tensors.LOGITS_ROWS][at] = read[-1]
        outputs = {name: array[at] for name, array in self._target.run(shape).items()}
        self._target.commit(view.slot, past, read)
        if top is not None:
            after = view.tokens[past + 1 : past + len(read) + 1]
            view.prompt_logprobs += token_logprobs(outputs[tensors.LOGITS], read, after, top)
        self.inform(view, outputs, 0 if top is None else read[-1], past, read)
        return past + len(read) < end

    def _first_unread(self, view: SlotView) -> int:
        """The position from which the target reads a prompt: within its cached rows if the proposer missed some."""
        filled = self._target.filled(view.slot)
        if view.method is None:
            return filled
        usable = self._target.reusable(view.slot, min(filled, self._proposers[view.method].needs_from(view)))
        view.read_again += filled - usable
        return usable

    def move(self, source: int, to: int, method: str | None) -> None:
        """Moves a request to another slot, which is free."""
        self._target.copy(source, to, self._target.filled(source))
        for proposer in self._proposers_of(method):
            proposer.move(source, to)

    def share(self, source: int, to: int, tokens: int) -> None:
        """Begins a text in slot ``to`` with the first ``tokens`` tokens in slot ``source``, perhaps the same slot."""
        self._target.copy(source, to, tokens)
        if source != to:
            for proposer in self._proposers.values():
                proposer.share(source, to, tokens)

    def shrink_cache(self, rows: int) -> None:
        """Allows caches to shrink, as running texts will have at most ``rows`` tokens."""
        self._target.shrink_cache(rows)
        for proposer in self._proposers.values():
            proposer.shrink_cache(rows)

    def release(self, slot: int, method: str | None) -> None:
        """Releases the slot of an ended request; its cache stays until the slot is used again."""
        for proposer in self._proposers_of(method):
            proposer.release(slot)

    def _proposers_of(self, method: str | None) -> list[Proposer]:
        """The proposers that may hold state for a slot: its method's, and all look-ups'."""
        return [p for name, p in self._proposers.items() if name == method or not p.method.needs_graph]


@lru_cache(maxsize=256)
def padded_mask(tree: TokenTree, width: int) -> npt.NDArray[np.bool_]:
    """A tree's mask, bool ``[width,width]``; padding tokens see only themselves, so that all rows are finite."""
    mask = np.eye(width, dtype=np.bool_)
    mask[: len(tree), : len(tree)] = tree.mask
    return mask


@dataclass(frozen=True)
class Verified:
    """The tree that a step verified for one slot, and its accepted path.

    Attributes:
        tree: the tree; node 0 is the last token of the text before the step.
        drafted: the tokens of its nodes 1..K; empty if they stayed on a device.
        path: the accepted nodes, in order.
    """

    tree: TokenTree
    drafted: Sequence[int]
    path: Sequence[int]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step for one slot, with the numbers of draft tokens that were verified and accepted.

    Attributes:
        tokens: the accepted draft tokens, then the bonus token.
        logprobs: one entry for each token, if the request asks for them.
        finite: whether the logits before the bonus token are finite; a device does not check them.
        verified: the tree; None for a plain step.
    """

    tokens: list[int]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finite: bool = True
    verified: Verified | None = None

    @property
    def drafted(self) -> int:
        return 0 if self.verified is None else len(self.verified.tree) - 1

    @property
    def depth(self) -> int:
        return 0 if self.verified is None else self.verified.tree.depth

    @property
    def accepted(self) -> int:
        return 0 if self.verified is None else len(self.verified.path)


@dataclass(frozen=True)
class StepResult:
    """The outcomes of a step, and its times in seconds.

    Attributes:
        outcomes: one for each slot, in the order of the views.
        propose: time of proposing, unless that is part of the target's run.
        verify: time of the target's run, including a draft in it.
        accept: time of deciding which tokens are accepted; 0 if that is part of the target's run.
        execution: how the work reached the device; see ``Stats.execution``.
        fused: whether a draft proposed in the target's run.
    """

    outcomes: list[Outcome]
    propose: float
    verify: float
    accept: float
    execution: str
    fused: bool = False
