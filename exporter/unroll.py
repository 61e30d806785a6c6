"""Fixes how many tokens a propose graph drafts: its loop is unrolled, or stages beyond those are cut off.

Compilers that want every shape known (TensorRT) cannot take a loop whose first pass sees more tokens than the others.
The passes share the weights of the one loop body.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from specexport.contract import tensors


def fix_drafts(model: ir.Model, drafts: int) -> None:
    """Makes of a propose graph the one that drafts a fixed number of tokens."""
    if any(node.op_type == "Loop" for node in model.graph):
        unroll(model, drafts)
    else:
        cut_stages(model, drafts)


def cut_stages(model: ir.Model, stages: int) -> None:
    """Leaves an MLP speculator its first stages only."""
    kept = {tensors.of_stage(kind, stage) for kind in tensors.DRAFTED for stage in range(stages)}
    model.graph.outputs[:] = [value for value in model.graph.outputs if value.name in kept]
    passes.RemoveUnusedNodesPass()(model)


def unroll(model: ir.Model, trips: int) -> None:
    """Replaces the one Loop of a propose graph by ``trips`` copies of its body; ``num_draft_tokens`` is no input then.

    Args:
        model: changed in place.
        trips: how many tokens the static graph drafts.
    """
    graph = model.graph
    loop = next(node for node in graph if node.op_type == "Loop")
    body = loop.attributes["body"].as_graph()
    shared = {value: _moved(graph, value) for value in list(body.initializers.values())}
    carried = [value for value in loop.inputs[2:] if value is not None]
    scanned: list[list[ir.Value]] = []
    for trip in range(trips):
        made = _copy(graph, loop, body, carried, shared, trip)
        carried, scans = made[: len(carried)], made[len(carried) :]
        scanned.append(scans)
    stacked = [_stack(graph, loop, name, list(values)) for name, values in enumerate(zip(*scanned, strict=True))]
    old, new = list(loop.outputs), [*carried, *stacked]
    for value, replacement in zip(old, new, strict=True):
        replacement.type = value.type or replacement.type
        if value.shape is not None:
            replacement.shape = ir.Shape([trips if getattr(dim, "value", dim) == "K" else dim for dim in value.shape])
    ir.convenience.replace_nodes_and_values(graph, loop, [loop], [], old, new)
    graph.inputs[:] = [value for value in graph.inputs if value.name != tensors.NUM_DRAFT_TOKENS]
    passes.RemoveUnusedNodesPass()(model)


def _moved(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """An initializer of the loop's body, as one of the whole graph."""
    moved = ir.Value(name=f"body.{value.name}", type=value.type, shape=value.shape, const_value=value.const_value)
    graph.register_initializer(moved)
    return moved


def _copy(
    graph: ir.Graph,
    loop: ir.Node,
    body: ir.Graph,
    carried: list[ir.Value],
    shared: dict[ir.Value, ir.Value],
    trip: int,
) -> list[ir.Value]:
    """Puts one copy of the body before the loop; returns its outputs without the loop condition."""
    iteration, _condition, *inputs = body.inputs
    index = _constant(graph, f"trip.{trip}", np.array(trip, np.int64))
    always = _constant(graph, f"going.{trip}", np.array(True))
    known = {**shared, iteration: index, _condition: always, **dict(zip(inputs, carried, strict=True))}
    for node in body:
        # Symbolic sizes differ from pass to pass.
        outputs = [ir.Value(name=f"{out.name}.{trip}", type=out.type, shape=_known(out)) for out in node.outputs]
        copy = ir.node(
            node.op_type,
            [known.get(value, value) if value is not None else None for value in node.inputs],
            attributes={name: attribute.value for name, attribute in node.attributes.items()},
            outputs=outputs,
            name=f"{node.name}.{trip}",
        )
        graph.insert_before(loop, copy)
        known.update(zip(node.outputs, outputs, strict=True))
    return [known[value] for value in body.outputs[1:]]


def _known(value: ir.Value) -> ir.Shape | None:
    """A value's shape with the sizes that are numbers, the others unknown; it is kept with its type alone."""
    if value.shape is None or value.type is None:
        return None
    return ir.Shape([size if isinstance(size, int) else None for size in value.shape])


def _constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.Tensor(array, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
    graph.register_initializer(value)
    return value


def _stack(graph: ir.Graph, loop: ir.Node, name: int, values: list[ir.Value]) -> ir.Value:
    """What the passes made, stacked along a new first axis as the loop does."""
    axis = _constant(graph, f"stack.{name}.axis", np.array([0], np.int64))
    rows = []
    for trip, value in enumerate(values):
        row = ir.node("Unsqueeze", [value, axis], name=f"stack.{name}.{trip}")
        row.outputs[0].name = row.name
        graph.insert_before(loop, row)
        rows.append(row.outputs[0])
    joined = ir.node("Concat", rows, attributes={"axis": 0}, name=f"stack.{name}")
    joined.outputs[0].name = joined.name
    graph.insert_before(loop, joined)
    return joined.outputs[0]
