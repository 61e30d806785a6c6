"""One step for the requests in the slots: propose -> verify -> accept -> commit."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from copy import copy
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from specexport.contract import tensors
from specexport.contract.manifest import Manifest
from specexport.contract.shapes import window
from specexport.contract.tree import TokenTree
from specexport.runtime.backend import Array, Graph, RunShape
from specexport.runtime.logits import token_logprobs
from specexport.runtime.prompt import is_embedding
from specexport.runtime.proposal import Ints, Proposal, Proposer, SlotView, TextProposer
from specexport.runtime.sampling import accept_greedy, accept_relaxed, accept_sampled, accept_typical
from specexport.runtime.step_program import PLAIN_TREE, LoadedMethod, Outcome, StepResult, Verified


class HostProgram:
    """Steps driven by the host: one graph call to propose, one to verify, and NumPy for the rest.

    See :class:`~specexport.runtime.step_program.StepProgram`.
    """

    fuses = False

    def __init__(
        self, manifest: Manifest, target: Graph, loaded_methods: Mapping[str, LoadedMethod], execution: str = "host"
    ) -> None:
        self.sizes = target.sizes
        self._execution = execution
        self._chunk = manifest.prefill_chunk
        self._longest = manifest.max_seq_len
        self._last_position = manifest.target.max_positions - 1
        self._target = target
        self._loaded_methods = loaded_methods

    def step(self, views: Sequence[SlotView]) -> StepResult:
        start = time.perf_counter()
        proposals = self.propose(views)
        proposed = time.perf_counter()
        outputs = self._verify(views, proposals)
        verified = time.perf_counter()
        accepted = [_accept(outputs[view.slot][tensors.LOGITS], proposals.get(view.slot), view) for view in views]
        decided = time.perf_counter()
        outcomes = [
            self._commit(view, proposals.get(view.slot), outputs[view.slot], path, bonus)
            for view, (path, bonus) in zip(views, accepted, strict=True)
        ]
        return StepResult(outcomes, proposed - start, verified - proposed, decided - verified, self._execution)

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        """Proposals by slot; each method proposes for all its slots in one call."""
        by_method: dict[str, list[SlotView]] = {}
        for view in views:
            if view.method is not None and len(view.tree) > 1:
                by_method.setdefault(view.lookup or view.method, []).append(view)
        proposals: dict[int, Proposal] = {}
        for method, members in by_method.items():
            if len(views) == 1:  # a single request stalls no others
                self.catch_up(method, members[0])
            proposals |= self.proposer(method).propose(members)
        return proposals

    def catch_up(self, method: str, view: SlotView) -> None:
        """Has a proposer read the text that it missed, except the last tokens, which it can read as it proposes."""
        proposer, unread = self.proposer(method), True
        while unread:
            unread = proposer.prefill(view, proposer.reads_along)

    def _verify(self, views: Sequence[SlotView], proposals: Mapping[int, Proposal]) -> dict[int, dict[str, Array]]:
        """The target's outputs at the root and every draft token, by slot; it writes their rows into its cache.

        All slots run as many tokens as the widest tree; the nodes of a smaller tree do not see the padding.
        """
        to_verify = {slot: proposal.wider or proposal for slot, proposal in proposals.items()}
        slots = window([view.slot for view in views], self.sizes)
        widest = max((len(step.tree) for step in to_verify.values()), default=1)
        width = self._target.step_width(len(slots), widest)
        shape = RunShape(width, width, slots=slots)
        inputs = self._target.prepare(shape, max(len(view.tokens) for view in views) - 1 + width)
        for view in views:
            step = to_verify.get(view.slot)
            tree, drafted = (PLAIN_TREE, None) if step is None else (step.tree, step.tokens)
            self.write_tree(inputs, view.slot - slots.start, view, tree, drafted)
        outputs = self._target.run(shape)
        return {view.slot: {name: array[view.slot - slots.start] for name, array in outputs.items()} for view in views}

    def write_tree(
        self, inputs: Mapping[str, Array], at: int, view: SlotView, tree: TokenTree, drafted: Ints | None
    ) -> None:
        """Writes the target's inputs for a tree of the slot at index ``at`` of the window.

        ``drafted``, int64 ``[K]``, are the tokens of nodes 1..K; None if the host does not know them.
        """
        self._write_nodes(inputs, at, view, tree, len(view.tokens) - 1, 1)
        if drafted is not None:
            inputs[tensors.INPUT_IDS][at, 1 : len(tree)] = drafted

    def _write_nodes(
        self, inputs: Mapping[str, Array], at: int, view: SlotView, tree: TokenTree, past: int, count: int
    ) -> None:
        """Writes ``count`` tokens of a text from position ``past`` on, as the first nodes of a tree there."""
        _write_text(inputs, at, view, past, count)
        # A step may extend beyond the end of the context; its tokens there are cut off.
        inputs[tensors.POSITION_IDS][at, : len(tree)] = np.minimum(past + tree.depths, self._last_position)
        inputs[tensors.TREE_MASK][at] = padded_mask(tree, inputs[tensors.INPUT_IDS].shape[1])
        inputs[tensors.PAST_LENGTH][at] = past
        if tensors.KNOWN_TOKENS in inputs:
            inputs[tensors.KNOWN_TOKENS][at] = count

    def _commit(
        self, view: SlotView, proposal: Proposal | None, outputs: Mapping[str, Array], path: list[int], bonus: int
    ) -> Outcome:
        """Commits the rows of an accepted path, and informs the proposer and the logits processors."""
        new = [*(int(proposal.tokens[node - 1]) for node in path), bonus] if proposal else [bonus]
        rows = [0, *path]
        self.inform(view, outputs, rows[-1], len(view.tokens) - 1, rows)
        # Nothing is accepted after a row that is not finite, so only the last row can be.
        finite = bool(np.isfinite(outputs[tensors.LOGITS][rows[-1]].max()))
        self._target.commit(view.slot, len(view.tokens) - 1, rows)
        for processor in view.processors:
            processor.advance(new)
        top = view.params.logprobs
        logprobs = token_logprobs(outputs[tensors.LOGITS], rows, new, top) if top is not None else ()
        verified = Verified(proposal.tree, proposal.tokens.tolist(), path) if proposal else None
        return Outcome(new, logprobs, finite, verified)

    def proposer(self, method: str) -> Proposer:
        return self._loaded_methods[method].proposer

    def inform(self, view: SlotView, outputs: Mapping[str, Array], row: int, past: int, rows: Sequence[int]) -> None:
        """Shows the target's outputs to a slot's proposer; see its ``observe`` and ``observe_text``."""
        if view.method is not None:
            self.proposer(view.method).observe(view.slot, outputs, row)
            self.proposer(view.method).observe_text(view, outputs, past, rows)

    def look_up(self, method: str, view: SlotView) -> Sequence[int]:
        proposer = self.proposer(method)
        return proposer.ahead(view) if isinstance(proposer, TextProposer) else ()

    def with_methods(self, loaded_methods: Mapping[str, LoadedMethod]) -> HostProgram:
        program = copy(self)
        program._loaded_methods = loaded_methods
        return program

    def filled(self, slot: int) -> int:
        return self._target.filled(slot)

    def reusable(self, slot: int, tokens: int) -> int:
        return self._target.reusable(slot, tokens)

    def prefill(self, view: SlotView, alone: bool = False) -> bool:
        """See :class:`StepProgram`; the last token is not read, as it is the first step's root."""
        unread = self._read(view, alone)
        # The proposer reads its chunk in the same turn: in separate turns it would stall the batch twice.
        if view.method is not None and len(view.tree) > 1 and view.lookup is None:
            unread |= self.proposer(view.method).prefill(view)
        return unread

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
        # Rows beyond the context do not belong to a text.
        running = max(min(self._target.filled(slot), self._longest - 1) for slot in slots)
        # Growing copies the cache, so it grows once for the whole prompt and the first tokens after it.
        room = min(end + self._chunk, self._target.cache_sizes[-1])
        shape = RunShape(width, rows, slots=slots)
        inputs = self._target.prepare(shape, max(max(past, running) + width, room))
        at, read = view.slot - slots.start, range(min(width, end - past))
        self._write_nodes(inputs, at, view, TokenTree.chain(width), past, len(read))
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
        usable = self._target.reusable(view.slot, min(filled, self.proposer(view.method).needs_from(view)))
        view.read_again += filled - usable
        return usable

    def move(self, source: int, to: int, method: str | None) -> None:
        self._target.copy(source, to, self._target.filled(source))
        for proposer in self._proposers_of(method):
            proposer.move(source, to)

    def share(self, source: int, to: int, tokens: int) -> None:
        self._target.copy(source, to, tokens)
        if source != to:
            for loaded in self._loaded_methods.values():
                loaded.proposer.share(source, to, tokens)

    def shrink_cache(self, rows: int) -> None:
        self._target.shrink_cache(rows)
        for loaded in self._loaded_methods.values():
            loaded.proposer.shrink_cache(rows)

    def release(self, slot: int, method: str | None) -> None:
        for proposer in self._proposers_of(method):
            proposer.release(slot)

    def _proposers_of(self, method: str | None) -> list[Proposer]:
        """The proposers that may hold state for a slot: its method's, and all look-ups'."""
        loaded = self._loaded_methods.items()
        return [s.proposer for name, s in loaded if name == method or not s.method.needs_graph]


def _accept(logits: npt.NDArray[np.float32], proposal: Proposal | None, view: SlotView) -> tuple[list[int], int]:
    """The accepted nodes of the proposal's tree, and the token after them.

    ``logits``, float32 ``[T,V]``, may have further rows after the tree's.
    """
    tree, drafted, q = PLAIN_TREE, np.empty(0, np.int64), None
    if proposal is not None:
        tree, drafted, q = proposal.tree, proposal.tokens, proposal.q
    logits = logits[: len(tree)]
    for processor in view.processors:
        logits = processor.apply(logits, tree, drafted)
    if view.params.acceptance == "relaxed":
        return accept_relaxed(logits, tree, drafted, view.params, view.random.random())
    if view.params.greedy:
        return accept_greedy(logits, tree, drafted)
    if view.params.acceptance == "typical":
        return accept_typical(logits, tree, drafted, view.params, view.random.random())
    return accept_sampled(logits, tree, drafted, q, view.params, view.random.random(len(tree)))


def _write_text(inputs: Mapping[str, Array], at: int, view: SlotView, start: int, count: int) -> None:
    """Writes ``count`` tokens of a text from position ``start`` on into a run's inputs, and the prompt's embeddings."""
    tokens = view.tokens[start : start + count]
    mask = inputs.get(tensors.EMBEDS_MASK)
    if mask is not None:
        mask[at] = False
    if mask is not None and view.embeddings is not None and start < view.prompt:
        view.embeddings.put(start, inputs[tensors.INPUTS_EMBEDS][at], mask[at])
        tokens = [0 if is_embedding(token) else token for token in tokens]
    inputs[tensors.INPUT_IDS][at, :count] = tokens


@lru_cache(maxsize=256)
def padded_mask(tree: TokenTree, width: int) -> npt.NDArray[np.bool_]:
    """A tree's mask, bool ``[width,width]``; padding tokens see only themselves, so that all rows are finite."""
    mask = np.eye(width, dtype=np.bool_)
    mask[: len(tree), : len(tree)] = tree.mask
    return mask
