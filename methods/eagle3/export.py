"""Export of EAGLE-3 drafts."""

from __future__ import annotations

from typing import Any, ClassVar

from specexport.methods.eagle3.checkpoint import read_eagle3
from specexport.methods.eagle3.spec import Eagle3, Eagle3Options
from specexport.methods.hidden_states.export import OwnStateExporter


class Eagle3Exporter(OwnStateExporter[Eagle3Options, Eagle3]):
    """Exports a layer that drafts from states between the target's layers."""

    stage: ClassVar[str | None] = "eagle3"
    title: ClassVar[str] = "EAGLE-3 draft"
    read = staticmethod(read_eagle3)

    def built(self, options: Eagle3Options, outline: Any, **fields: Any) -> Eagle3:
        return Eagle3(model=options.model, draft_hidden=outline.layer.hidden_size, **fields)


EXPORTER = Eagle3Exporter()
