"""Watches a proposer at work: what verification and tree search learn from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from specexport.runtime.backend import Array
from specexport.runtime.engine import Engine
from specexport.runtime.proposers import Proposal, Proposer, SlotView
from specexport.runtime.step import Speculation


class Recorder(Proposer):
    """A proposer that hands everything on to another one and keeps what it proposed.

    Attributes:
        made: each proposal, and how many tokens the text had when it was made.
    """

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.observes = proposer.observes
        self.made: list[tuple[int, Proposal]] = []

    def propose(self, sequences: Sequence[SlotView]) -> dict[int, Proposal]:
        """See :class:`Proposer`."""
        found = self._proposer.propose(sequences)
        lengths = {sequence.slot: len(sequence.tokens) for sequence in sequences}
        self.made += [(lengths[slot], proposal) for slot, proposal in found.items()]
        return found

    def observe(self, slot: int, outputs: Mapping[str, Array], row: int) -> None:
        """See :class:`Proposer`."""
        self._proposer.observe(slot, outputs, row)

    def prefill(self, sequence: SlotView) -> bool:
        """See :class:`Proposer`."""
        return self._proposer.prefill(sequence)

    def move(self, source: int, to: int) -> None:
        """See :class:`Proposer`."""
        self._proposer.move(source, to)

    def share(self, source: int, to: int, tokens: int) -> None:
        """See :class:`Proposer`."""
        self._proposer.share(source, to, tokens)

    def shrink_cache(self, rows: int) -> None:
        """See :class:`Proposer`."""
        self._proposer.shrink_cache(rows)

    def release(self, slot: int) -> None:
        """See :class:`Proposer`."""
        self._proposer.release(slot)


@contextlib.contextmanager
def recorded(engine: Engine, method: str) -> Iterator[Recorder]:
    """Records what a method of an engine proposes while the block runs; nothing else may use the engine meanwhile."""
    real = engine.speculations[method]
    recorder = Recorder(real.proposer)
    engine.speculations[method] = Speculation(recorder, real.trees)
    try:
        yield recorder
    finally:
        engine.speculations[method] = real
