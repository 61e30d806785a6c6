"""How the nodes of a graph read its weights."""

from __future__ import annotations

import onnx_ir as ir

from specexport.exporter.passes.editing import producer

GATHERED = ("lookup", "experts")
"""Roles of matrices of which rows are gathered."""


def role_of(node: ir.Node, index: int) -> str:
    """How a node reads an initializer: ``matmul``, row ``lookup``, ``experts``, ``tied`` (transposed head) or other."""
    if node.op_type == "MatMul" and index == 1:
        return "matmul"
    axis = node.attributes.get("axis")
    if node.op_type == "Gather" and index == 0 and (axis is None or axis.as_int() == 0):
        return "experts" if of_experts(node, 3) else "other" if of_experts(node, 2) else "lookup"
    if node.op_type == "Transpose" and all(use.op_type == "MatMul" and at == 1 for use, at in node.outputs[0].uses()):
        return "tied"
    return "other"


def of_experts(node: ir.Node, rank: int) -> bool:
    """Whether a node gathers experts from a stack of that rank: 3 for their matrices, 2 for their biases."""
    stack, ids = node.inputs[:2] if node.op_type == "Gather" else (None, None)
    if stack is None or ids is None or stack.const_value is None or ids.shape is None:
        return False
    return len(ids.shape) == 1 and len(stack.const_value.shape) == rank


def routers(graph: ir.Graph) -> set[ir.Value]:
    """The matrices whose products choose experts: rounded, they would choose others.

    They are those that experts' indices are computed from first, with a column for each expert.
    """
    matrices: set[ir.Value] = set()
    chosen: dict[ir.Value | None, int] = {}
    for node in graph:
        stack = node.inputs[0].const_value if of_experts(node, 3) and node.inputs[0] is not None else None
        if stack is not None:
            chosen[node.inputs[1]] = stack.shape.numpy()[0]
        elif node.op_type == "If" and (each := producer(node.inputs[0], "Split")) is not None:
            chosen[each.inputs[0]] = len(each.outputs)
    for start, experts in chosen.items():
        seen, waiting = set[ir.Value](), [start]
        while waiting:
            value = waiting.pop()
            made_by = value.producer() if value is not None and value not in seen else None
            if value is None or made_by is None:
                continue
            seen.add(value)
            weight = made_by.inputs[1] if made_by.op_type == "MatMul" else None
            if weight is None or weight.const_value is None:
                waiting += made_by.inputs
            elif weight.const_value.shape[-1] == experts:
                matrices.add(weight)
    return matrices
