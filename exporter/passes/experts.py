"""Lowers the experts of a mixture: gathered from their stacks, or each in a branch of its own."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from specexport.exporter.passes.editing import Nodes, ancestors, constant, op, producer
from specexport.graphs.ops import EXPERTS_DOMAIN

_MANY, _GROUP = 32, 4
"""From so many experts on, an If around every few of them saves most Ifs of those that no token chose: each costs some
6 microseconds."""
_Routes = dict[str, ir.Value]
"""Of some experts: by how many tokens each was chosen (``count``), by which (``chosen``), and with which ``shares``."""


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
    name = str(node.outputs[0].name)
    region, nodes = _nodes_between(hidden, rows, products), Nodes(name)
    stacks = {value: stack for source in region for value in source.inputs if (stack := _stack(value)) is not None}
    tensors = {stack: _required(stack.const_value) for stack in stacks.values()}
    read = functools.lru_cache(len(tensors))(lambda stack: tensors[stack].numpy())  # once for all experts of a stack
    count = _sizes(next(iter(stacks.values())))[0]
    axis = constant(graph, "experts.2", np.array([2]))

    def add_expert(nodes: Nodes, total: ir.Value, expert: int, route: _Routes) -> ir.Value:
        """The total ``[N,H]`` with what one expert adds to its tokens."""
        branch = Nodes(f"{name}.{expert}")
        _, token = branch.outputs("TopK", [route["chosen"], route["count"]], ["best", "token"])  # [1,count]
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
        weight = branch.op("GatherElements", [route["shares"], token], "share", axis=1)
        weighted = branch.op("Mul", [mapped[products], branch.op("Unsqueeze", [weight, axis], "shares")], "weighted")
        place = branch.op("Unsqueeze", [token, axis], "place")
        summed = branch.op("ScatterND", [total, place, weighted], "sum", reduction="add")
        return _if(nodes, route["used"], total, branch, summed, matrices.values())

    def add_experts(nodes: Nodes, total: ir.Value, first: int, number: int, routes: _Routes) -> ir.Value:
        """The total with what several experts add, one after another, so that the order of sums is theirs."""
        for expert, route in enumerate(_divided(graph, nodes, routes, number, 1), first):
            total = add_expert(nodes, total, expert, route)
        return total

    routes = _routes(graph, nodes, index, weights, count)
    total = nodes.op("Mul", [hidden, constant(graph, "experts.nothing", np.array(0, np.float32))], "nothing")
    if count < _MANY or count % _GROUP:
        total = add_experts(nodes, total, 0, count, routes)
    else:
        for group, route in enumerate(_divided(graph, nodes, routes, count // _GROUP, _GROUP)):
            branch, of_group = Nodes(f"{name}.group.{group}"), {key: route[key] for key in routes}
            summed = add_experts(branch, total, group * _GROUP, _GROUP, of_group)
            total = _if(nodes, route["used"], total, branch, summed)
    graph.insert_before(node, nodes.list)
    return total


def _routes(graph: ir.Graph, nodes: Nodes, index: ir.Value, weights: ir.Value, experts: int) -> _Routes:
    """The routes of all experts: ``[E]`` and ``[E,N]`` from the experts of each token and their weights, ``[N,k]``."""
    ids = constant(graph, f"experts.ids.{experts}", np.arange(experts)[:, None, None])
    same = nodes.op("Equal", [index, ids], "same")
    selected = nodes.op("Cast", [same], "chose", to=ir.DataType.FLOAT.value)  # [E,N,k]
    weighted, last, rows = nodes.op("Mul", [selected, weights], "weighted"), _number(graph, 2), _number(graph, 1)
    chosen = nodes.op("ReduceMax", [selected, last], "chosen", keepdims=0)  # [E,N]
    shares = nodes.op("ReduceSum", [weighted, last], "shares", keepdims=0)
    counts = nodes.op("ReduceSum", [chosen, rows], "counts", keepdims=0)
    count = nodes.op("Cast", [counts], "count", to=ir.DataType.INT64.value)
    return {"count": count, "chosen": chosen, "shares": shares}


def _divided(graph: ir.Graph, nodes: Nodes, routes: _Routes, parts: int, size: int) -> Iterator[_Routes]:
    """The routes of ``parts * size`` experts in equal parts, each with whether a token chose one of them (``used``)."""
    most = routes["count"]
    if size > 1:
        apart = constant(graph, f"experts.of.{size}", np.array([parts, size]))
        by_part = nodes.op("Reshape", [most, apart], f"{most.name}.by_part")
        most = nodes.op("ReduceMax", [by_part, _number(graph, 1)], f"{most.name}.most", keepdims=0)
    used = nodes.op("Cast", [most], f"{most.name}.used", to=ir.DataType.BOOL.value)
    divided = [
        nodes.outputs("Split", [value], [f"{value.name}.{n}" for n in range(parts)], axis=0, num_outputs=parts)
        for value in (used, *routes.values())
    ]
    return (dict(zip(("used", *routes), part, strict=True)) for part in zip(*divided, strict=True))


def _if(
    nodes: Nodes, used: ir.Value, total: ir.Value, branch: Nodes, summed: ir.Value, weights: Iterable[ir.Value] = ()
) -> ir.Value:
    """Adds an If, which runs ``branch`` to get its result from ``total``, or keeps the total."""
    unchanged = op("Identity", [total], f"{branch.name}.kept")
    return nodes.op(
        "If",
        [used],
        f"{branch.name}.after",
        then_branch=ir.Graph([], [summed], nodes=branch.list, initializers=list(weights), name="chosen"),
        else_branch=ir.Graph([], unchanged.outputs, nodes=[unchanged], name="not_chosen"),
    )


def _number(graph: ir.Graph, value: int) -> ir.Value:
    return constant(graph, f"experts.{value}", np.array([value]))


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
