"""How many draft tokens of a request are accepted, learned while it runs."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Sequence

PRIOR = 0.7
"""The chance that a draft token is accepted, before anything is known."""
WEIGHT, WEIGHT_OF_ALL = 4.0, 6.0
"""Draft tokens that this is worth, and that what is known of other requests is worth: a request's own first dozen say
little, and following them closely loses more than a text that is unlike the others does."""
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
        prior: the chance without ``before``.
    """

    def __init__(self, before: Acceptance | None = None, keep: float = KEEP, prior: float = PRIOR) -> None:
        self._before = before
        self._prior = prior
        self._weight = WEIGHT if before is None else WEIGHT_OF_ALL
        self._keep = keep
        self._tried: list[float] = []
        self._accepted: list[float] = []
        self._learned = 0
        self._means: list[float] = []
        self._sums = [0.0]
        self._known_at = (0, 0)

    def learn(self, depth: int, accepted: int) -> None:
        """Takes in a step."""
        self._learned += 1
        more = depth - len(self._tried)
        self._tried = [self._keep * count for count in self._tried] + [0.0] * more
        self._accepted = [self._keep * count for count in self._accepted] + [0.0] * more
        for at in range(min(accepted + 1, depth)):
            self._tried[at] += 1
            self._accepted[at] += at < accepted

    def expected(self, depth: int) -> float:
        """Draft tokens that a step with paths of this length is expected to accept."""
        return self.by_depth(depth)[depth]

    def by_depth(self, depth: int) -> Sequence[float]:
        """:meth:`expected` of all lengths from 0 to at least this one."""
        self._know(depth)
        return self._sums

    def _know(self, depth: int) -> None:
        """Finds the chance at each depth, given that all before it were accepted; most steps ask for the same again."""
        learned = (self._learned, 0 if self._before is None else self._before._learned)
        if learned == self._known_at and depth < len(self._sums):
            return
        depth = max(depth, len(self._means))
        before = [self._prior] * depth
        if self._before is not None:
            self._before._know(depth)
            before = self._before._means[:depth]
        means, better = list[float](), 1.0
        for at, prior in enumerate(before):
            mean = min(1.0, prior * better)
            if at < len(self._tried):
                mean = (self._weight * mean + self._accepted[at]) / (self._weight + self._tried[at])
            means.append(mean)
            better = mean / prior
        self._means, self._known_at = means, learned
        self._sums = [0.0, *itertools.accumulate(itertools.accumulate(means, operator.mul))]


class History:
    """What speculating brought a request, or all of them, so far. A step's outcome enters it after the step, so that
    what is drawn in a step and how much it speculates are independent given the text before it.

    Attributes:
        unread: see above; an estimate.
    """

    def __init__(self, unread: int = 0, keep: float = KEEP) -> None:
        self.unread = unread
        self._keep = keep
        self._acceptance: dict[Hashable, Acceptance] = {}

    def acceptance(
        self, method: str | None, trees: Hashable, before: Acceptance | None = None, prior: float = PRIOR
    ) -> Acceptance:
        """Of a method's trees that are alike, such as chains, whatever their length; with what is known of others."""
        if (method, trees) not in self._acceptance:
            self._acceptance[method, trees] = Acceptance(before, self._keep, prior)
        return self._acceptance[method, trees]
