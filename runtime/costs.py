"""What a step is going to take on this machine: what was measured, and what lies between."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Final

from msgspec import Meta

from specexport.contract.model import Size, Strict

Seconds = Annotated[float, Meta(gt=0.0, le=1e6)]
_PACE_STEP, _FACTOR_STEP = 1.02, 1.005
"""By what a time that was seen moves the machine's speed, and how a call compares with the others."""
_MOST: Final = 1.5
"""Furthest that a cost is moved from what was measured."""


class Cost(Strict, frozen=True):
    """The time of one call, the least of several: whatever else a machine does only adds to it.

    Attributes:
        batch: slots that took part, B.
        tokens: of a step, T a slot; of proposing, the nodes of the tree proposed for each slot.
        seconds: of wall clock.
    """

    batch: Size
    tokens: Size
    seconds: Seconds


class MethodCosts(Strict, frozen=True):
    """What a way to propose costs beside the step that verifies.

    Attributes:
        method: its name.
        propose: d(B, K): proposing the trees that it may be asked to fill.
        read: seconds of a chunk of text that a draft is behind in; 0 where nothing is read.
    """

    method: str
    propose: Annotated[tuple[Cost, ...], Meta(min_length=1)]
    read: Annotated[float, Meta(ge=0.0, le=1e6)]


class CostCurve(Strict, frozen=True):
    """What was measured of a bundle on a machine.

    Attributes:
        rows: of the cache that ``steps`` were measured with.
        steps: c(B, T): whole steps but for proposing, for every batch size up to the largest that was measured.
        more_rows: of the larger cache of ``longer``.
        longer: c(1, T) with the larger cache; none if there was no room for one.
        methods: of every method that was measured.
        noise: by what factor the median time of a call was above its least, for the middle one of the calls: what else
            the machine did.
    """

    rows: Size
    steps: Annotated[tuple[Cost, ...], Meta(min_length=1)]
    more_rows: Size
    longer: tuple[Cost, ...]
    methods: tuple[MethodCosts, ...]
    noise: float = 1.0


class Costs:
    """c(B, T) and d(B, K) of a curve, at any number of cache rows. Widths that were not measured are interpolated
    linearly, and extrapolated beyond the last. Attention costs the same for each further row of each slot's cache.

    A batch larger than all that were measured takes as long as the largest of them does with as many tokens in all,
    and its proposals take longer in proportion.

    The times of the steps themselves refine them (:meth:`refine`): in decoding a wide step takes some percent longer,
    beside a plain one, than when it was measured, and the machine may have been busy then. Only how costs compare
    matters. So each call has a factor of its own beside the machine's present speed, and a time that is longer or
    shorter than expected moves both a little, whatever it is: they follow the median, and an outlier is one step.

    Attributes:
        curve: what was measured.

    Args:
        curve: it.
        refined: whether to take in the times of steps; else costs stay what they are.
    """

    def __init__(self, curve: CostCurve, refined: bool = False) -> None:
        self.curve = curve
        self._refined = refined
        self._pace = 1.0
        self._factors: dict[tuple[str | None, int, int], float] = {}
        self._steps, self._longer = _Line(curve.steps), _Line(curve.longer)
        self._propose = {one.method: _Line(one.propose) for one in curve.methods}
        self._read = {one.method: one.read for one in curve.methods}
        self._measured_step = lru_cache(maxsize=4096)(self._step)
        self._measured_propose = lru_cache(maxsize=4096)(self._proposing)

    def step(self, batch: int, tokens: int, rows: int) -> float:
        """Seconds of a step that verifies ``tokens`` tokens a slot, without proposing."""
        return self._measured_step(batch, tokens, rows) * self._factors.get((None, batch, tokens), 1.0)

    def propose(self, method: str, batch: int, nodes: int) -> float:
        """Seconds of proposing a tree of this many nodes for each slot."""
        return self._measured_propose(method, batch, nodes) * self._factors.get((method, batch, nodes), 1.0)

    def refine(self, method: str | None, batch: int, tokens: int, expected: float, seconds: float) -> None:
        """Takes in how long a call took.

        Args:
            method: that proposed; None for a step without proposing.
            batch: slots that took part.
            tokens: of a step, a slot; of proposing, the nodes of the tree.
            expected: seconds that :meth:`step` or :meth:`propose` said.
            seconds: that it took.
        """
        if not self._refined or expected <= 0.0:
            return
        key, longer = (method, batch, tokens), seconds > expected * self._pace
        self._pace *= _PACE_STEP if longer else 1 / _PACE_STEP
        factor = self._factors.get(key, 1.0) * (_FACTOR_STEP if longer else 1 / _FACTOR_STEP)
        self._factors[key] = min(max(factor, 1 / _MOST), _MOST)

    def _step(self, batch: int, tokens: int, rows: int) -> float:
        more = self.curve.more_rows - self.curve.rows
        row = max(0.0, self._longer.at(1, tokens) - self._steps.at(1, tokens)) / more if self.curve.longer else 0.0
        wide = tokens * max(1.0, batch / self._steps.largest)
        return self._steps.at(batch, wide) + row * batch * max(0, rows - self.curve.rows)

    def _proposing(self, method: str, batch: int, nodes: int) -> float:
        known = self._propose.get(method)  # methods that need no graph cost next to nothing and may be unmeasured
        if known is None:
            return 0.0
        return known.at(batch, nodes) * max(1.0, batch / known.largest)

    def read(self, method: str) -> float:
        """Seconds of a chunk that a method's draft is behind in; 0 where nothing is read."""
        return self._read.get(method, 0.0)


class _Line:
    """Seconds by batch and tokens.

    Attributes:
        largest: batch size.
    """

    def __init__(self, costs: Sequence[Cost]) -> None:
        self._known: dict[int, list[tuple[int, float]]] = {}
        for cost in sorted(costs, key=lambda one: one.tokens):
            self._known.setdefault(cost.batch, []).append((cost.tokens, cost.seconds))
        self.largest = max(self._known, default=1)

    def at(self, batch: int, tokens: float) -> float:
        """The value at a place between or beyond those of a batch size; more of anything never costs less."""
        known = self._known[batch if batch in self._known else self.largest]
        if tokens <= known[0][0] or len(known) == 1:
            return known[0][1]
        right = min(max(bisect_left(known, (tokens, 0.0)), 1), len(known) - 1)
        (before, low), (after, high) = known[right - 1], known[right]
        return low + max(0.0, (high - low) / (after - before)) * (tokens - before)
