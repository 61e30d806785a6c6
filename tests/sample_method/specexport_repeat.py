"""A way to speculate in one module: a token that came several times in a row is expected to come again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta

from specexport.contract.methods import Flag, TextMethod
from specexport.runtime.proposal import Chains, Proposal, Proposer, SlotView
from specexport.runtime.proposers.opening import Opening


class Repeat(TextMethod, frozen=True, kw_only=True, tag="repeat"):
    """The last token again and again, once it came ``at_least`` times in a row."""

    at_least: Annotated[int, Meta(ge=1, le=64)] = 2

    proposer: ClassVar[str] = __name__  # the module with open_proposer
    flags: ClassVar[tuple[Flag, ...]] = (Flag("--repeat", None, "propose a token that repeats itself"),)


class RepeatProposer(Proposer):
    """Proposes the longest chain of the last token that the bundle verifies and the request allows."""

    def __init__(self, method: Repeat) -> None:
        self._at_least = method.at_least
        self._chains = Chains(method.token_trees())

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        made = {}
        for view in views:
            tail = view.tokens[-self._at_least :]
            tree = self._chains.within(view.tree, len(view.tree) - 1)
            if tree is not None and len(tail) == self._at_least and len(set(tail)) == 1:
                tokens = np.full(len(tree) - 1, tail[-1], np.int64)
                # q is None: the tokens were not drawn. Sampling stays lossless, as acceptance then takes q = 1.
                made[view.slot] = Proposal(tokens, tree, None, tokens[:, None])
        return made


def open_proposer(method: Repeat, opening: Opening) -> Proposer:
    return RepeatProposer(method)
