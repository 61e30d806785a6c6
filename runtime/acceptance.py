"""How many draft tokens of a request are accepted, learned while it runs."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Sequence

PRIOR = 0.7
"""The assumed probability that a draft token is accepted, without any observations."""
WEIGHT, WEIGHT_OF_ALL = 4.0, 6.0
"""Weights of the prior in observed draft tokens: of the assumed one, and of the one learned from other requests. A
request's first dozen tokens say little; following them closely loses more than an unusual text does."""
KEEP, KEEP_OF_ALL = 0.95, 0.99
"""Decay of a request's observations, and of all requests', with each step that verified draft tokens: texts change."""


class Acceptance:
    """The probability that a draft token is accepted, by its depth.

    The probability that a token at depth j is accepted if its parent was has a Beta posterior with decaying counts. Its
    prior mean is that of other requests, scaled by the ratio of this request to them at the depth above: a depth
    without observations is assumed to behave like the one above.

    Args:
        before: the acceptance of other requests.
        keep: the share of the counts that is kept after each step that verified draft tokens.
        prior: the probability without ``before``.
    """

    def __init__(self, before: Acceptance | None = None, keep: float = KEEP, prior: float = PRIOR) -> None:
        self._before = before
        self._prior = prior
        self._weight = WEIGHT if before is None else WEIGHT_OF_ALL
        self._keep = keep
        self._trials: list[float] = []
        self._accepted: list[float] = []
        self._learned = 0
        self._means: list[float] = []
        self._sums = [0.0]
        self._counted = (0, 0)

    def learn(self, depth: int, accepted: int) -> None:
        """Counts a step that verified ``depth`` levels of draft tokens."""
        self._learned += 1
        padding = depth - len(self._trials)
        self._trials = [self._keep * count for count in self._trials] + [0.0] * padding
        self._accepted = [self._keep * count for count in self._accepted] + [0.0] * padding
        for at in range(min(accepted + 1, depth)):
            self._trials[at] += 1
            self._accepted[at] += at < accepted

    def expected(self, depth: int) -> float:
        """The number of draft tokens that a step with paths of this length is expected to accept."""
        return self.by_depth(depth)[depth]

    def by_depth(self, depth: int) -> Sequence[float]:
        """:meth:`expected` of all lengths from 0 to at least this one."""
        self._update(depth)
        return self._sums

    def _update(self, depth: int) -> None:
        """Updates the probabilities of all depths; most steps repeat the last query."""
        learned = (self._learned, 0 if self._before is None else self._before._learned)
        if learned == self._counted and depth < len(self._sums):
            return
        depth = max(depth, len(self._means))
        before = [self._prior] * depth
        if self._before is not None:
            self._before._update(depth)
            before = self._before._means[:depth]
        means, better = list[float](), 1.0
        for at, prior in enumerate(before):
            mean = min(1.0, prior * better)
            if at < len(self._trials):
                mean = (self._weight * mean + self._accepted[at]) / (self._weight + self._trials[at])
            means.append(mean)
            better = mean / prior
        self._means, self._counted = means, learned
        self._sums = [0.0, *itertools.accumulate(itertools.accumulate(means, operator.mul))]


class History:
    """The acceptance of a request, or of all of them, so far. A step's outcome is recorded after the step, so what is
    drawn in a step and how much it speculates are independent given the text before it.

    Attributes:
        unread: an estimate of the tokens that the request's draft has not read yet.
    """

    def __init__(self, unread: int = 0, keep: float = KEEP) -> None:
        self.unread = unread
        self._keep = keep
        self._acceptance: dict[Hashable, Acceptance] = {}

    def acceptance(
        self, method: str | None, trees: Hashable, before: Acceptance | None = None, prior: float = PRIOR
    ) -> Acceptance:
        """That of a method's trees of one acceptance class, such as chains of any length; ``before`` is its prior."""
        if (method, trees) not in self._acceptance:
            self._acceptance[method, trees] = Acceptance(before, self._keep, prior)
        return self._acceptance[method, trees]
