"""Chooses the combination of methods for a step that is expected to commit most tokens a second.

An example. A plain step takes 10 ms, and each further row 0.5 ms; a draft takes 1 ms a token, and a token of its chain
is accepted with a chance of 0.7 if the one before it was. So K = 4 is expected to gain 0.7 + 0.49 + 0.34 + 0.24 = 1.77
tokens, for 2 ms of rows and 4 ms of drafting:

>>> def chain(k):
...     return Option(width=k + 1, gain=sum(0.7**depth for depth in range(1, k + 1)), seconds=0.001 * k, fits={})
>>> def verify(width):
...     return 0.010 + 0.0005 * (width - 1)
>>> for k in (0, 1, 2, 4, 8):
...     print(k, f"{(1 + chain(k).gain) / (verify(k + 1) + chain(k).seconds):.0f} tokens/s")
0 100 tokens/s
1 148 tokens/s
2 168 tokens/s
4 173 tokens/s
8 145 tokens/s

K = 4 is chosen. For a target ten times as fast the draft takes as long as a plain step, and nothing pays:

>>> best([[chain(k) for k in (1, 2, 4, 8)]], requests=1, least=100.0, verify=verify)[1][0].width
5
>>> best([[chain(k) for k in (1, 2, 4, 8)]], requests=1, least=1000.0, verify=lambda width: verify(width) / 10)
(1000.0, (None,))
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specexport.contract.tree import TokenTree

if TYPE_CHECKING:
    from specexport.runtime.request import Request
    from specexport.runtime.step_program import Outcome

PRIOR = 0.7
"""The assumed probability that a draft token is accepted, without any observations."""
WEIGHT, WEIGHT_OF_ALL = 4.0, 6.0
"""Weights of the prior in observed draft tokens: of the assumed one, and of the one learned from other requests. A
request's first dozen tokens say little; following them closely loses more than an unusual text does."""
KEEP, KEEP_OF_ALL = 0.95, 0.99
"""Decay of a request's observations, and of all requests', with each step that verified draft tokens: texts change."""
MAX_PLAIN_STEPS = 4
"""Most plain steps in a row without looking whether the text repeats itself."""


@dataclass(frozen=True)
class Fit:
    """A tree that a request may verify.

    Attributes:
        width: T of a step that verifies it.
        nodes: the tree's size.
        depth: the tree's depth.
        acceptance_class: equal for trees whose draft tokens are equally likely to be accepted, as chains of any length.
    """

    tree: TokenTree
    width: int
    nodes: int
    depth: int
    acceptance_class: int

    @property
    def windowed(self) -> bool:
        """Whether such a step is as wide even if nothing was proposed."""
        return self.width > self.nodes


@dataclass(frozen=True)
class Option:
    """Trees that one method may propose in a step.

    Attributes:
        width: T of a step that verifies the widest of them.
        gain: draft tokens that are expected to be accepted.
        seconds: time of proposing.
        fits: the tree of each of its requests.
    """

    width: int
    gain: float
    seconds: float
    fits: Mapping[Request, Fit]


def best(
    options: Sequence[Sequence[Option]], requests: int, least: float, verify: Callable[[int], float]
) -> tuple[float, tuple[Option | None, ...]]:
    """The choice of at most one option of each method that is expected to commit most tokens a second.

    For a step of some width the rate is (requests + sum of gains) / (verify + sum of seconds). Dinkelbach's method
    (1967) maximises it: at a given rate, each method's best option is the one with the largest gain - rate * seconds,
    whatever the other methods do, and the rate of that choice is tried next, until it stops rising.

    Each request commits one token in any case; ``verify`` gives the seconds of a step of some width without proposing.

    Returns:
        The rate, and an option or None for each method. If no choice commits more than ``least`` tokens a second, that
        rate, and None for every method.
    """
    rate = least
    chosen: tuple[Option | None, ...] = (None,) * len(options)
    if len(options) == 1:  # the usual case: nothing to combine
        for option in options[0]:
            candidate = (requests + option.gain) / (verify(option.width) + option.seconds)
            if candidate > rate:
                rate, chosen = candidate, (option,)
        return rate, chosen
    for width in sorted({option.width for choices in options for option in choices}):
        while True:
            picks = tuple(_pick([option for option in choices if option.width <= width], rate) for choices in options)
            proposing = [pick for pick in picks if pick is not None]
            tokens = requests + sum(pick.gain for pick in proposing)
            candidate = tokens / (verify(width) + sum(pick.seconds for pick in proposing))
            if candidate <= rate * (1 + 1e-12):
                break
            rate, chosen = candidate, picks
    return rate, chosen


def _pick(options: Sequence[Option], rate: float) -> Option | None:
    best = max(options, key=lambda option: option.gain - rate * option.seconds, default=None)
    return best if best is not None and best.gain > rate * best.seconds else None


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
        speculated: number of steps that verified tokens of the request's own method.
    """

    def __init__(self, unread: int = 0, keep: float = KEEP) -> None:
        self.unread = unread
        self.speculated = 0
        self._keep = keep
        self._acceptance: dict[Hashable, Acceptance] = {}

    def acceptance(
        self, method: str | None, trees: Hashable, before: Acceptance | None = None, prior: float = PRIOR
    ) -> Acceptance:
        """That of a method's trees of one acceptance class, such as chains of any length; ``before`` is its prior."""
        if (method, trees) not in self._acceptance:
            self._acceptance[method, trees] = Acceptance(before, self._keep, prior)
        return self._acceptance[method, trees]


class Pause:
    """Plain steps without evaluation after steps in which nothing paid; their number grows with each such step:
    one, then three, then as many as :meth:`follow` allows.
    """

    def __init__(self) -> None:
        self._requests: Sequence[Request] = ()
        self._remaining = self._last = self._since = 0

    def covers(self, requests: Sequence[Request], joining: int) -> bool:
        """Whether the next step is one of them; they hold for the same requests only."""
        covered = self._remaining > 0 and not joining and requests == self._requests
        self._remaining -= covered
        self._since += covered
        return covered

    def extend(self, requests: Sequence[Request], joining: int, most: int) -> bool:
        """Begins the longest pause again without an evaluation, if that is at most ``most`` steps ago."""
        extended = self._last == MAX_PLAIN_STEPS and self._since < most and not joining and requests == self._requests
        if extended:
            self._remaining = MAX_PLAIN_STEPS
            self._since += 1
        return extended

    def follow(self, requests: Sequence[Request], joining: int, most: int) -> None:
        """Updates the pause after an evaluation: at most ``most`` steps; 0 if something was chosen."""
        self._remaining = self._last = min(2 * self._last + 1, most) if requests == self._requests else 0
        self._since = 0
        self._requests = () if joining else list(requests)


@dataclass
class Idle:
    """A method that a step leaves out, and the cost of probing it.

    Attributes:
        name: its name.
        fits: the trees of a probe.
        cost: seconds that a probe adds to the step, reading included.
        read: seconds in which its draft reads a chunk.
        token: seconds of a token in plain decoding.
        income: seconds that the step adds to the probing budget.
        probed: whether the step probes it.
    """

    name: str
    fits: Mapping[Request, Fit]
    cost: float
    read: float
    token: float
    income: float
    probed: bool = False

    def settled(self, saved: float, outcomes: Mapping[Request, Outcome]) -> float:
        """The probing budget after a step: a probe spends its cost and earns the value of its accepted tokens."""
        if self.probed:
            verified = any(outcomes[request].drafted or fit.windowed for request, fit in self.fits.items())
            accepted = sum(outcomes[request].accepted for request in self.fits)
            saved += accepted * self.token - (self.cost if verified else self.read)
        return min(saved + self.income, self.cost)
