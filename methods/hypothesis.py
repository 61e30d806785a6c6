"""A hypothesis as the draft: the expected output, proposed as far as it is right."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from specexport.contract.methods.base import Flag, TextMethod
from specexport.runtime.proposal import Proposer, SlotView, TextProposer
from specexport.runtime.proposers import Opening


class Hypothesis(TextMethod, frozen=True, kw_only=True, tag="hypothesis"):
    """The expected output, proposed as far as it is right."""

    suits: ClassVar[str] = "free; for requests whose answer is mostly known up front"
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag("--hypothesis", None, "verify expected outputs given with requests, in chains of up to 16 tokens"),
    )
    takes_hypothesis: ClassVar[bool] = True
    default_sizes: ClassVar[tuple[int, ...]] = (16, 8, 4, 2)


LONGEST_MATCH = 4
"""Tokens that are compared to find the place again; a longer match says no more."""
TRUST = 4
"""Draft tokens a matched token is worth after the place was found again."""
NEAR = 16
"""How far ahead of the place where it was lost a single token is taken for the place where it goes on."""
GUESS = 2
"""Draft tokens after a token that is taken to stand for another one."""


class Follower:
    """Where an output is in a hypothesis, and how sure that is.

    While the output says what the hypothesis says there is nothing to find. Where it departs, the place it goes on at
    is looked for by the output's last tokens: most tokens first, and of several places the nearest ahead of where both
    last agreed for a while, else the nearest behind. A single token is common, so it must be found near. One token
    that differs, and matches nowhere, is taken to stand for one of the hypothesis.

    A token costs one entry for each match length when the hypothesis is read, and one look-up each when it is followed,
    however long the texts are.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        # Where the hypothesis goes on after some tokens, ascending.
        self._after: dict[tuple[int, ...], list[int]] = {}
        for end in range(1, len(self._tokens) + 1):
            for n in range(1, min(LONGEST_MATCH, end) + 1):
                self._after.setdefault(tuple(self._tokens[end - n : end]), []).append(end)
        self._said: list[int] = []
        self._at = self._agreed = self._departed = 0
        # A hypothesis is a claim about the output's beginning, so it starts out trusted.
        self._matched = len(self._tokens)

    def extend(self, said: Iterable[int]) -> None:
        """Takes in the new tokens."""
        for token in said:
            self._said = [*self._said[1 - LONGEST_MATCH :], token]
            if not self._departed and self._at < len(self._tokens) and self._tokens[self._at] == token:
                self._matched, self._at = self._matched + 1, self._at + 1
            elif (found := self._find()) is not None:
                self._matched, self._at = found
                self._departed = 0
            else:
                self._departed += 1
            if not self._departed and self._matched >= LONGEST_MATCH:
                self._agreed = self._at

    def _find(self) -> tuple[int, int] | None:
        """Tokens matched, and where the hypothesis goes on after them; None where it is lost."""
        for n in range(len(self._said), 0, -1):
            places = self._after.get(tuple(self._said[-n:]), ())
            # Not the very place where it was lost: what it says there was just rejected.
            ahead = bisect_right(places, self._agreed)
            if ahead < len(places) and (n > 1 or places[ahead] <= self._agreed + NEAR):
                return n, places[ahead]
            if places and n > 1:
                return n, places[-1]
        return None

    def following(self) -> list[int]:
        """What the hypothesis goes on with, as many tokens as are worth verifying."""
        if self._departed > 1:
            return []
        at = self._at + self._departed
        return self._tokens[at : at + (GUESS if self._departed else TRUST * self._matched)]


@dataclass
class _Followed:
    """A slot's hypothesis, and how much of the slot's text was compared with it."""

    follower: Follower
    read: int


class HypothesisProposer(TextProposer[_Followed]):
    """Proposes what the request's hypothesis goes on with, as far as the last match is trusted."""

    def ahead(self, view: SlotView) -> Sequence[int]:
        """Nothing for a request that brought none."""
        followed = self._slots.get(view.slot)
        if followed is None:
            followed = self._slots[view.slot] = _Followed(Follower(view.hypothesis), view.prompt)
        followed.follower.extend(view.tokens[followed.read :])
        followed.read = len(view.tokens)
        return followed.follower.following()


def open_proposer(method: Hypothesis, opening: Opening) -> Proposer:
    return HypothesisProposer(method)
