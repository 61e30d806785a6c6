"""The base of proposers whose draft reads every text itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from specexport.runtime.backend import Graph
from specexport.runtime.proposal import Proposer


class ReadingProposer(Proposer):
    """A proposer that keeps its draft's cache up to date with the texts of all slots.

    A comparison of tokens tells which rows are valid. So rejections need no notice, and the next request in a slot
    reuses the rows of a shared prefix.

    Attributes:
        graph: the draft's graph.
    """

    def __init__(self, graph: Graph, chunk: int) -> None:
        self.graph = graph
        self._chunk = chunk
        self._texts: dict[int, list[int]] = {}

    @abstractmethod
    def _read_chunk(self, slot: int, tokens: list[int], past: int) -> None:
        """Runs the draft over a chunk of a slot's text, with ``past`` rows before it."""

    def _known(self, slot: int, tokens: Sequence[int]) -> int:
        """Number of a text's first tokens whose rows a slot holds."""
        return self.graph.reusable(slot, common_prefix(self._texts.get(slot, ()), tokens))

    def _read(self, slot: int, tokens: Sequence[int]) -> bool:
        """Reads at most a chunk of a text's unread tokens; returns whether tokens remain unread."""
        known = self._known(slot, tokens)
        part = list(tokens[known : known + self._chunk])
        if part:
            self._read_chunk(slot, part, known)
            self._texts[slot] = list(tokens[: known + len(part)])
        return known + len(part) < len(tokens)

    def _catch_up(self, texts: Mapping[int, Sequence[int]]) -> set[int]:
        """Reads a chunk of one of the texts with unread tokens; returns the slots that still have unread tokens."""
        unread = [slot for slot, text in texts.items() if self._known(slot, text) < len(text)]
        return {slot for at, slot in enumerate(unread) if at or self._read(slot, texts[slot])}

    def move(self, source: int, to: int) -> None:
        self.share(source, to, len(self._texts.get(source, ())))

    def share(self, source: int, to: int, tokens: int) -> None:
        text = self._texts.get(source, [])[:tokens]
        rows = min(len(text), self.graph.filled(source))
        self.graph.copy(source, to, rows)
        self._texts[to] = text[:rows]

    def shrink_cache(self, rows: int) -> None:
        self.graph.shrink_cache(rows)


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
