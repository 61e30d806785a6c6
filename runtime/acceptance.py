"""How many draft tokens of a request are accepted, learned while it runs."""

from __future__ import annotations

from collections.abc import Hashable

PRIOR = 0.7
"""The chance that a draft token is accepted, before anything is known."""
WEIGHT = 4.0
"""Draft tokens that this is worth."""
KEEP = 0.95
"""Of what is known, after each step that verified draft tokens: texts change."""


class Acceptance:
    """The chance that a draft token is accepted, by its depth.

    That a token at depth j is accepted if the one before it was has a Beta posterior, with counts that fade. Its prior
    mean is the posterior mean at depth j - 1: where nothing is known of a depth it is taken to be like the one above.
    """

    def __init__(self) -> None:
        self._tried: list[float] = []
        self._accepted: list[float] = []

    def learn(self, depth: int, accepted: int) -> None:
        """Takes in a step."""
        more = depth - len(self._tried)
        self._tried = [KEEP * count for count in self._tried] + [0.0] * more
        self._accepted = [KEEP * count for count in self._accepted] + [0.0] * more
        for at in range(min(accepted + 1, depth)):
            self._tried[at] += 1
            self._accepted[at] += at < accepted

    def expected(self, depth: int) -> float:
        """Draft tokens that a step with paths of this length is expected to accept."""
        chance, mean, total = 1.0, PRIOR, 0.0
        for tried, accepted in zip(self._tried[:depth], self._accepted, strict=False):
            mean = (WEIGHT * mean + accepted) / (WEIGHT + tried)
            chance *= mean
            total += chance
        for _ in range(depth - len(self._tried)):
            chance *= mean
            total += chance
        return total


class History:
    """What speculating brought a request so far. A step's outcome enters it after the step, so that what is drawn in a
    step and how much it speculates are independent given the text before it.

    Attributes:
        unread: see above; an estimate.
        credit: seconds it may spend on trying to speculate again after that did not pay.
    """

    def __init__(self, unread: int) -> None:
        self.unread = unread
        self.credit = 0.0
        self._acceptance: dict[Hashable, Acceptance] = {}

    def acceptance(self, method: str | None, trees: Hashable) -> Acceptance:
        """Of a method's trees that are alike, such as chains, whatever their length."""
        return self._acceptance.setdefault((method, trees), Acceptance())
