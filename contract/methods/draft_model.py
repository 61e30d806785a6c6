"""Speculation by a smaller model with the target's tokenizer."""

from __future__ import annotations

from typing import ClassVar, Literal

from specexport.contract import tensors
from specexport.contract.methods.base import DEFAULT_DRAFT_TOKENS, Flag, RankedMethod, SourceKind
from specexport.contract.model import Model
from specexport.contract.signature import SAMPLING, GraphSignature, Spec
from specexport.contract.tree import TokenTree

_SIZES = (DEFAULT_DRAFT_TOKENS, 6, 8)
"""Draft tokens of a step where nobody says: the first, or up to the most where it is known what they cost."""


class ChainDraft(RankedMethod, frozen=True, kw_only=True):
    """A model drafts a chain, a pass a token (Leviathan 2023, Chen 2023); a tree may add less probable tokens beside
    each token of that chain.

    Attributes:
        draft: the model, as a propose graph.
    """

    draft: Model | None = None

    built: ClassVar[frozenset[str]] = RankedMethod.built | {"draft"}
    role: ClassVar[str] = "draft"
    branching: ClassVar[Literal[0, 1, 2]] = 1
    drafts_chain: ClassVar[bool] = True

    def default_trees(self) -> tuple[TokenTree, ...]:
        return tuple(TokenTree.chain(size + 1) for size in _SIZES)

    @property
    def models(self) -> dict[str, Model]:
        return {} if self.draft is None else {self.role: self.draft}

    @property
    def support(self) -> int:
        return self.candidates

    @property
    def signatures(self) -> dict[str, GraphSignature]:
        """See :class:`Method`: the propose graph, first a pass over T tokens, then one of a single token each."""
        inputs = {
            tensors.INPUT_IDS: Spec("int64", ("B", "T")),
            tensors.PAST_LENGTH: Spec("int64", ("B",)),
            tensors.LAST_ROW: Spec("int64", ("B",)),
            tensors.NUM_DRAFT_TOKENS: Spec("int64", ()),
            tensors.UNIFORM: Spec("float32", ("B", "K")),
            **SAMPLING,
        }
        outputs = {
            tensors.DRAFT_TOKENS: Spec("int64", ("K", "B")),
            tensors.DRAFT_IDS: Spec("int64", ("K", "B", self.candidates)),
            tensors.DRAFT_PROBS: Spec("float32", ("K", "B", self.candidates)),
        }
        return {self.role: GraphSignature(inputs, outputs, "F")}

    def validate_tree(self, tree: TokenTree) -> str | None:
        spine = "only the most probable token of each depth can have children"
        return super().validate_tree(tree) or (None if tree.has_spine else spine)

    def drafted_lengths(self) -> frozenset[int] | None:
        return frozenset(point.drafts for point in self.draft.graph.points) if self.draft is not None else None


class DraftModel(ChainDraft, frozen=True, kw_only=True, tag="draft_model"):
    """A smaller model with the target's tokenizer drafts.

    Attributes:
        model: its folder or hub id.
    """

    model: str

    main: ClassVar[str] = "model"
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag("--draft", "model", "smaller model with the same tokenizer", "DIR_OR_ID"),
    )
    sources: ClassVar[dict[str, SourceKind]] = {"model": "checkpoint"}
    needs_training: ClassVar[str | None] = "a smaller model"
