"""Puts one traced draft pass into the propose graph: a loop of K passes and what becomes of their cache rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from specexport.contract import tensors
from specexport.contract.model import OPSETS, CacheLayer, LoweredAs
from specexport.contract.tensors import cache_names, returned_names
from specexport.exporter.passes.hoist import hoist_invariants
from specexport.exporter.trace import row_names

_INT64 = ir.TensorType(ir.DataType.INT64)
_FLOAT = ir.TensorType(ir.DataType.FLOAT)
_BOOL = ir.TensorType(ir.DataType.BOOL)


def _constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.Tensor(array, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
    graph.register_initializer(value)
    return value


def _op(op_type: str, inputs: Sequence[ir.Value | None], name: str, **attributes: object) -> ir.Node:
    node = ir.node(op_type, inputs, attributes=attributes or None, name=name)  # type: ignore[arg-type]
    node.outputs[0].name = name
    return node


def propose_graph(draft_pass: ir.Model, shapes: Sequence[CacheLayer], lowering: LoweredAs = "native") -> ir.Model:
    """Builds the propose graph around one pass of the draft.

    The pass becomes the body of an ONNX Loop. Its weights live in the body: ONNX Runtime fuses a quantized weight only
    where one node reads it, and packs weights once a node, so unrolled passes would each hold (and, quantized, each
    dequantize) a copy of their own. The first pass sees T tokens, later ones the token just drawn; rows for the cache
    are carried along and written once at the end, since only a TensorScatter from a graph input to a graph output
    works in place. Lowered portably, the rows themselves are returned.

    Args:
        draft_pass: what :func:`~specexport.exporter.trace.trace_draft_pass` returned; it is consumed.
        shapes: the cache layers.
        lowering: the pass's.
    """
    body = draft_pass.graph
    layers = len(shapes)
    named = {value.name: value for value in body.inputs}
    carried = [named[tensors.INPUT_IDS], named[tensors.LAST_ROW], *(named[name] for name in row_names(layers))]

    inputs = _propose_inputs(shapes)
    outer = {value.name: value for value in inputs}
    for name in (tensors.PAST_LENGTH, tensors.TEMPERATURE, tensors.TOP_K, tensors.TOP_P, tensors.MIN_P):
        _rewire(named[name], outer[name])
    for name in cache_names(layers):
        _rewire(named[name], outer[name])

    iteration = ir.Value(name="iteration", type=_INT64, shape=ir.Shape([]))
    going = ir.Value(name="going", type=_BOOL, shape=ir.Shape([]))
    noise = _op("Gather", [outer[tensors.UNIFORM], iteration], "noise", axis=1)
    _rewire(named[tensors.UNIFORM], noise.outputs[0])
    body.insert_before(next(iter(body)), noise)

    token, ids, probs, *grown = body.outputs
    axis = _constant(body, "next_token_axis", np.array([1], np.int64))
    go_on = _op("Identity", [going], "go_on")
    next_ids = _op("Unsqueeze", [token, axis], "next_input_ids")
    first_row = _op("Sub", [named[tensors.LAST_ROW], named[tensors.LAST_ROW]], "next_last_row")
    body.extend([go_on, next_ids, first_row])
    for value, name in ((token, "token"), (ids, "ids"), (probs, "probs")):
        value.name = f"pass.{name}"
    for value in (named[tensors.INPUT_IDS], named[tensors.LAST_ROW]):
        value.name = f"pass.{value.name}"
    body.inputs[:] = [iteration, going, *carried]
    body.outputs[:] = [go_on.outputs[0], next_ids.outputs[0], first_row.outputs[0], *grown, token, ids, probs]
    body.name = "draft_pass"

    return _around(body, inputs, outer, shapes, draft_pass, lowering)


def _rewire(old: ir.Value, new: ir.Value) -> None:
    for node, index in list(old.uses()):
        node.replace_input_with(index, new)


def _propose_inputs(shapes: Sequence[CacheLayer]) -> list[ir.Value]:
    def value(name: str, kind: ir.TensorType, *shape: int | str) -> ir.Value:
        return ir.Value(name=name, type=kind, shape=ir.Shape(shape))

    caches = [
        value(name, _FLOAT, "B", shape.heads, "S", size)
        for layer, shape in enumerate(shapes)
        for name, size in ((tensors.past_key(layer), shape.key_size), (tensors.past_value(layer), shape.value_size))
    ]
    return [
        value(tensors.INPUT_IDS, _INT64, "B", "T"),
        value(tensors.PAST_LENGTH, _INT64, "B"),
        value(tensors.LAST_ROW, _INT64, "B"),
        value(tensors.NUM_DRAFT_TOKENS, _INT64),
        value(tensors.UNIFORM, _FLOAT, "B", "K"),
        value(tensors.TEMPERATURE, _FLOAT, "B"),
        value(tensors.TOP_K, _INT64, "B"),
        value(tensors.TOP_P, _FLOAT, "B"),
        value(tensors.MIN_P, _FLOAT, "B"),
        *caches,
    ]


def _around(
    body: ir.Graph,
    inputs: list[ir.Value],
    outer: dict[str | None, ir.Value],
    shapes: Sequence[CacheLayer],
    draft_pass: ir.Model,
    lowering: LoweredAs,
) -> ir.Model:
    """The graph that holds the loop: empty rows in, the loop, rows out or one TensorScatter a cache."""
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": OPSETS[lowering]}, name="propose")
    batch = _op("Shape", [outer[tensors.PAST_LENGTH]], "batch")
    graph.append(batch)
    empty: list[ir.Value] = []
    for name, heads, size in _rows(shapes):
        rest = _constant(graph, f"{name}.rest", np.array([heads, 0, size], np.int64))
        extent = _op("Concat", [batch.outputs[0], rest], f"{name}.shape", axis=0)
        filled = _op("ConstantOfShape", [extent.outputs[0]], f"{name}.empty")
        graph.extend([extent, filled])
        empty.append(filled.outputs[0])
    always = _constant(graph, "always", np.array(True))
    loop = ir.node(
        "Loop",
        [
            outer[tensors.NUM_DRAFT_TOKENS],
            always,
            outer[tensors.INPUT_IDS],
            outer[tensors.LAST_ROW],
            *empty,
        ],
        attributes={"body": ir.AttrGraph("body", body)},
        num_outputs=2 + len(empty) + 3,
        name="draft",
    )
    graph.append(loop)
    hoist_invariants(graph, loop)
    last_ids, last_row, *rows = loop.outputs[: 2 + len(empty)]
    last_ids.name, last_row.name = "last_drawn", "last_drawn_row"
    drafted = loop.outputs[2 + len(empty) :]
    candidates = body.outputs[-1].shape
    width = candidates[-1] if candidates is not None else "M"
    for value, name, kind, inner in zip(
        drafted,
        (tensors.DRAFT_TOKENS, tensors.DRAFT_IDS, tensors.DRAFT_PROBS),
        (_INT64, _INT64, _FLOAT),
        ((), (width,), (width,)),
        strict=True,
    ):
        value.name, value.type, value.shape = name, kind, ir.Shape(["K", "B", *inner])
    returned: list[ir.Value] = []
    past, names = cache_names(len(shapes)), returned_names(len(shapes), lowering)
    for row, (name, heads, size), old, new in zip(rows, _rows(shapes), past, names, strict=True):
        if lowering == "portable":
            row.name, row.type, row.shape = new, _FLOAT, ir.Shape(["B", heads, "F", size])
            returned.append(row)
            continue
        row.name = f"{name}.made"
        write = _op("TensorScatter", [outer[old], row, outer[tensors.PAST_LENGTH]], new, axis=-2)
        write.outputs[0].type, write.outputs[0].shape = _FLOAT, outer[old].shape
        graph.append(write)
        returned.append(write.outputs[0])
    graph.outputs.extend([*drafted, *returned])
    return ir.Model(graph, ir_version=draft_pass.ir_version, producer_name="specexport")


def _rows(shapes: Sequence[CacheLayer]) -> list[tuple[str, int, int]]:
    """Name, heads and size of each tensor of new rows, in the order of :func:`row_names`."""
    sizes = [(shape.heads, size) for shape in shapes for size in (shape.key_size, shape.value_size)]
    return [(name, heads, size) for name, (heads, size) in zip(row_names(len(shapes)), sizes, strict=True)]
