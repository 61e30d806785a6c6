"""An EAGLE-3 draft in a bundle."""

from __future__ import annotations

from typing import ClassVar

from specexport.checkpoints import eagle3
from specexport.contract.methods.base import DEFAULT_DRAFT_TOKENS
from specexport.contract.methods.eagle3 import Eagle3
from specexport.exporter.methods import Suggestion, Wanted
from specexport.exporter.methods.states import OwnStateExporter


class Eagle3Exporter(OwnStateExporter[Eagle3]):
    """A layer that goes on from states between the target's layers."""

    stage: ClassVar[str | None] = "eagle3"
    title: ClassVar[str] = "EAGLE-3 draft"
    read = staticmethod(eagle3.read_eagle3)

    def suggest(self, kind: type[Eagle3], wanted: Wanted) -> Suggestion | None:
        why = (
            "one layer over the target's own states, which agrees with it more often than heads do; published for many "
            "targets (SafeAILab, speculators)"
        )
        return Suggestion("eagle3", f"K = {DEFAULT_DRAFT_TOKENS}", why, 1)


EXPORTER = Eagle3Exporter()
