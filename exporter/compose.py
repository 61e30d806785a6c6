"""Builds the propose graph from a traced draft pass: a loop of K passes, then the writes to the cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from specexport.contract import tensors
from specexport.contract.model import OPSETS, CacheLayer, LoweredAs
from specexport.contract.signature import caches, propose_signature
from specexport.contract.tensors import Tensor
from specexport.exporter.passes.editing import constant

_INT64, _FLOAT, _BOOL = ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.BOOL
_MAX_CONSTANT = 1024
"""Maximum number of elements of a constant; larger constants are weights, which stay in the loop's body."""
_FUSED = frozenset({"Transpose"})
"""Operators that ONNX Runtime fuses into the following product, which is cheaper than a copy before the loop."""


def propose_graph(
    draft_pass: ir.Model,
    shapes: Sequence[CacheLayer],
    lowering: LoweredAs = "native",
    start: ir.Model | None = None,
) -> ir.Model:
    """Builds the propose graph around one pass of the draft.

    The pass becomes the body of an ONNX Loop, which holds the weights. Unrolled passes would each hold and dequantize a
    copy: ONNX Runtime fuses a dequantization only if a single node reads it, and packs weights once per node. The first
    pass reads T tokens, later passes read the token just drawn. Cache rows are carried from pass to pass and written
    once at the end, since only a TensorScatter from a graph input to a graph output works in place; the portable
    lowering returns the rows instead. Both graphs are consumed.

    Args:
        draft_pass: outputs the token, q, further inputs of the next pass, and its rows.
        start: computes the further inputs of the first pass, by name, from inputs of the propose graph; None if passes
            have only tokens and rows as inputs. The propose graph returns the first of these after the last pass.
    """
    rows = {str(v.name): _sizes(v) for v in draft_pass.graph.inputs if str(v.name).startswith("row.")}
    drafted = [str(v.name) for v in draft_pass.graph.outputs if str(v.name).startswith("draft_")]
    start_values = [] if start is None else list(start.graph.outputs)
    inputs = _inputs(draft_pass.graph, shapes, start)
    graph = ir.Graph(list(inputs.values()), [], nodes=[], opset_imports={"": OPSETS[lowering]}, name="propose")
    body = _loop_body(draft_pass.graph, inputs, [*(str(value.name) for value in start_values), *rows], drafted)
    if start is not None:
        _prepend(start.graph, graph, body, inputs)

    tape = Tape(graph)
    read = [inputs[tensors.INPUT_IDS], inputs[tensors.LAST_ROW]]
    batch = tape.op("Shape", [inputs[tensors.PAST_LENGTH]], output=ir.val("batch"))
    first = []  # values carried into the first pass: no rows, and the states from the graph's inputs
    for name, sizes in rows.items():
        if (at_first := name.replace("row.", "past_", 1)).startswith("past_state."):
            first.append(inputs[at_first])
            continue
        rest = constant(graph, f"{name}.rest", np.array([size or 0 for size in sizes], np.int64))
        extent = tape.op("Concat", [batch, rest], {"axis": 0}, output=ir.val(f"{name}.shape"))
        first.append(tape.op("ConstantOfShape", [extent], output=ir.val(f"{name}.empty")))
    carried = [*read, *start_values, *first]
    results = tape.op_multi_out(
        "Loop",
        [inputs[tensors.NUM_DRAFT_TOKENS], constant(graph, "always", np.array(True)), *carried],
        {"body": ir.AttrGraph("body", body)},
        outputs=_loop_outputs(body, drafted),
        name="draft",
    )
    hoist_invariants(graph, tape.nodes[-1])
    states = results[len(read) :][: len(start_values[:1])]
    for state in states:
        state.name, state.dtype, state.shape = tensors.NEXT_STATE, _FLOAT, body.outputs[1 + len(read)].shape
    returned = []
    for row, (name, sizes) in zip(results[len(carried) - len(rows) : len(carried)], rows.items(), strict=True):
        name = name.removeprefix("row.")
        if lowering == "native" and f"past_{name}".startswith(tensors.CACHES):
            cache = inputs[f"past_{name}"]
            present = ir.val(f"present_{name}", _FLOAT, cache.shape)
            scattered = [cache, row, inputs[tensors.PAST_LENGTH]]
            returned.append(tape.op("TensorScatter", scattered, {"axis": -2}, output=present))
        else:
            row.name, row.dtype, row.shape = f"new_{name}", _FLOAT, ir.Shape(["B", *(size or "F" for size in sizes)])
            returned.append(row)
    graph.outputs.extend([*results[len(carried) :], *states, *returned])
    return ir.Model(graph, ir_version=draft_pass.ir_version, producer_name="specexport")


def _sizes(rows: ir.Value) -> list[int | None]:
    """The sizes of a pass's rows but the number of slots; None for the number of tokens."""
    assert rows.shape is not None
    return [size if isinstance(size, int) else None for size in rows.shape[1:]]


def _inputs(draft_pass: ir.Graph, shapes: Sequence[CacheLayer], start: ir.Model | None) -> dict[str, ir.Value]:
    """The propose graph's inputs by name: the loop's, those of ``start``, the caches, and the draft's states."""
    of_loop = map(_value, propose_signature("M").inputs)
    of_start = [] if start is None else [ir.val(v.name, v.dtype, v.shape) for v in start.graph.inputs]
    of_states = [
        ir.val(value.name, value.dtype, value.shape)
        for value in draft_pass.inputs
        if str(value.name).startswith(tensors.STATES) or value.name in (tensors.KNOWN_TOKENS, tensors.CELL_ROWS)
    ]
    return {str(value.name): value for value in (*of_loop, *of_start, *map(_value, caches(shapes)), *of_states)}


def _value(tensor: Tensor) -> ir.Value:
    return ir.val(str(tensor), ir.DataType.from_numpy(np.dtype(tensor.dtype)), list(tensor.dims))


def _prepend(start: ir.Graph, graph: ir.Graph, body: ir.Graph, inputs: dict[str, ir.Value]) -> None:
    """Moves the nodes and weights of ``start`` into the graph around a loop, under names that the body does not use."""
    nodes, weights = list(start), list(start.initializers.values())
    used = {value.name for node in body for value in node.outputs} | {value.name for value in body.inputs}
    used |= body.initializers.keys()
    for value in start.inputs:
        value.replace_all_uses_with(inputs[str(value.name)])
    start.outputs.clear()
    start.initializers.clear()
    start.remove(nodes)
    for node in nodes:
        node.name = f"start.{node.name}"
    for value in (*weights, *(value for node in nodes for value in node.outputs)):
        if value.name in used:
            value.name = f"start.{value.name}"
    for value in weights:
        graph.register_initializer(value)
    graph.extend(nodes)


def _loop_body(body: ir.Graph, outer: dict[str, ir.Value], start_values: list[str], drafted: list[str]) -> ir.Graph:
    """Turns a pass's graph into the body of a Loop, which reads the inputs that do not change from the outer graph."""
    named = {str(value.name): value for value in body.inputs}
    last_row, uniform = named[tensors.LAST_ROW], named[tensors.UNIFORM]
    read = [named[tensors.INPUT_IDS], last_row]
    carried = [*read, *(named[name] for name in start_values)]
    for name, value in named.items():
        if value not in carried and value is not uniform:
            value.replace_all_uses_with(outer[name])
    iteration, going = ir.val("iteration", _INT64, []), ir.val("going", _BOOL, [])
    tape = Tape()
    noise = tape.op("Gather", [outer[tensors.UNIFORM], iteration], {"axis": 1}, output=ir.val("noise"))
    uniform.replace_all_uses_with(noise)
    body.insert_before(body[0], tape.nodes)

    stacked, next_values = body.outputs[: len(drafted)], body.outputs[len(drafted) :]
    tape = Tape(body)
    following = [tape.op("Identity", [going], output=ir.val("go_on"))]
    next_ids = ir.val("next_input_ids")
    axis = constant(body, "next_token_axis", np.array([1], np.int64))
    following.append(tape.op("Unsqueeze", [stacked[0], axis], output=next_ids))
    following.append(tape.op("Sub", [last_row, last_row], output=ir.val("next_last_row")))
    for value in (*read, *stacked, *next_values):
        value.name = f"pass.{value.name}"
    body.inputs[:] = [iteration, going, *carried]
    body.outputs[:] = [*following, *next_values, *stacked]
    body.name = "draft_pass"
    return body


def _loop_outputs(body: ir.Graph, drafted: list[str]) -> list[ir.Value]:
    """The carried values after the last pass, and the stacked drafts of all K passes."""
    carried, stacked = body.outputs[1 : -len(drafted)], body.outputs[-len(drafted) :]
    results = [ir.val(f"{value.name}.last") for value in carried]
    for name, value in zip(drafted, stacked, strict=True):
        assert value.shape is not None
        results.append(ir.val(name, value.dtype, ["K", *value.shape]))
    return results


def hoist_invariants(graph: ir.Graph, loop: ir.Node) -> None:
    """Moves nodes of a loop's body before the loop if they depend only on the graph around it.

    Nodes that depend on constants alone stay: they are weights, which a backend packs where they are multiplied. Nodes
    with subgraphs stay too, as these may read values of a pass that are not among the node's inputs.
    """
    body = loop.attributes["body"].as_graph()
    constants = {value: value.const_value for value in body.initializers.values() if value.const_value is not None}
    varying = set(body.inputs)
    for node in list(body):
        read = {value for value in node.inputs if value is not None}
        small = all(constants[value].size <= _MAX_CONSTANT for value in read & constants.keys())
        invariant = small and not read & varying and not read <= constants.keys()
        holds_graph = any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values())
        returned = any(value.is_graph_output() for value in node.outputs)
        if not invariant or holds_graph or returned or node.op_type in _FUSED:
            varying.update(node.outputs)
            continue
        for at, value in enumerate(node.inputs):
            if value in constants:
                node.replace_input_with(at, constant(graph, f"every.{value.name}", constants[value].numpy()))
        body.remove(node)
        graph.insert_before(loop, node)
    for value in constants:
        if not value.uses() and value.name is not None:
            del body.initializers[value.name]
