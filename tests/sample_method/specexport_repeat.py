"""A way to speculate in one module: a token that came several times in a row is expected to come again."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from specexport.contract.methods import Flag, TextMethod
from specexport.runtime.proposal import Opening, Proposer, SlotView, TextProposer


class Repeat(TextMethod, frozen=True, kw_only=True, tag="repeat"):
    """The last token again and again, once it came ``at_least`` times in a row."""

    at_least: Annotated[int, Meta(ge=1, le=64)] = 2

    flag = Flag("--repeat", None, "propose a token that repeats itself")


class RepeatProposer(TextProposer[None]):
    """Proposes the last token again and again."""

    def __init__(self, method: Repeat) -> None:
        super().__init__(method)
        self._at_least = method.at_least

    def ahead(self, view: SlotView) -> list[int]:
        tail = view.tokens[-self._at_least :]
        repeats = len(tail) == self._at_least and len(set(tail)) == 1
        return tail[-1:] * (len(view.tree) - 1) if repeats else []


def open_proposer(method: Repeat, opening: Opening) -> Proposer:
    return RepeatProposer(method)
