"""The MTP layer of the target's own checkpoint in a bundle."""

from __future__ import annotations

from typing import ClassVar

from specexport.checkpoints import mtp
from specexport.contract.errors import BuildError
from specexport.contract.methods.base import DEFAULT_DRAFT_TOKENS
from specexport.contract.methods.mtp import MTP
from specexport.exporter.methods import Suggestion, Wanted
from specexport.exporter.methods.states import OwnStateExporter


class MTPExporter(OwnStateExporter[MTP]):
    """A layer behind the target's last one."""

    stage: ClassVar[str | None] = "mtp"
    title: ClassVar[str] = "MTP layer"
    read = staticmethod(mtp.read_mtp)

    def suggest(self, kind: type[MTP], wanted: Wanted) -> Suggestion | None:
        try:
            mtp.read_mtp(str(wanted.target))
        except BuildError:
            return None
        why = "a layer that was trained with the target and is in its own checkpoint: nothing to find or to train"
        return Suggestion("mtp", f"K = {DEFAULT_DRAFT_TOKENS}", why, 0, ("--mtp",))


EXPORTER = MTPExporter()
