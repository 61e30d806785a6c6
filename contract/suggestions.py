"""Suggestions of ``specexport suggest``: which method suits a target, before anything is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "gpu"]
SMALLER = (5.0, 10.0)
"""How many times smaller a draft should be: a larger one costs what it gains, a smaller one guesses badly."""


@dataclass(frozen=True)
class Suggestion:
    """A suggested method.

    Attributes:
        settings: what to build it with, in words of the field.
        rank: its place among the others, the better ones first.
        flags: of ``specexport build``; empty where something has to be found or trained first.
    """

    method: str
    settings: str
    why: str
    rank: int
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """What a method is suggested for.

    Attributes:
        parameters: of the target.
        device: where the bundle is to run: on a GPU the nodes of a step are nearly free, on a CPU every one costs.
        drafts: smaller models at hand, with how many times smaller they are, the best first.
        has_mtp: whether the target's checkpoint holds a layer that drafts.
    """

    parameters: int
    device: Device
    drafts: tuple[tuple[str, float], ...] = ()
    has_mtp: bool = False
