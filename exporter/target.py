"""The stages that build the target, from its checkpoint to its folder in the bundle."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass, field

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
from specexport.exporter.calibration import LEAST_TOKENS, calibrate, calibration_text
from specexport.exporter.checkpoints import parity
from specexport.exporter.checkpoints.checkpoint import Checkpoint, load_checkpoint
from specexport.exporter.checkpoints.config import quantized_in, read_model_config
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.checkpoints.split import same_when_split, split_checkpoint
from specexport.exporter.method import TargetInfo, exporter_of
from specexport.exporter.options import DEFAULT_BLOCK_SIZE, QUANTIZED, BuildOptions
from specexport.exporter.passes.ranks import cut
from specexport.exporter.pipeline import Stage, run_stages
from specexport.exporter.writing import TracedGraph, trace_checkpoint, write_models
from specexport.graphs.step import Addition, StepModule

DEFAULT_MAX_SEQ_LEN = 2048


def for_checkpoint(options: BuildOptions) -> BuildOptions:
    """The options with a precision: by default that of a quantized target, or else fp32.

    Matrices that a quantized target holds in floating point keep their type. The portable lowering turns int4 into
    int8, as opset 20 has no four-bit integers.

    Raises:
        BuildError: the target does not exist, or its format is unsupported.
    """
    if options.precision not in (None, "stored"):
        return options
    path = locate(options.target)
    format_and_kind = quantized_in(path)
    halves: dict[object, StoredAs] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    unquantized = halves.get(read_model_config(path).dtype, "fp32")
    if format_and_kind is None:
        return msgspec.structs.replace(options, precision=unquantized if options.precision == "stored" else "fp32")
    kind = format_and_kind[1]
    if kind == "stored":
        if options.on_cpu:
            return msgspec.structs.replace(options, precision="stored")
        if options.precision == "stored":
            raise BuildError(
                f"precision is 'stored' with lowering {options.lowering} and backend {options.backend}, which have no "
                "such scales as GGUF; choose another precision, or the native lowering and backend onnxruntime"
            )
        return msgspec.structs.replace(options, precision="int8")
    kind = "int8" if options.lowering == "portable" and kind == "int4" else kind
    return msgspec.structs.replace(options, precision=kind, rest=unquantized)


@dataclass
class TargetBuild:
    """The target while it is built. Stages set the attributes after ``build``.

    Attributes:
        checkpoint: the loaded model, until it is released.
        calibration: the tokens of the text that it is rounded for; empty if it is not.
        sample: the checkpoint's logits over a sample text; None if nothing is rounded.
        added: what each method adds, in the order of the plan's methods.
        graphs: the step graph, and graphs of methods that share its weights; empty for a split target.
    """

    build: Build
    checkpoint: Checkpoint = field(init=False)
    calibration: list[int] = field(init=False)
    plan: BuildPlan = field(init=False)
    sample: graph_checks.Reference | None = field(init=False)
    added: list[Addition | TracedGraph | None] = field(init=False)
    graphs: list[TracedGraph] = field(init=False)
    written: WrittenTarget = field(init=False)

    @property
    def options(self) -> BuildOptions:
        return self.build.options

    @property
    def embedding_size(self) -> int | None:
        """H if prompts may hold embeddings; otherwise None."""
        if not self.options.inputs_embeds:
            return None
        return int(self.checkpoint.model.get_input_embeddings().weight.shape[1])

    @property
    def state_layers(self) -> tuple[StateLayer, ...]:
        """The layers without attention, with room for the rows of the widest step."""
        return with_rows(list(self.checkpoint.states.values()), self.plan.widths[-1])


def build_target(build: Build) -> WrittenTarget:
    """Runs the target's stages."""
    return run_stages(TargetBuild(build), STAGES, build.progress).written


def load(target: TargetBuild) -> None:
    """Loads the checkpoint."""
    target.checkpoint = load_checkpoint(target.options.target)


def read_calibration_text(target: TargetBuild) -> None:
    """Reads the text to round for, if any: first, as loading a model may take long.

    Raises:
        BuildError: it cannot be read, or is too short.
    """
    path = target.options.calibration_data
    text = calibration_text(path) if target.options.calibrated else ""
    target.calibration = target.build.tokenizer.tokenizer.encode(text).ids
    if path is not None and len(target.calibration) < LEAST_TOKENS:
        raise BuildError(
            f"{path}: {counted(len(target.calibration), 'token')} of calibration data; expected some thousand, and at "
            f"least {LEAST_TOKENS}"
        )


def plan(target: TargetBuild) -> None:
    """Decides trees, widths and cache sizes."""
    options, checkpoint = target.options, target.checkpoint
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
    )
    methods = tuple(exporter_of(method).plan(method, info) for method in options.methods)
    if checkpoint.states:
        methods = tuple(_chains(method, options.methods[at], checkpoint) for at, method in enumerate(methods))
        if options.backend != "onnxruntime":
            raise BuildError(
                f"{checkpoint.source}: model family '{checkpoint.family}' has layers without attention, which run on "
                "the CPU alone yet; build it with --backend onnxruntime"
            )
    target.plan = BuildPlan.of(methods, options, max_seq_len)


def _chains(method: Method, options: MethodOptions, target: Checkpoint) -> Method:
    """A method with chains instead of trees, for a target with layers that read text token by token."""
    branching = [tree for tree in method.token_trees() if not_a_chain(tree)]
    if (branching and options.trees) or method.own_widths:
        raise BuildError(
            f"{target.source}: model family '{target.family}' has layers without attention, which read chains alone, "
            f"and '{method.name}' verifies trees with branches; ask for chains (--num-speculative-tokens), or leave it "
            "out"
        )
    chains = dict.fromkeys(TokenTree.chain(tree.depth + 1) for tree in method.token_trees())
    return with_trees(method, tuple(chains)) if branching else method


def _max_seq_len(options: BuildOptions, target: Checkpoint) -> int:
    if options.max_seq_len is None:
        return min(DEFAULT_MAX_SEQ_LEN, target.max_positions)
    if options.max_seq_len > target.max_positions:
        raise BuildError(
            f"max_seq_len (max_model_len) is {options.max_seq_len}, but {target.source} was made for "
            f"{target.max_positions} positions; expected at most {target.max_positions}"
        )
    return options.max_seq_len


def run_sample(target: TargetBuild) -> None:
    """Runs the checkpoint over the text that rounding is measured on."""
    target.sample = None
    if target.options.precision in QUANTIZED:
        with target.build.during("reading the target's sample text"):
            tokens = target.build.tokenizer.tokenizer.encode(graph_checks.default_text()).ids
            target.sample = graph_checks.reference(target.checkpoint, tokens)


def check(target: TargetBuild) -> None:
    """Compares our lowering with plain transformers."""
    parity.same_as_eager(target.checkpoint, target.options.lowering)
    if target.options.inputs_embeds:
        parity.same_as_eager(target.checkpoint, target.options.lowering, embeds=True)
    if target.options.tensor_parallel > 1:
        same_when_split(target.checkpoint, target.options.tensor_parallel)


def trace_target(target: TargetBuild) -> None:
    """Traces the step graph with the methods' additions; a split target is traced rank by rank as it is written."""
    options = target.options
    target.added = [
        exporter_of(method).add_to_target(method, target.checkpoint, options, target.plan)
        for method in target.plan.methods
    ]
    drafts = [added for added in target.added if isinstance(added, TracedGraph)]
    if drafts and options.tensor_parallel > 1:
        raise BuildError(
            f"tensor_parallel is {options.tensor_parallel}, and a method drafts with layers of the target, which are "
            "split; choose a draft of its own"
        )
    target.graphs = [_step(target, target.checkpoint), *drafts] if options.tensor_parallel == 1 else []


def _step(target: TargetBuild, checkpoint: Checkpoint) -> TracedGraph:
    """The step graph of the target, or of one rank's share of it."""
    additions = [added for added in target.added if isinstance(added, Addition)]
    outputs = [tensors.LOGITS, *(name for method in target.plan.methods for name in method.target_outputs)]
    states = dict(zip(target.checkpoint.states, target.state_layers, strict=True))
    module = StepModule(checkpoint.model, additions, outputs, target.options.lowering, states)
    graph = trace_checkpoint(checkpoint, lambda: trace.trace_step(module, checkpoint.cache, target.embedding_size))
    return TracedGraph("step", graph, target.plan.target_points(), checkpoint.cache, target.checkpoint.parameters)


def round_for_text(target: TargetBuild) -> None:
    """Rounds matrices to int4 for a text, if the options ask for it."""
    if target.options.calibrated:
        block_size = target.options.target_storage.block_size or DEFAULT_BLOCK_SIZE
        target.checkpoint = calibrate(target.checkpoint, target.calibration, block_size, target.build.progress)


def write(target: TargetBuild) -> None:
    """Writes the weights and graphs."""
    options, checkpoint = target.options, target.checkpoint
    if options.tensor_parallel > 1:
        models = iter([_write_ranks(target)])
    else:
        models = iter(
            write_models(
                target.build, "target", target.graphs, checkpoint, options.target_storage, options.draft_storage
            )
        )
    model = next(models)
    methods = tuple(
        with_draft(method, next(models)) if isinstance(added, TracedGraph) else method
        for method, added in zip(target.plan.methods, target.added, strict=True)
    )
    target.written = WrittenTarget(
        model=msgspec.structs.replace(model, embedding_size=target.embedding_size, states=target.state_layers),
        plan=msgspec.structs.replace(target.plan, methods=methods),
        eos_token_ids=checkpoint.eos_token_ids,
        generation=checkpoint.generation,
    )


def _write_ranks(target: TargetBuild) -> Model:
    """Writes each rank's share of the target, cut where the ranks combine their parts."""
    models, files = [], []
    build, options = target.build, target.options
    for rank in range(options.tensor_parallel):
        role = f"target/rank-{rank}"
        graph = _step(target, split_checkpoint(target.checkpoint, rank, options.tensor_parallel))
        (model,) = write_models(build, role, [graph], target.checkpoint, options.target_storage, options.draft_storage)
        segments = {f"{role}/{at:03}.onnx": segment for at, segment in enumerate(cut(graph.model))}
        for name, segment in segments.items():
            ir.save(segment, build.folder / name)
        models.append(model)
        files.append(RankFiles(weights=model.weights, master=model.graph.master, segments=tuple(segments)))
    return msgspec.structs.replace(models[0], cache=target.checkpoint.cache, ranks=tuple(files))


def release(target: TargetBuild) -> None:
    """Releases the checkpoint, as its written graph and drafts are loaded next."""
    del target.checkpoint, target.added, target.graphs
    gc.collect()


def measure(target: TargetBuild) -> None:
    """Measures the effect of rounding on the logits, if onnxruntime is installed, which builds do not require."""
    if target.sample is None:
        return
    model = target.written.model
    with target.build.during("measuring the target's rounding"), contextlib.suppress(BackendError):
        measured = graph_checks.measure(target.build.folder.joinpath, target.options.lowering, model, target.sample)
        model = msgspec.structs.replace(model, precision=msgspec.structs.replace(model.precision, quality=measured))
    target.written = msgspec.structs.replace(target.written, model=model)


STAGES: tuple[Stage[TargetBuild], ...] = (
    Stage(read_calibration_text, ensures=("calibration",)),
    Stage(load, ensures=("checkpoint",), title="loading the target"),
    Stage(plan, needs=("checkpoint",), ensures=("plan",)),
    Stage(run_sample, needs=("checkpoint",), ensures=("sample",)),
    Stage(check, needs=("checkpoint",), title="checking the target's lowering"),
    Stage(trace_target, needs=("checkpoint", "plan"), ensures=("added", "graphs"), title="tracing the target"),
    Stage(round_for_text, needs=("checkpoint", "calibration"), ensures=("checkpoint",)),
    Stage(write, needs=("checkpoint", "plan", "added", "graphs"), ensures=("written",)),
    Stage(release, needs=("checkpoint", "added", "graphs")),
    Stage(measure, needs=("written", "sample"), ensures=("written",)),
)
