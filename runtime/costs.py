"""What a step is going to take: a measured curve, and what lies between its points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

from specexport.contract.costs import Cost, CostCurve


class Costs:
    """c(B, T) and d(B, K) of a curve, at any number of cache rows. Widths and rows that were not measured are
    interpolated linearly, and extrapolated beyond the last: attention costs for every row of the cache.
    """

    def __init__(self, curve: CostCurve) -> None:
        self._steps = _Grid(curve.steps)
        self._propose = {one.method: _Grid(one.propose) for one in curve.methods}
        self._read = {one.method: one.read for one in curve.methods}

    def step(self, batch: int, tokens: int, rows: int) -> float:
        """Seconds of a step that verifies so many tokens a slot, without proposing."""
        return self._steps.at(batch, tokens, rows)

    def propose(self, method: str, batch: int, nodes: int, rows: int) -> float:
        """Seconds of proposing a tree of so many nodes for each slot."""
        known = self._propose.get(method)  # methods that need no graph cost next to nothing and may be unmeasured
        return known.at(batch, nodes, rows) if known is not None else 0.0

    def read(self, method: str) -> float:
        """Seconds of a chunk that a method's draft is behind in; 0 where nothing is read."""
        return self._read.get(method, 0.0)


class _Grid:
    """Seconds by batch, tokens and cache rows."""

    def __init__(self, costs: Sequence[Cost]) -> None:
        self._tokens = sorted({cost.tokens for cost in costs})
        self._caches = sorted({cost.cache for cost in costs})
        self._seconds = {(cost.batch, cost.tokens, cost.cache): cost.seconds for cost in costs}
        self.at = lru_cache(maxsize=None)(self._at)

    def _at(self, batch: int, tokens: int, rows: int) -> float:
        by_cache = [
            _on_line(tokens, self._tokens, [self._seconds[batch, width, cache] for width in self._tokens])
            for cache in self._caches
        ]
        return _on_line(rows, self._caches, by_cache)


def _on_line(at: int, places: Sequence[int], values: Sequence[float]) -> float:
    """The value at a place between or beyond ascending places; more of anything never costs less."""
    if at <= places[0] or len(places) == 1:
        return values[0]
    right = min(max(bisect_left(places, at), 1), len(places) - 1)
    slope = max(0.0, (values[right] - values[right - 1]) / (places[right] - places[right - 1]))
    return values[right - 1] + slope * (at - places[right - 1])
