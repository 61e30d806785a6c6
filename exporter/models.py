"""The models of a bundle, each from its checkpoint to its folder: a stage of a build."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import msgspec
import onnx_ir as ir

from specexport.checkpoints import parity as check
from specexport.checkpoints.checkpoint import (
    Checkpoint,
    TokenizerFiles,
    load_checkpoint,
    load_tokenizer,
)
from specexport.checkpoints.medusa import load_medusa
from specexport.checkpoints.mlp_speculator import (
    SpeculatorOutline,
    as_checkpoint,
    load_speculator,
    require_fit,
)
from specexport.contract.errors import BuildError
from specexport.contract.methods import (
    DraftModel,
    Medusa,
    MedusaDraft,
    Method,
    MlpSpeculator,
    SelfDraft,
    UniversalDraft,
)
from specexport.contract.model import LoweredAs, Model, Strict
from specexport.contract.shapes import ShapePoint
from specexport.exporter import compose, methods, points, quality, trace
from specexport.exporter.layout import BuildPlan, speculator_outline
from specexport.exporter.options import BuildOptions
from specexport.exporter.weights import QUANTIZED
from specexport.exporter.writing import Part, Progress, write_models
from specexport.graphs.layers import first_layers
from specexport.graphs.medusa import MedusaHeads
from specexport.graphs.propose import MAX_CANDIDATES

DEFAULT_MAX_SEQ_LEN = 2048


class WrittenTarget(Strict, frozen=True):
    """What the stage that writes the target leaves to those after it."""

    model: Model
    self_draft: SelfDraft | None
    medusa: Medusa | None
    eos_token_ids: tuple[int, ...]
    generation: dict[str, float]
    max_seq_len: int


class WrittenDraft(Strict, frozen=True):
    """What the stage that writes the draft leaves."""

    method: Method


def target_stage(folder: Path, options: BuildOptions, tokenizer: TokenizerFiles, progress: Progress) -> WrittenTarget:
    """Loads, checks, traces and writes the target."""
    progress("loading the target", 0, 1)
    target = load_checkpoint(options.target)
    progress("loading the target", 1, 1)
    heads = _heads(options.medusa, target)
    if (outline := speculator_outline(options)) is not None:
        require_fit(outline, hidden=_hidden_size(target), vocab=target.vocab_size)
    max_seq_len = _max_seq_len(options, target)
    layout = BuildPlan.of(options, target.vocab_size, target.parameters, max_seq_len)
    sample = tokenizer.tokenizer.encode(quality.SAMPLE).ids
    exact = quality.reference(target, sample) if options.precision in QUANTIZED and sample else None
    at = points.of_target(layout.plan, layout.batches, layout.caches, layout.widths)
    model, self_draft = _export_target(
        folder, target, heads, options, layout.plan, at, layout.batches, layout.caches, progress
    )
    eos, generation = target.eos_token_ids, target.generation
    medusa = _medusa(options, heads, layout.plan, target.vocab_size) if heads is not None else None
    del target, heads
    gc.collect()
    if exact is not None:
        model = _with_logits_error(folder, model, options.lowering, exact, progress)
    return WrittenTarget(
        model=model,
        self_draft=self_draft,
        medusa=medusa,
        eos_token_ids=eos,
        generation=generation,
        max_seq_len=max_seq_len,
    )


def draft_stage(
    folder: Path, options: BuildOptions, source: str, target: WrittenTarget, layout: BuildPlan, progress: Progress
) -> WrittenDraft:
    """Loads, checks, traces and writes the draft."""
    progress("loading the draft", 0, 1)
    draft = load_checkpoint(source)
    progress("loading the draft", 1, 1)
    if draft.max_positions < target.max_seq_len:
        raise BuildError(
            f"max_seq_len is {target.max_seq_len}, but the draft {draft.source} was made for {draft.max_positions} "
            f"positions; pass --max-seq-len {draft.max_positions} or choose another draft"
        )
    # A draft with a tokenizer of its own proposes text, and so all of its tokens.
    vocab = min(draft.vocab_size, target.model.vocab_size) if options.draft is not None else draft.vocab_size
    return WrittenDraft(
        method=_export_draft(folder, draft, options, layout.plan, vocab, layout.batches, layout.caches, progress)
    )


def speculator_stage(
    folder: Path,
    outline: SpeculatorOutline,
    options: BuildOptions,
    target: WrittenTarget,
    layout: BuildPlan,
    progress: Progress,
) -> MlpSpeculator:
    """Loads, traces and writes the target's MLP speculator."""
    progress("loading the speculator", 0, 1)
    stages = load_speculator(outline)
    # Nobody would read what those behind the deepest tree say.
    stages.keep_first(max(tree.depth for tree in layout.plan["mlp_speculator"]))
    checkpoint = as_checkpoint(outline, str(options.mlp_speculator), stages, target.model.max_positions)
    progress("loading the speculator", 1, 1)
    progress("tracing the speculator", 0, 1)
    model = _traced(checkpoint, lambda: trace.trace_speculator(stages, options.lowering))
    progress("tracing the speculator", 1, 1)
    (draft,) = write_models(
        folder / "speculator",
        [Part("propose", model, points.of_speculator(layout.plan, layout.batches), (), checkpoint.parameters)],
        checkpoint,
        options.proposing,
        None,
        progress,
    )
    return MlpSpeculator(
        trees=tuple(tree.choices for tree in layout.plan["mlp_speculator"]),
        candidates=min(MAX_CANDIDATES, outline.vocab),
        stages=len(stages),
        hidden=outline.hidden,
        draft=draft,
    )


def _max_seq_len(options: BuildOptions, target: Checkpoint) -> int:
    if options.max_seq_len is None:
        return min(DEFAULT_MAX_SEQ_LEN, target.max_positions)
    if options.max_seq_len > target.max_positions:
        raise BuildError(
            f"max_seq_len is {options.max_seq_len}, but {target.source} was made for {target.max_positions} positions; "
            f"pass --max-seq-len {target.max_positions} or less"
        )
    return options.max_seq_len


def _export_target(
    folder: Path,
    target: Checkpoint,
    heads: MedusaHeads | None,
    options: BuildOptions,
    plan: methods.Plan,
    at: tuple[ShapePoint, ...],
    batches: tuple[int, ...],
    caches: tuple[int, ...],
    progress: Progress,
) -> tuple[Model, SelfDraft | None]:
    """The target, and its first layers as a draft where they are asked for."""
    progress("checking the target's lowering", 0, 1)
    check.same_as_eager(target, options.lowering)
    embedding_size = None
    if options.inputs_embeds:
        check.same_as_eager(target, options.lowering, embeds=True)
        embedding_size = int(target.model.get_input_embeddings().weight.shape[1])
    progress("checking the target's lowering", 1, 1)
    progress("tracing the target", 0, 1)
    model = _traced(
        target,
        lambda: trace.trace_step(
            target.model,
            target.cache,
            heads,
            methods.candidates(target.vocab_size),
            options.mlp_speculator is not None,
            options.lowering,
            embedding_size,
        ),
    )
    graphs = [Part("step", model, at, target.cache, target.parameters)]
    if options.self_draft_layers is not None:
        graphs.append(_self_draft(target, options, plan, batches, caches))
    progress("tracing the target", 1, 1)
    info, *rest = write_models(
        folder / "target",
        graphs,
        target,
        options.stored,
        options.proposing,
        progress,
    )
    info = msgspec.structs.replace(info, embedding_size=embedding_size)
    if options.self_draft_layers is None:
        return info, None
    return info, SelfDraft(
        trees=tuple(tree.choices for tree in plan["self_draft"]),
        candidates=min(MAX_CANDIDATES, target.vocab_size),
        draft=rest[0],
        layers=options.self_draft_layers,
    )


def _self_draft(
    target: Checkpoint,
    options: BuildOptions,
    plan: methods.Plan,
    batches: tuple[int, ...],
    caches: tuple[int, ...],
) -> Part:
    """The propose graph of the target's first layers."""
    count = options.self_draft_layers
    assert count is not None
    cache = target.cache[:count]
    try:
        with first_layers(target.model, count):
            parameters = sum(parameter.numel() for parameter in target.model.parameters())
            one_pass = _traced(
                target,
                lambda: trace.trace_draft_pass(
                    target.model,
                    cache,
                    target.vocab_size,
                    target.input_vocab,
                    target.max_positions,
                    options.lowering,
                ),
            )
    except ValueError as error:
        raise BuildError(f"self_draft_layers is {count}, but of {target.source}: {error}") from error
    at = points.of_draft(plan, "self_draft", batches, caches)
    return Part("self_draft", compose.propose_graph(one_pass, cache, options.lowering), at, cache, parameters)


def _with_logits_error(
    folder: Path, model: Model, lowering: LoweredAs, exact: quality.Reference, progress: Progress
) -> Model:
    progress("measuring the target's rounding", 0, 1)
    found = quality.logits_error(folder / model.graph.master, lowering, model, exact)
    progress("measuring the target's rounding", 1, 1)
    if found is None:
        return model
    error, same = found
    precision = msgspec.structs.replace(model.precision, logits_rms_error=error, same_choice=same)
    return msgspec.structs.replace(model, precision=precision)


def _heads(source: str | None, model: Checkpoint) -> MedusaHeads | None:
    """The Medusa heads of a model."""
    if source is None:
        return None
    return load_medusa(Path(source).expanduser(), hidden=_hidden_size(model), vocab=model.vocab_size)


def _hidden_size(checkpoint: Checkpoint) -> int:
    """H, of what the language-model head reads."""
    return int(checkpoint.model.get_output_embeddings().weight.shape[1])


def _medusa(options: BuildOptions, heads: MedusaHeads, plan: methods.Plan, vocab: int) -> Medusa:
    return Medusa(
        trees=tuple(tree.choices for tree in plan["medusa"]),
        candidates=methods.candidates(vocab),
        heads=len(heads),
        source=str(Path(str(options.medusa)).resolve()),
        weights=options.proposing.kind,
        parameters=sum(parameter.numel() for parameter in heads.parameters()),
    )


def _export_draft(
    folder: Path,
    draft: Checkpoint,
    options: BuildOptions,
    plan: methods.Plan,
    vocab_size: int,
    batches: tuple[int, ...],
    caches: tuple[int, ...],
    progress: Progress,
) -> DraftModel | MedusaDraft:
    heads = _heads(options.draft_medusa, draft)
    progress("checking the draft's lowering", 0, 1)
    check.same_as_eager(draft, options.lowering)
    progress("checking the draft's lowering", 1, 1)

    def export(name: str, model: ir.Model, at: tuple[ShapePoint, ...]) -> Model:
        progress("tracing the draft", 1, 1)
        (info,) = write_models(
            folder / "draft",
            [Part(name, model, at, draft.cache, draft.parameters)],
            draft,
            options.proposing,
            None,
            progress,
        )
        return info

    progress("tracing the draft", 0, 1)
    if heads is None:
        universal = options.universal_draft is not None
        trees = plan["universal_draft" if universal else "draft_model"]
        one_pass = _traced(
            draft,
            lambda: trace.trace_draft_pass(
                draft.model, draft.cache, vocab_size, draft.input_vocab, draft.max_positions, options.lowering
            ),
        )
        made = DraftModel(
            trees=tuple(tree.choices for tree in trees),
            candidates=min(MAX_CANDIDATES, vocab_size),
            draft=export(
                "propose",
                compose.propose_graph(one_pass, draft.cache, options.lowering),
                points.of_draft(plan, "universal_draft" if universal else "draft_model", batches, caches),
            ),
        )
        if not universal:
            return made
        load_tokenizer(draft.path).tokenizer.save(str(folder / "draft" / "tokenizer.json"))
        return UniversalDraft(**msgspec.structs.asdict(made), tokenizer="draft/tokenizer.json")
    trees, known = plan["medusa_draft"], methods.candidates(vocab_size)
    model = _traced(
        draft,
        lambda: trace.trace_candidates(
            draft.model, draft.cache, heads, known, vocab_size, draft.input_vocab, options.lowering
        ),
    )
    return MedusaDraft(
        trees=tuple(tree.choices for tree in trees),
        candidates=known,
        heads=len(heads),
        source=str(Path(str(options.draft_medusa)).resolve()),
        draft=export("step", model, points.of_draft_with_heads(plan, batches, caches)),
    )


def _traced(checkpoint: Checkpoint, tracer: Callable[[], ir.Model]) -> ir.Model:
    try:
        return tracer()
    except BuildError:
        raise
    except Exception as error:  # torch.export raises many unrelated types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BuildError(
            f"{checkpoint.source}: model family '{checkpoint.family}' cannot be traced into a static graph: {reason}"
        ) from error
