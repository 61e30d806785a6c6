"""Suffix decoding: proposes the most frequent continuation of the text's longest suffix that occurred before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, cast

from msgspec import Meta

from specexport.contract.errors import RequestError
from specexport.contract.methods.base import Flag, TextMethod
from specexport.contract.model import Probability
from specexport.runtime.proposal import Opening, Proposer, SlotView, TextProposer


class Suffix(TextMethod, frozen=True, kw_only=True, tag="suffix"):
    """The most frequent continuation of the longest suffix that occurred before (SuffixDecoding, arXiv 2411.04975).

    Attributes:
        max_spec_factor: most draft tokens per matched token. If chains have at least two tokens, a match of one token,
            which is often chance, proposes nothing.
        min_token_prob: a chain ends before its estimated probability falls below this.
        store_tokens: capacity of a store of earlier outputs to search too, at about half a kilobyte a token; the oldest
            are dropped first. 0 for none. It affects acceptance, never the text.
    """

    max_spec_factor: Annotated[float, Meta(gt=0.0, le=128.0)] = 1.5
    min_token_prob: Probability = 0.1
    store_tokens: Annotated[int, Meta(ge=0, le=2**31)] = 0

    suits = "free; gains where answers repeat their prompt, themselves or each other"
    engine_keys = frozenset({"store_tokens"})
    flag = Flag("--suffix", None, "propose the most frequent continuation of the longest suffix seen before")

    def describe(self) -> str:
        stored = f", {self.store_tokens:,} tokens of earlier outputs" if self.store_tokens else ""
        return (
            f"suffix, at most {self.max_spec_factor:g} a matched token, down to probability {self.min_token_prob:g}"
            f"{stored}"
        )


_END = -1
"""Separates the outputs in a store: as no token is -1, no match crosses it."""
_MIN_OUTPUT = 3
"""Shorter outputs cannot match two tokens and continue."""


class SuffixAutomaton:
    """The suffix automaton of a growing text, with the number of occurrences of each substring.

    It is built online (Blumer et al. 1985): a token takes amortized constant time and at most two states. A state
    represents all substrings with the same end positions; its suffix link leads to the longest suffix with more end
    positions.

    A new token updates counts along its suffix links, longest suffixes first, for at most ``COUNTED`` states. Counts
    are exact unless the suffixes of the text have more states, as in a text that only repeats a short pattern; counts
    of short substrings are then too low.
    """

    COUNTED = 32

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        self._last = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, token: int) -> None:
        new = self._state(self._length[self._last] + 1, 0, {}, 0)
        at = self._last
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = new
            at = self._link[at]
        if at >= 0:
            self._link[new] = self._suffix(at, token)
        self._last = new
        self._size += 1
        for _ in range(self.COUNTED):
            self._count[new] += 1
            new = self._link[new]
            if new <= 0:
                break

    def _suffix(self, at: int, token: int) -> int:
        """The state of the longest string of ``at`` plus a token; splits it off from a larger state if necessary."""
        target = self._next[at][token]
        if self._length[target] == self._length[at] + 1:
            return target
        split = self._state(self._length[at] + 1, self._link[target], dict(self._next[target]), self._count[target])
        self._link[target] = split
        while at >= 0 and self._next[at].get(token) == target:
            self._next[at][token] = split
            at = self._link[at]
        return split

    def _state(self, length: int, link: int, following: dict[int, int], count: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        return len(self._link) - 1

    def repeated_suffix(self) -> tuple[int, int]:
        """The longest suffix of the text that also occurs earlier: its state and its length."""
        state = max(0, self._link[self._last])
        return state, self._length[state]

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Extends a match to the longest suffix of the matched string plus ``token`` that occurs in the text."""
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        following = self._next[state].get(token)
        return (0, 0) if following is None else (following, length + 1)

    def find(self, tokens: Sequence[int]) -> int | None:
        """The state of a string; None if the text does not contain it."""
        state: int | None = 0
        for token in tokens:
            state = self._next[state].get(token) if state is not None else None
        return state

    def count(self, state: int) -> int:
        """The number of occurrences of a state's strings; see the class for its precision."""
        return self._count[state]

    def continuation(self, state: int, limit: int, least: float) -> tuple[list[int], float]:
        """The most frequent continuation of a match, token by token.

        Args:
            least: the chain ends before its estimated probability, the product of its tokens' frequencies among the
                continuations, falls below this.

        Returns:
            The tokens, and their expected acceptance: the sum of the estimated probabilities of reaching each of them
            (SuffixDecoding, arXiv 2411.04975).
        """
        tokens: list[int] = []
        chance, expected = 1.0, 0.0
        while len(tokens) < limit:
            while state > 0 and not self._next[state]:  # the text's end: only a shorter suffix has a continuation
                state = self._link[state]
            following = self._next[state]
            if not state or not following:
                break
            # Of equally frequent tokens the most recent one.
            token, state = max(reversed(following.items()), key=lambda item: self._count[item[1]])
            chance *= self._count[state] / sum(self._count[other] for other in following.values())
            if token < 0 or chance < least:  # an output's end, or an embedding
                break
            tokens.append(token)
            expected += chance
        return tokens, expected


class OutputStore:
    """The outputs of earlier requests as suffix automata, up to a number of tokens.

    Automata cannot forget, so there are two, each for at most half of the tokens: when the newer one is full, the older
    one is dropped with the oldest outputs, and a new one is started. A stored token takes about half a kilobyte.

    Attributes:
        automata: the older first.

    Raises:
        RequestError: the capacity is too small for any output.
    """

    def __init__(self, tokens: int) -> None:
        self._half = tokens // 2
        if self._half <= _MIN_OUTPUT:
            raise RequestError(
                f"suffix: store_tokens is {tokens}; expected 0 for no store, or {2 * _MIN_OUTPUT + 2} or more"
            )
        self.automata: list[SuffixAutomaton] = []

    def __len__(self) -> int:
        return sum(map(len, self.automata))

    def add(self, output: Sequence[int]) -> None:
        """Stores an output, or the end of a very long one; drops the oldest outputs if there is no room."""
        if len(output) < _MIN_OUTPUT:
            return
        output = output[-(self._half - 1) :]
        if not self.automata or len(self.automata[-1]) + len(output) + 1 > self._half:
            self.automata = [*self.automata[-1:], SuffixAutomaton()]
        for token in (*output, _END):
            self.automata[-1].append(token)


@dataclass
class _Match:
    """The match of a text's end in a store's automaton; valid while the automaton has this size."""

    automaton: SuffixAutomaton
    size: int
    state: int = 0
    length: int = 0

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.state, self.length = self.automaton.step(self.state, self.length, token)


@dataclass
class _Text:
    """The state of a slot: its tokens, the length of its prompt, and the matches of its end."""

    tokens: list[int]
    prompt: int
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    matches: list[_Match] = field(default_factory=list)


class SuffixProposer(TextProposer[_Text]):
    """Proposes the most frequent continuation of the text's longest suffix that occurs earlier, in it or in the store.

    The longer the match and the more certain the continuation, the longer the chain: at most ``max_spec_factor`` tokens
    per matched token, and only while the chain's estimated probability is at least ``min_token_prob`` (SuffixDecoding,
    arXiv 2411.04975). Of the chains from the text and from the store, it proposes the chain with the highest expected
    acceptance. The store affects proposals, never the output's distribution.
    """

    def __init__(self, method: Suffix, store: OutputStore | None = None) -> None:
        super().__init__(method)
        self._method = method
        self._store = store

    def ahead(self, view: SlotView) -> Sequence[int]:
        text = self._read(view)
        method = cast(Suffix, view.options or self._method)
        best: list[int] = []
        most = 0.0
        in_text = (text.automaton, *text.automaton.repeated_suffix())
        for automaton, state, length in (in_text, *((m.automaton, m.state, m.length) for m in text.matches)):
            allowed = min(len(view.tree) - 1, int(method.max_spec_factor * length))
            tokens, expected = automaton.continuation(state, allowed, method.min_token_prob)
            if expected > most:
                best, most = tokens, expected
        return best

    def _read(self, view: SlotView) -> _Text:
        """Adds the new tokens of a slot's text."""
        text = self._slots.get(view.slot)
        if text is None:
            # The list is the request's, which will contain the whole output.
            text = self._slots[view.slot] = _Text(view.tokens, view.prompt)
        new = view.tokens[len(text.automaton) :]
        for token in new:
            text.automaton.append(token)
        stored = [(automaton, len(automaton)) for automaton in self._store.automata] if self._store is not None else []
        if [(match.automaton, match.size) for match in text.matches] != stored:
            text.matches = [_Match(automaton, size) for automaton, size in stored]
            new = view.tokens
        for match in text.matches:
            match.advance(new)
        return text

    def release(self, slot: int) -> None:
        """See :class:`Proposer`; stores the output, even if it is incomplete."""
        text = self._slots.pop(slot, None)
        if text is not None and self._store is not None:
            self._store.add(text.tokens[text.prompt :])


def open_proposer(method: Suffix, opening: Opening) -> Proposer:
    return SuffixProposer(method, OutputStore(method.store_tokens) if method.store_tokens else None)
