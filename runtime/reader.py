"""Keeps a draft's cache up to date with the texts of its slots, for proposers with such a draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from specexport.runtime.backend import Graph
from specexport.runtime.proposal import Proposer

ReadChunk = Callable[[int, list[int], int], None]
"""Runs a draft over a chunk of a slot's text, given the slot, the tokens, and the number of rows before them."""


class Reader:
    """Reads texts into the slots of a draft's cache.

    A comparison of tokens tells which rows are valid. So rejections need no notice, and the next request in a slot
    reuses the rows of a shared prefix.
    """

    def __init__(self, graph: Graph, chunk: int, run: ReadChunk) -> None:
        self._graph = graph
        self._chunk = chunk
        self._run = run
        self._texts: dict[int, list[int]] = {}

    def known(self, slot: int, tokens: Sequence[int]) -> int:
        """Number of a text's first tokens whose rows a slot holds."""
        return self._graph.reusable(slot, common_prefix(self._texts.get(slot, ()), tokens))

    def record(self, slot: int, tokens: list[int]) -> None:
        """Records the tokens to which a slot's rows belong."""
        self._texts[slot] = tokens

    def read(self, slot: int, tokens: Sequence[int]) -> bool:
        """Reads at most a chunk of a text's unread tokens; returns whether tokens remain unread."""
        known = self.known(slot, tokens)
        part = list(tokens[known : known + self._chunk])
        if part:
            self._run(slot, part, known)
            self.record(slot, list(tokens[: known + len(part)]))
        return known + len(part) < len(tokens)

    def catch_up(self, texts: Mapping[int, Sequence[int]]) -> set[int]:
        """Reads a chunk of one of the texts with unread tokens; returns the slots that still have unread tokens."""
        unread = [slot for slot, text in texts.items() if self.known(slot, text) < len(text)]
        return {slot for at, slot in enumerate(unread) if at or self.read(slot, texts[slot])}

    def copy(self, source: int, to: int, tokens: int | None = None) -> None:
        """Copies the rows of a slot's first ``tokens`` tokens, or of all tokens, to another slot."""
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
    """Number of leading tokens that two texts share."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:  # the usual case
        return length
    low, high = 0, length
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low
