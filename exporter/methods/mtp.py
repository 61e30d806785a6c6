"""The MTP layer of the target's own checkpoint in a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tokenizers import Tokenizer

from specexport.checkpoints import mtp
from specexport.contract.errors import BuildError
from specexport.contract.methods.base import DEFAULT_DRAFT_TOKENS
from specexport.contract.methods.mtp import MTP
from specexport.exporter.methods import Suggestion, Wanted
from specexport.exporter.methods.states import OwnStateExporter
from specexport.graphs.mtp import MTPDraft


class MTPExporter(OwnStateExporter[MTP]):
    """A layer behind the target's last one."""

    stage: ClassVar[str | None] = "mtp"
    title: ClassVar[str] = "MTP layer"
    read = staticmethod(mtp.read_mtp)

    def check(self, method: MTP, target: Path, tokenizer: Tokenizer) -> None:
        mtp.require_fit(mtp.read_mtp(str(target)))

    def require_fit(self, outline: mtp.MTPOutline, *, hidden: int, vocab: int, layers: int) -> None:
        """See :class:`StatesDraftExporter`; it is the target's, and its tensors were looked at by :meth:`check`."""

    def make(self, outline: mtp.MTPOutline, layers: int) -> MTPDraft:
        return outline.make()

    def suggest(self, kind: type[MTP], wanted: Wanted) -> Suggestion | None:
        try:
            mtp.read_mtp(str(wanted.target))
        except BuildError:
            return None
        why = "a layer that was trained with the target and is in its own checkpoint: nothing to find or to train"
        return Suggestion("mtp", f"K = {DEFAULT_DRAFT_TOKENS}", why, 0, ("--mtp",))

    def load(self, outline: mtp.MTPOutline, target: Path, layers: int, positions: int) -> MTPDraft:
        return mtp.load_mtp(outline, positions)


EXPORTER = MTPExporter()
