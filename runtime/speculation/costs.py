"""The costs of steps and proposals on a machine, measured, interpolated and refined by later steps; those of a step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Final

from msgspec import Meta

from specexport.contract.shapes import Size, Strict

Seconds = Annotated[float, Meta(gt=0.0, le=1e6)]
_PACE_STEP, _FACTOR_STEP = 1.02, 1.005
"""Factors by which an observed time moves the estimate of the machine's speed, and the call's correction."""
_MOST: Final = 1.5
"""Largest factor by which refinement changes a measured cost."""
_TEXT = 64
"""Text lengths are rounded up to a multiple of this many tokens, so that most costs are cached."""


class Cost(Strict, frozen=True):
    """The time of a call.

    Attributes:
        batch: B, slots that took part.
        tokens: for a step, T; for proposing, the nodes of each slot's tree.
        seconds: the least wall-clock time of several calls, as other load on the machine only adds to it.
    """

    batch: Size
    tokens: Size
    seconds: Seconds


class MethodCosts(Strict, frozen=True):
    """The costs of proposing with a method.

    Attributes:
        method: its name.
        propose: d(B, K), for each of its trees.
        read: seconds in which a draft reads a chunk of text; 0 for methods that read nothing.
    """

    method: str
    propose: Annotated[tuple[Cost, ...], Meta(min_length=1)]
    read: Annotated[float, Meta(ge=0.0, le=1e6)]


class CostCurve(Strict, frozen=True):
    """The measured costs of a bundle on a machine.

    Attributes:
        text: tokens of the text after which ``steps`` were measured.
        steps: c(B, T) without proposing, for every batch size up to the largest that was measured.
        longer_text: tokens of the text after which ``longer`` was measured.
        longer: c(B, T) of the smallest batch size; empty if the bundle's context is too short.
        methods: the costs of every measured method.
        noise: ratio of a call's median time to its least, the median over all calls: other load on the machine.
    """

    text: Size
    steps: Annotated[tuple[Cost, ...], Meta(min_length=1)]
    longer_text: Size
    longer: tuple[Cost, ...]
    methods: tuple[MethodCosts, ...]
    noise: float = 1.0


class Costs:
    """c(B, T) and d(B, K) for any batch, width and text, from a measured curve.

    Costs between measured widths are interpolated linearly, and extrapolated beyond the last. Each further token of a
    slot's text adds the same cost. A batch larger than any that was measured takes as long as the largest one with as
    many tokens in total, and its proposals take proportionally longer.

    The times of steps refine the costs (:meth:`refine`), as wide steps take a few percent longer in decoding, relative
    to plain ones, than when they were measured, and the machine may have been busy then. Only ratios of costs matter.
    So there is one estimate of the machine's present speed and a correction for each call, and a time above or below
    the expected one moves both by a small fixed factor: they follow the median, and an outlier counts like any other
    time.

    Args:
        curve: the measured costs, also an attribute.
        refined: whether the times of steps refine the costs; otherwise they are constant.
    """

    def __init__(self, curve: CostCurve, refined: bool = False) -> None:
        self.curve = curve
        self._refined = refined
        self._pace = 1.0
        self._factors: dict[tuple[str | None, int, int], float] = {}
        self._steps, self._longer = _Line(curve.steps), _Line(curve.longer)
        self._propose = {costs.method: _Line(costs.propose) for costs in curve.methods}
        self._read = {costs.method: costs.read for costs in curve.methods}
        self._measured_step = lru_cache(maxsize=4096)(self._step_seconds)
        self._measured_propose = lru_cache(maxsize=4096)(self._propose_seconds)

    def step(self, batch: int, tokens: int, text: int) -> float:
        """Seconds of a step that verifies ``tokens`` tokens a slot after ``text`` tokens, without proposing."""
        return self._measured_step(batch, tokens, text) * self._factors.get((None, batch, tokens), 1.0)

    def propose(self, method: str, batch: int, nodes: int) -> float:
        """Seconds of proposing a tree of this many nodes for each slot."""
        return self._measured_propose(method, batch, nodes) * self._factors.get((method, batch, nodes), 1.0)

    def refine(self, method: str | None, batch: int, tokens: int, expected: float, seconds: float) -> None:
        """Refines the costs by the time of a call.

        Args:
            method: the method that proposed; None for a step without proposing.
            batch: slots that took part.
            tokens: for a step, T; for proposing, the nodes of the tree.
            expected: seconds by :meth:`step` or :meth:`propose`.
            seconds: measured seconds.
        """
        if not self._refined or expected <= 0.0:
            return
        key, longer = (method, batch, tokens), seconds > expected * self._pace
        self._pace *= _PACE_STEP if longer else 1 / _PACE_STEP
        factor = self._factors.get(key, 1.0) * (_FACTOR_STEP if longer else 1 / _FACTOR_STEP)
        self._factors[key] = min(max(factor, 1 / _MOST), _MOST)

    def _step_seconds(self, batch: int, tokens: int, text: int) -> float:
        curve, token = self.curve, 0.0
        if curve.longer:
            more = self._longer.at(1, tokens) - self._steps.at(1, tokens)
            token = max(0.0, more) / (curve.longer_text - curve.text) / self._longer.largest
        wide = tokens * max(1.0, batch / self._steps.largest)
        return self._steps.at(batch, wide) + token * batch * max(0, text - curve.text)

    def _propose_seconds(self, method: str, batch: int, nodes: int) -> float:
        line = self._propose.get(method)  # methods that need no graph cost next to nothing and may be unmeasured
        if line is None:
            return 0.0
        return line.at(batch, nodes) * max(1.0, batch / line.largest)

    def read(self, method: str) -> float:
        """Seconds in which a method's draft reads a chunk of text; 0 for methods that read nothing."""
        return self._read.get(method, 0.0)


class StepCosts:
    """The costs of one step, which is built for ``widths`` alone; kept, as a decision asks for them many times.

    Attributes:
        batch: B, the slots of the step.
    """

    def __init__(self, costs: Costs, widths: Sequence[int], batch: int, text: int) -> None:
        self.batch = batch
        self._costs = costs
        self._widths = widths
        self._text = -(-text // _TEXT) * _TEXT
        self._verify: dict[int, float] = {}
        self._added: dict[tuple[str, int], float] = {}

    def width(self, least: int) -> int:
        """T of the step with trees of at least this width."""
        return at_least(self._widths, least)

    def verify(self, width: int) -> float:
        """Seconds of the step with trees of at most this width, without proposing."""
        if width not in self._verify:
            self._verify[width] = self._costs.step(self.batch, self.width(width), self._text)
        return self._verify[width]

    def added(self, method: str, width: int, nodes: int, batch: int, requests: int) -> float:
        """Seconds that a tree of this width adds, if a run of ``batch`` slots proposes for up to all ``requests``."""
        key = method, nodes
        if key not in self._added:
            proposing = self._costs.propose(method, batch, nodes) / min(batch, requests)
            self._added[key] = self.verify(width) - self.verify(1) + proposing
        return self._added[key]


def at_least(sizes: Sequence[int], least: int) -> int:
    """The smallest of ascending sizes that is at least ``least``, or the largest."""
    return next((size for size in sizes if size >= least), sizes[-1])


class _Line:
    """Seconds by batch and tokens.

    Attributes:
        largest: the largest batch size.
    """

    def __init__(self, costs: Sequence[Cost]) -> None:
        self._points: dict[int, list[tuple[int, float]]] = {}
        for cost in sorted(costs, key=lambda cost: cost.tokens):
            self._points.setdefault(cost.batch, []).append((cost.tokens, cost.seconds))
        self.largest = max(self._points, default=1)

    def at(self, batch: int, tokens: float) -> float:
        """The cost of a number of tokens, interpolated or extrapolated; more tokens never cost less."""
        points = self._points[batch if batch in self._points else self.largest]
        if tokens <= points[0][0] or len(points) == 1:
            return points[0][1]
        right = min(max(bisect_left(points, (tokens, 0.0)), 1), len(points) - 1)
        (before, low), (after, high) = points[right - 1], points[right]
        return low + max(0.0, (high - low) / (after - before)) * (tokens - before)
