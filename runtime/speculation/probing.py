"""While nothing pays: pauses between decisions, and probes of methods that a step leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specexport.runtime.speculation.choice import Fit

if TYPE_CHECKING:
    from specexport.runtime.request import Request
    from specexport.runtime.step import Outcome

MAX_PLAIN_STEPS = 4
"""Most plain steps in a row without checking whether the text repeats itself."""


class Pause:
    """Plain steps without a decision, after decisions that nothing pays.

    Their number grows with each such decision: one, then three, then as many as :meth:`follow` allows.
    """

    def __init__(self) -> None:
        self._requests: Sequence[Request] = ()
        self._remaining = self._last = self._since = self._longest = 0

    def covers(self, requests: Sequence[Request], joining: int, is_quiet: Callable[[], bool]) -> bool:
        """Whether the next step is one of them; a pause ends when other requests run.

        The longest pause is repeated up to the ``longest`` of :meth:`follow`, while ``is_quiet()``.
        """
        if joining or requests != self._requests:
            return False
        if not self._remaining:
            if self._last < MAX_PLAIN_STEPS or self._since >= self._longest or not is_quiet():
                return False
            self._remaining = MAX_PLAIN_STEPS + 1
        self._remaining -= 1
        self._since += 1
        return True

    def follow(self, requests: Sequence[Request], joining: int, most: int, longest: int) -> None:
        """Begins the pause after a decision, of at most ``most`` steps; 0 if something was chosen."""
        self._remaining = self._last = min(2 * self._last + 1, most) if requests == self._requests else 0
        self._since, self._longest = 0, longest
        self._requests = () if joining else list(requests)


@dataclass
class Probe:
    """A possible trial of a method that the step leaves out.

    Attributes:
        fits: the tree of each request that would take part.
        cost: seconds that it adds to the step, reading included.
        read: seconds in which the method's draft reads a chunk.
        token: seconds of a token in plain decoding.
        income: seconds that the step adds to the method's budget for probes.
        chosen: whether the step includes it.
    """

    method: str
    fits: Mapping[Request, Fit]
    cost: float
    read: float
    token: float
    income: float
    chosen: bool = False

    def settle(self, budget: float, outcomes: Mapping[Request, Outcome]) -> float:
        """The method's budget after the step: a probe spends its cost and earns the value of its accepted tokens."""
        if self.chosen:
            verified = any(outcomes[request].drafted or fit.has_extra_nodes for request, fit in self.fits.items())
            accepted = sum(outcomes[request].accepted for request in self.fits)
            budget += accepted * self.token - (self.cost if verified else self.read)
        return min(budget + self.income, self.cost)
