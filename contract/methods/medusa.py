"""Speculation by Medusa heads on the target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from specexport.contract.methods.base import BYTES, Flag, RankedMethod, SourceKind
from specexport.contract.model import Positive, Size, StoredAs
from specexport.contract.signature import Signature, candidates
from specexport.contract.tree import TokenTree


class Medusa(RankedMethod, frozen=True, kw_only=True, tag="medusa"):
    """Heads on the target's last hidden state, in its step graph (Medusa, arXiv 2401.10774).

    Attributes:
        model: folder of the heads.
        heads: how many; a tree is at most as deep.
        parameters: theirs alone.
        weights: how their matrices are stored.
    """

    model: str
    heads: Size = 1
    parameters: Positive = 1
    weights: StoredAs = "fp32"

    main: ClassVar[str] = "model"
    built: ClassVar[frozenset[str]] = RankedMethod.built | {"heads", "parameters", "weights"}
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag("--medusa", "model", "Medusa heads of the target (specexport train medusa)", "DIR"),
    )
    sources: ClassVar[dict[str, SourceKind]] = {"model": "folder"}
    needs_training: ClassVar[str | None] = "heads"
    branching: ClassVar[Literal[0, 1, 2]] = 2

    @property
    def target_outputs(self) -> Signature:
        return candidates(self.heads, self.candidates)

    @property
    def stored_in_target(self) -> StoredAs | None:
        return self.weights

    def describe(self) -> str:
        return f"medusa, {self.heads} heads ({self.parameters:,} parameters, {self.weights})"

    def validate_tree(self, tree: TokenTree) -> str | None:
        deep = f"depth {tree.depth}, with {self.heads} heads" if tree.depth > self.heads else None
        return super().validate_tree(tree) or deep

    def memory(self, files: Mapping[str, int], rows: int) -> int:
        return int(self.parameters * BYTES[self.weights])
