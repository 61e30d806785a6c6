"""The passes over a graph, in order, from torch's export to the graph that a device runs.

A new rewrite is a file in ``exporter/passes`` and a line here. The functions, which change a graph in place, run one
after the other: :func:`export_passes`, whose results are kept in the cache folder; :func:`trace_passes`, after which a
draft's pass may become a loop's body (``exporter/compose.py``); :func:`write_passes`; and :func:`device_passes` for
GPUs. Passes that need torch or onnxscript are imported inside them, as :func:`device_passes` runs without either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir
import onnx_ir.passes.common as common

from specexport.contract.engines import ComputedIn
from specexport.contract.model import LoweredAs
from specexport.exporter.passes.compute_type import HALF_TYPES, Store, compute_in
from specexport.exporter.passes.fewer_launches import use_fewer_launches
from specexport.exporter.passes.fix_sizes import fix_drafts, fix_sizes
from specexport.exporter.passes.onnxruntime_cuda import use_fused_operators
from specexport.exporter.passes.ranks import join_along_first, use_collectives
from specexport.exporter.passes.tensorrt import flatten_products, restore_tables


def export_passes(model: ir.Model, aliases: Mapping[str, str]) -> None:
    """The passes after torch's export: fold constants, and name weights as checkpoints do.

    ``aliases`` maps the names of tied parameters to their names in checkpoints.
    """
    from specexport.exporter.passes.simplify import name_weights, simplify

    simplify(model)
    name_weights(model, aliases)


def trace_passes(model: ir.Model, lowering: LoweredAs) -> None:
    """The passes up to a master graph, or a draft's pass, in which products with weights are ``MatMul(x, W[K,N])``."""
    from specexport.exporter.passes.linear import canonical_weights, merge_linear
    from specexport.exporter.passes.rms_norm import fuse_rms_norm

    canonical_weights(model)
    merge_linear(model)
    if lowering == "native":
        fuse_rms_norm(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.LiftConstantsToInitializersPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.ClearMetadataAndDocStringPass()(model)
    common.TopologicalSortPass()(model)


def write_passes(model: ir.Model, store: Callable[[ir.Model], None], *, branches: bool) -> None:
    """The passes up to a master's file, which has only ONNX's operators, those that combine ranks, and no weights.

    ``store`` moves the weights to their own file; with ``branches``, each expert of a mixture gets a branch.
    """
    from specexport.exporter.passes.experts import lower_experts

    lower_experts(model, branches=branches)
    store(model)
    common.RemoveUnusedNodesPass()(model)
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        node.name = node.outputs[0].name  # torch's names contain counters of the process


def device_passes(
    model: ir.Model,
    compute: ComputedIn,
    drafts: int,
    sizes: Mapping[str, int],
    store: Store,
    *,
    compiled: bool,
    ranks: int,
) -> None:
    """The passes up to the graph that a device runs; see :func:`~specexport.exporter.engines.source.write_source`."""
    if drafts:
        fix_drafts(model, drafts)  # the graph has no loops from here on
    if ranks:
        (use_collectives if compiled else join_along_first)(model, ranks)
    if compiled:
        restore_tables(model, store)
    if compiled and "B" not in sizes:
        flatten_products(model)
    if compute in HALF_TYPES:
        compute_in(model, HALF_TYPES[compute], store, narrow_norms=not compiled)
    sizes = {**sizes, "K": drafts} if drafts else sizes
    fix_sizes(model, sizes)
    if not compiled:
        use_fewer_launches(model, sizes)
        use_fused_operators(model)
