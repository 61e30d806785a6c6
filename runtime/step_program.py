"""The interface of step programs, and the outcome of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from specexport.contract.methods import Method
from specexport.contract.tree import TokenTree
from specexport.runtime.logits import TokenLogprobs
from specexport.runtime.proposal import Proposer, SlotView

PLAIN_TREE = TokenTree.chain(1)
"""The tree of a plain step."""


@dataclass(frozen=True)
class LoadedMethod:
    """A loaded method with its proposer."""

    method: Method
    proposer: Proposer


@dataclass(frozen=True)
class Verified:
    """The tree that a step verified for one slot, and its accepted path.

    Attributes:
        tree: the tree; node 0 is the last token of the text before the step.
        drafted: the tokens of its nodes 1..K; empty if a device kept them.
        path: the accepted nodes, in order.
    """

    tree: TokenTree
    drafted: Sequence[int]
    path: Sequence[int]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step for one slot.

    Attributes:
        tokens: the accepted tokens and the bonus token.
        depth: length of their longest path.
        finite: whether the logits of the last token are finite; a device does not check them.
        verified: the tree; None for a plain step.
    """

    tokens: list[int]
    drafted: int = 0
    depth: int = 0
    accepted: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    finite: bool = True
    verified: Verified | None = None


@dataclass(frozen=True)
class StepResult:
    """The outcomes of a step, and its times in seconds.

    Attributes:
        propose: time of proposing, unless in the target's run.
        verify: time in the target, and of a draft in the same run.
        accept: time of deciding what is accepted; 0 if that is part of the target's run.
        execution: how its work reached the device; see ``Stats.execution``.
        fused: whether a draft proposed in the target's run.
    """

    outcomes: list[Outcome]
    propose: float
    verify: float
    accept: float
    execution: str
    fused: bool = False


class StepProgram(Protocol):
    """Takes steps for the scheduler, with graphs driven from the host or captured on a device.

    One thread at a time calls it. Between two calls a slot's cache holds all tokens of its text but the last.

    Attributes:
        fuses: whether drafts may propose in the target's run, so that only whole steps can be timed.
    """

    fuses: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes, ascending; the last is the number of slots."""

    def filled(self, slot: int) -> int:
        """The number of tokens of a slot's last text in its cache."""

    def prefill(self, view: SlotView, alone: bool = False) -> bool:
        """Reads up to one chunk of a prompt after the cached part; returns whether tokens are unread.

        If the slot speculates, its proposer reads a chunk too. ``alone`` says that no other request waits meanwhile: a
        chunk may be longer.
        """

    def step(self, views: Sequence[SlotView]) -> StepResult:
        """Proposes, verifies, accepts and commits for slots whose prompts are read; their texts are not changed."""

    def look_up(self, method: str, view: SlotView) -> Sequence[int]:
        """The draft tokens that a look-up method would propose for a slot."""

    def with_methods(self, loaded_methods: Mapping[str, LoadedMethod]) -> StepProgram:
        """The same steps in the same memory with other methods, by name; no model of theirs proposes on a device."""

    def move(self, source: int, to: int, method: str | None) -> None:
        """Moves a request to another slot, which is free."""

    def reusable(self, slot: int, tokens: int) -> int:
        """The number of the first ``tokens`` tokens of a slot's last text that another text may reuse."""

    def share(self, source: int, to: int, tokens: int) -> None:
        """Begins a text in slot ``to`` with the first ``tokens`` tokens of ``source``, which may be the same slot."""

    def shrink_cache(self, rows: int) -> None:
        """Allows caches to shrink: the longest running text will have at most ``rows`` tokens."""

    def release(self, slot: int, method: str | None) -> None:
        """Releases the slot of an ended request; its cache stays until the slot is used again."""
