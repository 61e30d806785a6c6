"""What a method advises for a target before anything is built (``specexport suggest``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "gpu"]
SMALLER = (5.0, 10.0)
"""How many times smaller a draft should be: a larger one costs as much as it gains, a smaller one drafts badly."""


@dataclass(frozen=True)
class TargetProfile:
    """The target that methods are suggested for.

    Attributes:
        device: where the bundle is to run: on a GPU the nodes of a step are nearly free, on a CPU every node costs.
        drafts: available smaller models, with how many times smaller they are, the best first.
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
        settings: what to build it with, in words.
        rank: its place, the best first.
        flags: those of ``specexport build``; empty if a model has to be downloaded or trained first.
    """

    method: str
    settings: str
    why: str
    rank: int
    flags: tuple[str, ...] = ()
