"""Speculation by an MLP speculator."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from specexport.contract import tensors
from specexport.contract.methods.base import (
    CheckpointOptions,
    Flag,
    MethodOptions,
    RankedMethod,
    SourceKind,
    Suggestion,
    Wanted,
)
from specexport.contract.model import Model, Size
from specexport.contract.shapes import uncached_points
from specexport.contract.signature import GraphSignature, stage_outputs
from specexport.contract.tensors import Dim, Tensor
from specexport.contract.tree import TokenTree

MAX_STAGES = 16


class MlpSpeculatorOptions(CheckpointOptions, frozen=True, kw_only=True, tag="mlp_speculator"):
    """Options of an MLP speculator."""

    flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            "--mlp-speculator",
            "model",
            "MLP speculator of the target: an ibm-fms accelerator, or from specexport train mlp-speculator",
            "DIR_OR_ID",
        ),
    )


class MlpSpeculator(RankedMethod, frozen=True, kw_only=True, tag="mlp_speculator"):
    """Stages over the target's hidden state and the last token (arXiv 2404.19124).

    Each stage reads the previous token, so branches of a tree also differ below their first tokens.

    Attributes:
        model: folder or hub id of the speculator.
        stages: their number, and the maximum depth of a tree.
        hidden: H, the target's hidden size.
        draft: the stages, as a propose graph without a cache; None until it is written.
    """

    model: str
    stages: Annotated[int, Meta(ge=1, le=MAX_STAGES)]
    hidden: Size
    draft: Model | None = None

    options: ClassVar[type[MethodOptions]] = MlpSpeculatorOptions
    sources: ClassVar[dict[str, SourceKind]] = {"model": "checkpoint"}
    needs_training: ClassVar[str | None] = "a speculator"
    branching: ClassVar[Literal[0, 1, 2]] = 2

    @classmethod
    def suggest(cls, wanted: Wanted) -> Suggestion | None:
        why = (
            "stages that see each other's tokens, where heads guess apart; published for some targets (ibm-fms, "
            "ibm-granite), and trained like heads"
        )
        return Suggestion("mlp_speculator", "the tree that 'specexport tune tree' finds", why, 2)

    @property
    def models(self) -> dict[str, Model]:
        return {} if self.draft is None else {"speculator": self.draft}

    @property
    def support(self) -> int:
        return self.candidates

    def device_run(self, tree: TokenTree) -> tuple[int, int] | None:
        """See :class:`Method`: a device's narrowest run that is wide enough for the tree's levels."""
        points = uncached_points(self.draft.graph.points) if self.draft is not None else []
        return next((point.tokens, point.drafts) for point in points if point.tokens >= tree.level_width)

    @property
    def target_outputs(self) -> tuple[Tensor, ...]:
        return (tensors.HIDDEN.sized(H=self.hidden),)

    @property
    def signatures(self) -> dict[str, GraphSignature]:
        inputs = (*speculator_inputs(self.stages, self.hidden), *tensors.SAMPLING)
        return {"speculator": GraphSignature(inputs, tuple(stage_outputs(self.candidates, self.stages, "T")))}

    def describe(self) -> str:
        return f"mlp_speculator, {self.stages} stages"

    def validate_tree(self, tree: TokenTree) -> str | None:
        deep = f"depth {tree.depth}, with {self.stages} stages" if tree.depth > self.stages else None
        return super().validate_tree(tree) or deep

    def validate(self) -> str | None:
        """See :class:`Method`: the stages run at the sizes that the trees need."""
        if self.draft is None:
            return None
        trees, points = self.token_trees(), self.draft.graph.points
        deepest, widest = max(tree.depth for tree in trees), max(tree.level_width for tree in trees)
        if any(point.drafts >= deepest and point.tokens >= widest for point in points):
            return None
        return f"no shape point of the speculator fills trees {deepest} deep and {widest} nodes with children wide"


def speculator_inputs(stages: Dim, hidden: Dim) -> tuple[Tensor, ...]:
    """Inputs of the propose graph of ``stages`` stages, except the sampling parameters."""
    return (
        tensors.HIDDEN_STATE.sized(H=hidden),
        tensors.INPUT_IDS.shaped("B", 1),
        tensors.LEVEL_PARENTS.sized(stages=stages),
        tensors.LEVEL_RANKS.sized(stages=stages),
        tensors.UNIFORM.shaped("B", stages, "T"),
    )
