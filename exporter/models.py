"""The target of a bundle, from its checkpoint to its folder: the first stage of a build."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import msgspec
import onnx_ir as ir
import torch

from specexport.contract import tensors
from specexport.contract.errors import BackendError, BuildError
from specexport.contract.manifest import GenerationDefaults
from specexport.contract.methods import Method, MethodOptions, not_a_chain, with_draft, with_trees
from specexport.contract.model import LoweredAs, Model, RankFiles, Strict
from specexport.contract.states import with_rows
from specexport.contract.tree import TokenTree
from specexport.exporter import quality, trace
from specexport.exporter.build_plan import BuildPlan
from specexport.exporter.calibration import calibrate, calibration_text
from specexport.exporter.checkpoints import parity
from specexport.exporter.checkpoints.checkpoint import Checkpoint, TokenizerFiles, load_checkpoint
from specexport.exporter.checkpoints.config import quantized_in, read_model_config
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.checkpoints.split import same_when_split, split_checkpoint
from specexport.exporter.cut import cut
from specexport.exporter.drafts import traced
from specexport.exporter.method import TargetOutline, exporter_of
from specexport.exporter.options import DEFAULT_BLOCK_SIZE, QUANTIZED, BuildOptions, Precision
from specexport.exporter.writing import Part, Progress, write_models
from specexport.graphs.step import StepModule

DEFAULT_MAX_SEQ_LEN = 2048


class WrittenTarget(Strict, frozen=True):
    """What the stage that writes the target leaves to those after it.

    Attributes:
        plan: of the whole build; its methods have what was written for them together with the target.
    """

    model: Model
    plan: BuildPlan
    eos_token_ids: tuple[int, ...]
    generation: GenerationDefaults


def for_checkpoint(options: BuildOptions) -> BuildOptions:
    """Options with a precision: of a target that is quantized already, its own, if no other was asked for.

    What it has not quantized is then stored as it has it. Lowered portably, int4 becomes int8: opset 20 has no integers
    of four bits.

    Raises:
        BuildError: the target is not there, or nothing here reads its format.
    """
    if options.precision not in (None, "stored"):
        return options
    path = locate(options.target)
    format_and_kind = quantized_in(path)
    halves: dict[object, Precision] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    rest = halves.get(read_model_config(path).dtype, "fp32")
    if format_and_kind is None:
        return msgspec.structs.replace(options, precision=rest if options.precision == "stored" else "fp32")
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
    return msgspec.structs.replace(options, precision=kind, rest=rest)


def target_stage(
    folder: Path,
    options: BuildOptions,
    tokenizer: TokenizerFiles,
    progress: Progress,
) -> WrittenTarget:
    """Loads, checks, plans, traces and writes the target.

    Args:
        folder: the bundle's.
        options: what to build.
        tokenizer: the target's.
        progress: see :data:`Progress`.
    """
    progress("loading the target", 0, 1)
    target = load_checkpoint(options.target)
    progress("loading the target", 1, 1)
    hidden = int(target.model.get_output_embeddings().weight.shape[1])
    outline = TargetOutline(
        target.vocab_size, target.parameters, target.layers, hidden, target.path, options.proposing.kind
    )
    text = calibration_text(options.calibration_data) if options.calibrated else ""  # what is wrong with it shows now
    methods = tuple(exporter_of(method).plan(method, outline) for method in options.methods)
    if target.states:
        methods = tuple(_chains_alone(method, options.methods[at], target) for at, method in enumerate(methods))
        if options.backend != "onnxruntime":
            raise BuildError(
                f"{target.source}: model family '{target.family}' has layers without attention, which run on the CPU "
                "alone yet; build it with --backend onnxruntime"
            )
    plan = BuildPlan.of(methods, options, _max_seq_len(options, target))
    exact = None
    if options.precision in QUANTIZED:
        progress("reading the target's sample text", 0, 1)
        exact = quality.reference(target, tokenizer.tokenizer.encode(quality.default_text()).ids)
        progress("reading the target's sample text", 1, 1)
    calibration = tokenizer.tokenizer.encode(text).ids
    written, methods = _write(folder, target, options, plan, calibration, progress)
    eos, generation = target.eos_token_ids, target.generation
    del target
    gc.collect()
    if exact is not None:
        written = _with_quality(folder, written, options.lowering, exact, progress)
    plan = msgspec.structs.replace(plan, methods=methods)
    return WrittenTarget(model=written, plan=plan, eos_token_ids=eos, generation=generation)


def _chains_alone(method: Method, asked: MethodOptions, target: Checkpoint) -> Method:
    """A method for a target whose states go through a text token by token: chains, in the place of its own trees.

    Raises:
        BuildError: trees with branches were asked for, or it has no others.
    """
    branching = [tree for tree in method.token_trees() if not_a_chain(tree)]
    if (branching and asked.trees) or method.own_widths:
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
            f"max_seq_len is {options.max_seq_len}, but {target.source} was made for {target.max_positions} positions; "
            f"pass --max-seq-len {target.max_positions} or less"
        )
    return options.max_seq_len


def _write(
    folder: Path,
    target: Checkpoint,
    options: BuildOptions,
    plan: BuildPlan,
    calibration: list[int],
    progress: Progress,
) -> tuple[Model, tuple[Method, ...]]:
    """The target, and the methods with what is written together with it."""
    progress("checking the target's lowering", 0, 1)
    parity.same_as_eager(target, options.lowering)
    embedding_size = None
    if options.inputs_embeds:
        parity.same_as_eager(target, options.lowering, embeds=True)
        embedding_size = int(target.model.get_input_embeddings().weight.shape[1])
    if options.tensor_parallel > 1:
        same_when_split(target, options.tensor_parallel)
    progress("checking the target's lowering", 1, 1)
    progress("tracing the target", 0, 1)
    added = [exporter_of(method).add_to_target(method, target, options, plan) for method in plan.methods]
    additions = [one.outputs for one in added if one is not None and one.outputs is not None]
    outputs = [tensors.LOGITS, *(name for method in plan.methods for name in method.target_outputs)]
    layers = with_rows(list(target.states.values()), plan.widths[-1])
    states = dict(zip(target.states, layers, strict=True))

    def step(of: Checkpoint) -> Part:
        module = StepModule(of.model, additions, outputs, options.lowering, states)
        graph = traced(of, lambda: trace.trace_step(module, of.cache, embedding_size))
        return Part("step", graph, plan.target_points(), of.cache, target.parameters)

    def write(role: str, written: list[Part]) -> list[Model]:
        return write_models(
            folder, role, written, rounded, options.stored, options.proposing, options.lowering, progress
        )

    rounded = target
    beside = [one.graph for one in added if one is not None and one.graph is not None]
    if options.tensor_parallel > 1:
        if beside:
            raise BuildError(
                f"tensor_parallel is {options.tensor_parallel}, and a method drafts with layers of the target, which "
                "are split; choose a draft of its own"
            )
        model, rest = _write_ranks(folder, target, options.tensor_parallel, step, write), []
    else:
        first = step(target)
        progress("tracing the target", 1, 1)
        if options.calibrated:
            rounded = calibrate(target, calibration, options.stored.block_size or DEFAULT_BLOCK_SIZE, progress)
        model, *rest = write("target", [first, *beside])
    models = iter(rest)
    methods = tuple(
        method if one is None or one.graph is None else with_draft(method, next(models))
        for method, one in zip(plan.methods, added, strict=True)
    )
    return msgspec.structs.replace(model, embedding_size=embedding_size, states=layers), methods


def _write_ranks(
    folder: Path,
    target: Checkpoint,
    ranks: int,
    step: Callable[[Checkpoint], Part],
    write: Callable[[str, list[Part]], list[Model]],
) -> Model:
    """The target in as many parts, each cut where the ranks meet."""
    models, made = [], []
    for rank in range(ranks):
        role = f"target/rank-{rank}"
        part = step(split_checkpoint(target, rank, ranks))
        (model,) = write(role, [part])
        segments = {f"{role}/{at:03}.onnx": segment for at, segment in enumerate(cut(part.model))}
        for name, segment in segments.items():
            ir.save(segment, folder / name)
        models.append(model)
        made.append(RankFiles(weights=model.weights, master=model.graph.master, segments=tuple(segments)))
    return msgspec.structs.replace(models[0], cache=target.cache, ranks=tuple(made))


def _with_quality(
    folder: Path, model: Model, lowering: LoweredAs, exact: quality.Reference, progress: Progress
) -> Model:
    progress("measuring the target's rounding", 0, 1)
    try:
        measured = quality.measure(folder.joinpath, lowering, model, exact)
    except BackendError:
        return model  # builds need no onnxruntime
    finally:
        progress("measuring the target's rounding", 1, 1)
    return msgspec.structs.replace(model, precision=msgspec.structs.replace(model.precision, quality=measured))
