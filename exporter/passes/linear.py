"""Brings every weight multiplication into one form: ``MatMul(x, W)`` with ``W`` a ``[K,N]`` initializer."""

from __future__ import annotations

import onnx_ir as ir

from specexport.exporter.passes.matching import producer


def canonical_weights(model: ir.Model) -> None:
    """Turns ``Transpose(weight)`` under MatMul into a transposed initializer and Gemm into MatMul and Add.

    A transposed initializer is a view of the checkpoint's tensor: it costs no memory and is made contiguous when it is
    written. A weight that something else reads too (an embedding tied to the head) keeps its Transpose, so that it is
    stored once.
    """
    for node in list(model.graph):
        if node.op_type == "Gemm":
            _split_gemm(model.graph, node)
    transposed: dict[ir.Value, ir.Value] = {}
    for node in list(model.graph):
        if node.op_type != "MatMul":
            continue
        transpose = producer(node.inputs[1], "Transpose")
        weight = transpose.inputs[0] if transpose is not None else None
        if weight is None or weight.const_value is None or len(weight.uses()) > 1:
            continue
        # Several products may read it: those of tied stages.
        if weight not in transposed:
            transposed[weight] = _transposed(model.graph, weight)
        node.replace_input_with(1, transposed[weight])


def _transposed(graph: ir.Graph, weight: ir.Value) -> ir.Value:
    assert weight.const_value is not None
    name = f"{weight.name}.T"
    tensor = ir.Tensor(weight.const_value.numpy().T, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
    graph.register_initializer(value)
    return value


def _split_gemm(graph: ir.Graph, node: ir.Node) -> None:
    """Gemm with ``alpha = beta = 1`` and an untransposed first input becomes MatMul (and Transpose) and Add."""
    attributes = node.attributes
    alpha = attributes["alpha"].as_float() if "alpha" in attributes else 1.0
    beta = attributes["beta"].as_float() if "beta" in attributes else 1.0
    transposed_input = "transA" in attributes and attributes["transA"].as_int()
    if alpha != 1.0 or beta != 1.0 or transposed_input:
        return
    name = node.outputs[0].name
    nodes = []
    weight = node.inputs[1]
    if "transB" in attributes and attributes["transB"].as_int():
        nodes.append(ir.node("Transpose", [weight], attributes={"perm": [1, 0]}))
        weight = nodes[-1].outputs[0]
        weight.name = f"{name}.weight"
    nodes.append(ir.node("MatMul", [node.inputs[0], weight]))
    nodes[-1].outputs[0].name = f"{name}.product"
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        nodes.append(ir.node("Add", [nodes[-1].outputs[0], node.inputs[2]]))
        nodes[-1].outputs[0].name = f"{name}.sum"
    last = nodes[-1].outputs[0]
    last.type, last.shape = node.outputs[0].type, node.outputs[0].shape
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, node.outputs, [last])
