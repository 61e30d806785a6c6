"""An EAGLE-3 draft in a bundle."""

from __future__ import annotations

from typing import ClassVar

from specexport.checkpoints import eagle3
from specexport.contract.methods.eagle3 import Eagle3
from specexport.exporter.methods.states import OwnStateExporter


class Eagle3Exporter(OwnStateExporter[Eagle3]):
    """A layer that goes on from states between the target's layers."""

    stage: ClassVar[str | None] = "eagle3"
    title: ClassVar[str] = "EAGLE-3 draft"
    read = staticmethod(eagle3.read_eagle3)


EXPORTER = Eagle3Exporter()
