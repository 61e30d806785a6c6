"""Watches a proposer at work: what verification and tree search learn from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from specexport.runtime.engine import Engine
from specexport.runtime.proposal import Proposal, SlotView


@contextlib.contextmanager
def recorded(engine: Engine, method: str) -> Iterator[list[tuple[int, Proposal]]]:
    """Records what a method of an engine proposes while the block runs; nothing else may use the engine meanwhile.

    Gives a list that each proposal is added to, with how many tokens the text had when it was made.
    """
    proposer = engine.speculations[method].proposer
    propose = proposer.propose
    made: list[tuple[int, Proposal]] = []

    def recording(views: Sequence[SlotView]) -> dict[int, Proposal]:
        found = propose(views)
        made.extend((len(view.tokens), found[view.slot]) for view in views if view.slot in found)
        return found

    proposer.propose = recording  # type: ignore[method-assign]
    try:
        yield made
    finally:
        del proposer.propose
