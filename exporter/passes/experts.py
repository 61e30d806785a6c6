"""Lowers the experts of a mixture: gathered from their stacks, or each in a branch of its own."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnx_ir.tape import Tape

from specexport.exporter.passes.editing import ancestors, constant, producer
from specexport.graphs.ops import EXPERTS_DOMAIN

_GRAIN = 16
"""Experts multiply all rows or a multiple of this number, which fills onnxruntime's tiles. A row's result then does not
depend on the number of other rows that chose the expert."""


def lower_experts(model: ir.Model, *, branches: bool) -> None:
    """Replaces the operator that :func:`specexport.graphs.experts.apply_experts` traces with standard operators.

    Gathered experts need no control flow. With ``branches``, the matrices ``[K,N]`` of each expert are in a branch of
    an If, which runs if a token chose the expert: ONNX Runtime packs matrices and fuses their dequantization there.
    """
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in [candidate for candidate in graph if candidate.domain == EXPERTS_DOMAIN]:
            total = _branches(graph, node) if branches else _required(node.inputs[0])
            ir.convenience.replace_all_uses_with(node.outputs[0], total, replace_graph_outputs=True)
            graph.remove(node, safe=True)
    model.opset_imports.pop(EXPERTS_DOMAIN, None)
    passes.RemoveUnusedNodesPass()(model)


def _branches(graph: ir.Graph, node: ir.Node) -> ir.Value:
    """Inserts an If for each expert, which adds the expert's output to a running sum; returns the sum ``[N,H]``."""
    _, hidden, rows, products, index, weights = (_required(value) for value in node.inputs)
    region = _nodes_between(hidden, rows, products)
    gathered = [value for source in region for value in source.inputs if _stack(value) is not None]
    stacks = {value: _required(_stack(value)) for value in gathered if value is not None}
    tensors = {stack: _required(stack.const_value) for stack in stacks.values()}
    count = next(iter(tensors.values())).shape.numpy()[0]
    name, tape = node.outputs[0].name, Tape()

    def add(nodes: Tape, result: str, op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        return nodes.op(op_type, inputs, attributes, output=ir.val(f"{name}.{result}"))

    def number(*numbers: int) -> ir.Value:
        return constant(graph, f"experts.{'.'.join(map(str, numbers))}", np.array(numbers))

    def each(value: ir.Value) -> list[ir.Value]:
        outputs = [ir.val(f"{value.name}.{expert}") for expert in range(count)]
        return list(tape.op_multi_out("Split", [value], {"axis": 0, "num_outputs": count}, outputs=outputs))

    ids = constant(graph, f"experts.ids.{count}", np.arange(count)[:, None, None])
    selected = add(tape, "chose", "Cast", add(tape, "same", "Equal", index, ids), to=ir.DataType.FLOAT)  # [E,N,k]
    weighted = add(tape, "weighted", "Mul", selected, weights)
    chosen = add(tape, "chosen", "ReduceMax", selected, number(2), keepdims=0)  # [E,N]
    tokens = add(tape, "tokens", "Shape", hidden, start=0, end=1)
    sums = add(tape, "counts", "ReduceSum", chosen, number(1), keepdims=0)
    full = add(tape, "up", "Add", add(tape, "sizes", "Cast", sums, to=ir.DataType.INT64), number(_GRAIN - 1))
    full = add(tape, "full", "Mul", add(tape, "tiles", "Div", full, number(_GRAIN)), number(_GRAIN))
    sizes = add(tape, "rows", "Min", full, tokens)
    used = add(tape, "used", "Cast", sizes, to=ir.DataType.BOOL)
    shares = add(tape, "shares", "ReduceSum", weighted, number(2), keepdims=0)
    total = add(tape, "nothing", "Mul", hidden, constant(graph, "experts.nothing", np.array(0, np.float32)))

    read = functools.lru_cache(len(tensors))(lambda stack: tensors[stack].numpy())  # once for all experts of a stack
    parts = zip(each(used), each(sizes), each(chosen), each(shares), strict=True)
    for expert, (is_used, size, selected_by, share) in enumerate(parts):
        prefix, branch = f"{expert}.", Tape()
        best = [ir.val(f"{name}.{prefix}{result}") for result in ("best", "token")]
        _, token = branch.op_multi_out(
            "TopK", [selected_by, size], outputs=best
        )  # [1,M]: the expert's tokens, then others
        mapped: dict[ir.Value, Any] = {rows: add(branch, f"{prefix}rows", "Gather", hidden, token, axis=0)}
        matrices = {stack: _expert(stack, tensors[stack], expert, read) for stack in stacks.values()}
        mapped |= {value: matrices[stack] for value, stack in stacks.items()}
        for source in region:
            inputs = [mapped.get(value, value) if value is not None else None for value in source.inputs]
            outputs = [ir.val(f"{value.name}.{expert}") for value in source.outputs]
            branch.op_multi_out(source.op_type, inputs, source.attributes, outputs=outputs, domain=source.domain)
            mapped |= zip(source.outputs, outputs, strict=True)
        weight = add(branch, f"{prefix}share", "GatherElements", share, token, axis=1)
        weight = add(branch, f"{prefix}shares", "Unsqueeze", weight, number(2))
        update = add(branch, f"{prefix}weighted", "Mul", mapped[products], weight)
        place = add(branch, f"{prefix}place", "Unsqueeze", token, number(2))
        output = ir.val(f"{name}.{prefix}sum")
        summed = branch.op("ScatterND", [total, place, update], {"reduction": "add"}, output=output)
        unchanged = ir.node("Identity", [total], outputs=[ir.val(f"{name}.{prefix}kept")])
        then = ir.Graph([], [summed], nodes=branch.nodes, initializers=list(matrices.values()), name="chosen")
        otherwise = ir.Graph([], unchanged.outputs, nodes=[unchanged], name="not_chosen")
        attributes = {
            "then_branch": ir.AttrGraph("then_branch", then),
            "else_branch": ir.AttrGraph("else_branch", otherwise),
        }
        total = tape.op("If", [is_used], attributes, output=ir.val(f"{name}.{expert}"))
    graph.insert_before(node, tape.nodes)
    return total


def _required(value: Any) -> Any:
    assert value is not None
    return value


def _stack(value: ir.Value | None) -> ir.Value | None:
    """The stack of all experts' matrices or biases from which a value was gathered; None for other values."""
    gather = producer(value, "Gather")
    stack = gather.inputs[0] if gather is not None else None
    return stack if stack is not None and stack.const_value is not None else None


def _expert(stack: ir.Value, tensor: ir.TensorProtocol, expert: int, read: Any) -> ir.Value:
    """The matrix ``[K,N]`` of one expert, or its bias ``[1,N]``."""
    _, *sizes = tensor.shape.numpy()
    sizes = sizes if len(sizes) > 1 else [1, *sizes]
    name, shape = f"{stack.name}[{expert}]", ir.Shape(sizes)

    def slice_of() -> ir.TensorProtocol:
        return ir.Tensor(read(stack)[expert].reshape(sizes), name=name)

    return ir.val(name, shape=shape, const_value=ir.LazyTensor(slice_of, dtype=tensor.dtype, shape=shape, name=name))


def _nodes_between(hidden: ir.Value, rows: ir.Value, outputs: ir.Value) -> list[ir.Node]:
    """The nodes that compute ``outputs`` from ``rows`` and gathered matrices, in order."""
    nodes: dict[ir.Node, None] = {}
    depends_on_rows = {**dict.fromkeys(ancestors([hidden]), False), rows: True}

    def depends(value: ir.Value | None) -> bool:
        node = value.producer() if value is not None else None
        if value is not None and value not in depends_on_rows and node is not None:
            gathered = _stack(value) is not None
            read = [] if gathered else [depends(source) for source in node.inputs]
            depends_on_rows[value] = gathered or any(read)
            if any(read):
                nodes[node] = None
        return value is not None and depends_on_rows.get(value, False)

    depends(outputs)
    return list(nodes)
