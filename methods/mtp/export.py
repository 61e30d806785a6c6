"""Export of the MTP layer of the target's own checkpoint."""

from __future__ import annotations

from typing import Any, ClassVar

from specexport.methods.hidden_states.export import OwnStateExporter
from specexport.methods.mtp.checkpoint import read_mtp
from specexport.methods.mtp.spec import MTP, MTPOptions


class MTPExporter(OwnStateExporter[MTPOptions, MTP]):
    """Exports the layer after the target's last one."""

    stage: ClassVar[str | None] = "mtp"
    title: ClassVar[str] = "MTP layer"
    read = staticmethod(read_mtp)

    def built(self, options: MTPOptions, outline: Any, **fields: Any) -> MTP:
        return MTP(draft_hidden=outline.layer.hidden_size, **fields)


EXPORTER = MTPExporter()
