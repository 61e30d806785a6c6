"""The interface of step programs, and the outcomes of a step."""

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
    """A method and its opened proposer."""

    method: Method
    proposer: Proposer


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
    """The outcome of a step for one slot.

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
        """Number of draft tokens that were verified."""
        return 0 if self.verified is None else len(self.verified.tree) - 1

    @property
    def depth(self) -> int:
        """Depth of the verified tree."""
        return 0 if self.verified is None else self.verified.tree.depth

    @property
    def accepted(self) -> int:
        """Number of draft tokens that were accepted."""
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


class StepProgram(Protocol):
    """Takes steps for the scheduler, with graphs that the host runs one by one or that are captured on a device.

    One thread at a time calls it. Between two steps a slot's cache holds all tokens of its text but the last.

    Attributes:
        fuses: whether drafts may propose in the target's run, so that only whole steps can be timed.
    """

    fuses: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes, ascending; the last is the number of slots."""

    def filled(self, slot: int) -> int:
        """The number of tokens of a slot's last text that its cache holds."""

    def prefill(self, view: SlotView, alone: bool = False) -> bool:
        """Reads up to one chunk of a prompt after its cached part; returns whether tokens remain unread.

        If the slot speculates, its proposer reads a chunk too. A chunk may be longer if ``alone``: if no other request
        waits meanwhile.
        """

    def step(self, views: Sequence[SlotView]) -> StepResult:
        """Proposes, verifies, accepts and commits for slots whose prompts are read; does not change their texts."""

    def look_up(self, method: str, view: SlotView) -> Sequence[int]:
        """The draft tokens that a look-up method would propose for a slot."""

    def with_methods(self, loaded_methods: Mapping[str, LoadedMethod]) -> StepProgram:
        """The program of the same steps, in the same memory, with other methods, whose models stay off the device."""

    def move(self, source: int, to: int, method: str | None) -> None:
        """Moves a request to another slot, which is free."""

    def reusable(self, slot: int, tokens: int) -> int:
        """The number of the first ``tokens`` tokens of a slot's last text that another text may reuse."""

    def share(self, source: int, to: int, tokens: int) -> None:
        """Begins a text in slot ``to`` with the first ``tokens`` tokens in slot ``source``, perhaps the same slot."""

    def shrink_cache(self, rows: int) -> None:
        """Allows caches to shrink, as running texts will have at most ``rows`` tokens."""

    def release(self, slot: int, method: str | None) -> None:
        """Releases the slot of an ended request; its cache stays until the slot is used again."""
