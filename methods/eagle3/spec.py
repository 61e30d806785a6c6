"""Speculation by an EAGLE-3 draft."""

from __future__ import annotations

from typing import ClassVar

from specexport.contract.methods.base import DEFAULT_DRAFT_TOKENS, Flag, MethodOptions, SourceKind, Suggestion, Wanted
from specexport.methods.hidden_states.spec import OwnStateDraft, StatesCheckpointOptions


class Eagle3Options(StatesCheckpointOptions, frozen=True, kw_only=True, tag="eagle3"):
    """Options of an EAGLE-3 draft."""

    flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            "--eagle3", "model", "EAGLE-3 draft of the target (SafeAILab's or the speculators library's)", "DIR_OR_ID"
        ),
    )


class Eagle3(OwnStateDraft, frozen=True, kw_only=True, tag="eagle3"):
    """A layer drafts from states between the target's layers (EAGLE-3, arXiv 2503.01840).

    Attributes:
        model: folder or hub id of the draft.
    """

    model: str

    options: ClassVar[type[MethodOptions]] = Eagle3Options
    sources: ClassVar[dict[str, SourceKind]] = {"model": "checkpoint"}
    needs_training: ClassVar[str | None] = "an EAGLE-3 draft"
    role: ClassVar[str] = "eagle3"

    @classmethod
    def suggest(cls, wanted: Wanted) -> Suggestion | None:
        why = (
            "one layer over the target's own states, which agrees with it more often than heads do; published for many "
            "targets (SafeAILab, speculators)"
        )
        return Suggestion("eagle3", f"K = {DEFAULT_DRAFT_TOKENS}", why, 1)
