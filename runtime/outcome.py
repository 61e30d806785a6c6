"""The outcome of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specexport.contract.tree import TokenTree
from specexport.runtime.logits import TokenLogprobs


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
