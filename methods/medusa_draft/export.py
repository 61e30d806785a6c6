"""Exports a smaller model with Medusa heads, as a step graph that returns candidates instead of logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
from tokenizers import Tokenizer

from specexport.contract import tensors
from specexport.contract.errors import BuildError
from specexport.contract.folders import expanded
from specexport.contract.shapes import ShapePoint
from specexport.exporter import trace
from specexport.exporter.build_state import Build, BuildPlan
from specexport.exporter.checkpoints.checkpoint import Checkpoint, clamp_tokens, load_reference
from specexport.exporter.checkpoints.config import meta_model
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.method import Array, TargetInfo, Verification, vocabulary
from specexport.exporter.options import PREFILL_CHUNK
from specexport.graphs.propose import MAX_TOP_K
from specexport.graphs.step import StepModule
from specexport.methods.draft_model.export import load_draft, require_tokenizer, vocabulary_of
from specexport.methods.medusa.export import HeadsExporter, heads_of, read_medusa, reference_heads
from specexport.methods.medusa.graph import HeadCandidates
from specexport.methods.medusa_draft import MedusaDraft, MedusaDraftOptions


class MedusaDraftExporter(HeadsExporter[MedusaDraftOptions, MedusaDraft]):
    """Exports a draft whose own head proposes the first depth, and its Medusa heads the depths after it."""

    earlier_accuracy = (0.8,)  # of the draft's own head
    heads_key = "medusa"

    def check(self, options: MedusaDraftOptions, target: Path, tokenizer: Tokenizer) -> None:
        require_tokenizer(options.model, tokenizer)

    def resolve(self, options: MedusaDraftOptions, target: TargetInfo) -> MedusaDraft:
        vocabulary_of(options.model, target.max_seq_len)
        folder = expanded(options.medusa)
        head = meta_model(locate(options.model)).get_output_embeddings().weight
        heads = read_medusa(folder)
        heads.make(hidden=head.shape[1], vocab=head.shape[0])
        return MedusaDraft(
            trees=(),
            model=options.model,
            medusa=str(folder.resolve()),
            heads=heads.count,
            candidates=min(MAX_TOP_K, target.vocab, head.shape[0]),
        )

    def points(self, method: MedusaDraft, plan: BuildPlan) -> tuple[ShapePoint, ...]:
        """See :class:`MethodExporter`; the draft reads as many tokens in a step as a step can commit."""
        steps = [(batch, method.draft_width, 1, 0) for batch in plan.batches]
        return plan.at_caches([*steps, (1, PREFILL_CHUNK, 1, 0)])

    def load(self, method: MedusaDraft, build: Build) -> Checkpoint:
        draft = load_draft(method, method.model, build)
        if draft.states:
            raise BuildError(
                f"medusa_draft: {draft.source} has layers without attention, which read only chains; choose "
                "another draft, or leave out its Medusa heads"
            )
        return draft

    def trace(self, method: MedusaDraft, draft: Checkpoint, build: Build) -> ir.Model:
        heads, vocab = heads_of(method.medusa, draft), min(draft.vocab_size, build.vocab_size)
        candidates = HeadCandidates(heads, draft.model, method.candidates, vocab, depth_1=True)
        outputs, lowering = [tensors.CANDIDATES], build.options.lowering
        step = StepModule(draft.model, [candidates], outputs, lowering, input_vocab=draft.input_vocab)
        return trace.trace_step(step, draft.cache)

    def compare(self, method: MedusaDraft, run: Verification) -> Iterator[tuple[Array, Array]]:
        draft = method.written_draft
        heads = run.source(method, "medusa")
        checkpoint = run.source(method)
        recorded = run.recorded(method)
        model = load_reference(checkpoint, draft)
        for text, tokens in recorded:
            expected = reference_heads(model, heads, clamp_tokens(text, model))
            yield expected[:, : vocabulary(run.bundle.manifest, draft)], tokens


EXPORTER = MedusaDraftExporter()
