"""Speculation by a smaller model with the target's tokenizer."""

from __future__ import annotations

from typing import ClassVar, Literal

from specexport.contract.methods.base import (
    DEFAULT_DRAFT_TOKENS,
    SMALLER,
    CheckpointOptions,
    Flag,
    MethodOptions,
    RankedMethod,
    SourceKind,
    Suggestion,
    Wanted,
)
from specexport.contract.model import Model
from specexport.contract.signature import GraphSignature, propose_signature
from specexport.contract.tree import TokenTree

_GPU_DRAFT_TOKENS = 5


class ChainDraft(RankedMethod, frozen=True, kw_only=True):
    """A model drafts a chain, with a pass per token (Leviathan 2023, Chen 2023); a tree may add less probable tokens
    beside each token of the chain.

    Attributes:
        draft: the model, as a propose graph; None until it is written.
    """

    draft: Model | None = None

    role: ClassVar[str] = "draft"
    branching: ClassVar[Literal[0, 1, 2]] = 1

    @property
    def models(self) -> dict[str, Model]:
        return {} if self.draft is None else {self.role: self.draft}

    @property
    def support(self) -> int:
        return self.candidates

    @property
    def signatures(self) -> dict[str, GraphSignature]:
        """See :class:`Method`: the propose graph, first a pass over T tokens, then one of a single token each."""
        return {self.role: propose_signature(self.candidates, () if self.draft is None else self.draft.states)}

    def validate_tree(self, tree: TokenTree) -> str | None:
        spine = "only the most probable token of each depth can have children"
        return super().validate_tree(tree) or (None if tree.has_spine else spine)

    def device_run(self, tree: TokenTree) -> tuple[int, int] | None:
        return self.catch_up, tree.depth

    def drafted_lengths(self) -> frozenset[int] | None:
        return frozenset(point.drafts for point in self.draft.graph.points) if self.draft is not None else None


class DraftModelOptions(CheckpointOptions, frozen=True, kw_only=True, tag="draft_model"):
    """Options of a draft model."""

    flags: ClassVar[tuple[Flag, ...]] = (
        Flag("--draft", "model", "smaller model with the same tokenizer", "DIR_OR_ID"),
    )


class DraftModel(ChainDraft, frozen=True, kw_only=True, tag="draft_model"):
    """A smaller model with the target's tokenizer drafts.

    Attributes:
        model: its folder or hub id.
    """

    model: str

    options: ClassVar[type[MethodOptions]] = DraftModelOptions
    sources: ClassVar[dict[str, SourceKind]] = {"model": "checkpoint"}
    needs_training: ClassVar[str | None] = "a smaller model"
    whole_model: ClassVar[bool] = True

    @classmethod
    def suggest(cls, wanted: Wanted) -> Suggestion | None:
        K = DEFAULT_DRAFT_TOKENS if wanted.device == "cpu" else _GPU_DRAFT_TOKENS
        least, most = SMALLER
        if not wanted.drafts:
            low, high = wanted.parameters / most / 1e6, wanted.parameters / least / 1e6
            why = (
                f"look for a model of the same family and tokenizer with {low:,.4g} to {high:,.4g} million parameters, "
                "and pass it with --draft; 'specexport train draft' makes it agree with this target more often"
            )
            return Suggestion("draft_model", f"K = {K}", why, 0)
        name, ratio = wanted.drafts[0]
        why = f"{ratio:.1f} times smaller, the same tokenizer"
        if not least <= ratio <= most:
            why += f"; {least:g} to {most:g} times would be better"
        flags = ("--draft", name, "--num-speculative-tokens", str(K))
        return Suggestion("draft_model", f"{name}, K = {K}", why, 0, flags)
