"""Lowers the experts of a mixture: gathered from their stacks, or each in a branch of its own."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from specexport.exporter.passes.editing import Nodes, ancestors, constant, op, producer
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
    region, nodes = _nodes_between(hidden, rows, products), Nodes(str(node.outputs[0].name))
    stacks = {value: stack for source in region for value in source.inputs if (stack := _stack(value)) is not None}
    tensors = {stack: _required(stack.const_value) for stack in stacks.values()}
    read = functools.lru_cache(len(tensors))(lambda stack: tensors[stack].numpy())  # once for all experts of a stack
    count = _sizes(next(iter(stacks.values())))[0]
    routes = _routes(graph, nodes, hidden, index, weights, count)
    total = nodes.op("Mul", [hidden, constant(graph, "experts.nothing", np.array(0, np.float32))], "nothing")
    axis = constant(graph, "experts.2", np.array([2]))
    for expert, (used, tokens_of, chosen, share) in enumerate(routes):
        branch = Nodes(f"{nodes.name}.{expert}")
        # [1,M]: the expert's tokens, then others.
        _, token = branch.outputs("TopK", [chosen, tokens_of], ["best", "token"])
        matrices = {stack: _expert(stack, expert, read) for stack in stacks.values()}
        mapped: dict[Any, ir.Value] = {value: matrices[stack] for value, stack in stacks.items()}
        mapped[rows] = branch.op("Gather", [hidden, token], "rows", axis=0)
        for source in region:
            outputs = [ir.val(f"{value.name}.{expert}") for value in source.outputs]
            inputs = [mapped.get(value, value) for value in source.inputs]
            branch.list.append(
                ir.Node(source.domain, source.op_type, inputs, source.attributes.values(), outputs=outputs)
            )
            mapped |= zip(source.outputs, outputs, strict=True)
        weight = branch.op("GatherElements", [share, token], "share", axis=1)
        weighted = branch.op("Mul", [mapped[products], branch.op("Unsqueeze", [weight, axis], "shares")], "weighted")
        place = branch.op("Unsqueeze", [token, axis], "place")
        summed = branch.op("ScatterND", [total, place, weighted], "sum", reduction="add")
        unchanged = op("Identity", [total], f"{branch.name}.kept")
        total = nodes.op(
            "If",
            [used],
            str(expert),
            then_branch=ir.Graph([], [summed], nodes=branch.list, initializers=list(matrices.values()), name="chosen"),
            else_branch=ir.Graph([], unchanged.outputs, nodes=[unchanged], name="not_chosen"),
        )
    graph.insert_before(node, nodes.list)
    return total


def _routes(
    graph: ir.Graph, nodes: Nodes, hidden: ir.Value, index: ir.Value, weights: ir.Value, experts: int
) -> Iterator[tuple[ir.Value, ...]]:
    """Which tokens take part in each expert's products: whether any, how many, ``[1]``, who chose it, and their shares.

    ``index`` and ``weights`` are the experts of each token and their weights, ``[N,k]``; both results are ``[1,N]``.
    """

    def number(value: int) -> ir.Value:
        return constant(graph, f"experts.{value}", np.array([value]))

    ids = constant(graph, f"experts.ids.{experts}", np.arange(experts)[:, None, None])
    same = nodes.op("Equal", [index, ids], "same")
    selected = nodes.op("Cast", [same], "chose", to=ir.DataType.FLOAT.value)  # [E,N,k]
    chosen = nodes.op("ReduceMax", [selected, number(2)], "chosen", keepdims=0)  # [E,N]
    shares = nodes.op("ReduceSum", [nodes.op("Mul", [selected, weights], "weighted"), number(2)], "shares", keepdims=0)
    counts = nodes.op("ReduceSum", [chosen, number(1)], "counts", keepdims=0)
    sizes = nodes.op("Cast", [counts], "sizes", to=ir.DataType.INT64.value)
    tiles = nodes.op("Div", [nodes.op("Add", [sizes, number(_GRAIN - 1)], "up"), number(_GRAIN)], "tiles")
    tokens = nodes.op("Shape", [hidden], "tokens", start=0, end=1)
    taking_part = nodes.op("Min", [nodes.op("Mul", [tiles, number(_GRAIN)], "full"), tokens], "rows")
    used = nodes.op("Cast", [taking_part], "used", to=ir.DataType.BOOL.value)
    of_all = {"used": used, "rows": taking_part, "chosen": chosen, "shares": shares}
    by_expert = (
        nodes.outputs("Split", [value], [f"{name}.{n}" for n in range(experts)], axis=0, num_outputs=experts)
        for name, value in of_all.items()
    )
    return zip(*by_expert, strict=True)


def _required(value: Any) -> Any:
    assert value is not None
    return value


def _stack(value: ir.Value | None) -> ir.Value | None:
    """The stack of all experts' matrices or biases from which a value was gathered; None for other values."""
    gather = producer(value, "Gather")
    stack = gather.inputs[0] if gather is not None else None
    return stack if stack is not None and stack.const_value is not None else None


def _sizes(stack: ir.Value) -> tuple[int, ...]:
    return tuple(map(int, _required(stack.const_value).shape.numpy()))


def _expert(stack: ir.Value, expert: int, read: Any) -> ir.Value:
    """The matrix ``[K,N]`` of one expert, or its bias ``[1,N]``."""
    _, *sizes = _sizes(stack)
    sizes = sizes if len(sizes) > 1 else [1, *sizes]
    name, shape = f"{stack.name}[{expert}]", ir.Shape(sizes)

    def slice_of() -> ir.TensorProtocol:
        return ir.Tensor(read(stack)[expert].reshape(sizes), name=name)

    return ir.val(
        name,
        shape=shape,
        const_value=ir.LazyTensor(slice_of, dtype=_required(stack.const_value).dtype, shape=shape, name=name),
    )


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
