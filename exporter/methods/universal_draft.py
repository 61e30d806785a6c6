"""A smaller model with another tokenizer in a bundle: as a draft model, with its tokenizer beside it."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from specexport.checkpoints.checkpoint import load_tokenizer
from specexport.contract.methods.draft_model import DraftModel
from specexport.contract.methods.universal_draft import UniversalDraft
from specexport.exporter.drafts import load_draft
from specexport.exporter.methods import Agreement, Build, Verification
from specexport.exporter.methods.draft_model import ChainDraftExporter, write_propose_graph
from specexport.graphs.propose import MAX_CANDIDATES

_TOKENIZER = "draft/tokenizer.json"


class UniversalDraftExporter(ChainDraftExporter[UniversalDraft]):
    """It proposes text, and so all of its tokens."""

    stage: ClassVar[str | None] = "draft"

    def export(self, method: UniversalDraft, build: Build) -> UniversalDraft:
        draft = load_draft(method.model, build)
        model = write_propose_graph(method, draft, draft.vocab_size, build)
        own = load_tokenizer(draft.path)
        own.tokenizer.save(str(build.folder / _TOKENIZER))
        candidates = min(MAX_CANDIDATES, draft.vocab_size)
        return msgspec.structs.replace(
            method,
            candidates=candidates,
            draft=model,
            model=model.source,
            tokenizer=_TOKENIZER,
            split_special_tokens=own.split_special_tokens,
        )

    def compare(self, method: UniversalDraft, run: Verification) -> tuple[str, Agreement] | None:
        (draft,) = method.models.values()
        target = run.bundle.tokenizer()
        own = run.bundle.tokenizer(method.tokenizer, split_special_tokens=method.split_special_tokens)
        texts = [list(own.encode(target.decode(text)).ids) for text in run.texts]
        # In its own tokens it is a draft model like any other.
        alone = DraftModel(model=method.model, draft=draft, candidates=method.candidates, trees=method.trees)
        return self.compare_with(alone, run, run.source(method), texts=texts, vocab=draft.vocab_size, layers=None)


EXPORTER = UniversalDraftExporter()
