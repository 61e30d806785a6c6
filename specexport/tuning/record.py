"""Records proposals, for verification and tree search."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from specexport.runtime.engine import Engine
from specexport.runtime.proposal import Proposal, SlotView


@contextlib.contextmanager
def recorded(engine: Engine, method: str) -> Iterator[list[tuple[int, Proposal]]]:
    """Records a method's proposals while the block runs; nothing else may use the engine meanwhile.

    Yields a list to which each proposal is added, with the length of the text before it.
    """
    proposer = engine.loaded_methods[method].proposer
    propose = proposer.propose
    records: list[tuple[int, Proposal]] = []

    def recording(views: Sequence[SlotView]) -> dict[int, Proposal]:
        proposals = propose(views)
        records.extend((len(view.tokens), proposals[view.slot]) for view in views if view.slot in proposals)
        return proposals

    proposer.propose = recording  # type: ignore[method-assign]
    try:
        yield records
    finally:
        del proposer.propose
