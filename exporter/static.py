"""Pins a master's symbolic dimensions, and how many tokens a propose graph drafts: the graph of one shape point.

Compilers that want every shape known (TensorRT) cannot take a loop whose first pass sees more tokens than the others:
it is unrolled, and the passes share the weights of the one loop body. Of stages those beyond are cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from specexport.contract import tensors
from specexport.contract.shapes import ShapePoint
from specexport.exporter.passes.editing import constant, op


def pin(master: Path, point: ShapePoint, output: Path) -> None:
    """Writes the graph of one shape point: graph only, its weights stay in the master's weights file.

    A propose graph drafts as many tokens as the point says. ``output`` is in the master's folder, as both refer to the
    same weights file.
    """
    model = ir.load(master)
    if point.drafts:
        fix_drafts(model, point.drafts)
    fix(model.graph, point.sizes)
    model.graph.name = f"{model.graph.name}.{point}"
    ir.save(model, output)


def fix(graph: ir.Graph, sizes: dict[str, int]) -> None:
    """Gives symbolic dimensions of a graph's inputs and outputs their sizes; those not named stay symbolic."""
    for value in (*graph.inputs, *graph.outputs):
        if value.shape is not None:
            dims = [dim if isinstance(dim, int) else sizes.get(str(dim.value), dim) for dim in value.shape]
            value.shape = ir.Shape(dims)


def fix_drafts(model: ir.Model, drafts: int) -> None:
    """Makes of a propose graph the one that drafts a fixed number of tokens."""
    loop = next((node for node in model.graph if node.op_type == "Loop"), None)
    if loop is not None:
        _unroll(model, loop, drafts)
    else:
        kept = {tensors.of_stage(kind, stage) for kind in tensors.DRAFTED for stage in range(drafts)}
        model.graph.outputs[:] = [value for value in model.graph.outputs if value.name in kept]
    passes.RemoveUnusedNodesPass()(model)


def _unroll(model: ir.Model, loop: ir.Node, trips: int) -> None:
    """Replaces a Loop by ``trips`` copies of its body; ``num_draft_tokens`` is no input then."""
    graph = model.graph
    passes.LiftSubgraphInitializersToMainGraphPass()(model)
    body = loop.attributes["body"].as_graph()
    always = constant(graph, "going", np.array(True))
    carried = [value for value in loop.inputs[2:] if value is not None]
    scanned = []
    for trip in range(trips):
        copy = body.clone(allow_outer_scope_values=True)
        given = [constant(graph, f"trip.{trip}", np.array(trip, np.int64)), always, *carried]
        ir.convenience.replace_all_uses_with(copy.inputs, given, replace_graph_outputs=True)
        results, nodes = list(copy.outputs)[1:], list(copy)
        copy.outputs.clear()
        copy.remove(nodes)
        for node in nodes:
            node.name = f"{node.name}.{trip}"
            for value in node.outputs:
                # Sizes that are no numbers differ from pass to pass.
                value.name = f"{value.name}.{trip}"
                value.shape = _known(value)
        graph.insert_before(loop, nodes)
        carried = results[: len(carried)]
        scanned.append(results[len(carried) :])
    body.outputs.clear()
    body.remove(list(body), safe=True)  # or weights would still have these readers
    stacked = [_stack(graph, loop, f"stack.{at}", values) for at, values in enumerate(zip(*scanned, strict=True))]
    ir.convenience.replace_nodes_and_values(graph, loop, [loop], [], list(loop.outputs), [*carried, *stacked])
    graph.inputs[:] = [value for value in graph.inputs if value.name != tensors.NUM_DRAFT_TOKENS]


def _known(value: ir.Value) -> ir.Shape | None:
    """A value's shape with the sizes that are numbers, the others unknown; it is kept with its type alone."""
    if value.shape is None or value.type is None:
        return None
    return ir.Shape([size if isinstance(size, int) else None for size in value.shape])


def _stack(graph: ir.Graph, loop: ir.Node, name: str, values: Sequence[ir.Value]) -> ir.Value:
    """What the passes made, stacked along a new first axis as the loop does."""
    axis = constant(graph, "stack.axis", np.array([0], np.int64))
    rows = [op("Unsqueeze", [value, axis], f"{name}.{trip}") for trip, value in enumerate(values)]
    joined = op("Concat", [row.outputs[0] for row in rows], name, axis=0)
    graph.insert_before(loop, [*rows, joined])
    return joined.outputs[0]
