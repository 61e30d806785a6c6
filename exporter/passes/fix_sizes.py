"""Fixes the number of draft tokens and the sizes of a graph for a device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from specexport.contract import tensors
from specexport.exporter.passes.editing import constant, op


def fix_drafts(model: ir.Model, drafts: int) -> None:
    """Makes a propose graph draft a fixed number of tokens: one, or one for each of the first stages of a speculator.

    On a device, the caller runs the body of the loop once per draft token: a Loop would wait for the host after each
    pass, and compilers would store the weights for every unrolled pass. Graphs without a loop or stages stay unchanged.
    """
    loop = next((node for node in model.graph if node.op_type == "Loop"), None)
    if loop is not None:
        assert drafts == 1
        _first_pass(model, loop)
    elif model.graph.outputs[0].name not in tensors.DRAFTED:
        kept = {kind.of_stage(stage) for kind in tensors.DRAFTED for stage in range(drafts)}
        model.graph.outputs[:] = [value for value in model.graph.outputs if value.name in kept]
    passes.RemoveUnusedNodesPass()(model)


def _first_pass(model: ir.Model, loop: ir.Node) -> None:
    """Replaces a Loop by its body, and removes the input ``num_draft_tokens``."""
    graph = model.graph
    passes.LiftSubgraphInitializersToMainGraphPass()(model)
    body = loop.attributes["body"].as_graph()
    carried = [value for value in loop.inputs[2:] if value is not None]
    inputs = [constant(graph, "pass", np.array(0, np.int64)), constant(graph, "going", np.array(True)), *carried]
    ir.convenience.replace_all_uses_with(body.inputs, inputs, replace_graph_outputs=True)
    results, nodes = list(body.outputs)[1:], list(body)
    body.outputs.clear()
    body.remove(nodes)
    graph.insert_before(loop, nodes)
    axis = constant(graph, "stack.axis", np.array([0], np.int64))
    per_token = results[len(carried) :]
    stacked = [op("Unsqueeze", [value, axis], f"stack.{at}") for at, value in enumerate(per_token)]
    graph.insert_before(loop, stacked)
    outputs = [*results[: len(carried)], *(node.outputs[0] for node in stacked)]
    ir.convenience.replace_nodes_and_values(graph, loop, [loop], [], list(loop.outputs), outputs)
    caches = [value for value in graph.inputs if str(value.name).startswith(tensors.CACHES)]
    _remove_empty_joins(graph, dict(zip(carried[-len(caches) :], caches, strict=True)))
    graph.inputs[:] = [value for value in graph.inputs if value.name != tensors.NUM_DRAFT_TOKENS]


def _remove_empty_joins(graph: ir.Graph, empty: dict[ir.Value, ir.Value]) -> None:
    """Removes the concatenations of earlier passes' rows, which are empty, with this pass's: two copies per layer.

    ``empty`` maps the empty rows to their caches, which have the same shape but for the number of rows.
    """
    for node in list(graph):
        source = node.inputs[0] if node.inputs else None
        if source not in empty or source is None:
            continue
        if node.op_type == "Concat" and not node.outputs[0].is_graph_output():
            _, row = node.inputs
            assert row is not None
            node.outputs[0].replace_all_uses_with(row)
        elif node.op_type == "Shape" and node.attributes.get_int("start", 0) == 2:
            node.outputs[0].replace_all_uses_with(constant(graph, "no.rows", np.array([0], np.int64)))
        elif node.op_type == "Shape":
            node.replace_input_with(0, empty[source])


def fix_sizes(model: ir.Model, sizes: Mapping[str, int]) -> None:
    """Replaces symbolic dimensions with their ``sizes``; dimensions without a size stay symbolic."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.shape is not None:
            dims = [dim if isinstance(dim, int) else sizes.get(str(dim.value), dim) for dim in value.shape]
            value.shape = ir.Shape(dims)
