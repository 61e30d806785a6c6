"""``specexport build``: from checkpoints to a bundle."""

from __future__ import annotations

import datetime
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch

from specexport.contract.engines import ProgramGraph
from specexport.contract.errors import BuildError
from specexport.contract.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    FileEntry,
    GenerationDefaults,
    Manifest,
    TokenizerInfo,
)
from specexport.contract.methods import (
    DraftModel,
    Hypothesis,
    Medusa,
    MedusaDraft,
    Method,
    MlpSpeculator,
    Ngram,
    SelfDraft,
    Suffix,
    UniversalDraft,
)
from specexport.contract.model import CacheLayer, Graph, LoweredAs, Model, PointGraph, PrecisionInfo, Strict
from specexport.contract.reading import file_entry, read_manifest, write_manifest
from specexport.contract.shapes import ShapePoint, batch_points, cache_buckets
from specexport.exporter import check, compose, methods, points, quality, static, trace
from specexport.exporter.checkpoint import (
    TRANSFORMERS_VERSION,
    Checkpoint,
    TokenizerFiles,
    load_checkpoint,
    load_tokenizer,
    require_same_tokenizer,
)
from specexport.exporter.engines.bundle import CompileReport, compile_bundle
from specexport.exporter.engines.library import load_library
from specexport.exporter.engines.program import write_program
from specexport.exporter.folders import written_beside
from specexport.exporter.locate import locate
from specexport.exporter.medusa import HeadsOutline, load_medusa, read_outline
from specexport.exporter.mlp_speculator import (
    SpeculatorOutline,
    as_checkpoint,
    load_speculator,
    read_speculator,
    require_fit,
)
from specexport.exporter.options import BuildOptions
from specexport.exporter.stages import RECORDS, Stages
from specexport.exporter.weights import QUANTIZED, Precision, WeightsFile, WeightsReport
from specexport.graphs.layers import first_layers
from specexport.graphs.medusa import MedusaHeads
from specexport.graphs.propose import MAX_CANDIDATES

DEFAULT_MAX_SEQ_LEN = 2048

Progress = Callable[[str, int, int], None]
"""Called with a step's name, how much of it is done, and how much there is in all."""


def build(
    options: BuildOptions, progress: Progress | None = None, compiled: Callable[[CompileReport], None] | None = None
) -> Path:
    """Builds a bundle.

    It is written beside its place and renamed at the end, so that a build that fails or is killed leaves nothing half
    written there.

    Args:
        options: what to build.
        progress: see :data:`Progress`.
        compiled: called with what became of the engines, if the bundle is to have some.

    Returns:
        The bundle's folder.

    Raises:
        BuildError: something about the checkpoints, the options or the output folder is wrong.
    """
    report = progress or (lambda *_: None)
    output = options.output
    if output.exists() and not options.overwrite:
        raise BuildError(f"{output}: exists already; choose another folder or pass --overwrite to replace it")
    if output.exists() and not (output / MANIFEST_NAME).is_file():
        raise BuildError(f"{output}: exists and is not a bundle (no {MANIFEST_NAME}); not replacing it")
    if options.engines is not None:
        load_library(options.engines.runtime)  # whether it is there should not be found out at the end
    with written_beside(output, resume=options.resume) as folder:
        stages = Stages(folder, _built_with())
        _fill(folder, options, stages, report)
        if options.engines is not None:
            found = compile_bundle(folder, options.engines, report)
            if compiled is not None:
                compiled(found)
        stages.close()
    return output


class _Target(Strict, frozen=True):
    """What the stage that writes the target leaves to those after it."""

    model: Model
    self_draft: SelfDraft | None
    medusa: Medusa | None
    eos_token_ids: tuple[int, ...]
    generation: dict[str, float]
    max_seq_len: int


class _Draft(Strict, frozen=True):
    """What the stage that writes the draft leaves."""

    method: Method


@dataclass(frozen=True)
class _Layout:
    """The trees and shapes of a bundle, which follow from the options and a few numbers of the target."""

    plan: methods.Plan
    text_only: tuple[Method, ...]
    widths: frozenset[int]
    batches: tuple[int, ...]
    caches: tuple[int, ...]

    @classmethod
    def of(cls, options: BuildOptions, vocab: int, parameters: int, max_seq_len: int) -> _Layout:
        heads, draft_heads = _outline(options.medusa), _outline(options.draft_medusa)
        plan = methods.plan(options, heads, draft_heads, _speculator(options), vocab)
        text_only = tuple(_text_only(options, plan, parameters))
        widths = frozenset(width for method in text_only for width in method.widths())
        batches = batch_points(options.max_batch_size)
        caches = cache_buckets(max_seq_len, max(*points.verify_widths(plan, batches, widths), points.PREFILL_CHUNK))
        return cls(plan, text_only, widths, batches, caches)


def _built_with() -> dict[str, str]:
    return {"torch": str(torch.__version__), "transformers": TRANSFORMERS_VERSION, "onnx": onnx.__version__}


def _target_stage(folder: Path, options: BuildOptions, tokenizer: TokenizerFiles, progress: Progress) -> _Target:
    """Loads, checks, traces and writes the target."""
    progress("loading the target", 0, 1)
    target = load_checkpoint(options.target)
    progress("loading the target", 1, 1)
    heads = _heads(options.medusa, target)
    if (outline := _speculator(options)) is not None:
        require_fit(outline, hidden=_hidden_size(target), vocab=target.vocab_size)
    max_seq_len = _max_seq_len(options, target)
    layout = _Layout.of(options, target.vocab_size, target.parameters, max_seq_len)
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
    return _Target(
        model=model,
        self_draft=self_draft,
        medusa=medusa,
        eos_token_ids=eos,
        generation=generation,
        max_seq_len=max_seq_len,
    )


def _draft_stage(
    folder: Path, options: BuildOptions, source: str, target: _Target, layout: _Layout, progress: Progress
) -> _Draft:
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
    return _Draft(
        method=_export_draft(folder, draft, options, layout.plan, vocab, layout.batches, layout.caches, progress)
    )


def _fill(folder: Path, options: BuildOptions, stages: Stages, progress: Progress) -> None:
    path = locate(options.target)
    tokenizer = load_tokenizer(path)
    if options.draft is not None:
        draft_path = locate(options.draft)
        require_same_tokenizer(tokenizer.tokenizer, load_tokenizer(draft_path).tokenizer, path, draft_path)
    target = stages.run("target", _Target, lambda: _target_stage(folder, options, tokenizer, progress))
    layout = _Layout.of(options, target.model.vocab_size, target.model.parameters, target.max_seq_len)
    made: list[Method] = []
    source = options.draft or options.universal_draft
    if source is not None:
        drafted = stages.run("draft", _Draft, lambda: _draft_stage(folder, options, source, target, layout, progress))
        made.append(drafted.method)
    if target.self_draft is not None:
        made.append(target.self_draft)
    if target.medusa is not None:
        made.append(target.medusa)
    if (outline := _speculator(options)) is not None:
        made.append(
            stages.run(
                "speculator",
                MlpSpeculator,
                lambda: _speculator_stage(folder, outline, options, target, layout, progress),
            )
        )
    made += layout.text_only

    (folder / "tokenizer").mkdir()
    tokenizer.tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    if tokenizer.chat_template is not None:
        (folder / "tokenizer" / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
    program: tuple[ProgramGraph, ...] = ()
    if options.backend != "onnxruntime":
        progress("tracing the step program", 0, 1)
        program = write_program(folder, made, target.model.cache, options.lowering)
        progress("tracing the step program", 1, 1)
    from specexport import __version__

    manifest = Manifest(
        format_version=FORMAT_VERSION,
        specexport_version=__version__,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        built_with=_built_with(),
        backend=options.backend,
        lowering=options.lowering,
        max_seq_len=target.max_seq_len,
        prefill_chunk=points.PREFILL_CHUNK,
        batch_sizes=layout.batches,
        target=target.model,
        methods=tuple(made),
        tokenizer=TokenizerInfo(
            file="tokenizer/tokenizer.json",
            eos_token_ids=target.eos_token_ids,
            special_tokens=tokenizer.special_tokens,
            chat_template="tokenizer/chat_template.jinja" if tokenizer.chat_template is not None else None,
        ),
        generation=_generation(target.generation, options),
        files=_file_entries(folder, stages.files, progress),
        program=program,
    )
    write_manifest(folder, manifest)
    read_manifest(folder)


def _generation(defaults: dict[str, float], options: BuildOptions) -> GenerationDefaults:
    values: dict[str, float | int] = {
        **defaults,
        "posterior_threshold": options.posterior_threshold,
        "posterior_alpha": options.posterior_alpha,
    }
    if "top_k" in values:
        values["top_k"] = int(values["top_k"])
    return GenerationDefaults(**values)  # type: ignore[arg-type]


def _max_seq_len(options: BuildOptions, target: Checkpoint) -> int:
    if options.max_seq_len is None:
        return min(DEFAULT_MAX_SEQ_LEN, target.max_positions)
    if options.max_seq_len > target.max_positions:
        raise BuildError(
            f"max_seq_len is {options.max_seq_len}, but {target.source} was made for {target.max_positions} positions; "
            f"pass --max-seq-len {target.max_positions} or less"
        )
    return options.max_seq_len


def _outline(source: str | None) -> HeadsOutline | None:
    return read_outline(Path(source).expanduser()) if source is not None else None


def _heads(source: str | None, model: Checkpoint) -> MedusaHeads | None:
    """The Medusa heads of a model."""
    if source is None:
        return None
    return load_medusa(Path(source).expanduser(), hidden=_hidden_size(model), vocab=model.vocab_size)


def _medusa(options: BuildOptions, heads: MedusaHeads, plan: methods.Plan, vocab: int) -> Medusa:
    return Medusa(
        trees=tuple(tree.choices for tree in plan["medusa"]),
        candidates=methods.candidates(vocab),
        heads=len(heads),
        source=str(Path(str(options.medusa)).resolve()),
        weights=options.proposing_precision,
        parameters=sum(parameter.numel() for parameter in heads.parameters()),
    )


def _speculator(options: BuildOptions) -> SpeculatorOutline | None:
    return read_speculator(options.mlp_speculator) if options.mlp_speculator is not None else None


def _speculator_stage(
    folder: Path,
    outline: SpeculatorOutline,
    options: BuildOptions,
    target: _Target,
    layout: _Layout,
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
    (draft,) = _write_models(
        folder / "speculator",
        [_Part("propose", model, points.of_speculator(layout.plan, layout.batches), (), checkpoint.parameters)],
        checkpoint,
        options.proposing_precision,
        None,
        options.weights_a_scale,
        progress,
    )
    return MlpSpeculator(
        trees=tuple(tree.choices for tree in layout.plan["mlp_speculator"]),
        candidates=min(MAX_CANDIDATES, outline.vocab),
        stages=len(stages),
        hidden=outline.hidden,
        draft=draft,
    )


def _hidden_size(checkpoint: Checkpoint) -> int:
    """H, of what the language-model head reads."""
    return int(checkpoint.model.get_output_embeddings().weight.shape[1])


def _text_only(options: BuildOptions, plan: methods.Plan, parameters: int) -> list[Method]:
    """The methods that need no model but the target."""
    made: list[Method] = []
    if options.ngram:
        made.append(
            Ngram(
                trees=tuple(tree.choices for tree in plan["ngram"]),
                prompt_lookup_max=options.prompt_lookup_max,
                prompt_lookup_min=options.prompt_lookup_min,
            )
        )
    if options.suffix:
        made.append(
            Suffix(
                trees=tuple(tree.choices for tree in plan["suffix"]),
                max_spec_factor=methods.MAX_SPEC_FACTOR,
                min_token_prob=methods.MIN_TOKEN_PROB,
            )
        )
    if options.hypothesis:
        made.append(Hypothesis(trees=tuple(tree.choices for tree in plan["hypothesis"])))
    if options.lookahead is not None:
        made.append(methods.lookahead(options.lookahead, options.lookahead_seeding, parameters))
    return made


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
    graphs = [_Part("step", model, at, target.cache, target.parameters)]
    if options.self_draft_layers is not None:
        graphs.append(_self_draft(target, options, plan, batches, caches))
    progress("tracing the target", 1, 1)
    info, *rest = _write_models(
        folder / "target",
        graphs,
        target,
        options.precision,
        options.proposing_precision,
        options.weights_a_scale,
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
) -> _Part:
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
    return _Part("self_draft", compose.propose_graph(one_pass, cache, options.lowering), at, cache, parameters)


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
        (info,) = _write_models(
            folder / "draft",
            [_Part(name, model, at, draft.cache, draft.parameters)],
            draft,
            options.proposing_precision,
            None,
            options.weights_a_scale,
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


@dataclass(frozen=True)
class _Part:
    """A traced graph of a checkpoint: all of its layers or the first ones.

    Attributes:
        name: of its files.
        model: the master.
        at: where it runs.
        cache: its attention layers.
        parameters: how many it has.
    """

    name: str
    model: ir.Model
    at: tuple[ShapePoint, ...]
    cache: tuple[trace.CacheShape, ...]
    parameters: int


def _write_models(
    folder: Path,
    parts: list[_Part],
    checkpoint: Checkpoint,
    precision: Precision,
    heads: Precision | None,
    block_size: int | None,
    progress: Progress,
) -> list[Model]:
    """Writes one weights file, masters and static graphs into ``folder`` and describes them."""
    folder.mkdir()
    role = folder.name
    total = 4 * checkpoint.parameters
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done = min(total, done + size)
        progress(f"writing the {role}'s weights ({precision})", done, total)

    reports = []
    with WeightsFile(folder / "weights.bin", advance) as weights:
        for part in parts:
            weights.externalize(part.model.graph, precision, block_size, heads)
            reports.append(weights.report)
            weights.report = WeightsReport()
    progress(f"writing the {role}'s weights ({precision})", total, total)
    count, pinned, made = sum(len(part.at) for part in parts), 0, []
    for part, report in zip(parts, reports, strict=True):
        passes.RemoveUnusedNodesPass()(part.model)
        master = folder / f"{part.name}.onnx"
        ir.save(part.model, master)
        graphs = []
        for point in part.at:
            file = folder / f"{part.name}.{point}.onnx"
            static.pin(master, point, file)
            graphs.append(PointGraph(point=point, file=f"{role}/{file.name}"))
            pinned += 1
            progress(f"pinning the {role}'s shape points", pinned, count)
        made.append(
            Model(
                family=checkpoint.family,
                source=str(checkpoint.path.resolve()) if Path(checkpoint.source).is_dir() else checkpoint.source,
                parameters=part.parameters,
                vocab_size=checkpoint.vocab_size,
                max_positions=checkpoint.max_positions,
                precision=_precision_info(precision, block_size, report),
                cache=tuple(
                    CacheLayer(heads=c.heads, key_size=c.key_size, value_size=c.value_size) for c in part.cache
                ),
                weights=f"{role}/weights.bin",
                graph=Graph(master=f"{role}/{part.name}.onnx", points=tuple(graphs)),
            )
        )
    return made


def _precision_info(precision: Precision, block_size: int | None, report: WeightsReport) -> PrecisionInfo:
    quantized = precision in QUANTIZED
    return PrecisionInfo(
        weights=precision,
        compute="fp32",
        cache="fp32",
        block_size=block_size if quantized and precision != "fp8" else None,
        weight_rms_error=report.rms_error if quantized else None,
        not_quantized=report.left,
    )


def _file_entries(folder: Path, known: Sequence[FileEntry], progress: Progress) -> tuple[FileEntry, ...]:
    """Entries of every file; ``known`` are those of files that stages hashed already."""
    entries = {entry.path: entry for entry in known}
    files = sorted(path for path in folder.rglob("*") if path.is_file() and RECORDS not in path.parts)
    for index, path in enumerate(files):
        name = path.relative_to(folder).as_posix()
        if name not in entries:
            entries[name] = file_entry(folder, name)
        progress("hashing files", index + 1, len(files))
    return tuple(entry for _, entry in sorted(entries.items()))
