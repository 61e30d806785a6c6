"""A smaller model with Medusa heads in a bundle: a step graph that makes candidates instead of logits."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import msgspec
from tokenizers import Tokenizer

from specexport.checkpoints.medusa import read_outline
from specexport.checkpoints.reference import as_read, load_reference, reference_heads
from specexport.contract.errors import BuildError
from specexport.contract.methods.medusa_draft import MedusaDraft
from specexport.contract.shapes import ShapePoint
from specexport.contract.tree import TokenTree
from specexport.exporter import trace
from specexport.exporter.build_plan import PREFILL_CHUNK, BuildPlan
from specexport.exporter.drafts import load_draft, require_tokenizer, write_draft
from specexport.exporter.methods import Agreement, Build, MethodExporter, TargetOutline, Verification, vocabulary
from specexport.exporter.methods.medusa import folder_of, heads_of, path_weight
from specexport.graphs.medusa import MAX_TOP_K
from specexport.graphs.step import CandidatesModule

_OWN_ACCURACY = 0.8
"""Stands in for how often the draft's own head is right."""


class MedusaDraftExporter(MethodExporter[MedusaDraft]):
    """The draft's own head proposes for the first depth, its Medusa heads for those after it."""

    stage: ClassVar[str | None] = "draft"

    def check(self, method: MedusaDraft, target: Path, tokenizer: Tokenizer) -> None:
        require_tokenizer(method.model, target, tokenizer)

    def outline(self, method: MedusaDraft, target: TargetOutline) -> MedusaDraft:
        heads = read_outline(folder_of(method.medusa))
        return msgspec.structs.replace(method, heads=heads.count, candidates=min(MAX_TOP_K, target.vocab))

    def sized(self, method: MedusaDraft, size: int) -> TokenTree:
        weight = path_weight(read_outline(folder_of(method.medusa)), (_OWN_ACCURACY,))
        return TokenTree.best(weight, size + 1, method.candidates, method.heads + 1)

    def default_trees(self, method: MedusaDraft) -> tuple[TokenTree, ...]:
        """See :class:`MethodExporter`; what the heads bring, if anything."""
        own = read_outline(folder_of(method.medusa)).tree
        return (own,) if own is not None else (self.sized(method, len(method.default_trees()[0]) - 1),)

    def points(self, method: MedusaDraft, plan: BuildPlan) -> tuple[ShapePoint, ...]:
        """See :class:`MethodExporter`; the draft sees all that a step can commit."""
        steps = [(batch, method.draft_width, 1, 0) for batch in plan.batches]
        return plan.at_caches([*steps, (1, PREFILL_CHUNK, 1, 0)])

    def export(self, method: MedusaDraft, build: Build) -> MedusaDraft:
        draft = load_draft(method.model, build)
        if draft.states:
            raise BuildError(
                f"medusa_draft: {draft.source} has layers without attention, which go through chains alone; choose "
                "another draft, or leave out its Medusa heads"
            )
        heads = heads_of(method.medusa, draft)
        vocab, lowering = min(draft.vocab_size, build.vocab_size), build.options.lowering
        known = min(MAX_TOP_K, vocab)
        points = self.points(method, build.plan)
        step = CandidatesModule(draft.model, heads, known, vocab, draft.input_vocab, lowering)
        model = write_draft(draft, build, "step", lambda: trace.trace_step(step, draft.cache), points)
        return msgspec.structs.replace(
            method,
            candidates=known,
            draft=model,
            model=model.source,
            medusa=str(folder_of(method.medusa).resolve()),
        )

    def compare(self, method: MedusaDraft, run: Verification) -> tuple[str, Agreement] | None:
        (draft,) = method.models.values()
        heads = run.source(method, "medusa")
        checkpoint = run.source(method)
        made = run.recorded(method)
        model = load_reference(checkpoint, draft)
        agreement = run.agreement(draft.precision.weights)
        for text, tokens in made:
            said = reference_heads(model, heads, as_read(text, model))
            agreement.count(said[:, : vocabulary(run.bundle.manifest, draft)], tokens)
        return "the heads in the draft's graph propose the original heads' own token", agreement


EXPORTER = MedusaDraftExporter()
