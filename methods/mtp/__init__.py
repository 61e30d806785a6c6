"""Speculation by the multi-token prediction layer of the target's own checkpoint."""

from __future__ import annotations

from specexport.contract.methods.base import DEFAULT_DRAFT_TOKENS, Flag
from specexport.contract.methods.suggestion import Suggestion, TargetProfile
from specexport.methods.hidden_states import OwnStateDraft, StatesDraftOptions


class MTPOptions(StatesDraftOptions, frozen=True, kw_only=True, tag="mtp"):
    """Options of an MTP layer."""

    flag = Flag("--mtp", None, "draft with the target checkpoint's own MTP layer")


class MTP(OwnStateDraft, frozen=True, kw_only=True, tag="mtp"):
    """Drafts with the layer that follows the last one in the target's checkpoint (DeepSeek-V3, arXiv 2412.19437)."""

    options = MTPOptions
    role = "mtp"
    draft_name = "MTP layer"

    @classmethod
    def suggest(cls, target: TargetProfile) -> Suggestion | None:
        if not target.has_mtp:
            return None
        why = "a layer that was trained with the target and is in its own checkpoint: nothing to find or to train"
        return Suggestion("mtp", f"K = {DEFAULT_DRAFT_TOKENS}", why, 0, ("--mtp",))

    @classmethod
    def stores_weights(cls) -> bool:
        return True
