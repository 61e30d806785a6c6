"""The passes over a graph, in order, from torch's export to the graph that a device runs.

A new rewrite is a file in ``exporter/passes`` and a line here. The lists run one after the other:
:func:`export_passes`, whose results are kept in the cache folder; :func:`trace_passes`, after which a draft's pass may
become a loop's body (``exporter/compose.py``); :func:`write_passes`; and :func:`device_passes` for GPUs. Passes that
need torch or onnxscript are imported inside the functions, as :func:`device_passes` runs without them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir
import onnx_ir.passes.common as common

from specexport.contract.engines import ComputedIn
from specexport.contract.model import LoweredAs
from specexport.exporter.passes.compute_type import HALF_TYPES, Store, compute_in
from specexport.exporter.passes.fix_sizes import fix_drafts, fix_sizes
from specexport.exporter.passes.ranks import join_along_first, use_collectives
from specexport.exporter.passes.tensorrt import flatten_products, restore_tables


class Form(enum.Flag):
    """Properties of a graph, which passes need and ensure."""

    NONE = 0
    EXPORTED = enum.auto()
    """As ``torch.onnx.export`` returns it, with local functions and constants in nodes."""
    SIMPLE = enum.auto()
    """Constants are folded, and initializers."""
    NAMED = enum.auto()
    """Weights have the names of the checkpoint."""
    PRODUCTS = enum.auto()
    """Every product with a weight is ``MatMul(x, W[K,N])``."""
    STANDARD = enum.auto()
    """All operators are ONNX's, except those that combine ranks."""
    STORED = enum.auto()
    """Weights are in the weights file, quantized if they are to be."""
    STRAIGHT = enum.auto()
    """The graph has no subgraphs: neither loops nor branches."""


@dataclass(frozen=True)
class Pass:
    """A rewrite of a graph, in place.

    Attributes:
        needs: properties that the graph must have.
        ensures: properties that it has afterwards, in addition.
    """

    rewrite: Callable[[ir.Model], object]
    needs: Form
    ensures: Form = Form.NONE


Passes = tuple[Pass, ...]


def run_passes(model: ir.Model, passes: Passes) -> None:
    """Rewrites a graph."""
    for step in passes:
        step.rewrite(model)


def export_passes(aliases: Mapping[str, str]) -> Passes:
    """After torch's export; ``aliases`` maps the names of tied parameters to those that checkpoints use."""
    from specexport.exporter.passes.simplify import name_weights, simplify

    return (
        Pass(simplify, needs=Form.EXPORTED, ensures=Form.SIMPLE),
        Pass(partial(name_weights, aliases=aliases), needs=Form.SIMPLE, ensures=Form.NAMED),
    )


def trace_passes(lowering: LoweredAs) -> Passes:
    """From there to a master graph, or to one pass of a draft."""
    from specexport.exporter.passes.linear import canonical_weights, merge_linear
    from specexport.exporter.passes.rms_norm import fuse_rms_norm

    return (
        Pass(canonical_weights, needs=Form.NAMED, ensures=Form.PRODUCTS),
        Pass(merge_linear, needs=Form.PRODUCTS),
        *([Pass(fuse_rms_norm, needs=Form.SIMPLE)] if lowering == "native" else []),
        Pass(common.CommonSubexpressionEliminationPass(), needs=Form.SIMPLE),
        Pass(common.LiftConstantsToInitializersPass(), needs=Form.SIMPLE),
        Pass(common.RemoveUnusedNodesPass(), needs=Form.SIMPLE),
        Pass(common.ClearMetadataAndDocStringPass(), needs=Form.SIMPLE),
        Pass(common.TopologicalSortPass(), needs=Form.SIMPLE),
    )


def write_passes(store: Callable[[ir.Model], None], *, branches: bool) -> Passes:
    """From a master graph to its file; ``store`` moves the weights into their file.

    With ``branches``, each expert of a mixture gets a branch of its own.
    """
    from specexport.exporter.passes.experts import lower_experts

    return (
        Pass(partial(lower_experts, branches=branches), needs=Form.PRODUCTS, ensures=Form.STANDARD),
        Pass(store, needs=Form.STANDARD | Form.PRODUCTS, ensures=Form.STORED),
        Pass(common.RemoveUnusedNodesPass(), needs=Form.STORED),
        Pass(_name_nodes, needs=Form.STORED),
    )


def device_passes(
    compute: ComputedIn, drafts: int, sizes: Mapping[str, int], store: Store, *, compiled: bool, ranks: int
) -> Passes:
    """From a master's file to the graph that a device runs; see :func:`~specexport.exporter.engines.source`."""
    passes: list[Pass] = []
    if drafts:
        passes.append(Pass(partial(fix_drafts, drafts=drafts), needs=Form.STORED, ensures=Form.STRAIGHT))
    if ranks:
        meet = use_collectives if compiled else join_along_first
        passes.append(Pass(partial(meet, ranks=ranks), needs=Form.STORED))
    if compiled:
        passes.append(Pass(partial(restore_tables, store=store), needs=Form.STORED))
    if compiled and "B" not in sizes:
        passes.append(Pass(flatten_products, needs=Form.PRODUCTS | Form.STRAIGHT))
    if compute in HALF_TYPES:
        narrow = partial(compute_in, narrow=HALF_TYPES[compute], store=store, narrow_norms=not compiled)
        passes.append(Pass(narrow, needs=Form.STRAIGHT))
    return (*passes, Pass(partial(fix_sizes, sizes=sizes), needs=Form.STORED))


def _name_nodes(model: ir.Model) -> None:
    """Names nodes after their outputs, as torch's names contain counters of the process."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        node.name = node.outputs[0].name
