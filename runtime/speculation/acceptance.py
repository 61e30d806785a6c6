"""Estimates how many draft tokens are accepted, from the steps of a request and of all others."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Sequence

PRIOR = 0.7
"""The assumed probability that a draft token is accepted, before any observations."""
WEIGHT, WEIGHT_OF_ALL = 4.0, 6.0
"""Weights of the prior, in observed draft tokens: of the assumed probability, and of the one learned from other
requests. A request's first dozen tokens say little: following them closely costs more than reacting late does."""
KEEP, KEEP_OF_ALL = 0.95, 0.99
"""Shares of a request's and of all requests' counts that remain after each step with draft tokens, as texts change."""


class Acceptance:
    """The probability that a draft token is accepted, by its depth.

    For each depth j it estimates the probability that a token at depth j is accepted if its parent was: the mean of a
    Beta posterior with decaying counts. The prior mean is that of other requests, scaled by how this request compares
    with them at depth j - 1, so that a depth without observations is assumed to behave like the one above.

    Args:
        others: the acceptance of all requests.
        keep: the share of the counts that remains after each step with draft tokens.
        prior: the prior mean without ``others``.
    """

    def __init__(self, others: Acceptance | None = None, keep: float = KEEP, prior: float = PRIOR) -> None:
        self._others = others
        self._prior = prior
        self._weight = WEIGHT if others is None else WEIGHT_OF_ALL
        self._keep = keep
        self._trials: list[float] = []
        self._accepted: list[float] = []
        self._learned = 0
        self._means: list[float] = []
        self._sums = [0.0]
        self._counted = (0, 0)

    def learn(self, depth: int, accepted: int) -> None:
        """Counts a step that verified ``depth`` levels of draft tokens and accepted a path of ``accepted`` tokens.

        It counts for ``others`` too.
        """
        self._learned += 1
        padding = depth - len(self._trials)
        self._trials = [self._keep * count for count in self._trials] + [0.0] * padding
        self._accepted = [self._keep * count for count in self._accepted] + [0.0] * padding
        for at in range(min(accepted + 1, depth)):
            self._trials[at] += 1
            self._accepted[at] += at < accepted
        if self._others is not None:
            self._others.learn(depth, accepted)

    def expected(self, depth: int) -> Sequence[float]:
        """The expected number of accepted draft tokens, for trees of depth 0, 1, ... up to at least ``depth``."""
        self._update(depth)
        return self._sums

    def _update(self, depth: int) -> None:
        """Updates the probabilities of all depths; most steps repeat the last query."""
        learned = (self._learned, 0 if self._others is None else self._others._learned)
        if learned == self._counted and depth < len(self._sums):
            return
        depth = max(depth, len(self._means))
        priors = [self._prior] * depth
        if self._others is not None:
            self._others._update(depth)
            priors = self._others._means[:depth]
        means, better = list[float](), 1.0
        for at, prior in enumerate(priors):
            mean = min(1.0, prior * better)
            if at < len(self._trials):
                mean = (self._weight * mean + self._accepted[at]) / (self._weight + self._trials[at])
            means.append(mean)
            better = mean / prior
        self._means, self._counted = means, learned
        self._sums = [0.0, *itertools.accumulate(itertools.accumulate(means, operator.mul))]


class History:
    """The acceptance of one request, or of all of them, so far.

    An outcome is recorded after its step. So given the text before a step, its draws do not depend on how much it
    speculates.

    Attributes:
        unread: estimated number of tokens that the request's draft has not read yet.
        speculated: number of steps that verified draft tokens of the request's own method.
    """

    def __init__(self, unread: int = 0, keep: float = KEEP) -> None:
        self.unread = unread
        self.speculated = 0
        self._keep = keep
        self._acceptance: dict[Hashable, Acceptance] = {}

    def acceptance(
        self, method: str | None, trees: Hashable, others: Acceptance | None = None, prior: float = PRIOR
    ) -> Acceptance:
        """The acceptance of a method's trees of one acceptance class; ``others`` is its prior."""
        if (method, trees) not in self._acceptance:
            self._acceptance[method, trees] = Acceptance(others, self._keep, prior)
        return self._acceptance[method, trees]
