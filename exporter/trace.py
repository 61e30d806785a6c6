"""Traces the modules of ``specexport.graphs`` into ``onnx_ir`` models with symbolic B, T, S: the masters."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal

import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from onnxscript import optimizer

from specexport.checkpoints.quiet import quiet
from specexport.contract import tensors
from specexport.contract.model import OPSETS, CacheLayer, LoweredAs
from specexport.contract.tensors import cache_names, returned_names
from specexport.exporter.passes.linear import canonical_weights, transposes_weight
from specexport.exporter.passes.merge_linear import merge_linear
from specexport.exporter.passes.names import name_weights
from specexport.exporter.passes.rms_norm import fuse_rms_norm
from specexport.graphs.accept import AcceptModule, TypicalModule
from specexport.graphs.commit import CommitModule
from specexport.graphs.fill import FillModule
from specexport.graphs.medusa import MedusaHeads
from specexport.graphs.mlp_speculator import SpeculatorModule, SpeculatorStages
from specexport.graphs.ops import translations
from specexport.graphs.propose import DraftPass
from specexport.graphs.rotary import fused_rotary
from specexport.graphs.step import CandidatesModule, StepModule

PROGRAM_OPSET = 18
"""Of the accept and fill graphs. ONNX Runtime registers CUDA kernels by operator version, and of this one it has those
of all their operators; for Equal, ReduceMax and ReduceMin newer ones came late (``docs/gpu.md``)."""

# Sizes to trace with: all different from one another and from 0 and 1, which torch.export would specialise on.
_B, _T, _S, _DONE = 2, 5, 24, 4

_Inputs = dict[str, tuple[torch.Tensor, dict[int, Any]]]
"""Inputs by name: an example of each, and the names of its symbolic dimensions (``torch.export.Dim``)."""


def _cache(shapes: Sequence[CacheLayer], rows: int) -> list[torch.Tensor]:
    return [torch.zeros(_B, s.heads, rows, size) for s in shapes for size in (s.key_size, s.value_size)]


def trace_step(
    model: torch.nn.Module,
    shapes: Sequence[CacheLayer],
    heads: MedusaHeads | None = None,
    candidates: int = 0,
    hidden: bool = False,
    lowering: LoweredAs = "native",
    embedding_size: int | None = None,
) -> ir.Model:
    """The step graph of a target, with Medusa heads and hidden states if wanted (``specexport.contract.tensors``).

    With an ``embedding_size`` H it reads embeddings in the place of tokens too.
    """
    more = {tensors.CANDIDATES: heads is not None, tensors.HIDDEN: hidden}
    outputs = [tensors.LOGITS, *(name for name, wanted in more.items() if wanted)]
    module = StepModule(model, len(shapes), heads, candidates, hidden, lowering)
    return _trace_step(model, module, shapes, outputs, embedding_size)


def trace_candidates(
    model: torch.nn.Module,
    shapes: Sequence[CacheLayer],
    heads: MedusaHeads,
    candidates: int,
    vocab_size: int,
    input_vocab: int,
    lowering: LoweredAs = "native",
) -> ir.Model:
    """The graph of a draft with Medusa heads (:class:`~specexport.graphs.step.CandidatesModule`)."""
    module = CandidatesModule(model, len(shapes), heads, candidates, vocab_size, input_vocab, lowering)
    return _trace_step(model, module, shapes, [tensors.CANDIDATES])


def _trace_step(
    model: torch.nn.Module,
    module: StepModule | CandidatesModule,
    shapes: Sequence[CacheLayer],
    outputs: list[str],
    embedding_size: int | None = None,
) -> ir.Model:
    layers = len(shapes)
    b, t, s, r = (torch.export.Dim(name) for name in "BTSR")
    position_ids = torch.arange(_T)[None].repeat(_B, 1)
    inputs = {
        tensors.INPUT_IDS: (torch.ones(_B, _T, dtype=torch.int64), {0: b, 1: t}),
        tensors.POSITION_IDS: (position_ids, {0: b, 1: t}),
        tensors.TREE_MASK: (torch.ones(_B, _T, _T, dtype=torch.bool).tril(), {0: b, 1: t, 2: t}),
        tensors.PAST_LENGTH: (torch.tensor([3, 6]), {0: b}),
        tensors.LOGITS_ROWS: (torch.tensor([[0, 1, 2]] * _B), {0: b, 1: r}),
    }
    embeds = {
        tensors.INPUTS_EMBEDS: (torch.zeros(_B, _T, embedding_size or 0), {0: b, 1: t}),
        tensors.EMBEDS_MASK: (torch.zeros(_B, _T, dtype=torch.bool), {0: b, 1: t}),
    }
    last = {} if embedding_size is None else embeds
    return _trace(
        model,
        module,
        (*(tensor for tensor, _ in inputs.values()), _cache(shapes, _S), *(tensor for tensor, _ in last.values())),
        (
            *(dims for _, dims in inputs.values()),
            [{0: b, 2: s}] * (2 * layers),
            *(dims for _, dims in last.values()),
        ),
        [*inputs, *cache_names(layers), *last],
        [*outputs, *returned_names(layers, module.lowering)],
        module.lowering,
    )


def _sampling(batch: Any) -> _Inputs:
    """The sampling parameters, a number a slot each."""
    return {
        tensors.TEMPERATURE: (torch.ones(_B), {0: batch}),
        tensors.TOP_K: (torch.zeros(_B, dtype=torch.int64), {0: batch}),
        tensors.TOP_P: (torch.full((_B,), 0.9), {0: batch}),
        tensors.MIN_P: (torch.zeros(_B), {0: batch}),
    }


def trace_draft_pass(
    model: torch.nn.Module,
    shapes: Sequence[CacheLayer],
    vocab_size: int,
    input_vocab: int,
    max_positions: int,
    lowering: LoweredAs = "native",
) -> ir.Model:
    """One pass of a draft (:class:`~specexport.graphs.propose.DraftPass`), to be put into a loop.

    Its inputs are the propose graph's; ``row.*`` are the cache rows made so far and not written yet.
    """
    layers = len(shapes)
    b, t, s, done = (torch.export.Dim(name) for name in ("B", "T", "S", "R"))
    inputs = {
        tensors.INPUT_IDS: (torch.ones(_B, _T, dtype=torch.int64), {0: b, 1: t}),
        tensors.LAST_ROW: (torch.tensor([1, 2]), {0: b}),
        tensors.UNIFORM: (torch.full((_B,), 0.5), {0: b}),
        tensors.PAST_LENGTH: (torch.tensor([3, 6]), {0: b}),
    } | _sampling(b)
    return _trace(
        model,
        DraftPass(model, layers, vocab_size, input_vocab, max_positions),
        (*(tensor for tensor, _ in inputs.values()), _cache(shapes, _S), _cache(shapes, _DONE)),
        (*(dims for _, dims in inputs.values()), [{0: b, 2: s}] * (2 * layers), [{0: b, 2: done}] * (2 * layers)),
        [*inputs, *cache_names(layers), *row_names(layers)],
        [
            tensors.DRAFT_TOKENS,
            tensors.DRAFT_IDS,
            tensors.DRAFT_PROBS,
            *(f"{name}.grown" for name in row_names(layers)),
        ],
        lowering,
    )


def trace_speculator(speculator: SpeculatorStages, lowering: LoweredAs = "native") -> ir.Model:
    """The propose graph of an MLP speculator (:class:`~specexport.graphs.mlp_speculator.SpeculatorModule`)."""
    stages = len(speculator)
    b, t = torch.export.Dim("B"), torch.export.Dim("T")
    levels = (_B, stages, _T)
    inputs = {
        tensors.HIDDEN_STATE: (torch.ones(_B, speculator.hidden), {0: b}),
        tensors.INPUT_IDS: (torch.ones(_B, 1, dtype=torch.int64), {0: b}),
        tensors.LEVEL_PARENTS: (torch.zeros(levels, dtype=torch.int64), {0: b, 2: t}),
        tensors.LEVEL_RANKS: (torch.zeros(levels, dtype=torch.int64), {0: b, 2: t}),
        tensors.UNIFORM: (torch.full(levels, 0.5), {0: b, 2: t}),
    } | _sampling(b)
    outputs = [tensors.of_stage(kind, stage) for stage in range(stages) for kind in tensors.DRAFTED]
    return _trace_named(SpeculatorModule(speculator), inputs, outputs, lowering)


def trace_accept(rule: Literal["lossless", "typical"], max_children: int, candidates: int) -> ir.Model:
    """An accept graph (see ``specexport.graphs.accept``).

    Args:
        rule: greedy and lossless, or typical acceptance.
        max_children: most children a node of any tree has; typical acceptance does not need it.
        candidates: tokens q gives probability to; likewise.
    """
    nodes, vocab = 5, 40
    b, drafts, v = (torch.export.Dim(name) for name in ("B", "drafts", "V"))
    n = drafts + 1
    verified = {
        tensors.LOGITS: (torch.randn(_B, nodes, vocab), {0: b, 1: n, 2: v}),
        tensors.PARENTS: (torch.tensor([[-1, 0, 0, 1, 1]] * _B), {0: b, 1: n}),
        tensors.TREE_MASK: (torch.ones(_B, nodes, nodes, dtype=torch.bool).tril(), {0: b, 1: n, 2: n}),
        tensors.DRAFT_TOKENS: (torch.ones(_B, nodes - 1, dtype=torch.int64), {0: b, 1: drafts}),
    }
    sampling = _sampling(b)
    module: torch.nn.Module
    if rule == "lossless":
        module = AcceptModule(max_children)
        q = {
            tensors.DRAFT_IDS: (torch.arange(candidates).repeat(_B, nodes - 1, 1), {0: b, 1: drafts}),
            tensors.DRAFT_PROBS: (torch.full((_B, nodes - 1, candidates), 1 / candidates), {0: b, 1: drafts}),
            tensors.UNIFORM: (torch.full((_B, nodes), 0.5), {0: b, 1: n}),
        }
        inputs = verified | q | sampling
    else:
        module = TypicalModule()
        thresholds = {name: (torch.full((_B,), 0.3), {0: b}) for name in (tensors.THRESHOLD, tensors.ALPHA)}
        inputs = verified | {tensors.UNIFORM: (torch.full((_B, 1), 0.5), {0: b})} | sampling | thresholds
    return _trace_named(module, inputs, [tensors.NUM_ACCEPTED, tensors.TOKENS, tensors.PATH], opset=PROGRAM_OPSET)


def trace_fill(candidates: int) -> ir.Model:
    """The fill graph (see ``specexport.graphs.fill``); ``candidates`` is M."""
    depth, nodes = 3, 6
    b, k, drafts = (torch.export.Dim(name) for name in ("B", "K", "drafts"))
    ids = torch.arange(candidates).repeat(depth, _B, 1)
    inputs = {
        tensors.DRAFT_TOKENS: (torch.zeros(depth, _B, dtype=torch.int64), {0: k, 1: b}),
        tensors.DRAFT_IDS: (ids, {0: k, 1: b}),
        tensors.DRAFT_PROBS: (torch.full(ids.shape, 1 / candidates), {0: k, 1: b}),
        tensors.TREE_DEPTHS: (torch.ones(_B, nodes - 1, dtype=torch.int64), {0: b, 1: drafts}),
        tensors.TREE_RANKS: (torch.zeros(_B, nodes - 1, dtype=torch.int64), {0: b, 1: drafts}),
    }
    outputs = [tensors.TREE_TOKENS, tensors.TREE_IDS, tensors.TREE_PROBS]
    return _trace_named(FillModule(), inputs, outputs, opset=PROGRAM_OPSET)


def trace_commit(shapes: Sequence[CacheLayer]) -> ir.Model:
    """The commit graph of a model lowered natively (see ``specexport.graphs.commit``)."""
    b, n, s = (torch.export.Dim(name) for name in "BNS")
    module = CommitModule()
    return _trace(
        module,
        module,
        (torch.tensor([3, 6]), torch.zeros(_B, _T, dtype=torch.int64), _cache(shapes, _S)),
        ({0: b}, {0: b, 1: n}, [{0: b, 2: s}] * (2 * len(shapes))),
        [tensors.PAST_LENGTH, tensors.PATH, *cache_names(len(shapes))],
        returned_names(len(shapes), "native"),
    )


def row_names(layers: int) -> list[str]:
    """The draft pass's new cache rows, ``[row.key.0, row.value.0, ...]``."""
    return [f"row.{kind}.{layer}" for layer in range(layers) for kind in ("key", "value")]


def _trace_named(
    module: torch.nn.Module,
    inputs: _Inputs,
    output_names: list[str],
    lowering: LoweredAs = "native",
    opset: int | None = None,
) -> ir.Model:
    """Traces a module whose inputs are single tensors."""
    examples, dims = zip(*inputs.values(), strict=True)
    return _trace(module, module, examples, dims, list(inputs), output_names, lowering, opset)


def _trace(
    model: torch.nn.Module,
    module: torch.nn.Module,
    example: tuple[object, ...],
    dynamic_shapes: tuple[object, ...],
    input_names: list[str],
    output_names: list[str],
    lowering: LoweredAs = "native",
    opset: int | None = None,
) -> ir.Model:
    leaves = torch.utils._pytree.tree_leaves(example)
    # torch.export takes inputs that are one tensor for one input, and leaves the others unread.
    assert len({id(leaf) for leaf in leaves}) == len(leaves) == len(input_names)
    native = lowering == "native"
    with quiet(), fused_rotary(model) if native else contextlib.nullcontext(), torch.no_grad():
        try:
            program = torch.onnx.export(
                module.eval(),
                example,
                dynamo=True,
                opset_version=opset or OPSETS[lowering],
                custom_translation_table=translations(),
                dynamic_shapes=dynamic_shapes,
                input_names=input_names,
                output_names=output_names,
                optimize=False,
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as error:
            raise RuntimeError(str(_root_cause(error))) from error
        assert program is not None
        traced = program.model
        # Else a transposed weight would be a constant without a name; canonical_weights transposes them all.
        optimizer.optimize_ir(traced, should_fold=lambda node: False if transposes_weight(node) else None)
    name_weights(traced, _aliases(module))
    canonical_weights(traced)
    merge_linear(traced)
    if native:
        fuse_rms_norm(traced)
    for clean in (
        passes.CommonSubexpressionEliminationPass(),
        passes.LiftConstantsToInitializersPass(),
        passes.RemoveUnusedNodesPass(),
        passes.ClearMetadataAndDocStringPass(),
        passes.TopologicalSortPass(),
    ):
        clean(traced)
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
