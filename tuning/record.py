"""Watches a proposer at work: what verification and tree search learn from."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from specexport.runtime.engine import Engine
from specexport.runtime.graph import Array
from specexport.runtime.proposal import Proposal, Proposer, SlotView


class Recorder(Proposer):
    """A proposer that hands everything on to another one and keeps what it proposed.

    Attributes:
        made: each proposal, and how many tokens the text had when it was made.
    """

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.observes = proposer.observes
        self.made: list[tuple[int, Proposal]] = []

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        found = self._proposer.propose(views)
        lengths = {view.slot: len(view.tokens) for view in views}
        self.made += [(lengths[slot], proposal) for slot, proposal in found.items()]
        return found

    def observe(self, slot: int, outputs: Mapping[str, Array], row: int, root: int = 0) -> None:
        self._proposer.observe(slot, outputs, row, root)

    def prefill(self, view: SlotView) -> bool:
        return self._proposer.prefill(view)

    def move(self, source: int, to: int) -> None:
        self._proposer.move(source, to)

    def share(self, source: int, to: int, tokens: int) -> None:
        self._proposer.share(source, to, tokens)

    def shrink_cache(self, rows: int) -> None:
        self._proposer.shrink_cache(rows)

    def release(self, slot: int) -> None:
        self._proposer.release(slot)


@contextlib.contextmanager
def recorded(engine: Engine, method: str) -> Iterator[Recorder]:
    """Records what a method of an engine proposes while the block runs; nothing else may use the engine meanwhile."""
    real = engine.speculations[method]
    recorder = Recorder(real.proposer)
    engine.speculations[method] = dataclasses.replace(real, proposer=recorder)
    try:
        yield recorder
    finally:
        engine.speculations[method] = real
