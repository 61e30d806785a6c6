"""Chooses the trees of a step: the combination of methods that is expected to commit most tokens a second.

An example. A plain step takes 10 ms, and each further row 0.5 ms. A draft takes 1 ms a token, and a token of its chain
is accepted with probability 0.7 if the one before it was. So K = 4 is expected to gain 0.7 + 0.49 + 0.34 + 0.24 = 1.77
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

K = 4 is chosen. For a target ten times as fast, drafting a token takes as long as a plain step, and nothing pays:

>>> best_options([[chain(k) for k in (1, 2, 4, 8)]], requests=1, least=100.0, verify=verify)[1][0].width
5
>>> best_options([[chain(k) for k in (1, 2, 4, 8)]], requests=1, least=1000.0, verify=lambda width: verify(width) / 10)
(1000.0, (None,))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specexport.contract.tree import TokenTree

if TYPE_CHECKING:
    from specexport.runtime.request import Request


@dataclass(frozen=True)
class Fit:
    """A tree that a request may verify, with the figures that each decision needs.

    Attributes:
        width: T of a step that verifies it.
        nodes: its number of nodes.
        depth: its depth.
        acceptance_class: equal for trees whose draft tokens are equally likely to be accepted, as chains of any length.
    """

    tree: TokenTree
    width: int
    nodes: int
    depth: int
    acceptance_class: int

    @property
    def has_extra_nodes(self) -> bool:
        """Whether the step also runs nodes outside the tree; it is then as wide even if nothing was proposed."""
        return self.width > self.nodes


@dataclass(frozen=True)
class Option:
    """The trees of one method's requests under a limit on their width.

    Attributes:
        width: T of a step that verifies the widest of them.
        gain: expected number of accepted draft tokens.
        seconds: time of proposing.
        fits: the tree of each request.
    """

    width: int
    gain: float
    seconds: float
    fits: Mapping[Request, Fit]


def best_options(
    options: Sequence[Sequence[Option]], requests: int, least: float, verify: Callable[[int], float]
) -> tuple[float, tuple[Option | None, ...]]:
    """Chooses at most one option of each method, for most expected tokens a second.

    For a step of some width the rate is (requests + sum of gains) / (verify + sum of seconds). Dinkelbach's method
    (1967) maximises it: at a given rate, each method's best option is the one with the largest gain - rate * seconds,
    whatever the other methods do, and the rate of that choice is tried next, until it stops rising.

    Args:
        options: those of each method.
        requests: number of requests in the step; each commits one token in any case.
        least: the rate to exceed.
        verify: seconds of a step of some width, without proposing.

    Returns:
        The rate, and an option or None for each method; ``least`` and only None if no choice exceeds it.
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
    """The option worth most at this rate; None if none is worth its time."""
    best = max(options, key=lambda option: option.gain - rate * option.seconds, default=None)
    return best if best is not None and best.gain > rate * best.seconds else None
