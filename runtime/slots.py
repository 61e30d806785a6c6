"""The assignment of slots to requests."""

from __future__ import annotations

from collections.abc import Sequence

from specexport.contract.shapes import window
from specexport.runtime.step import StepProgram
from specexport.runtime.text import common_prefix


class Slots:
    """Keeps running requests in neighbouring slots, and reuses prefixes that a cache holds already.

    A run takes a window of neighbouring slots, so gaps between running slots cost as much as requests. A freed slot
    keeps its text: a prompt that begins like it, or like a running text, does not read that part again.
    """

    def __init__(self, program: StepProgram, reuse: bool) -> None:
        self._program = program
        self._sizes = program.sizes
        self._reuse = reuse
        self._texts: list[list[int]] = [[] for _ in range(self._sizes[-1])]
        self._freed_at: list[int] = [0] * self._sizes[-1]
        self._clock = 0
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        return self._sizes[-1] - len(self._used)

    def take(self, tokens: list[int], *, whole: bool = False) -> int:
        """Assigns a slot to a text: one that keeps the window small and, among these, shares the longest prefix.

        The list ``tokens`` is stored, as it will grow. ``whole`` says that all of it must be read, even if a cache
        holds a prefix.
        """

        def cost(slot: int) -> tuple[int, int, int]:
            return len(window((*self._used, slot), self._sizes)), -self._shared(slot, tokens), self._freed_at[slot]

        slot = min((slot for slot in range(self._sizes[-1]) if slot not in self._used), key=cost)
        self._program.share(slot, slot, 0 if whole else self._shared(slot, tokens))
        self._used.add(slot)
        self._texts[slot] = tokens
        return slot

    def begin(self, slot: int) -> int:
        """Copies a text's prefix from the slot that holds most of it; returns the number of tokens not to be read.

        Called just before the text would be read, so that concurrent requests read a shared prefix once.
        """
        tokens, filled = self._texts[slot], self._program.filled(slot)
        shared = [(self._shared(source, tokens), source) for source in range(self._sizes[-1]) if source != slot]
        prefix, source = max(shared, default=(0, slot))
        if prefix > filled:
            self._program.share(source, slot, prefix)
        return max(prefix, filled)

    def _shared(self, slot: int, tokens: Sequence[int]) -> int:
        """Number of a slot's rows that a prompt can reuse, at most all but its last token, the first step's root."""
        if not self._reuse:
            return 0
        rows = min(common_prefix(self._texts[slot], tokens), self._program.filled(slot), len(tokens) - 1)
        return self._program.reusable(slot, rows)

    def leave(self, slot: int) -> None:
        """Frees a slot; its text stays for prompts with the same prefix."""
        self._used.discard(slot)
        self._texts[slot] = list(self._texts[slot])
        self._clock += 1
        self._freed_at[slot] = self._clock

    def next_move(self) -> tuple[int, int] | None:
        """A move of a request, as two slots, that makes the window smaller; None if there is none."""
        if not self._used or len(window(self._used, self._sizes)) == len(goal := self._least_window()):
            return None
        source = next(slot for slot in sorted(self._used) if slot not in goal)
        return source, min((slot for slot in goal if slot not in self._used), key=lambda slot: self._freed_at[slot])

    def _least_window(self) -> range:
        """The smallest window for as many slots as are used; of these, the one that needs the fewest moves."""
        size = next(size for size in self._sizes if size >= len(self._used))
        starts = range(self._sizes[-1] - size + 1)
        return max((range(start, start + size) for start in starts), key=lambda at: len(self._used.intersection(at)))

    def record_move(self, source: int, to: int) -> None:
        self._used.remove(source)
        self._used.add(to)
        self._texts[to], self._texts[source] = self._texts[source], list(self._texts[source])
