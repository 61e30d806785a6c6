"""The interface of what runs steps, and the inputs and outcome of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specexport.contract.methods import Method
from specexport.contract.tree import TokenTree
from specexport.runtime.logprobs import TokenLogprobs
from specexport.runtime.proposal import Proposer, SlotView

PLAIN_TREE = TokenTree.chain(1)
"""What a plain step verifies."""


@dataclass(frozen=True)
class Speculation:
    """A loaded method with its proposer."""

    method: Method
    proposer: Proposer


@dataclass(frozen=True)
class Verified:
    """The tree a step verified for one slot, and what came of it.

    Attributes:
        tree: its shape; node 0 is the last token of the text before the step.
        drafted: the tokens of its nodes 1..K; empty where a draft on the device did not tell them.
        path: the nodes accepted, in order.
    """

    tree: TokenTree
    drafted: Sequence[int]
    path: Sequence[int]


@dataclass(frozen=True)
class Outcome:
    """What a step did for one slot.

    Attributes:
        tokens: the accepted ones and the bonus token.
        drafted: draft tokens verified.
        depth: the longest path among them.
        accepted: draft tokens accepted.
        finite: whether the logits that the last token follows from are numbers; a device does not look.
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
    """What a step did, and where its time went, in seconds.

    Attributes:
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
    """What runs steps for the scheduler: graphs driven from the host, or one captured on a device.

    It is asked by one thread at a time. Between two calls a slot's cache holds all tokens of its text but the last.
    """

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes, ascending; the last is the number of slots."""

    def filled(self, slot: int) -> int:
        """How many tokens of the text last in a slot its cache holds."""

    def prefill(self, view: SlotView) -> bool:
        """Reads up to one chunk of a prompt beyond what the slot's cache holds; whether there is more to read.

        A proposer reads as much of it, if the slot has a tree to fill.
        """

    def step(self, views: Sequence[SlotView]) -> StepResult:
        """Proposes, verifies, accepts and commits for slots whose prompts are read; adds nothing to their texts."""

    def move(self, source: int, to: int, method: str | None) -> None:
        """A request moves to another slot, which is free."""

    def reusable(self, slot: int, tokens: int) -> int:
        """How many of the first ``tokens`` tokens of the text last in a slot another text may reuse."""

    def share(self, source: int, to: int, tokens: int) -> None:
        """Slot ``to`` begins a text whose first tokens are those in ``source``, this many; they may be one slot."""

    def shrink_cache(self, rows: int) -> None:
        """The longest running text will have at most ``rows`` tokens: larger caches may be freed."""

    def release(self, slot: int, method: str | None) -> None:
        """A slot's request ended; what its cache holds stays until the slot is used again."""
