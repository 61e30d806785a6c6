"""Which request is in which slot, and which texts the slots' caches still hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specexport.contract.shapes import window
from specexport.runtime.program import StepProgram
from specexport.runtime.reader import common_prefix


class Slots:
    """Places requests so that those running lie close together, and begin with what a cache holds already.

    A run takes a window of neighbouring slots, so running slots that lie apart cost as many as lie between. A slot that
    is left keeps its text: a prompt that begins like it, or like a text that is running, is not read again.
    """

    def __init__(self, program: StepProgram, reuse: bool) -> None:
        self._program = program
        self._sizes = program.sizes
        self._reuse = reuse
        self._texts: list[list[int]] = [[] for _ in range(self._sizes[-1])]
        self._left: list[int] = [0] * self._sizes[-1]
        self._clock = 0
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """How many slots are free."""
        return self._sizes[-1] - len(self._taken)

    def take(self, tokens: list[int], *, whole: bool = False) -> int:
        """Gives a slot to a text: one that keeps the window small, then one that holds the text's beginning.

        The list is kept: the text grows in it. ``whole`` has all of it read, whatever a cache holds.
        """

        def cost(slot: int) -> tuple[int, int, int]:
            return len(window((*self._taken, slot), self._sizes)), -self._shared(slot, tokens), self._left[slot]

        slot = min((slot for slot in range(self._sizes[-1]) if slot not in self._taken), key=cost)
        self._program.share(slot, slot, 0 if whole else self._shared(slot, tokens))
        self._taken.add(slot)
        self._texts[slot] = tokens
        return slot

    def begin(self, slot: int) -> int:
        """Takes the start of a slot's text over from another slot if more of it is there: how much is not to be read.

        To be called just before it would be read, so that requests that came together read what they share once.
        """
        tokens, there = self._texts[slot], self._program.filled(slot)
        found = [(self._shared(other, tokens), other) for other in range(self._sizes[-1]) if other != slot]
        most, source = max(found, default=(0, slot))
        if most > there:
            self._program.share(source, slot, most)
        return max(most, there)

    def _shared(self, slot: int, tokens: Sequence[int]) -> int:
        """How many rows of a slot belong to a prompt; its last token is left out, as it is the first root."""
        if not self._reuse:
            return 0
        alike = min(common_prefix(self._texts[slot], tokens), self._program.filled(slot), len(tokens) - 1)
        return self._program.reusable(slot, alike)

    def leave(self, slot: int) -> None:
        """Frees a slot, if it was taken; its text stays for prompts that begin alike."""
        self._taken.discard(slot)
        self._texts[slot] = list(self._texts[slot])
        self._clock += 1
        self._left[slot] = self._clock

    def next_move(self) -> tuple[int, int] | None:
        """A move from one slot to another that makes the window smaller; None where none does."""
        if not self._taken or len(window(self._taken, self._sizes)) == len(self._least(self._taken)):
            return None
        goal = self._least(self._taken)
        source = next(slot for slot in sorted(self._taken) if slot not in goal)
        return source, min((slot for slot in goal if slot not in self._taken), key=lambda slot: self._left[slot])

    def _least(self, taken: Collection[int]) -> range:
        """The window of fewest slots that could hold as many, with most of them in it already."""
        size = next(size for size in self._sizes if size >= len(taken))
        starts = range(self._sizes[-1] - size + 1)
        return max((range(start, start + size) for start in starts), key=lambda at: len(set(at) & set(taken)))

    def moved(self, source: int, to: int) -> None:
        """Records a move that was made."""
        self._taken.remove(source)
        self._taken.add(to)
        self._texts[to], self._texts[source] = self._texts[source], list(self._texts[source])
