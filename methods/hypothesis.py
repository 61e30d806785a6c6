"""A hypothesis as the draft: proposes the expected output as long as it matches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from specexport.contract.methods.base import Flag, TextMethod
from specexport.runtime.proposal import Opening, Proposer, SlotView, TextProposer


class Hypothesis(TextMethod, frozen=True, kw_only=True, tag="hypothesis"):
    """Proposes the expected output as long as it matches."""

    suits = "free; for requests whose answer is mostly known up front"
    flag = Flag("--hypothesis", None, "verify expected outputs given with requests, in chains of up to 16 tokens")
    takes_hypothesis = True
    default_sizes = (16, 8, 4, 2)


LONGEST_MATCH = 4
"""Most tokens to compare when the position is searched for; longer matches say no more."""
TRUST = 4
"""Draft tokens per matched token after a search for the position."""
NEAR = 16
"""Greatest distance from the lost position at which a match of one token is trusted."""
GUESS = 2
"""Draft tokens after a token that seems to replace a token of the hypothesis."""


class Tracker:
    """Tracks the position of an output in its hypothesis, and how certain it is.

    While the output equals the hypothesis, the position advances. When they differ, the output's last tokens are
    searched for in the hypothesis: the longest match counts, and of several matches the nearest one after the last long
    agreement, or else the last one before it. A single token is common, so its match must be near. A differing token
    that matches nowhere is assumed to replace one token of the hypothesis.

    The hypothesis takes an entry for each token and match length, and each output token a look-up for each match
    length, whatever the lengths of the texts.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        # Positions in the hypothesis after an n-gram, ascending.
        self._after: dict[tuple[int, ...], list[int]] = {}
        for end in range(1, len(self._tokens) + 1):
            for n in range(1, min(LONGEST_MATCH, end) + 1):
                self._after.setdefault(tuple(self._tokens[end - n : end]), []).append(end)
        self._recent: list[int] = []
        self._length = self._at = self._agreed = self._mismatches = 0
        # A hypothesis describes the output from its beginning, so it is trusted at first.
        self._matched = len(self._tokens)

    def __len__(self) -> int:
        """Number of tokens of the output so far."""
        return self._length

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._length += 1
            self._recent = [*self._recent[1 - LONGEST_MATCH :], token]
            if not self._mismatches and self._at < len(self._tokens) and self._tokens[self._at] == token:
                self._matched, self._at = self._matched + 1, self._at + 1
            elif (place := self._find()) is not None:
                self._matched, self._at = place
                self._mismatches = 0
            else:
                self._mismatches += 1
            if not self._mismatches and self._matched >= LONGEST_MATCH:
                self._agreed = self._at

    def _find(self) -> tuple[int, int] | None:
        """The length of a match and the position after it in the hypothesis; None if nothing matches."""
        for n in range(len(self._recent), 0, -1):
            places = self._after.get(tuple(self._recent[-n:]), ())
            # Not the position where it was lost, as the token there was just rejected.
            ahead = bisect_right(places, self._agreed)
            if ahead < len(places) and (n > 1 or places[ahead] <= self._agreed + NEAR):
                return n, places[ahead]
            if places and n > 1:
                return n, places[-1]
        return None

    def following(self) -> list[int]:
        """The next tokens of the hypothesis, as many as are worth verifying."""
        if self._mismatches > 1:
            return []
        at = self._at + self._mismatches
        return self._tokens[at : at + (GUESS if self._mismatches else TRUST * self._matched)]


class HypothesisProposer(TextProposer[Tracker]):
    """Proposes the next tokens of the request's hypothesis, as many as the last match is trusted for."""

    def ahead(self, view: SlotView) -> Sequence[int]:
        """The next tokens; none for a request without a hypothesis."""
        tracker = self._slots.get(view.slot)
        if tracker is None:
            tracker = self._slots[view.slot] = Tracker(view.hypothesis)
        tracker.extend(view.tokens[view.prompt + len(tracker) :])
        return tracker.following()


def open_proposer(method: Hypothesis, opening: Opening) -> Proposer:
    return HypothesisProposer(method)
