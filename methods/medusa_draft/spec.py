"""Speculation by a smaller model with Medusa heads."""

from __future__ import annotations

from typing import ClassVar, Literal

from specexport.contract.methods.base import CheckpointOptions, DraftingMethod, Flag, MethodOptions, SourceKind
from specexport.contract.shapes import Size
from specexport.contract.signature import GraphSignature, step_signature
from specexport.contract.tensors import CANDIDATES
from specexport.contract.tree import TokenTree


class MedusaDraftOptions(CheckpointOptions, frozen=True, kw_only=True, tag="medusa_draft"):
    """Options of a draft with Medusa heads.

    Attributes:
        medusa: folder of its Medusa heads.
    """

    medusa: str

    flag: ClassVar[Flag | None] = Flag(
        "--draft-medusa",
        "medusa",
        "Medusa heads of the draft, which then proposes a tree in one pass",
        "DIR",
        claims={"--draft": "model"},
    )


class MedusaDraft(DraftingMethod, frozen=True, kw_only=True, tag="medusa_draft"):
    """A smaller model with Medusa heads proposes a whole tree in one pass.

    Attributes:
        model: folder or hub id of a model with the target's tokenizer.
        medusa: folder of its heads.
        heads: number of heads; a tree is at most one level deeper, as the draft's own head comes first.
    """

    model: str
    medusa: str
    heads: Size

    options: ClassVar[type[MethodOptions]] = MedusaDraftOptions
    sources: ClassVar[dict[str, SourceKind]] = {"model": "checkpoint", "medusa": "folder"}
    needs_training: ClassVar[str | None] = "a smaller model and its heads"
    role: ClassVar[str] = "draft"
    branching: ClassVar[Literal[0, 1, 2]] = 1

    @property
    def signature(self) -> GraphSignature:
        """See :class:`Method`: a step graph that returns candidates instead of logits."""
        return step_signature([CANDIDATES.sized(heads=self.heads + 1, M=self.candidates)])

    @property
    def draft_width(self) -> int:
        """Number of tokens that the draft reads in a step: as many as a step can commit."""
        return 1 + max(tree.depth for tree in self.token_trees())

    def describe(self) -> str:
        return f"medusa_draft, {self.heads} heads on the draft"

    def validate_tree(self, tree: TokenTree) -> str | None:
        deep = f"depth {tree.depth}, with {self.heads} heads" if tree.depth > self.heads + 1 else None
        return super().validate_tree(tree) or deep
