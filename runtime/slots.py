"""Assigns slots to requests, and reuses the texts that the slots' caches still hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specexport.contract.shapes import window
from specexport.runtime.reader import common_prefix
from specexport.runtime.step_program import StepProgram


class Slots:
    """Keeps running requests in neighbouring slots, and reuses prefixes that a cache holds already.

    A run takes a window of neighbouring slots, so gaps between running slots cost as much as requests. A freed slot
    keeps its text: a prompt that shares a prefix with it, or with a running text, does not read that part again.
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
        """Number of free slots."""
        return self._sizes[-1] - len(self._used)

    def take(self, tokens: list[int], *, whole: bool = False) -> int:
        """Assigns a slot to a text: one that keeps the window small, then one with the longest shared prefix.

        The list is stored, as the text grows in it. ``whole`` has all of it read, whatever a cache holds.
        """

        def cost(slot: int) -> tuple[int, int, int]:
            return len(window((*self._used, slot), self._sizes)), -self._shared(slot, tokens), self._freed_at[slot]

        slot = min((slot for slot in range(self._sizes[-1]) if slot not in self._used), key=cost)
        self._program.share(slot, slot, 0 if whole else self._shared(slot, tokens))
        self._used.add(slot)
        self._texts[slot] = tokens
        return slot

    def begin(self, slot: int) -> int:
        """Copies a text's prefix from another slot if that holds more of it; returns the tokens that need not be read.

        To be called just before it would be read, so that concurrent requests read a shared prefix once.
        """
        tokens, there = self._texts[slot], self._program.filled(slot)
        shared = [(self._shared(source, tokens), source) for source in range(self._sizes[-1]) if source != slot]
        most, source = max(shared, default=(0, slot))
        if most > there:
            self._program.share(source, slot, most)
        return max(most, there)

    def _shared(self, slot: int, tokens: Sequence[int]) -> int:
        """Rows of a slot that a prompt can reuse; its last token is left out, as it is the first root."""
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
        """A move of a request that makes the window smaller; None if there is none."""
        if not self._used or len(window(self._used, self._sizes)) == len(self._least(self._used)):
            return None
        goal = self._least(self._used)
        source = next(slot for slot in sorted(self._used) if slot not in goal)
        return source, min((slot for slot in goal if slot not in self._used), key=lambda slot: self._freed_at[slot])

    def _least(self, used: Collection[int]) -> range:
        """The smallest window that could hold as many slots, with the fewest moves."""
        size = next(size for size in self._sizes if size >= len(used))
        starts = range(self._sizes[-1] - size + 1)
        return max((range(start, start + size) for start in starts), key=lambda at: len(set(at) & set(used)))

    def moved(self, source: int, to: int) -> None:
        """Records a completed move."""
        self._used.remove(source)
        self._used.add(to)
        self._texts[to], self._texts[source] = self._texts[source], list(self._texts[source])
