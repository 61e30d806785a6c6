"""Exports the target's first layers as a draft: a propose graph over the target's weights."""

from __future__ import annotations

from collections.abc import Iterator

from specexport.contract.errors import BuildError
from specexport.contract.values import counted
from specexport.exporter import compose, trace
from specexport.exporter.build_state import BuildPlan
from specexport.exporter.checkpoints.checkpoint import Checkpoint
from specexport.exporter.method import Array, MethodExporter, TargetInfo, Verification, vocabulary
from specexport.exporter.options import BuildOptions
from specexport.exporter.writing import TracedGraph, tracing
from specexport.graphs.layers import first_layers
from specexport.graphs.propose import MAX_CANDIDATES, DraftPass
from specexport.methods.draft_model.export import compare_chain
from specexport.methods.self_draft import SelfDraft, SelfDraftOptions


class SelfDraftExporter(MethodExporter[SelfDraftOptions, SelfDraft]):
    """Exports the draft while the target is loaded."""

    def resolve(self, options: SelfDraftOptions, target: TargetInfo) -> SelfDraft:
        if options.layers >= target.layers:
            raise BuildError(
                f"self_draft: layers is {options.layers}, but {target.path} has {counted(target.layers, 'layer')}; "
                "expected fewer"
            )
        return SelfDraft(trees=(), layers=options.layers, candidates=min(MAX_CANDIDATES, target.vocab))

    def add_to_target(self, method: SelfDraft, target: Checkpoint, build: BuildOptions, plan: BuildPlan) -> TracedGraph:
        if target.states:
            raise BuildError(
                f"self_draft: {target.source} has layers without attention, which drafts must not have; leave it out"
            )
        cache = target.cache[: method.layers]
        try:
            with first_layers(target.model, method.layers):
                parameters = sum(parameter.numel() for parameter in target.model.parameters())
                draft_pass = DraftPass(target.model, target.vocab_size, None, target.max_positions)
                with tracing(target):
                    master = trace.trace_draft_pass(draft_pass, cache, build.lowering)
        except ValueError as error:
            raise BuildError(f"self_draft: {target.source}: {error}") from error
        graph = compose.propose_graph(master, cache, build.lowering)
        return TracedGraph(graph, plan.propose_points(method), cache, parameters, name=method.role)

    def compare(self, method: SelfDraft, run: Verification) -> Iterator[tuple[Array, Array]]:
        vocab = vocabulary(run.bundle.manifest, method.written_draft)
        return compare_chain(method, run, run.source(None), run.texts, vocab, method.layers)


EXPORTER = SelfDraftExporter()
