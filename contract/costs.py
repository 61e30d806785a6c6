"""What steps cost on a device, as measured there: what says how much a batch may speculate."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from specexport.contract.model import Size, Strict

Seconds = Annotated[float, Meta(ge=0.0, le=1e6)]


class Cost(Strict, frozen=True):
    """The time of one call, the least of several: whatever else a machine does only adds to it.

    Attributes:
        batch: slots that took part, B.
        tokens: of a step, T a slot; of proposing, the nodes of the tree proposed for each slot.
        cache: cache rows a slot, S.
        seconds: of wall clock.
    """

    batch: Size
    tokens: Size
    cache: Size
    seconds: Seconds


class MethodCosts(Strict, frozen=True):
    """What a way to propose costs beside the step that verifies.

    Attributes:
        method: its name.
        propose: proposing, at every batch size and for every tree that it may be asked to fill.
        read: seconds of a chunk of text that a draft is behind in; 0 where nothing is read.
    """

    method: str
    propose: Annotated[tuple[Cost, ...], Meta(min_length=1)]
    read: Seconds


class CostCurve(Strict, frozen=True):
    """What was measured on one device.

    Attributes:
        device: which, by backend, name and threads; the curve holds for engines that run on the very same.
        versions: of the libraries it was measured with.
        steps: c(B, T): whole steps but for proposing, at every batch size and width.
        methods: d(B, K) of every method of the bundle.
    """

    device: str
    versions: dict[str, str]
    steps: Annotated[tuple[Cost, ...], Meta(min_length=1)]
    methods: tuple[MethodCosts, ...]
