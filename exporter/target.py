"""Builds the target, from its checkpoint to its folder in the bundle."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import onnx_ir as ir
import torch

from specexport.contract import tensors
from specexport.contract.errors import BackendError, BuildError
from specexport.contract.methods import Method, MethodOptions, not_a_chain, with_draft, with_trees
from specexport.contract.model import Model, RankFiles, StateLayer, StoredAs, with_rows
from specexport.contract.tree import TokenTree
from specexport.contract.values import counted
from specexport.exporter import graph_checks, trace
from specexport.exporter.build_state import Build, BuildPlan, WrittenTarget
from specexport.exporter.calibration import MIN_TOKENS, calibrate, calibration_text
from specexport.exporter.checkpoints import parity
from specexport.exporter.checkpoints.checkpoint import Checkpoint, load_checkpoint
from specexport.exporter.checkpoints.config import precision_of_matrices, quantized_in, read_model_config
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.checkpoints.sizes import require_positions
from specexport.exporter.checkpoints.split import require_split_parity, split_checkpoint
from specexport.exporter.method import TargetInfo, exporter_of
from specexport.exporter.options import DEFAULT_BLOCK_SIZE, QUANTIZED, BuildOptions
from specexport.exporter.passes.ranks import cut
from specexport.exporter.writing import TracedGraph, tracing, write_models
from specexport.graphs.step import Addition, StepModule

DEFAULT_MAX_SEQ_LEN = 2048


def for_checkpoint(options: BuildOptions) -> BuildOptions:
    """The options with a definite precision: by default the target's own, or fp32 if backends would compute in it.

    On CPUs the weights of every precision are multiplied in fp32, elsewhere those in bf16 and fp16 are not. Matrices
    that a quantized target holds in floating point keep their type. The portable lowering turns int4 into int8, as
    opset 20 has no four-bit integers.
    """
    if options.precision not in (None, "stored"):
        return options
    path = locate(options.target)
    format_and_kind = quantized_in(path)
    if format_and_kind is None:
        as_stored = options.on_cpu or options.precision == "stored"
        return msgspec.structs.replace(options, precision=precision_of_matrices(path) if as_stored else "fp32")
    halves: dict[object, StoredAs] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    unquantized = halves.get(read_model_config(path).dtype, "fp32")
    kind = format_and_kind[1]
    if kind == "stored":
        if options.on_cpu:
            return msgspec.structs.replace(options, precision="stored")
        if options.precision == "stored":
            raise BuildError(
                f"precision is 'stored' with lowering {options.lowering} and backend {options.backend}, which have no "
                "such scales as GGUF; choose another precision, or the native lowering and backend onnxruntime",
                param="precision",
            )
        return msgspec.structs.replace(options, precision="int8")
    kind = "int8" if options.lowering == "portable" and kind == "int4" else kind
    return msgspec.structs.replace(options, precision=kind, rest=unquantized)


def build_target(build: Build) -> WrittenTarget:
    """Loads, checks, traces, rewrites and writes the target, and measures the effect of its quantization."""
    options = build.options
    calibration = read_calibration_text(build)  # before the model, whose loading may take long
    with build.during("loading the target"):
        checkpoint = load_checkpoint(options.target)
    plan = plan_target(options, checkpoint)
    sample = run_sample(build, checkpoint)
    with build.during("comparing the target with transformers"):
        check(options, checkpoint)
    written = write_target(build, plan, checkpoint, calibration)
    del checkpoint  # as its written graph and drafts are loaded next
    gc.collect()
    return measure(build, written, sample)


def read_calibration_text(build: Build) -> list[int]:
    """The tokens of the calibration text; none if the options do not calibrate."""
    path = build.options.calibration_data
    text = calibration_text(path) if build.options.calibrated else ""
    tokens = build.tokenizer.tokenizer.encode(text).ids
    if path is not None and len(tokens) < MIN_TOKENS:
        raise BuildError(f"{path}: {counted(len(tokens), 'token')} of calibration data; expected at least {MIN_TOKENS}")
    return tokens


def plan_target(options: BuildOptions, checkpoint: Checkpoint) -> BuildPlan:
    """Decides trees, widths and cache sizes."""
    hidden = int(checkpoint.model.get_output_embeddings().weight.shape[1])
    max_seq_len = _max_seq_len(options, checkpoint)
    info = TargetInfo(
        checkpoint.vocab_size,
        checkpoint.parameters,
        checkpoint.layers,
        hidden,
        checkpoint.path,
        options.draft_storage.kind,
        max_seq_len,
        "cpu" if options.backend == "onnxruntime" else "gpu",
    )
    methods = tuple(exporter_of(method).plan(method, info) for method in options.methods)
    if checkpoint.states:
        methods = tuple(_chains(method, options.methods[at], checkpoint) for at, method in enumerate(methods))
        if options.backend != "onnxruntime":
            raise BuildError(
                f"{checkpoint.source}: model family '{checkpoint.family}' has layers without attention, which run "
                "only on CPUs so far; build it with --backend onnxruntime"
            )
    return BuildPlan.of(methods, options, max_seq_len)


def _chains(method: Method, options: MethodOptions, target: Checkpoint) -> Method:
    """A method with chains instead of trees, for a target with layers without attention."""
    branching = [tree for tree in method.token_trees() if not_a_chain(tree)]
    if (branching and options.trees) or method.own_widths:
        raise BuildError(
            f"{target.source}: model family '{target.family}' has layers without attention, which read only chains, "
            f"and '{method.name}' verifies trees with branches; ask for chains (--num-speculative-tokens), or leave it "
            "out"
        )
    chains = dict.fromkeys(TokenTree.chain(tree.depth + 1) for tree in method.token_trees())
    return with_trees(method, tuple(chains)) if branching else method


def _max_seq_len(options: BuildOptions, target: Checkpoint) -> int:
    if options.max_seq_len is None:
        return min(DEFAULT_MAX_SEQ_LEN, target.max_positions)
    require_positions(options.max_seq_len, target.max_positions, target.source)
    return options.max_seq_len


def run_sample(build: Build, checkpoint: Checkpoint) -> graph_checks.Reference | None:
    """Runs the checkpoint over the text on which quantization is measured; None if nothing is quantized."""
    if build.options.precision not in QUANTIZED:
        return None
    with build.during("running the target over a sample text"):
        tokens = build.tokenizer.tokenizer.encode(graph_checks.default_text()).ids
        return graph_checks.reference(checkpoint, tokens)


def check(options: BuildOptions, checkpoint: Checkpoint) -> None:
    """Compares our lowering, and split models, with plain transformers."""
    parity.require_parity(checkpoint, options.lowering)
    if options.inputs_embeds:
        parity.require_parity(checkpoint, options.lowering, embeds=True)
    if options.tensor_parallel > 1:
        require_split_parity(checkpoint, options.tensor_parallel)


def write_target(build: Build, plan: BuildPlan, checkpoint: Checkpoint, calibration: Sequence[int]) -> WrittenTarget:
    """Traces the step graph with the methods' additions, and writes it; a split target is traced rank by rank."""
    options, ranks = build.options, build.options.tensor_parallel
    if options.calibrated:  # first, as matrices that are stored alike are joined when they are traced
        block_size = options.target_storage.block_size or DEFAULT_BLOCK_SIZE
        checkpoint = calibrate(checkpoint, calibration, block_size, build.progress)
    with build.during("tracing the target"):
        added = [exporter_of(method).add_to_target(method, checkpoint, options, plan) for method in plan.methods]
        graphs = [graph for graph in added if isinstance(graph, TracedGraph)]
        if graphs and ranks > 1:
            raise BuildError(
                f"tensor_parallel is {ranks}, and a method drafts with layers of the target, which are split; choose a "
                "separate draft",
                param="tensor_parallel",
            )
        step = _StepTracer(options, plan, checkpoint, [each for each in added if isinstance(each, Addition)])
        if ranks == 1:
            graphs = [step.trace(checkpoint), *graphs]
    if ranks > 1:
        models = iter([_write_ranks(build, step)])
    else:
        storage = (options.target_storage, options.draft_storage)
        models = iter(write_models(build, "target", "target", graphs, checkpoint, *storage))
    model = next(models)
    methods = tuple(
        with_draft(method, next(models)) if isinstance(addition, TracedGraph) else method
        for method, addition in zip(plan.methods, added, strict=True)
    )
    return WrittenTarget(
        model=model,
        plan=msgspec.structs.replace(plan, methods=methods),
        eos_token_ids=checkpoint.eos_token_ids,
        generation=checkpoint.generation,
    )


@dataclass(frozen=True)
class _StepTracer:
    """Traces the step graph of a target, or of a rank's share of it."""

    options: BuildOptions
    plan: BuildPlan
    target: Checkpoint
    additions: list[Addition]

    @property
    def embedding_size(self) -> int | None:
        """H if prompts may hold embeddings; otherwise None."""
        table = self.target.model.get_input_embeddings().weight
        return int(table.shape[1]) if self.options.inputs_embeds else None

    @property
    def state_layers(self) -> tuple[StateLayer, ...]:
        """The layers without attention, with room for the rows of the widest step."""
        return with_rows(list(self.target.states.values()), self.plan.widths[-1])

    def trace(self, share: Checkpoint) -> TracedGraph:
        outputs = [tensors.LOGITS, *(name for method in self.plan.methods for name in method.target_outputs)]
        states = dict(zip(self.target.states, self.state_layers, strict=True))
        module = StepModule(share.model, self.additions, outputs, self.options.lowering, states)
        with tracing(share):
            graph = trace.trace_step(module, share.cache, self.embedding_size)
        points, parameters = self.plan.target_points(), self.target.parameters
        return TracedGraph(graph, points, share.cache, parameters, self.state_layers, self.embedding_size)


def _write_ranks(build: Build, step: _StepTracer) -> Model:
    """Writes each rank's share of the target, cut where the ranks combine their parts."""
    models, files = [], []
    options, checkpoint = build.options, step.target
    for rank in range(options.tensor_parallel):
        role, name = f"target.rank-{rank}", f"target's rank {rank}"
        graph = step.trace(split_checkpoint(checkpoint, rank, options.tensor_parallel))
        (model,) = write_models(build, role, name, [graph], checkpoint, options.target_storage, options.draft_storage)
        segments = {f"{role}.{at:03}.onnx": segment for at, segment in enumerate(cut(graph.model))}
        for name, segment in segments.items():
            ir.save(segment, build.folder / name)
        models.append(model)
        files.append(RankFiles(weights=model.weights, master=model.graph.master, segments=tuple(segments)))
    return msgspec.structs.replace(models[0], cache=checkpoint.cache, ranks=tuple(files))


def measure(build: Build, written: WrittenTarget, sample: graph_checks.Reference | None) -> WrittenTarget:
    """Measures the effect of quantization on the logits; skipped without onnxruntime, which builds do not require."""
    model = written.model
    if sample is not None:
        with build.during("measuring the effect of quantization"), contextlib.suppress(BackendError):
            quality = graph_checks.measure(build.folder.joinpath, build.options.lowering, model, sample)
            model = msgspec.structs.replace(model, precision=msgspec.structs.replace(model.precision, quality=quality))
    return msgspec.structs.replace(written, model=model)
