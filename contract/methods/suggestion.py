"""Suggestions of methods for a target, before anything is built (``specexport suggest``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "gpu"]
SMALLER = (5.0, 10.0)
"""How many times smaller than the target a draft should be: a larger draft costs as much as it gains, and a smaller
one drafts badly."""


@dataclass(frozen=True)
class TargetProfile:
    """The target that methods are suggested for.

    Attributes:
        device: where the bundle will run: on a GPU the nodes of a step are nearly free, on a CPU every node costs time.
        drafts: available smaller models, each with the ratio of the target's size to its own, the best first.
        has_mtp: whether the target's checkpoint holds a layer that drafts.
    """

    parameters: int
    device: Device
    drafts: tuple[tuple[str, float], ...] = ()
    has_mtp: bool = False


@dataclass(frozen=True)
class Suggestion:
    """A method to build for a target.

    Attributes:
        settings: the settings to build it with, in words.
        rank: its place among suggestions; the lowest is the best.
        flags: flags of ``specexport build``; empty if a model has to be downloaded or trained first.
    """

    method: str
    settings: str
    why: str
    rank: int
    flags: tuple[str, ...] = ()
