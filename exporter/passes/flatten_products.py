"""Multiplies the tokens of all slots by a weight as the rows of one matrix: ``[B,T,K]`` as ``[B*T,K]``.

TensorRT multiplies ``[1,T,K]`` and ``[B,T,K]`` by other kernels, which want weights in another order: an engine that
reads prompts a slot at a time and takes steps for several would hold every weight twice. Here it sees rows.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def flatten_products(graph: ir.Graph) -> int:
    """Rewrites every product of a ``[B,T,K]`` input with a weight.

    Reshapes get the numbers of heads that are known as constants: through another reshape TensorRT does not find them.

    Args:
        graph: changed in place; the ranks and constant sizes of its values are known.

    Returns:
        How many products there were.
    """
    for node in list(graph):
        if node.op_type == "Reshape":
            _pin(graph, node)
    found = 0
    for node in list(graph):
        sizes = _weight(node.inputs[1]) if node.op_type == "MatMul" else None
        x = node.inputs[0]
        if sizes is not None and x is not None and x.shape is not None and len(x.shape) == 3:
            _flatten(graph, node, x, *sizes)
            found += 1
    return found


def _weight(value: ir.Value | None) -> tuple[int, int] | None:
    """K and N of a matrix that is stored, perhaps quantized or in another type; None of anything else."""
    while value is not None and (made_by := value.producer()) is not None:
        value = made_by.inputs[0] if made_by.op_type in ("Cast", "DequantizeLinear") else None
    if value is None or value.const_value is None or len(value.const_value.shape) != 2:
        return None
    rows, columns = value.const_value.shape.numpy()
    return int(rows), int(columns)


def _flatten(graph: ir.Graph, node: ir.Node, x: ir.Value, rows: int, columns: int) -> None:
    product, dtype = node.outputs[0], node.outputs[0].dtype or x.dtype
    name = f"{product.name}.flat"
    flat = _node("Reshape", [x, _sizes(graph, [-1, rows])], f"{name}.rows", dtype, [None, rows])
    made = _node("MatMul", [flat.outputs[0], node.inputs[1]], name, dtype, [None, columns])
    kept = _node("Shape", [x], f"{name}.kept", ir.DataType.INT64, [2], {"start": 0, "end": 2})
    shape = _node(
        "Concat", [kept.outputs[0], _sizes(graph, [columns])], f"{name}.shape", ir.DataType.INT64, [3], {"axis": 0}
    )
    back = _node("Reshape", [made.outputs[0], shape.outputs[0]], f"{name}.back", dtype, [None, None, columns])
    ir.convenience.replace_nodes_and_values(
        graph, node, [node], [flat, made, kept, shape, back], [product], back.outputs
    )


def _pin(graph: ir.Graph, node: ir.Node) -> None:
    """Puts the sizes that are known of a reshaped value in the place of a -1."""
    shape, made_by = node.outputs[0].shape, node.inputs[1].producer() if node.inputs[1] is not None else None
    if shape is None or made_by is None or made_by.op_type != "Concat" or len(made_by.inputs) != len(shape):
        return
    parts = [
        _sizes(graph, [size]) if isinstance(size, int) else part
        for size, part in zip(shape, made_by.inputs, strict=True)
    ]
    name = f"{node.outputs[0].name}.shape"
    pinned = _node("Concat", parts, name, ir.DataType.INT64, [len(parts)], {"axis": 0})
    graph.insert_before(node, pinned)
    node.replace_input_with(1, pinned.outputs[0])


def _node(
    op_type: str,
    inputs: list[ir.Value | None],
    name: str,
    dtype: ir.DataType | None,
    shape: list[int | None],
    attributes: dict[str, int] | None = None,
) -> ir.Node:
    # TensorRT wants nodes to have other names than weights.
    node = ir.node(op_type, inputs, attributes=attributes or {}, name=f"{name}.node")
    value = node.outputs[0]
    value.name, value.shape = name, ir.Shape(shape)
    value.type = None if dtype is None else ir.TensorType(dtype)
    return node


def _sizes(graph: ir.Graph, sizes: list[int]) -> ir.Value:
    """A constant of sizes, one for all that ask for the same."""
    name = "sizes." + ".".join(map(str, sizes))
    if name not in graph.initializers:
        tensor = ir.Tensor(np.array(sizes, np.int64), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        graph.register_initializer(value)
    return graph.initializers[name]
