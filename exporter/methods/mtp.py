"""The MTP layer of the target's own checkpoint in a bundle."""

from __future__ import annotations

from typing import ClassVar

from specexport.checkpoints import mtp
from specexport.contract.methods.mtp import MTP
from specexport.exporter.methods.states import OwnStateExporter


class MTPExporter(OwnStateExporter[MTP]):
    """A layer behind the target's last one."""

    stage: ClassVar[str | None] = "mtp"
    title: ClassVar[str] = "MTP layer"
    read = staticmethod(mtp.read_mtp)


EXPORTER = MTPExporter()
