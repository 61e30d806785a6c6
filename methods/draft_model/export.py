"""Exports draft models: checks them, writes the propose graph, and compares it with the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
from tokenizers import Tokenizer

from specexport.contract.errors import BuildError
from specexport.contract.methods import Method
from specexport.contract.model import with_rows
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
from specexport.exporter.checkpoints.sizes import require_positions, require_whole_model
from specexport.exporter.checkpoints.tokenizer import load_tokenizer, require_same_tokenizer
from specexport.exporter.method import Array, MethodExporter, TargetInfo, Verification, vocabulary
from specexport.graphs.propose import MAX_CANDIDATES, DraftPass
from specexport.methods.draft_model import ChainDraft, DraftModel, DraftModelOptions


class DraftModelExporter(MethodExporter[DraftModelOptions, DraftModel]):
    """Exports a smaller model with the target's tokenizer."""

    def check(self, options: DraftModelOptions, target: Path, tokenizer: Tokenizer) -> None:
        require_tokenizer(options.model, tokenizer)

    def resolve(self, options: DraftModelOptions, target: TargetInfo) -> DraftModel:
        vocab = min(target.vocab, vocabulary_of(options.model, target.max_seq_len))
        return DraftModel(trees=(), model=options.model, candidates=min(MAX_CANDIDATES, vocab))

    def load(self, method: DraftModel, build: Build) -> Checkpoint:
        return load_draft(method, method.model, build)

    def trace(self, method: DraftModel, draft: Checkpoint, build: Build) -> ir.Model:
        return trace_chain(draft, min(draft.vocab_size, build.vocab_size), build)

    def compare(self, method: DraftModel, run: Verification) -> Iterator[tuple[Array, Array]]:
        vocab = vocabulary(run.bundle.manifest, method.written_draft)
        return compare_chain(method, run, run.source(method), run.texts, vocab)


def require_tokenizer(source: str, tokenizer: Tokenizer) -> None:
    """Refuses another method's checkpoint, and a draft whose tokenizer differs from the target's."""
    path = locate(source)
    require_whole_model(path)
    require_same_tokenizer(tokenizer, load_tokenizer(path).tokenizer, source)


def vocabulary_of(source: str, max_seq_len: int) -> int:
    """The number of a draft's tokens; refuses one that is for shorter texts, before the target is written."""
    config = read_model_config(locate(source))
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int):
        require_positions(max_seq_len, positions, f"the draft {source}")
    return int(config.vocab_size)


def load_draft(method: Method, source: str, build: Build) -> Checkpoint:
    """Loads a draft, and checks that our lowering computes the same logits."""
    with build.during("loading the draft"):
        draft = load_checkpoint(source)
    if draft.states and build.options.backend != "onnxruntime":
        raise BuildError(
            f"{draft.source}: model family '{draft.family}' has layers without attention, which run only on CPUs "
            "so far; choose another draft, or build it with --backend onnxruntime"
        )
    require_positions(build.plan.max_seq_len, draft.max_positions, f"the draft {source}")
    with build.during("comparing the draft with transformers"):
        parity.require_parity(draft, build.options.lowering)
    # Enough even if the text has not grown before the next call, so that no token is read twice.
    back = build.plan.depths(method)[-1] + 1
    layers = with_rows(list(draft.states.values()), back, back)
    return dataclasses.replace(draft, states=dict(zip(draft.states, layers, strict=True)))


def trace_chain(draft: Checkpoint, vocab: int, build: Build) -> ir.Model:
    """Traces a pass of a draft, and puts it into a loop; only the first ``vocab`` tokens are proposed."""
    lowering, input_vocab = build.options.lowering, draft.input_vocab if draft.input_vocab < build.vocab_size else None
    draft_pass = DraftPass(draft.model, vocab, input_vocab, draft.max_positions, draft.states)
    return compose.propose_graph(trace.trace_draft_pass(draft_pass, draft.cache, lowering), draft.cache, lowering)


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
