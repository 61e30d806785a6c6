"""Speculation by the target's own first layers."""

from __future__ import annotations

from collections.abc import Mapping

from specexport.contract.methods.base import Flag, MethodOptions
from specexport.contract.shapes import Size
from specexport.methods.draft_model import ChainDraft


class SelfDraftOptions(MethodOptions, frozen=True, kw_only=True, tag="self_draft"):
    """Options of a self-draft.

    Attributes:
        layers: number of the target's layers that draft.
    """

    layers: Size

    main = "layers"
    flag = Flag("--self-draft-layers", "layers", "propose with the target's own first N layers and its head", "N")


class SelfDraft(ChainDraft, frozen=True, kw_only=True, tag="self_draft"):
    """The target's first layers draft: its final norm and head read their output.

    The draft's graph is written beside the target's and shares its weights file.
    """

    layers: Size

    options = SelfDraftOptions
    role = "self_draft"

    def describe(self) -> str:
        return f"self_draft, the target's first {'layer' if self.layers == 1 else f'{self.layers} layers'}"

    def memory(self, files: Mapping[str, int], rows: int) -> int:
        """See :class:`Method`; the draft's weights are the target's."""
        return 0 if self.draft is None else self.draft.cache_row_bytes * rows
