"""A draft's graph, the text whose rows each slot of its cache holds, and what proposers with a draft share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from specexport.runtime.backend import Graph
from specexport.runtime.proposal import Proposer

ReadChunk = Callable[[int, list[int], int], None]
"""Runs a draft over a chunk of tokens: the slot, the tokens, and how many rows come before them."""


class Reader:
    """Keeps a draft's cache in step with the texts in its slots.

    Which rows are right is read off the tokens, so rejected drafts need not be told, and the text of a request that has
    ended serves the next one in its slot as far as the two begin alike.
    """

    def __init__(self, graph: Graph, chunk: int, run: ReadChunk) -> None:
        self._graph = graph
        self._chunk = chunk
        self._run = run
        self._texts: dict[int, list[int]] = {}

    def known(self, slot: int, tokens: Sequence[int]) -> int:
        """How many of a text's first tokens have their rows in a slot."""
        return self._graph.reusable(slot, common_prefix(self._texts.get(slot, ()), tokens))

    def note(self, slot: int, tokens: list[int]) -> None:
        """The rows of a slot are those of these tokens now."""
        self._texts[slot] = tokens

    def read(self, slot: int, tokens: Sequence[int]) -> bool:
        """Reads what is new of a text, at most a chunk; whether there is more."""
        done = self.known(slot, tokens)
        part = list(tokens[done : done + self._chunk])
        if part:
            self._run(slot, part, done)
            self.note(slot, list(tokens[: done + len(part)]))
        return done + len(part) < len(tokens)

    def catch_up(self, texts: Mapping[int, Sequence[int]]) -> set[int]:
        """Reads one chunk of one of the texts whose rows are missing; gives the slots that still miss some."""
        behind = [slot for slot, text in texts.items() if self.known(slot, text) < len(text)]
        return {slot for at, slot in enumerate(behind) if at or self.read(slot, texts[slot])}

    def copy(self, source: int, to: int, tokens: int | None = None) -> None:
        """Gives a slot the rows of another one: of its first so many tokens, or of all."""
        text = self._texts.get(source, [])[:tokens]
        rows = min(len(text), self._graph.filled(source))
        self._graph.copy(source, to, rows)
        self._texts[to] = text[:rows]

    def shrink_cache(self, rows: int) -> None:
        self._graph.shrink_cache(rows)


class ReadingProposer(Proposer):
    """A proposer with a draft that reads every text itself."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def move(self, source: int, to: int) -> None:
        self._reader.copy(source, to)

    def share(self, source: int, to: int, tokens: int) -> None:
        self._reader.copy(source, to, tokens)

    def shrink_cache(self, rows: int) -> None:
        self._reader.shrink_cache(rows)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two texts share. Texts grow at the end, so the search runs from there."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    low, high = 0, length
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low
