"""Brings every weight multiplication into one form: ``MatMul(x, W)`` with ``W`` a ``[K,N]`` initializer."""

from __future__ import annotations

import onnx_ir as ir


def canonical_weights(model: ir.Model) -> None:
    """Turns Gemm into MatMul and Add, and ``Transpose(weight)`` into the weight, transposed, under its own name.

    A transposed weight is a view of the checkpoint's tensor: it costs no memory and is made contiguous when it is
    written. One that something else reads too (an embedding tied to the head) keeps its Transpose, so that it is stored
    once.
    """
    for node in list(model.graph):
        if node.op_type == "Gemm":
            _split_gemm(model.graph, node)
    for node in list(model.graph):
        weight = node.inputs[0] if transposes_weight(node) else None
        if weight is not None and len(weight.uses()) == 1:
            _transpose(model.graph, node, weight)


def transposes_weight(node: ir.Node) -> bool:
    """Whether a node transposes a matrix that is constant."""
    weight = node.inputs[0] if node.op_type == "Transpose" else None
    return weight is not None and weight.const_value is not None and len(weight.const_value.shape) == 2


def _transpose(graph: ir.Graph, node: ir.Node, weight: ir.Value) -> None:
    assert weight.const_value is not None
    tensor = ir.Tensor(weight.const_value.numpy().T, name=weight.name)
    weight.const_value, weight.shape = tensor, tensor.shape
    for reader, index in list(node.outputs[0].uses()):
        reader.replace_input_with(index, weight)
    graph.remove(node, safe=True)


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
