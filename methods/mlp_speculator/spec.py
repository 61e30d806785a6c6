"""Speculation by an MLP speculator."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from specexport.contract import tensors
from specexport.contract.methods.base import (
    CheckpointOptions,
    DraftingMethod,
    Flag,
    MethodOptions,
    SourceKind,
    Suggestion,
    TargetProfile,
)
from specexport.contract.options import option
from specexport.contract.shapes import Size, uncached_points
from specexport.contract.signature import GraphSignature, stage_outputs
from specexport.contract.tensors import Dim, Tensor
from specexport.contract.tree import TokenTree
from specexport.training.options import HiddenStateOptions, Training, report_chain

MAX_STAGES = 16


class MlpSpeculatorOptions(CheckpointOptions, frozen=True, kw_only=True, tag="mlp_speculator"):
    """Options of an MLP speculator."""

    flag: ClassVar[Flag | None] = Flag(
        "--mlp-speculator",
        "model",
        "MLP speculator of the target: an ibm-fms accelerator, or from specexport train mlp-speculator",
        "DIR_OR_ID",
    )


class MlpSpeculator(DraftingMethod, frozen=True, kw_only=True, tag="mlp_speculator"):
    """Stages over the target's hidden state and the last token draft (arXiv 2404.19124).

    Each stage reads the token before, so branches of a tree also differ below their first tokens.

    Attributes:
        model: folder or hub id of the speculator.
        stages: number of stages, and the greatest depth of a tree.
        hidden: H, the target's hidden size.
    """

    model: str
    stages: Annotated[int, Meta(ge=1, le=MAX_STAGES)]
    hidden: Size

    options: ClassVar[type[MethodOptions]] = MlpSpeculatorOptions
    sources: ClassVar[dict[str, SourceKind]] = {"model": "checkpoint"}
    needs_training: ClassVar[str | None] = "a speculator"
    role: ClassVar[str] = "speculator"
    draft_name: ClassVar[str] = "speculator"
    branching: ClassVar[Literal[0, 1, 2]] = 2

    @classmethod
    def suggest(cls, target: TargetProfile) -> Suggestion | None:
        why = (
            "stages that see each other's tokens, where heads guess apart; published for some targets (ibm-fms, "
            "ibm-granite), and trained like heads"
        )
        return Suggestion("mlp_speculator", "the tree that 'specexport tune tree' finds", why, 2)

    @property
    def support(self) -> int:
        return self.candidates

    def device_run(self, tree: TokenTree) -> tuple[int, int] | None:
        """See :class:`Method`; the narrowest run of a device that is wide enough for the tree's levels."""
        points = uncached_points(self.draft.graph.points) if self.draft is not None else []
        return next((point.tokens, point.drafts) for point in points if point.tokens >= tree.level_width)

    @property
    def target_outputs(self) -> tuple[Tensor, ...]:
        return (tensors.HIDDEN.sized(H=self.hidden),)

    @property
    def signature(self) -> GraphSignature:
        """See :class:`Method`: the propose graph, without a cache."""
        inputs = (*speculator_inputs(self.stages, self.hidden), *tensors.SAMPLING)
        return GraphSignature(inputs, tuple(stage_outputs(self.candidates, self.stages, "T")))

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
    """The inputs of a propose graph of ``stages`` stages but the sampling parameters."""
    return (
        tensors.HIDDEN_STATE.sized(H=hidden),
        tensors.INPUT_IDS.shaped("B", 1),
        tensors.LEVEL_PARENTS.sized(stages=stages),
        tensors.LEVEL_RANKS.sized(stages=stages),
        tensors.UNIFORM.shaped("B", stages, "T"),
    )


_stages = partial(option, group="stages")


class SpeculatorTraining(HiddenStateOptions, frozen=True, kw_only=True):
    """Options of ``specexport train mlp-speculator``.

    Attributes:
        n_predict: number of stages; stage i, from 0, predicts the token i + 2 positions ahead and sees those before it.
        inner_dim: width of the states between stages (default: the model's).
        tie_weights: stages share embedding, head and norm, and all but the first their projection.
        scale_input: normalize the model's hidden state first.
        data_first: share of the steps that learn the data, before the sampled texts.
    """

    n_predict: Annotated[int, _stages("N", ge=1, le=MAX_STAGES)] = 3
    inner_dim: Annotated[int | None, _stages("I", ge=16)] = None
    tie_weights: Annotated[bool, _stages()] = False
    scale_input: Annotated[bool, _stages()] = False
    data_first: Annotated[float, _stages("SHARE", ge=0, le=1)] = 0.5

    def unused(self) -> Iterator[tuple[str, str]]:
        yield from super().unused()
        if not self.self_distill:
            yield "data_first", "without --self-distill, which alone uses it"


TRAINING = Training(
    "mlp-speculator",
    "Train an MLP speculator for a target.",
    SpeculatorTraining,
    partial(report_chain, "stage_accuracy"),
)
