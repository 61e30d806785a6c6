"""Joins products that share their input: the query, key and value projections, the gate and up projections."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import onnx_ir as ir

from specexport.contract import tensors
from specexport.exporter.passes.matching import constant, needed_only_for
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
    joined = 0
    for (x, _), nodes in readers.items():
        if len(nodes) > 1:
            _join(model.graph, x, nodes)
            joined += len(nodes)
    return joined


def _is_weight(value: ir.Value | None) -> bool:
    """A matrix of the checkpoint that nothing else reads."""
    return (
        value is not None
        and value.const_value is not None
        and value.is_initializer()
        and len(value.uses()) == 1
        and len(value.const_value.shape) == 2
    )


def _join(graph: ir.Graph, x: ir.Value, nodes: list[ir.Node]) -> None:
    weights = [weight for node in nodes if (weight := node.inputs[1]) is not None]
    name = joined_name([str(weight.name) for weight in weights])
    parts = [weight.const_value for weight in weights if weight.const_value is not None]
    (rows, *_), *_ = shapes = [part.shape.numpy() for part in parts]
    widths = [width for _, width in shapes]
    joined = ir.LazyTensor(
        # Joined only while it is written, so that no second copy of the model is ever held.
        lambda: ir.Tensor(np.concatenate([part.numpy() for part in parts], axis=1), name=name),
        dtype=ir.DataType.FLOAT,
        shape=ir.Shape([rows, sum(widths)]),
        name=name,
    )
    weight = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=joined.shape, const_value=joined)
    graph.register_initializer(weight)
    sizes = constant(graph, f"{name}.widths", np.array(widths, np.int64))
    product = ir.node("MatMul", [x, weight], name=f"{name}.product")
    product.outputs[0].name = product.name
    split = ir.node(
        "Split", [product.outputs[0], sizes], attributes={"axis": -1}, num_outputs=len(nodes), name=f"{name}.split"
    )
    old = [node.outputs[0] for node in nodes]
    first = next(node for node in graph if node in nodes)
    ir.convenience.replace_nodes_and_values(graph, first, nodes, [product, split], old, list(split.outputs))
    for value in weights:
        if value.name is not None:
            del graph.initializers[value.name]
