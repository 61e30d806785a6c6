"""Speculation by the multi-token prediction layer of the target's own checkpoint."""

from __future__ import annotations

from typing import ClassVar

from specexport.contract.methods.base import Flag
from specexport.contract.methods.draft_model import OwnStateDraft


class MTP(OwnStateDraft, frozen=True, kw_only=True, tag="mtp"):
    """The layer that the target's checkpoint holds behind its last one drafts (DeepSeek-V3, arXiv 2412.19437, 2.2)."""

    flags: ClassVar[tuple[Flag, ...]] = (Flag("--mtp", None, "draft with the target checkpoint's own MTP layer"),)
    role: ClassVar[str] = "mtp"

    @property
    def stores_weights(self) -> bool:
        return True
