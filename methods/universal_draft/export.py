"""Exports a smaller model with another tokenizer: a draft model and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from specexport.exporter.build_state import Build
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.checkpoints.tokenizer import load_tokenizer
from specexport.exporter.method import Array, MethodExporter, TargetInfo, Verification
from specexport.graphs.propose import MAX_CANDIDATES
from specexport.methods.draft_model import DraftModel
from specexport.methods.draft_model.export import compare_chain, load_draft, require_length, write_propose_graph
from specexport.methods.universal_draft import UniversalDraft, UniversalDraftOptions

_TOKENIZER = "draft/tokenizer.json"


class UniversalDraftExporter(MethodExporter[UniversalDraftOptions, UniversalDraft]):
    """Exports a draft that proposes text, from its whole vocabulary."""

    def resolve(self, options: UniversalDraftOptions, target: TargetInfo) -> UniversalDraft:
        require_length(options.model, target.max_seq_len)
        return UniversalDraft(
            trees=(),
            model=options.model,
            candidates=min(MAX_CANDIDATES, target.vocab),
            tokenizer=_TOKENIZER,
            split_special_tokens=load_tokenizer(locate(options.model)).split_special_tokens,
        )

    def export(self, method: UniversalDraft, build: Build) -> UniversalDraft:
        draft = load_draft(method.model, build)
        model = write_propose_graph(method, draft, draft.vocab_size, build)
        load_tokenizer(draft.path).tokenizer.save(str(build.folder / method.tokenizer))
        candidates = min(MAX_CANDIDATES, draft.vocab_size)
        return msgspec.structs.replace(method, candidates=candidates, draft=model, model=model.source)

    def compare(self, method: UniversalDraft, run: Verification) -> Iterator[tuple[Array, Array]]:
        draft = method.written_draft
        target = run.bundle.tokenizer()
        tokenizer = run.bundle.tokenizer(method.tokenizer, split_special_tokens=method.split_special_tokens)
        texts = [list(tokenizer.encode(target.decode(text)).ids) for text in run.texts]
        # With its own tokens it is an ordinary draft model.
        draft_model = DraftModel(model=method.model, draft=draft, candidates=method.candidates, trees=method.trees)
        return compare_chain(draft_model, run, run.source(method), texts, draft.vocab_size)


EXPORTER = UniversalDraftExporter()
