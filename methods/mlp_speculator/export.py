"""Exports MLP speculators as propose graphs, and compares these with the stages."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import ClassVar

import msgspec
import numpy as np
import onnx_ir as ir
import torch

from specexport.contract import tensors
from specexport.contract.errors import BuildError
from specexport.contract.model import LoweredAs
from specexport.contract.shapes import ShapePoint
from specexport.contract.signature import stage_outputs
from specexport.contract.tree import TokenTree
from specexport.exporter import trace
from specexport.exporter.build_state import Build, BuildPlan
from specexport.exporter.checkpoints.checkpoint import Checkpoint, load_reference, reference_states
from specexport.exporter.method import Agreement, MethodExporter, TargetInfo, Verification
from specexport.exporter.writing import write_draft
from specexport.graphs.propose import MAX_CANDIDATES
from specexport.methods.medusa.export import NEXT_RANK
from specexport.methods.mlp_speculator.checkpoint import (
    SpeculatorOutline,
    load_speculator,
    read_speculator,
    require_fit,
)
from specexport.methods.mlp_speculator.graph import SpeculatorModule, SpeculatorStages
from specexport.methods.mlp_speculator.spec import MlpSpeculator, MlpSpeculatorOptions, speculator_inputs

_STAGE_ACCURACY = 0.6
"""Assumed accuracy of a stage after correct tokens."""
_NEVER_SEEN = 1e-6
"""If accuracy was measured, the weight of a path that was never right, relative to its assumed probability."""


class MlpSpeculatorExporter(MethodExporter[MlpSpeculatorOptions, MlpSpeculator]):
    """Exports stages that draft from the target's last hidden state."""

    stage: ClassVar[str | None] = "speculator"

    def resolve(self, options: MlpSpeculatorOptions, target: TargetInfo) -> MlpSpeculator:
        outline = read_speculator(options.model)
        require_fit(outline, hidden=target.hidden, vocab=target.vocab)
        return MlpSpeculator(
            trees=(),
            model=options.model,
            stages=outline.stages,
            hidden=outline.hidden,
            candidates=min(MAX_CANDIDATES, outline.vocab),
        )

    def tree_of_size(self, method: MlpSpeculator, size: int) -> TokenTree:
        """See :class:`MethodExporter`; no wider than the speculator's widths.

        Raises:
            BuildError: the widest tree of these widths is smaller.
        """
        outline = read_speculator(method.model)
        tree = TokenTree.best(_path_weight(outline), size + 1, max(outline.widths), outline.stages)
        if len(tree) != size + 1:
            raise BuildError(
                f"num_speculative_tokens is {size}, and the widest tree of {outline.path} has {len(tree) - 1}: its "
                f"top_k_tokens_per_head is {list(outline.widths)}. Ask for fewer, or name a tree"
            )
        return tree

    def default_trees(self, method: MlpSpeculator) -> tuple[TokenTree, ...]:
        widest = sum(itertools.accumulate(read_speculator(method.model).widths, operator.mul))
        return (self.tree_of_size(method, min(*self.default_sizes, widest)),)

    def points(self, method: MlpSpeculator, plan: BuildPlan) -> tuple[ShapePoint, ...]:
        """See :class:`MethodExporter`: every depth of its trees at every width of their levels; there is no cache."""
        widths = sorted({1, *(tree.level_width for tree in method.token_trees())})
        shapes = itertools.product(plan.depths(method), widths, plan.batches)
        return plan.at_caches([(batch, width, 0, depth) for depth, width, batch in shapes], (0,))

    def export(self, method: MlpSpeculator, build: Build) -> MlpSpeculator:
        with build.during("loading the speculator"):
            outline = read_speculator(method.model)
            stages = load_speculator(outline)
            # Stages beyond the deepest tree are never used.
            stages.keep_first(max(tree.depth for tree in method.token_trees()))
            checkpoint = Checkpoint(
                source=method.model,
                path=outline.path,
                family=method.name,
                model=stages,
                cache=(),
                vocab_size=outline.vocab,
                input_vocab=outline.vocab,
                max_positions=build.max_positions,
            )
        model = write_draft(
            checkpoint,
            build,
            lambda: trace_speculator(stages, build.options.lowering),
            self.points(method, build.plan),
            role="speculator",
            title="speculator",
        )
        return msgspec.structs.replace(method, stages=len(stages), draft=model, model=model.source)

    def compare(self, method: MlpSpeculator, run: Verification) -> tuple[str, Agreement] | None:
        """See :class:`MethodExporter`; each token must be its stage's most probable one."""
        manifest, (draft,) = run.bundle.manifest, method.models.values()
        checkpoint, speculator = run.source(None), run.source(method)
        recorded = run.recorded(method)
        outline = read_speculator(str(speculator))
        require_fit(outline, hidden=method.hidden, vocab=manifest.target.vocab_size)
        model, stages = load_reference(checkpoint, manifest.target), load_speculator(outline)
        agreement = run.agreement(manifest.target.precision.weights, draft.precision.weights)
        for text, drafted in recorded:
            # The target's cache holds all tokens except the last, which is the root.
            _, hidden = reference_states(model, np.array(text[:-1]))
            with torch.no_grad():
                expected = stages.logits(hidden[-1], torch.tensor([text[-1], *drafted[:-1].tolist()]))
            agreement.count(expected.numpy(), drafted)
        return "the speculator's graph proposes the original stages' own token", agreement


def _path_weight(outline: SpeculatorOutline) -> Callable[[tuple[int, ...]], float]:
    """A function from a path of ranks to its probability: the measured one, or else a product of assumed ones.

    A path that was never right when measured weighs far less than any that was.
    """

    def weight(path: tuple[int, ...]) -> float:
        if any(rank >= width for rank, width in zip(path, outline.widths, strict=False)):
            return 0.0
        usual = math.prod(_STAGE_ACCURACY * NEXT_RANK**rank for rank in path)
        if outline.accuracy is None:
            return usual
        return outline.accuracy.paths.get(path, _NEVER_SEEN * usual)

    return weight


def trace_speculator(speculator: SpeculatorStages, lowering: LoweredAs = "native") -> ir.Model:
    """The propose graph of an MLP speculator (:class:`~specexport.methods.mlp_speculator.graph.SpeculatorModule`)."""
    inputs: trace.Inputs = [*speculator_inputs(len(speculator), speculator.hidden), tensors.SAMPLING]
    outputs = stage_outputs("M", len(speculator), "T")
    return trace.trace_module(SpeculatorModule(speculator), inputs, outputs, lowering)


EXPORTER = MlpSpeculatorExporter()
