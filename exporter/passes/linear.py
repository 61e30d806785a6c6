"""Brings every weight multiplication into one form: ``MatMul(x, W)`` with ``W`` a ``[K,N]`` initializer."""

from __future__ import annotations

import onnx_ir as ir

from specexport.exporter.passes.editing import op


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
        if weight is not None and weight.const_value is not None and len(weight.uses()) == 1:
            tensor = ir.Tensor(weight.const_value.numpy().T, name=weight.name)
            weight.const_value, weight.shape = tensor, tensor.shape
            node.outputs[0].replace_all_uses_with(weight)
            model.graph.remove(node, safe=True)


def transposes_weight(node: ir.Node) -> bool:
    """Whether a node transposes a matrix that is constant."""
    weight = node.inputs[0] if node.op_type == "Transpose" else None
    return weight is not None and weight.const_value is not None and len(weight.const_value.shape) == 2


def _split_gemm(graph: ir.Graph, node: ir.Node) -> None:
    """Gemm with ``alpha = beta = 1`` and an untransposed first input becomes MatMul (and Transpose) and Add."""
    given = {name: attribute.value for name, attribute in node.attributes.items()}
    if given.get("alpha", 1.0) != 1.0 or given.get("beta", 1.0) != 1.0 or given.get("transA", 0):
        return
    name, (x, weight, *bias) = node.outputs[0].name, node.inputs
    nodes = []
    if given.get("transB", 0):
        nodes.append(op("Transpose", [weight], f"{name}.weight", perm=[1, 0]))
        weight = nodes[-1].outputs[0]
    nodes.append(op("MatMul", [x, weight], f"{name}.product"))
    if bias and bias[0] is not None:
        nodes.append(op("Add", [nodes[-1].outputs[0], bias[0]], f"{name}.sum"))
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, node.outputs, nodes[-1].outputs)
