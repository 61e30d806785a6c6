"""Joins products that share their input: the query, key and value projections, the gate and up projections."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import onnx_ir as ir

from specexport.contract import tensors
from specexport.exporter.passes.editing import constant, needed_only_for, op
from specexport.exporter.passes.names import joined_name


def merge_linear(model: ir.Model) -> int:
    """Joins ``MatMul(x, W1), MatMul(x, W2), ...`` into ``Split(MatMul(x, [W1 W2 ...]))``.

    A step with few tokens is made of many short products; each one started, and with integer arithmetic each one
    quantizing the same ``x`` again, costs time that one longer product does not.

    Returns:
        How many products were joined.
    """
    # Medusa heads read what the model's own head reads, but are stored apart, perhaps in fewer bits.
    of_heads = needed_only_for(model.graph, tensors.CANDIDATES)
    readers: dict[tuple[ir.Value, bool], list[ir.Node]] = defaultdict(list)
    for node in model.graph:
        x = node.inputs[0] if node.op_type == "MatMul" else None
        if x is not None and _is_weight(node.inputs[1]):
            readers[x, node.outputs[0] in of_heads].append(node)
    shared = {key: nodes for key, nodes in readers.items() if len(nodes) > 1}
    for (x, _), nodes in shared.items():
        _join(model.graph, x, nodes)
    return sum(map(len, shared.values()))


def _is_weight(value: ir.Value | None) -> bool:
    """A matrix of the checkpoint that nothing else reads."""
    if value is None or value.const_value is None:
        return False
    return value.is_initializer() and len(value.uses()) == 1 and len(value.const_value.shape) == 2


def _join(graph: ir.Graph, x: ir.Value, nodes: list[ir.Node]) -> None:
    weights = [weight for node in nodes if (weight := node.inputs[1]) is not None]
    name = joined_name([str(weight.name) for weight in weights])
    parts = [weight.const_value for weight in weights if weight.const_value is not None]
    shapes = [part.shape.numpy() for part in parts]
    widths = [width for _, width in shapes]
    joined = ir.LazyTensor(
        # Joined only while it is written, so that no second copy of the model is ever held.
        lambda: ir.Tensor(np.concatenate([part.numpy() for part in parts], axis=1), name=name),
        dtype=ir.DataType.FLOAT,
        shape=ir.Shape([shapes[0][0], sum(widths)]),
        name=name,
    )
    weight = ir.val(name, const_value=joined)
    graph.register_initializer(weight)
    product = op("MatMul", [x, weight], f"{name}.product")
    sizes = constant(graph, f"{name}.widths", np.array(widths, np.int64))
    split = ir.node("Split", [*product.outputs, sizes], {"axis": -1}, num_outputs=len(nodes), name=f"{name}.split")
    old = [node.outputs[0] for node in nodes]
    first = next(node for node in graph if node in nodes)
    ir.convenience.replace_nodes_and_values(graph, first, nodes, [product, split], old, split.outputs)
    for value in weights:
        del graph.initializers[str(value.name)]
