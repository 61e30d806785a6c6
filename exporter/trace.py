"""Traces the modules of ``specexport.graphs`` into ``onnx_ir`` models with symbolic B, T, S: the masters."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch

from specexport.contract import tensors
from specexport.contract.engines import AcceptRule
from specexport.contract.model import OPSETS, CacheLayer, LoweredAs, StateLayer
from specexport.contract.shapes import ShapePoint
from specexport.contract.signature import states
from specexport.contract.states import CELL, cell_rows
from specexport.contract.tensors import cache_names, returned_names, returned_state_names
from specexport.exporter.checkpoints.quiet import quiet, uncollected
from specexport.exporter.kept_traces import kept_trace
from specexport.exporter.passes.epsilon import keep_epsilons
from specexport.exporter.passes.linear import canonical_weights, merge_linear
from specexport.exporter.passes.names import name_weights
from specexport.exporter.passes.rms_norm import fuse_rms_norm
from specexport.exporter.simplify import simplify
from specexport.exporter.sparing import sparing
from specexport.graphs.accept import AcceptModule, GreedyModule, TypicalModule
from specexport.graphs.ops import translations
from specexport.graphs.program import CommitModule, FillModule, StagesFillModule
from specexport.graphs.propose import DraftPass
from specexport.graphs.rotary import fused_rotary
from specexport.graphs.step import StepModule

PROGRAM_OPSET = 18
"""Of the accept and fill graphs. ONNX Runtime registers CUDA kernels by operator version, and of this one it has those
of all their operators; Equal changed in 19, ReduceMax and ReduceMin in 20, and kernels came late."""

# Sizes to trace with: all different from one another and from 0 and 1, which torch.export would specialise on.
B, T, S, DONE = 2, 5, 24, 4

Inputs = dict[str | tuple[str, ...], tuple[Any, Any]]
"""A module's inputs by name: an example of each and its symbolic dimensions (``torch.export.Dim``). Where an input is a
list of tensors, its key is their names."""


def trace_step(module: StepModule, shapes: Sequence[CacheLayer], embedding_size: int | None = None) -> ir.Model:
    """The step graph of a target, or of a draft with Medusa heads (``specexport.contract.tensors``).

    With an ``embedding_size`` H it reads embeddings in the place of tokens too.
    """
    b, t, r = (torch.export.Dim(name) for name in "BTR")
    position_ids = torch.arange(T)[None].repeat(B, 1)
    inputs: Inputs = {
        tensors.INPUT_IDS: (torch.ones(B, T, dtype=torch.int64), {0: b, 1: t}),
        tensors.POSITION_IDS: (position_ids, {0: b, 1: t}),
        tensors.TREE_MASK: (torch.ones(B, T, T, dtype=torch.bool).tril(), {0: b, 1: t, 2: t}),
        tensors.PAST_LENGTH: (torch.tensor([3, 6]), {0: b}),
        tensors.LOGITS_ROWS: (torch.tensor([[0, 1, 2]] * B), {0: b, 1: r}),
    }
    layers = list(module.states.values())
    inputs |= cache_inputs(cache_names(len(shapes)), shapes, S, b, "S", _states(layers, b))
    if embedding_size is not None:
        inputs[tensors.INPUTS_EMBEDS] = (torch.zeros(B, T, embedding_size), {0: b, 1: t})
        inputs[tensors.EMBEDS_MASK] = (torch.zeros(B, T, dtype=torch.bool), {0: b, 1: t})
    made = [*module.made, *returned_names(len(shapes), module.lowering), *returned_state_names(layers)]
    return trace_module(module.model, module, inputs, made, module.lowering)


def trace_draft_pass(draft: DraftPass, shapes: Sequence[CacheLayer], lowering: LoweredAs = "native") -> ir.Model:
    """One pass of a draft (:class:`~specexport.graphs.propose.DraftPass`), to be put into a loop.

    Its inputs are the propose graph's; ``row.*`` are the cache rows made so far and not written yet, and alike what
    layers without attention made.
    """
    b, t = torch.export.Dim("B"), torch.export.Dim("T")
    layers = list(draft.states.values())
    rows, more = row_names(len(shapes)), _state_rows(layers, b)
    inputs: Inputs = {
        tensors.INPUT_IDS: (torch.ones(B, T, dtype=torch.int64), {0: b, 1: t}),
        tensors.LAST_ROW: (torch.tensor([1, 2]), {0: b}),
        tensors.UNIFORM: (torch.full((B,), 0.5), {0: b}),
        tensors.PAST_LENGTH: (torch.tensor([3, 6]), {0: b}),
        **sampling_inputs(b),
        **cache_inputs(cache_names(len(shapes)), shapes, S, b, "S", _states(layers, b)),
        **cache_inputs(rows, shapes, DONE, b, "R", more),
    }
    outputs = [*tensors.DRAFTED, *(f"{name}.grown" for name in (*rows, *more))]
    return trace_module(draft.model, draft, inputs, outputs, lowering)


def trace_accept(rule: AcceptRule, max_children: int, candidates: int) -> ir.Model:
    """The accept graph of a rule (see ``specexport.graphs.accept``).

    Only lossless acceptance needs to know the most children of a node and how many tokens q gives probability to.
    """
    nodes, vocab = 5, 40
    b, drafts, v = (torch.export.Dim(name) for name in ("B", "drafts", "V"))
    n = drafts + 1
    inputs: Inputs = {
        tensors.LOGITS: (torch.randn(B, nodes, vocab), {0: b, 1: n, 2: v}),
        tensors.PARENTS: (torch.tensor([[-1, 0, 0, 1, 1]] * B), {0: b, 1: n}),
        tensors.TREE_MASK: (torch.ones(B, nodes, nodes, dtype=torch.bool).tril(), {0: b, 1: n, 2: n}),
        tensors.DRAFT_TOKENS: (torch.ones(B, nodes - 1, dtype=torch.int64), {0: b, 1: drafts}),
    }
    module: torch.nn.Module = GreedyModule()
    if rule == "lossless":
        module = AcceptModule(max_children)
        ids = torch.arange(candidates).repeat(B, nodes - 1, 1)
        inputs[tensors.DRAFT_IDS] = (ids, {0: b, 1: drafts})
        inputs[tensors.DRAFT_PROBS] = (torch.full(ids.shape, 1 / candidates), {0: b, 1: drafts})
        inputs[tensors.UNIFORM] = (torch.full((B, nodes), 0.5), {0: b, 1: n})
        inputs |= sampling_inputs(b)
    elif rule == "typical":
        module = TypicalModule()
        inputs[tensors.UNIFORM] = (torch.full((B, 1), 0.5), {0: b})
        inputs |= sampling_inputs(b)
        inputs |= {name: (torch.full((B,), 0.3), {0: b}) for name in (tensors.THRESHOLD, tensors.ALPHA)}
    outputs = [tensors.NUM_ACCEPTED, tensors.TOKENS, tensors.PATH]
    return trace_module(module, module, inputs, outputs, "native", PROGRAM_OPSET)


def trace_fill(candidates: int, stages: int = 0) -> ir.Model:
    """The fill graph (see ``specexport.graphs.program``); ``candidates`` is M."""
    depth, nodes = 3, 6
    b, drafts = torch.export.Dim("B"), torch.export.Dim("drafts")

    def made(*shape: int) -> list[torch.Tensor]:
        ids = torch.arange(candidates).repeat(*shape, 1)
        return [torch.zeros(shape, dtype=torch.int64), ids, torch.full(ids.shape, 1 / candidates)]

    inputs: Inputs
    if stages:
        rows = [{0: b}] + [{0: b, 1: torch.export.Dim("R")}] * (stages - 1)
        of_stages = zip(*(made(B, depth if stage else 1) for stage in range(stages)), strict=True)
        names = [tuple(tensors.of_stage(kind, stage) for stage in range(stages)) for kind in tensors.DRAFTED]
        inputs = {name: (list(of_kind), rows) for name, of_kind in zip(names, of_stages, strict=True)}
    else:
        k = torch.export.Dim("K")
        inputs = {name: (tensor, {0: k, 1: b}) for name, tensor in zip(tensors.DRAFTED, made(depth, B), strict=True)}
    inputs |= {
        tensors.TREE_ROWS: (torch.ones(B, nodes - 1, dtype=torch.int64), {0: b, 1: drafts}),
        tensors.TREE_RANKS: (torch.zeros(B, nodes - 1, dtype=torch.int64), {0: b, 1: drafts}),
    }
    outputs = [tensors.TREE_TOKENS, tensors.TREE_IDS, tensors.TREE_PROBS]
    module = StagesFillModule() if stages else FillModule()
    return trace_module(module, module, inputs, outputs, "native", PROGRAM_OPSET)


def trace_commit(shapes: Sequence[CacheLayer]) -> ir.Model:
    """The commit graph of a model lowered natively (see ``specexport.graphs.program``)."""
    b, n = torch.export.Dim("B"), torch.export.Dim("N")
    inputs: Inputs = {
        tensors.PAST_LENGTH: (torch.tensor([3, 6]), {0: b}),
        tensors.PATH: (torch.zeros(B, T, dtype=torch.int64), {0: b, 1: n}),
        **cache_inputs(cache_names(len(shapes)), shapes, S, b, "S"),
    }
    module = CommitModule()
    return trace_module(module, module, inputs, returned_names(len(shapes), "native"))


def row_names(layers: int) -> list[str]:
    """The draft pass's new cache rows, ``[row.key.0, row.value.0, ...]``."""
    return [f"row.{kind}.{layer}" for layer in range(layers) for kind in ("key", "value")]


def cache_inputs(
    names: list[str],
    shapes: Sequence[CacheLayer],
    rows: int,
    batch: Any,
    symbol: str,
    more: Mapping[str, tuple[torch.Tensor, Any]] = MappingProxyType({}),
) -> Inputs:
    """Keys and values of every layer, and ``more`` behind them; ``symbol`` names their rows."""
    caches = [torch.zeros(B, s.heads, rows, size) for s in shapes for size in (s.key_size, s.value_size)]
    examples = [*caches, *(example for example, _ in more.values())]
    dims = [*[{0: batch, 2: torch.export.Dim(symbol)}] * len(caches), *(dims for _, dims in more.values())]
    return {(*names, *more): (examples, dims)}


def _state_rows(layers: Sequence[StateLayer], batch: Any) -> dict[str, tuple[torch.Tensor, Any]]:
    """What a pass takes of an earlier one for layers without attention, by name: rows made so far, and states."""
    made: dict[str, tuple[torch.Tensor, Any]] = {}
    for name, spec in states(layers).items():
        sizes, dims = list(spec.shape(ShapePoint(B, T, S))), {0: batch}
        if len(sizes) == 3:
            sizes[1], dims[1] = DONE, torch.export.Dim("R")
        made[name.replace("past_", "row.", 1)] = torch.zeros(sizes), dims
    return made


def _states(layers: Sequence[StateLayer], batch: Any) -> dict[str, tuple[torch.Tensor, Any]]:
    """What a graph takes for layers without attention, by name."""
    made: dict[str, tuple[torch.Tensor, Any]] = {}
    if any(layer.recurrence for layer in layers):
        cells = torch.from_numpy(cell_rows([3, 6], [0, 0], 2 * CELL, 4 * CELL))
        made[tensors.KNOWN_TOKENS] = torch.tensor([1, 2]), {0: batch}
        made[tensors.CELL_ROWS] = cells, {0: torch.export.Dim("C"), 1: batch}
    sizes = ShapePoint(B, T, S)
    return made | {name: (torch.zeros(spec.shape(sizes)), {0: batch}) for name, spec in states(layers).items()}


def sampling_inputs(batch: Any) -> Inputs:
    """The sampling parameters, a number a slot each."""
    return {
        tensors.TEMPERATURE: (torch.ones(B), {0: batch}),
        tensors.TOP_K: (torch.zeros(B, dtype=torch.int64), {0: batch}),
        tensors.TOP_P: (torch.full((B,), 0.9), {0: batch}),
        tensors.MIN_P: (torch.zeros(B), {0: batch}),
    }


@uncollected()
def trace_module(
    model: torch.nn.Module,
    module: torch.nn.Module,
    inputs: Inputs,
    outputs: list[str],
    lowering: LoweredAs = "native",
    opset: int | None = None,
) -> ir.Model:
    """Traces a module.

    Args:
        model: the part of it that has rotary embeddings.
        module: what is traced.
        inputs: see :data:`Inputs`.
        outputs: names.
        lowering: which operators attention is made of.
        opset: None for the lowering's.
    """
    examples, dims = zip(*inputs.values(), strict=True)
    leaves = torch.utils._pytree.tree_leaves(examples)
    names = [name for key in inputs for name in ([key] if isinstance(key, str) else key)]
    # torch.export takes inputs that are one tensor for one input, and leaves the others unread.
    assert len({id(leaf) for leaf in leaves}) == len(leaves) == len(names)
    native = lowering == "native"

    def make() -> ir.Model:
        with (
            quiet(),
            sparing(),
            fused_rotary(model) if native else contextlib.nullcontext(),
            torch.no_grad(),
        ):
            try:
                program = torch.onnx.export(
                    module,
                    examples,
                    dynamo=True,
                    opset_version=opset or OPSETS[lowering],
                    custom_translation_table=translations(),
                    dynamic_shapes=dims,
                    input_names=names,
                    output_names=outputs,
                    optimize=False,
                    verbose=False,
                )
            except torch.onnx.OnnxExporterError as error:
                raise RuntimeError(str(_root_cause(error))) from error
            assert program is not None
            keep_epsilons(program.model)
            simplify(program.model)
        name_weights(program.model, _aliases(module))
        return program.model

    module.eval()
    about = ([(tuple(leaf.shape), leaf.dtype) for leaf in leaves], dims, names, outputs, lowering, opset)
    traced = kept_trace(module, about, make)
    canonical_weights(traced)
    merge_linear(traced)
    if native:
        fuse_rms_norm(traced)
    ir.passes.Sequential(
        passes.CommonSubexpressionEliminationPass(),
        passes.LiftConstantsToInitializersPass(),
        passes.RemoveUnusedNodesPass(),
        passes.ClearMetadataAndDocStringPass(),
        passes.TopologicalSortPass(),
    )(traced)
    return traced


def _aliases(module: torch.nn.Module) -> dict[str, str]:
    """Names of parameters that are tied to earlier ones, and the names of those, under which checkpoints hold them."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if name != first[id(parameter)]}


def _root_cause(error: BaseException) -> BaseException:
    """What torch's exporter wraps in advice to people who call it themselves."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
