"""Exports draft models: checks them, writes the propose graph, and compares it with the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Tokenizer

from specexport.contract.errors import BuildError
from specexport.contract.model import Model, with_rows
from specexport.exporter import compose, trace
from specexport.exporter.build_state import Build
from specexport.exporter.checkpoints import parity
from specexport.exporter.checkpoints.checkpoint import (
    Checkpoint,
    clamp_tokens,
    load_checkpoint,
    load_reference,
    reference_logits,
)
from specexport.exporter.checkpoints.config import read_model_config
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.checkpoints.sizes import require_whole_model
from specexport.exporter.checkpoints.tokenizer import load_tokenizer, require_same_tokenizer
from specexport.exporter.method import Array, MethodExporter, TargetInfo, Verification, vocabulary
from specexport.exporter.writing import tracing, write_draft
from specexport.graphs.propose import MAX_CANDIDATES, DraftPass
from specexport.methods.draft_model import ChainDraft, DraftModel, DraftModelOptions


class DraftModelExporter(MethodExporter[DraftModelOptions, DraftModel]):
    """Exports a smaller model with the target's tokenizer."""

    def check(self, options: DraftModelOptions, target: Path, tokenizer: Tokenizer) -> None:
        require_tokenizer(options.model, tokenizer)

    def resolve(self, options: DraftModelOptions, target: TargetInfo) -> DraftModel:
        require_length(options.model, target.max_seq_len)
        return DraftModel(trees=(), model=options.model, candidates=min(MAX_CANDIDATES, target.vocab))

    def export(self, method: DraftModel, build: Build) -> DraftModel:
        draft = load_draft(method.model, build)
        vocab = min(draft.vocab_size, build.vocab_size)
        model = write_propose_graph(method, draft, vocab, build)
        return msgspec.structs.replace(method, candidates=min(MAX_CANDIDATES, vocab), draft=model, model=model.source)

    def compare(self, method: DraftModel, run: Verification) -> Iterator[tuple[Array, Array]]:
        vocab = vocabulary(run.bundle.manifest, method.written_draft)
        return compare_chain(method, run, run.source(method), run.texts, vocab)


def require_tokenizer(source: str, tokenizer: Tokenizer) -> None:
    """Refuses another method's checkpoint, and a draft whose tokenizer differs from the target's."""
    path = locate(source)
    require_whole_model(path)
    require_same_tokenizer(tokenizer, load_tokenizer(path).tokenizer, source)


def require_length(source: str, max_seq_len: int) -> None:
    """Refuses a draft whose configuration is for shorter texts, before the target is written."""
    positions = getattr(read_model_config(locate(source)), "max_position_embeddings", None)
    if isinstance(positions, int):
        _require_positions(source, positions, max_seq_len)


def _require_positions(source: str, positions: int, max_seq_len: int) -> None:
    if positions < max_seq_len:
        raise BuildError(
            f"max_seq_len (max_model_len) is {max_seq_len}, but the draft {source} was made for {positions} positions; "
            f"set it to at most {positions}, or choose another draft",
            param="max_seq_len",
        )


def load_draft(source: str, build: Build) -> Checkpoint:
    """Loads a draft, and checks that our lowering computes the same logits."""
    with build.during("loading the draft"):
        draft = load_checkpoint(source)
    if draft.states and build.options.backend != "onnxruntime":
        raise BuildError(
            f"{draft.source}: model family '{draft.family}' has layers without attention, which run only on CPUs "
            "so far; choose another draft, or build it with --backend onnxruntime"
        )
    _require_positions(source, draft.max_positions, build.plan.max_seq_len)
    with build.during("comparing the draft with transformers"):
        parity.require_parity(draft, build.options.lowering)
    return draft


def write_propose_graph(method: ChainDraft, draft: Checkpoint, vocab: int, build: Build) -> Model:
    """Traces a pass of a draft, puts it into a loop, and writes it; only the first ``vocab`` tokens are proposed."""
    lowering, points = build.options.lowering, build.plan.propose_points(method)
    # Enough even if the text has not grown before the next call, so that no token is read twice.
    back = max(point.drafts for point in points) + 1
    layers = with_rows(list(draft.states.values()), back, back)
    states = dict(zip(draft.states, layers, strict=True))
    input_vocab = draft.input_vocab if draft.input_vocab < build.vocab_size else None
    draft_pass = DraftPass(draft.model, vocab, input_vocab, draft.max_positions, states)
    with build.during("tracing the draft"), tracing(draft):
        graph = compose.propose_graph(trace.trace_draft_pass(draft_pass, draft.cache, lowering), draft.cache, lowering)
    return msgspec.structs.replace(write_draft(draft, build, graph, points, method), states=layers)


def compare_chain(
    method: ChainDraft,
    run: Verification,
    checkpoint: Path,
    texts: list[list[int]],
    vocab: int,
    layers: int | None = None,
) -> Iterator[tuple[Array, Array]]:
    """Checks that each draft token is the most probable one after those before it, by the model in ``checkpoint``.

    ``vocab`` is the number of tokens that may be proposed, ``layers`` how many of the model's first layers draft; None
    for all. See :meth:`MethodExporter.compare`.
    """
    drafts, model = run.drafted(method, texts), load_reference(checkpoint, method.written_draft, layers)
    for text, drafted in drafts:
        tokens = clamp_tokens([*text, *drafted[:-1]], model)
        yield reference_logits(model, tokens)[len(text) - 1 :, :vocab], np.array(drafted)


EXPORTER = DraftModelExporter()
