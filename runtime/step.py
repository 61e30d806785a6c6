"""One step for the requests in the slots: propose -> verify -> accept -> commit."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specexport.contract import tensors
from specexport.contract.manifest import Manifest
from specexport.contract.shapes import window
from specexport.contract.tree import TokenTree
from specexport.runtime.backend import Array, Graph
from specexport.runtime.embeds import is_embedding
from specexport.runtime.logprobs import TokenLogprobs, token_logprobs
from specexport.runtime.proposers import Proposal, Proposer, SlotView
from specexport.runtime.sampling import accept_greedy, accept_relaxed, accept_sampled, accept_typical

PLAIN_TREE = TokenTree.chain(1)
"""What a plain step verifies."""


@dataclass(frozen=True)
class Speculation:
    """A way to propose, loaded.

    Attributes:
        proposer: proposes.
        trees: the trees the bundle was built for, the default first.
    """

    proposer: Proposer
    trees: tuple[TokenTree, ...]


@dataclass(frozen=True)
class Outcome:
    """What a step did for one slot.

    Attributes:
        tokens: the accepted ones and the bonus token.
        drafted: draft tokens verified.
        depth: the longest path among them.
        logprobs: of the tokens, if the request asks for them.
    """

    tokens: list[int]
    drafted: int = 0
    depth: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def accepted(self) -> int:
        """Draft tokens accepted."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Step:
    """What a step did, and where its time went, in seconds.

    Attributes:
        outcomes: one a slot.
        propose: time proposing.
        verify: time in the target.
        accept: time deciding what is accepted; nothing where that is part of the target's run.
        execution: how its work reached the device; see ``Stats.execution``.
    """

    outcomes: list[Outcome]
    propose: float
    verify: float
    accept: float
    execution: str


class StepProgram(Protocol):
    """What the scheduler asks of the thing that runs steps: graphs driven from the host, or one captured on a device.

    It is asked by one thread at a time. Between two calls a slot's cache holds all tokens of its text but the last.
    """

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes, ascending; the last is the number of slots."""

    def filled(self, slot: int) -> int:
        """How many tokens of the text last in a slot its cache holds."""

    def prefill(self, sequence: SlotView) -> bool:
        """Reads up to one chunk of a prompt beyond what the slot's cache holds; whether there is more to read.

        A proposer reads as much of it, if the sequence has a tree to fill.
        """

    def step(self, sequences: Sequence[SlotView]) -> Step:
        """Proposes, verifies, accepts and commits for slots whose prompts are read; adds nothing to their texts."""

    def move(self, source: int, to: int, method: str | None) -> None:
        """A request goes on in another slot, which is free."""

    def share(self, source: int, to: int, tokens: int) -> None:
        """Slot ``to`` begins a text whose first tokens are those in ``source``, this many; they may be one slot."""

    def shrink_cache(self, rows: int) -> None:
        """The longest text running will have at most so many tokens: larger caches may be given up."""

    def release(self, slot: int, method: str | None) -> None:
        """A slot's request ended; what its cache holds stays until the slot is used again."""


class HostProgram:
    """Steps driven from the host: a graph call to propose, one to verify, the rest in NumPy.

    Args:
        manifest: the bundle's.
        target: its step graph.
        speculations: the ways to propose, by the name of their method.
        execution: how graphs reach the device; see ``Stats.execution``.
    """

    def __init__(
        self, manifest: Manifest, target: Graph, speculations: Mapping[str, Speculation], execution: str = "host"
    ) -> None:
        self._execution = execution
        self._chunk = manifest.prefill_chunk
        self._longest = manifest.max_seq_len
        self._last_position = manifest.target.max_positions - 1
        self._target = target
        self._speculations = speculations
        self._widths = {size: target.widths(size) for size in target.sizes}

    @property
    def sizes(self) -> tuple[int, ...]:
        """See :class:`StepProgram`."""
        return self._target.sizes

    def step(self, sequences: Sequence[SlotView]) -> Step:
        """See :class:`StepProgram`."""
        start = time.perf_counter()
        proposals = self._propose(sequences)
        proposed = time.perf_counter()
        outputs = self._verify(sequences, proposals)
        verified = time.perf_counter()
        taken = [_accept(outputs[one.slot][tensors.LOGITS], proposals.get(one.slot), one) for one in sequences]
        decided = time.perf_counter()
        outcomes = []
        for one, (path, bonus) in zip(sequences, taken, strict=True):
            proposal = proposals.get(one.slot)
            if one.method is not None:
                self._proposer(one.method).observe(one.slot, outputs[one.slot], path[-1] if path else 0)
            self._target.commit(one.slot, len(one.tokens) - 1, [0, *path])
            new = [*(int(proposal.tokens[node - 1]) for node in path), bonus] if proposal else [bonus]
            if one.constraint is not None:
                one.constraint.advance(new)
            top, logits = one.params.logprobs, outputs[one.slot][tensors.LOGITS]
            said = token_logprobs(logits, [0, *path], new, top) if top is not None else ()
            drafted = (len(proposal.tokens), proposal.tree.depth) if proposal else (0, 0)
            outcomes.append(Outcome(new, *drafted, said))
        return Step(outcomes, proposed - start, verified - proposed, decided - verified, self._execution)

    def _propose(self, sequences: Sequence[SlotView]) -> dict[int, Proposal]:
        """Proposals by slot; each method proposes for all its slots at once."""
        asked: dict[str, list[SlotView]] = {}
        for one in sequences:
            if one.method is not None and len(one.tree) > 1:
                asked.setdefault(one.method, []).append(one)
        made: dict[int, Proposal] = {}
        for name, members in asked.items():
            # Alone it stalls nobody, and what it proposes must not depend on how much a cache held already.
            while len(sequences) == 1 and self._proposer(name).prefill(members[0]):
                pass
            made |= self._proposer(name).propose(members)
        return made

    def _verify(self, sequences: Sequence[SlotView], proposals: Mapping[int, Proposal]) -> dict[int, dict[str, Array]]:
        """What the target says at the root and at every draft token, by slot; rows go into its cache.

        All slots take as many tokens as the widest; what comes after a smaller tree is seen by none of its nodes.
        """
        to_verify = {slot: proposal.window or proposal for slot, proposal in proposals.items()}
        trees = {slot: step.tree for slot, step in to_verify.items()}
        slots = window([one.slot for one in sequences], self.sizes)
        widest = max((len(tree) for tree in trees.values()), default=1)
        width = next(width for width in self._widths[len(slots)] if width >= widest)
        self._target.reserve(max(len(one.tokens) for one in sequences) - 1 + width)
        given = self._target.inputs(width, width, slots=slots)
        for one in sequences:
            drafted = to_verify[one.slot].tokens if one.slot in to_verify else None
            self._write(given, one.slot - slots.start, one, trees.get(one.slot, PLAIN_TREE), drafted)
        made = self._target.run(width, width, slots=slots)
        return {one.slot: {name: array[one.slot - slots.start] for name, array in made.items()} for one in sequences}

    def _write(
        self,
        given: Mapping[str, Array],
        at: int,
        view: SlotView,
        tree: TokenTree,
        drafted: npt.NDArray[np.int64] | None,
    ) -> None:
        """Writes the target's inputs of one slot: the root, and the tokens of the other nodes if they are known."""
        width, past = given[tensors.INPUT_IDS].shape[1], len(view.tokens) - 1
        _read_in(given, at, view, past, 1)
        if drafted is not None:
            given[tensors.INPUT_IDS][at, 1 : len(tree)] = drafted
        given[tensors.POSITION_IDS][at, : len(tree)] = self._positions(past, tree)
        given[tensors.TREE_MASK][at] = padded_mask(tree, width)
        given[tensors.PAST_LENGTH][at] = past

    def _positions(self, past: int, tree: TokenTree) -> npt.NDArray[np.int64]:
        # A step at the end of the context reaches past it; what it computes there is cut off where it ends.
        return np.minimum(past + tree.depths, self._last_position)

    def _proposer(self, method: str) -> Proposer:
        return self._speculations[method].proposer

    def filled(self, slot: int) -> int:
        """See :class:`StepProgram`."""
        return self._target.filled(slot)

    def prefill(self, sequence: SlotView) -> bool:
        """See :class:`StepProgram`; the target reads all but the last token, which is the first step's root."""
        slot, tokens, chunk = sequence.slot, sequence.tokens, self._chunk
        proposing = sequence.method if len(sequence.tree) > 1 else None
        done, top, rows = self._target.filled(slot), sequence.params.prompt_logprobs, 1
        slots = range(slot, slot + 1)
        if top is not None:  # a prefill chunk has logits after its last token alone
            slots = window([slot], self.sizes)
            chunk = rows = self._widths[len(slots)][-1]
        part = tokens[done : min(done + chunk, len(tokens) - 1)]
        if part:
            at = slot - slots.start
            self._target.reserve(max(done, *(self._running_rows(other) for other in slots)) + chunk)
            given = self._target.inputs(chunk, rows, slots=slots)
            _read_in(given, at, sequence, done, len(part))
            given[tensors.POSITION_IDS][at] = self._positions(done, TokenTree.chain(chunk))
            given[tensors.PAST_LENGTH][at] = done
            if top is None:
                given[tensors.LOGITS_ROWS][at] = len(part) - 1
            else:
                given[tensors.TREE_MASK][at] = TokenTree.chain(chunk).mask
            made = self._target.run(chunk, rows, slots=slots)
            self._target.commit(slot, done, range(len(part)))
            last = 0 if top is None else len(part) - 1
            if top is not None:
                after = tokens[done + 1 : done + len(part) + 1]
                sequence.prompt_logprobs += token_logprobs(made[tensors.LOGITS][at], range(len(part)), after, top)
            if sequence.method is not None:
                self._proposer(sequence.method).observe(slot, {name: array[at] for name, array in made.items()}, last)
        more = done + len(part) < len(tokens) - 1
        # The proposer's chunk is read beside the target's: by turns, prompts would keep a full batch waiting twice.
        return (proposing is not None and self._proposer(proposing).prefill(sequence)) or more

    def _running_rows(self, slot: int) -> int:
        """The rows of a slot that a run it has no part in must leave alone; what is beyond the context is nobody's."""
        return min(self._target.filled(slot), self._longest - 1)

    def move(self, source: int, to: int, method: str | None) -> None:
        """See :class:`StepProgram`."""
        self._target.copy(source, to, self._target.filled(source))
        if method is not None:
            self._proposer(method).move(source, to)

    def share(self, source: int, to: int, tokens: int) -> None:
        """See :class:`StepProgram`."""
        self._target.copy(source, to, tokens)
        if source != to:
            for speculation in self._speculations.values():
                speculation.proposer.share(source, to, tokens)

    def shrink_cache(self, rows: int) -> None:
        """See :class:`StepProgram`."""
        self._target.shrink_cache(rows)
        for speculation in self._speculations.values():
            speculation.proposer.shrink_cache(rows)

    def release(self, slot: int, method: str | None) -> None:
        """See :class:`StepProgram`."""
        if method is not None:
            self._proposer(method).release(slot)


def _read_in(given: Mapping[str, Array], at: int, view: SlotView, start: int, count: int) -> None:
    """Gives a run what a text has from a position on: token ids, and embeddings where the prompt holds some."""
    tokens = view.tokens[start : start + count]
    mask = given.get(tensors.EMBEDS_MASK)
    if mask is not None:
        mask[at] = False
    if mask is not None and view.embeddings is not None and start < view.prompt:
        view.embeddings.put(start, given[tensors.INPUTS_EMBEDS][at], mask[at])
        tokens = [0 if is_embedding(token) else token for token in tokens]
    given[tensors.INPUT_IDS][at, :count] = tokens


@lru_cache(maxsize=256)
def padded_mask(tree: TokenTree, width: int) -> npt.NDArray[np.bool_]:
    """A tree's mask, bool ``[width,width]``: a token after its last node sees itself alone, so that all is finite."""
    mask = np.eye(width, dtype=np.bool_)
    mask[: len(tree), : len(tree)] = tree.mask
    return mask


def _accept(logits: npt.NDArray[np.float32], proposal: Proposal | None, view: SlotView) -> tuple[list[int], int]:
    """The nodes of the proposal's tree that are accepted, and the token after them; ``logits`` may have more rows."""
    tree, drafted, q = (
        (PLAIN_TREE, np.empty(0, np.int64), None) if proposal is None else (proposal.tree, proposal.tokens, proposal.q)
    )
    logits = logits[: len(tree)]
    if view.constraint is not None:
        logits = view.constraint.masked(logits, tree, drafted)
    if view.params.acceptance == "relaxed":
        return accept_relaxed(logits, tree, drafted, view.params, view.random.random())
    if view.params.greedy:
        return accept_greedy(logits, tree, drafted)
    if view.params.acceptance == "typical":
        return accept_typical(logits, tree, drafted, view.params, view.random.random())
    return accept_sampled(logits, tree, drafted, q, view.params, view.random.random(len(tree)))
