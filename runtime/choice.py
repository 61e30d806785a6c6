"""Of what each method of a step may do, the combination that is expected to commit most tokens a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specexport.contract.tree import TokenTree
from specexport.runtime.request import Request


@dataclass(frozen=True)
class Fit:
    """A tree that a request may verify.

    Attributes:
        width: T of a step that verifies it.
        nodes: of the tree.
        depth: of the tree.
        alike: the same for trees whose draft tokens are accepted alike: chains, whatever their length.
    """

    tree: TokenTree
    width: int
    nodes: int
    depth: int
    alike: int

    @property
    def windowed(self) -> bool:
        """Whether such a step is wide even where nothing was proposed."""
        return self.width > self.nodes


@dataclass(frozen=True)
class Option:
    """What one method may do in a step.

    Attributes:
        width: T of the widest of its trees at most.
        gain: draft tokens that are expected to be accepted.
        seconds: of proposing.
        fits: the trees of its requests.
    """

    width: int
    gain: float
    seconds: float
    fits: Mapping[Request, Fit]


def best(
    options: Sequence[Sequence[Option]], requests: int, least: float, verify: Callable[[int], float]
) -> tuple[float, tuple[Option | None, ...]]:
    """The choice of at most one option of each method that is expected to commit most tokens a second.

    At a width of the step the rate is (requests + sum of gains) / (verify + sum of seconds), and the best choice is
    found as ratios are maximised (Dinkelbach 1967): a method's best option at a rate is the one of largest gain less
    rate times seconds, whatever the other methods do, and the rate of that choice is the next to try.

    Each request commits one token in any case; ``verify`` gives seconds of a step of some width, without proposing.

    Returns:
        The rate, and an option or None for each method; None for all unless the best commits more than ``least``
        tokens a second, which is the rate then.
    """
    rate = least
    chosen: tuple[Option | None, ...] = (None,) * len(options)
    if len(options) == 1:  # as most often: there is nothing to combine
        for one in options[0]:
            found = (requests + one.gain) / (verify(one.width) + one.seconds)
            if found > rate:
                rate, chosen = found, (one,)
        return rate, chosen
    for width in sorted({option.width for known in options for option in known}):
        while True:
            picks = tuple(_pick([one for one in known if one.width <= width], rate) for known in options)
            taken = [pick for pick in picks if pick is not None]
            tokens = requests + sum(pick.gain for pick in taken)
            found = tokens / (verify(width) + sum(pick.seconds for pick in taken))
            if found <= rate * (1 + 1e-12):
                break
            rate, chosen = found, picks
    return rate, chosen


def _pick(options: Sequence[Option], rate: float) -> Option | None:
    most = max(options, key=lambda one: one.gain - rate * one.seconds, default=None)
    return most if most is not None and most.gain > rate * most.seconds else None
