"""Adaptive trees: a draft goes on while it is sure, and a step verifies what is probable enough (docs/trees.md)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from specexport.runtime.proposal import LeastProbability

MOST_ACCEPTED = 0.75
"""Acceptance of a draft's first token above which the draft does not choose trees: it is right more often than it is
sure, and would stop too early."""
_CHOOSING = 1e-4
"""About how many seconds it takes to choose a tree."""
_WEIGHT = 5.0
"""Weight of the prior, in steps."""
_LEAST_ACCEPTED = 0.1
"""Least assumed acceptance of a token that is not drafted yet."""

Cost = Callable[[int], float]
"""Seconds by a number of a tree's nodes, the root included."""


class Drafted(NamedTuple):
    """Means of steps with adaptive trees.

    Attributes:
        passes: tokens of the draft's chain.
        nodes: draft tokens that are verified.
        accepted: draft tokens that are accepted.
    """

    passes: float
    nodes: float
    accepted: float


class AdaptiveSteps:
    """What steps with adaptive trees cost and gain, by decaying counts; their prior is that of all requests.

    Args:
        before: the steps of all requests; None for those themselves.
        keep: the share of the counts that is kept after each step.
    """

    def __init__(self, before: AdaptiveSteps | None, keep: float) -> None:
        self._before = before
        self._keep = keep
        self._weight = _WEIGHT
        self._steps = 0.0
        self._sums = Drafted(0.0, 0.0, 0.0)

    def learn(self, step: Drafted) -> None:
        """Counts a step."""
        self._steps = self._keep * self._steps + 1
        self._sums = Drafted(*(self._keep * total + count for total, count in zip(self._sums, step, strict=True)))

    def expected(self, guess: Drafted) -> Drafted:
        """The means of the next step; ``guess`` is the prior without any steps."""
        prior = guess if self._before is None else self._before.expected(guess)
        weight = self._weight
        means = ((weight * p + total) / (weight + self._steps) for p, total in zip(prior, self._sums, strict=True))
        return Drafted(*means)


def first_guess(accepted: float, deepest: int) -> Drafted:
    """A step of a draft that always knows where it is wrong; ``accepted``: draft tokens of the deepest chain."""
    passes = min(accepted + 1.0, deepest)
    return Drafted(passes, passes, accepted)


def further_seconds(expected: Drafted, step: Cost, propose: Cost) -> float:
    """How much longer than a plain step a step with an adaptive tree is expected to take."""
    return _between(step, 1 + expected.nodes) - step(1) + _between(propose, 1 + expected.passes) + _CHOOSING


def least_probability(nodes: int, rate: float, accepted: float, step: Cost, propose: Cost) -> LeastProbability:
    """When a draft token is worth its time.

    Args:
        nodes: of the largest tree, at least 3.
        rate: tokens a second that the step is expected to commit.
        accepted: the acceptance of a draft's first token: the next token's own probability is not known yet.
        step: of the target.
        propose: of the draft.
    """
    row, draft_pass = (max(0.0, cost(nodes) - cost(2)) / (nodes - 2) for cost in (step, propose))
    return LeastProbability(drafted=rate * (row + draft_pass) / max(accepted, _LEAST_ACCEPTED), verified=rate * row)


def _between(cost: Cost, count: float) -> float:
    """A cost at a count between two whole numbers."""
    low = math.floor(count)
    return cost(low) + (count - low) * (cost(low + 1) - cost(low))
