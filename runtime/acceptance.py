"""How many draft tokens of a request are accepted, learned while it runs."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Hashable

PRIOR = 0.7
"""The chance that a draft token is accepted, before anything is known."""
WEIGHT = 4.0
"""Draft tokens that this is worth."""
KEEP, KEEP_OF_ALL = 0.95, 0.99
"""Of what is known of a request, and of all, after each step that verified draft tokens: texts change."""


class Acceptance:
    """The chance that a draft token is accepted, by its depth.

    That a token at depth j is accepted if the one before it was has a Beta posterior, with counts that fade. Its prior
    mean is what is known of other requests, times what the depth above makes of that: where nothing is known of a depth
    it is taken to be like the one above.

    Args:
        before: what is known of other requests.
        keep: of what is known, after each step that verified draft tokens: texts change.
    """

    def __init__(self, before: Acceptance | None = None, keep: float = KEEP) -> None:
        self._before = before
        self._keep = keep
        self._tried: list[float] = []
        self._accepted: list[float] = []

    def learn(self, depth: int, accepted: int) -> None:
        """Takes in a step."""
        more = depth - len(self._tried)
        self._tried = [self._keep * count for count in self._tried] + [0.0] * more
        self._accepted = [self._keep * count for count in self._accepted] + [0.0] * more
        for at in range(min(accepted + 1, depth)):
            self._tried[at] += 1
            self._accepted[at] += at < accepted

    def expected(self, depth: int) -> float:
        """Draft tokens that a step with paths of this length is expected to accept."""
        return math.fsum(itertools.accumulate(self._means(depth), operator.mul))

    def _means(self, depth: int) -> list[float]:
        """The chance at each depth, given that all before it were accepted."""
        before = self._before._means(depth) if self._before is not None else [PRIOR] * depth
        means, better = list[float](), 1.0
        for at, prior in enumerate(before):
            mean = min(1.0, prior * better)
            if at < len(self._tried):
                mean = (WEIGHT * mean + self._accepted[at]) / (WEIGHT + self._tried[at])
            means.append(mean)
            better = mean / prior
        return means


class History:
    """What speculating brought a request, or all of them, so far. A step's outcome enters it after the step, so that
    what is drawn in a step and how much it speculates are independent given the text before it.

    Attributes:
        unread: see above; an estimate.
        credit: seconds it may spend on trying to speculate again after that did not pay.
    """

    def __init__(self, unread: int = 0, keep: float = KEEP) -> None:
        self.unread = unread
        self.credit = 0.0
        self._keep = keep
        self._acceptance: dict[Hashable, Acceptance] = {}

    def acceptance(self, method: str | None, trees: Hashable, before: Acceptance | None = None) -> Acceptance:
        """Of a method's trees that are alike, such as chains, whatever their length; with what is known of others."""
        if (method, trees) not in self._acceptance:
            self._acceptance[method, trees] = Acceptance(before, self._keep)
        return self._acceptance[method, trees]
