"""Exports a smaller model with another tokenizer: a draft model and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from specexport.exporter.build_state import Build
from specexport.exporter.checkpoints.checkpoint import Checkpoint
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.checkpoints.tokenizer import load_tokenizer
from specexport.exporter.method import Array, MethodExporter, TargetInfo, Verification
from specexport.graphs.propose import MAX_CANDIDATES
from specexport.methods.draft_model import DraftModel
from specexport.methods.draft_model.export import compare_chain, load_draft, trace_chain, vocabulary_of
from specexport.methods.universal_draft import UniversalDraft, UniversalDraftOptions

_TOKENIZER = "draft.tokenizer.json"


class UniversalDraftExporter(MethodExporter[UniversalDraftOptions, UniversalDraft]):
    """Exports a draft that proposes text, from its whole vocabulary."""

    def resolve(self, options: UniversalDraftOptions, target: TargetInfo) -> UniversalDraft:
        return UniversalDraft(
            trees=(),
            model=options.model,
            candidates=min(MAX_CANDIDATES, vocabulary_of(options.model, target.max_seq_len)),
            tokenizer=_TOKENIZER,
            split_special_tokens=load_tokenizer(locate(options.model)).split_special_tokens,
        )

    def load(self, method: UniversalDraft, build: Build) -> Checkpoint:
        return load_draft(method, method.model, build)

    def trace(self, method: UniversalDraft, draft: Checkpoint, build: Build) -> ir.Model:
        return trace_chain(draft, draft.vocab_size, build)

    def export(self, method: UniversalDraft, build: Build) -> UniversalDraft:
        method = super().export(method, build)
        load_tokenizer(locate(method.model)).tokenizer.save(str(build.folder / method.tokenizer))
        return method

    def compare(self, method: UniversalDraft, run: Verification) -> Iterator[tuple[Array, Array]]:
        draft = method.written_draft
        target = run.bundle.tokenizer()
        tokenizer = run.bundle.tokenizer(method.tokenizer, split_special_tokens=method.split_special_tokens)
        texts = [list(tokenizer.encode(target.decode(text)).ids) for text in run.texts]
        # With its own tokens it is an ordinary draft model.
        draft_model = DraftModel(model=method.model, draft=draft, candidates=method.candidates, trees=method.trees)
        return compare_chain(draft_model, run, run.source(method), texts, draft.vocab_size)


EXPORTER = UniversalDraftExporter()
