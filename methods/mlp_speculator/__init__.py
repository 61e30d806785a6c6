"""Speculation by an MLP speculator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated

import numpy as np
from msgspec import Meta

from specexport.contract import tensors
from specexport.contract.methods.base import CHECKPOINT, CheckpointOptions, DraftingMethod, Flag
from specexport.contract.methods.suggestion import Suggestion
from specexport.contract.options import option
from specexport.contract.shapes import Size, uncached_points, window
from specexport.contract.signature import GraphSignature, stage_outputs
from specexport.contract.tensors import Dim, Tensor
from specexport.contract.tree import TokenTree
from specexport.runtime.backend import Array, Graph, RunShape, write_sampling
from specexport.runtime.prompt import is_embedding
from specexport.runtime.proposal import DeviceDraft, Ints, Opening, Proposal, Proposer, SlotProposer, SlotView, drawn
from specexport.runtime.sampling import Floats
from specexport.training.options import HiddenStateOptions, Training, report_chain

MAX_STAGES = 16


class MlpSpeculatorOptions(CheckpointOptions, frozen=True, kw_only=True, tag="mlp_speculator"):
    """Options of an MLP speculator."""

    flag = Flag(
        "--mlp-speculator",
        "model",
        "MLP speculator of the target: an ibm-fms accelerator, or from specexport train mlp-speculator",
        "DIR_OR_ID",
    )


class MlpSpeculator(DraftingMethod, frozen=True, kw_only=True, tag="mlp_speculator"):
    """Stages over the target's hidden state and the last token draft (arXiv 2404.19124).

    Each stage reads the token before, so branches of a tree also differ below their first tokens.

    Attributes:
        stages: number of stages, and the greatest depth of a tree.
    """

    model: str
    stages: Annotated[int, Meta(ge=1, le=MAX_STAGES)]
    hidden: Size

    options = MlpSpeculatorOptions
    sources = CHECKPOINT
    needs_training = "a speculator"
    role = "speculator"
    draft_name = "speculator"
    branching = 2

    suggestion = Suggestion(
        "mlp_speculator",
        "the tree that 'specexport tune tree' finds",
        "stages that see each other's tokens, where heads guess apart; published for some targets (ibm-fms, "
        "ibm-granite), and trained like heads",
        2,
    )

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


# --- proposing --------------------------------------------------------------------------------------------------------
class MlpSpeculatorProposer(SlotProposer[Floats]):
    """Fills a tree from the target's hidden state at the last token in its cache, and from the next token, the root.

    A stage computes a row for every node with children, from its parent's state and its token. The first child of a
    node is drawn from q; in greedy decoding it is the most probable token.
    """

    observes = frozenset({tensors.HIDDEN})

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    @property
    def device_draft(self) -> DeviceDraft:
        return self

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        """See :class:`Proposer`; leaves out slots that are not ready."""
        ready = [view for view in views if self.is_ready(view)]
        if not ready:
            return {}
        deepest, widest = max(view.tree.depth for view in ready), max(view.tree.level_width for view in ready)
        slots = window([view.slot for view in ready], self.graph.sizes)
        drafts, tokens = next((k, w) for k, w in self.graph.drafts(len(slots)) if k >= deepest and w >= widest)
        self.write_inputs(ready, tokens, drafts)
        outputs = self.graph.run(RunShape(tokens, drafts=drafts, slots=slots))
        return {view.slot: _proposal(view, outputs, view.slot - slots.start) for view in ready}

    def is_ready(self, view: SlotView) -> bool:
        """See :class:`DeviceDraft`; whether the target has run in the slot, and the root is a token."""
        return view.slot in self._slots and not is_embedding(view.tokens[-1])

    def write_inputs(self, views: Sequence[SlotView], tokens: int, drafts: int) -> range:
        """See :class:`DeviceDraft`; K is the number of stages and T the nodes of a level."""
        slots = window([view.slot for view in views], self.graph.sizes)
        inputs = self.graph.inputs(RunShape(tokens, drafts=drafts, slots=slots))
        for view in views:
            at, levels = view.slot - slots.start, _levels(view.tree)
            depth, width = levels.parents.shape
            inputs[tensors.HIDDEN_STATE][at] = self._slots[view.slot]
            inputs[tensors.INPUT_IDS][at] = view.tokens[-1]
            for name, indices in ((tensors.LEVEL_PARENTS, levels.parents), (tensors.LEVEL_RANKS, levels.ranks)):
                inputs[name][at] = 0
                inputs[name][at, :depth, :width] = indices
            write_sampling(inputs, at, view.params)
            if not view.params.greedy:
                # As much noise as the tree needs, so that results of a seed do not depend on the rest of the batch.
                inputs[tensors.UNIFORM][at, :depth, :width] = view.random.random((depth, width), np.float32)
        return slots

    def rows(self, tree: TokenTree, tokens: int) -> Ints:
        """See :class:`DeviceDraft`; the first stage has one row, each other stage T."""
        place = {node: at for level in tree.levels for at, node in enumerate(level)}
        below = [(tree.depths[parent], place[parent]) for parent in tree.parents[1:]]
        return np.array([1 + (stage - 1) * tokens + at if stage else 0 for stage, at in below], np.int64)

    def commit(self, view: SlotView, drafted: Sequence[int]) -> None:
        """See :class:`DeviceDraft`; there is no cache."""

    def observe(self, slot: int, outputs: Mapping[str, Array], row: int) -> None:
        self._slots[slot] = outputs[tensors.HIDDEN][row].copy()


@dataclass(frozen=True)
class _Levels:
    """A tree in the form of the stages' inputs: D levels of at most W inner nodes.

    Attributes:
        parents: int64 ``[D,W]``, each inner node's parent, as an index into the inner nodes of the level above.
        ranks: int64 ``[D,W]``, its rank among its siblings.
        counts: number of inner nodes of each level.
        spine: number of levels with a node on the path of rank 0.
        rows: int64 ``[K]``, for each node but the root, its parent's index among the inner nodes of all levels.
    """

    parents: Ints
    ranks: Ints
    counts: tuple[int, ...]
    spine: int
    rows: Ints


@lru_cache(maxsize=256)
def _levels(tree: TokenTree) -> _Levels:
    place = {node: at for level in tree.levels for at, node in enumerate(level)}
    parents, ranks = np.zeros((2, tree.depth, tree.level_width), np.int64)
    for depth, level in enumerate(tree.levels[1:], start=1):
        parents[depth, : len(level)] = [place[tree.parents[node]] for node in level]
        ranks[depth, : len(level)] = [tree.ranks[node] for node in level]
    row = {node: at for at, node in enumerate(node for level in tree.levels for node in level)}
    rows = np.array([row[parent] for parent in tree.parents[1:]], np.int64)
    spine = 1 + sum(not any(tree.choices[level[0] - 1]) for level in tree.levels[1:])
    return _Levels(parents, ranks, tuple(map(len, tree.levels)), spine, rows)


def _proposal(view: SlotView, outputs: Mapping[str, Array], at: int) -> Proposal:
    tree = view.tree
    levels = _levels(tree)

    def rows(name: Tensor) -> Array:
        parts = [outputs[name.of_stage(stage)][at, :count] for stage, count in enumerate(levels.counts)]
        return np.concatenate(parts)

    # The first node of each level is on the path of rank 0, as far as the tree has that path.
    best = np.cumsum((0, *levels.counts[: levels.spine - 1]))
    ids: Ints = rows(tensors.DRAFT_IDS)
    if view.params.greedy:
        return Proposal(ids[levels.rows, np.asarray(tree.ranks[1:])], tree, None, ids[best])
    probs: Floats = rows(tensors.DRAFT_PROBS)
    tokens, q, candidates = drawn(tree, levels.rows, rows(tensors.DRAFT_TOKENS), ids, probs)
    return Proposal(tokens, tree, q, candidates[best])


def open_proposer(method: MlpSpeculator, opening: Opening) -> Proposer:
    return MlpSpeculatorProposer(opening.graph(method))
