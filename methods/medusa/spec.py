"""Speculation by Medusa heads on the target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

from specexport.contract.methods.base import (
    BYTES,
    CheckpointOptions,
    Flag,
    MethodOptions,
    RankedMethod,
    SourceKind,
    Suggestion,
    Wanted,
)
from specexport.contract.model import Positive, Size, StoredAs
from specexport.contract.tensors import CANDIDATES, Tensor
from specexport.contract.tree import TokenTree

_PUBLISHED_TREES = ((10e9, "mc_sim_7b_63"), (20e9, "vicuna_13b_stage1"), (math.inf, "vicuna_33b_stage1"))
"""By the size of the model they were searched for (FasterDecoding/Medusa)."""


class MedusaOptions(CheckpointOptions, frozen=True, kw_only=True, tag="medusa"):
    """Options of Medusa heads."""

    flags: ClassVar[tuple[Flag, ...]] = (
        Flag("--medusa", "model", "Medusa heads of the target (specexport train medusa)", "DIR"),
    )


class Medusa(RankedMethod, frozen=True, kw_only=True, tag="medusa"):
    """Heads on the target's last hidden state, in its step graph (Medusa, arXiv 2401.10774).

    Attributes:
        model: folder of the heads.
        heads: their number, and the maximum depth of a tree.
        parameters: number of the heads' own parameters.
        weights: how the heads' matrices are stored.
    """

    model: str
    heads: Size
    parameters: Positive
    weights: StoredAs

    options: ClassVar[type[MethodOptions]] = MedusaOptions
    sources: ClassVar[dict[str, SourceKind]] = {"model": "folder"}
    needs_training: ClassVar[str | None] = "heads"
    branching: ClassVar[Literal[0, 1, 2]] = 2

    @classmethod
    def suggest(cls, wanted: Wanted) -> Suggestion | None:
        """See :class:`Method`; heads must be trained for this very target, so an available draft ranks higher."""
        if wanted.device == "gpu":
            tree = next(tree for limit, tree in _PUBLISHED_TREES if wanted.parameters < limit)
            return Suggestion("medusa", f"tree {tree}", "four heads and a wide tree, where nodes are nearly free", 1)
        tree = "the tree that 'specexport tune tree' finds, 4 to 8 nodes"
        why = "no second model; heads have to be trained, and a CPU pays for every node"
        return Suggestion("medusa", tree, why, 1)

    @property
    def target_outputs(self) -> tuple[Tensor, ...]:
        return (CANDIDATES.sized(heads=self.heads, M=self.candidates),)

    @property
    def stored(self) -> frozenset[StoredAs]:
        return frozenset({self.weights})

    def describe(self) -> str:
        return f"medusa, {self.heads} heads ({self.parameters:,} parameters, {self.weights})"

    def validate_tree(self, tree: TokenTree) -> str | None:
        deep = f"depth {tree.depth}, with {self.heads} heads" if tree.depth > self.heads else None
        return super().validate_tree(tree) or deep

    def memory(self, files: Mapping[str, int], rows: int) -> int:
        return int(self.parameters * BYTES[self.weights])
