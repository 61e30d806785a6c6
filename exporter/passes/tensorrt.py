"""Rewrites for TensorRT: products over the rows of all slots, and tables in floating point."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnx_ir.passes.common as passes

from specexport.exporter.external_data import split_int4
from specexport.exporter.passes.compute_type import Store
from specexport.exporter.passes.editing import constant, op, producer

_CHUNK_ELEMENTS = 4 << 20


def flatten_products(model: ir.Model) -> None:
    """Multiplies the tokens of all slots by weights as the rows of one matrix: ``[B,T,K]`` as ``[B*T,K]``.

    TensorRT multiplies ``[1,T,K]`` and ``[B,T,K]`` by different kernels, which store weights in different layouts: an
    engine that reads prompts one slot at a time and takes steps for several would store every weight twice.

    The ranks and constant sizes of values must be known. Reshapes get known sizes as constants, as TensorRT does not
    infer sizes through two reshapes.
    """
    graph = model.graph
    for node in list(graph):
        if node.op_type == "Reshape":
            _put_known_sizes(graph, node)
    for node in list(graph):
        sizes = _weight(node.inputs[1]) if node.op_type == "MatMul" else None
        x = node.inputs[0]
        if sizes is not None and x is not None and x.shape is not None and len(x.shape) == 3:
            _flatten(graph, node, x, *sizes)


def _weight(value: ir.Value | None) -> tuple[int, int] | None:
    """K and N of a stored matrix, which may be quantized or cast; None for other values."""
    while value is not None and (origin := value.producer()) is not None:
        value = origin.inputs[0] if origin.op_type in ("Cast", "DequantizeLinear") else None
    if value is None or value.const_value is None or len(value.const_value.shape) != 2:
        return None
    rows, columns = value.const_value.shape.numpy()
    return int(rows), int(columns)


def _flatten(graph: ir.Graph, node: ir.Node, x: ir.Value, rows: int, columns: int) -> None:
    product = node.outputs[0]
    dtype, name, int64 = product.dtype or x.dtype, f"{product.name}.flat", ir.DataType.INT64
    flat = op("Reshape", [x, _sizes(graph, [-1, rows])], f"{name}.rows")
    matmul = op("MatMul", [flat.outputs[0], node.inputs[1]], name)
    kept = op("Shape", [x], f"{name}.kept", start=0, end=2)
    shape = op("Concat", [kept.outputs[0], _sizes(graph, [columns])], f"{name}.shape", axis=0)
    back = op("Reshape", [matmul.outputs[0], shape.outputs[0]], f"{name}.back")
    _describe(flat, dtype, None, rows)
    _describe(matmul, dtype, None, columns)
    _describe(kept, int64, 2)
    _describe(shape, int64, 3)
    _describe(back, dtype, None, None, columns)
    nodes = [flat, matmul, kept, shape, back]
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, [product], back.outputs)


def _put_known_sizes(graph: ir.Graph, node: ir.Node) -> None:
    """Replaces sizes that a Reshape infers or computes with known sizes."""
    shape, origin = node.outputs[0].shape, node.inputs[1].producer() if node.inputs[1] is not None else None
    if shape is None or origin is None or origin.op_type != "Concat" or len(origin.inputs) != len(shape):
        return
    parts = [
        _sizes(graph, [size]) if isinstance(size, int) else part
        for size, part in zip(shape, origin.inputs, strict=True)
    ]
    sizes = op("Concat", parts, f"{node.outputs[0].name}.shape", axis=0)
    _describe(sizes, ir.DataType.INT64, len(parts))
    graph.insert_before(node, sizes)
    node.replace_input_with(1, sizes.outputs[0])


def _describe(node: ir.Node, dtype: ir.DataType | None, *shape: int | None) -> None:
    """Sets the type and shape of a node's output, which later rewrites read."""
    node.outputs[0].shape = ir.Shape(shape)
    node.outputs[0].type = None if dtype is None else ir.TensorType(dtype)


def _sizes(graph: ir.Graph, sizes: list[int]) -> ir.Value:
    """A shared constant with these sizes."""
    return constant(graph, "sizes." + ".".join(map(str, sizes)), np.array(sizes, np.int64))


def restore_tables(model: ir.Model, store: Store) -> None:
    """Dequantizes tables whose rows are gathered, as TensorRT does not gather from int8 tables.

    ``Mul(Cast(Gather(integers, ids)), Gather(scales, ids))`` becomes ``Cast(Gather(fp16 table, ids))``.

    The scales ``[V,G]`` may be cast before the Gather and get a last axis after it. Each byte of experts may hold two
    integers, which a Concat joins before the Mul.
    """
    graph = model.graph
    for node in list(graph):
        if node.op_type != "Mul":
            continue
        columns, pairs = producer(node.inputs[1], "Reshape"), producer(node.inputs[0], "Concat")
        scales = producer(node.inputs[1] if columns is None else columns.inputs[0], "Gather")
        difference = producer(pairs.inputs[1], "Sub") if pairs is not None else None
        wide = producer(node.inputs[0] if difference is None else difference.inputs[0], "Cast")
        rows = producer(wide.inputs[0], "Gather") if wide is not None else None
        if wide is None or scales is None or rows is None:
            continue
        stored, ids = rows.inputs
        assert stored is not None
        name = f"{stored.name}.restored"
        if name not in graph.initializers:
            cast = producer(scales.inputs[0], "Cast")
            array = _restored(
                stored, scales.inputs[0] if cast is None else cast.inputs[0], pairs=difference is not None
            )
            tensor = store(name, ir.DataType.FLOAT16, array)
            graph.register_initializer(ir.val(name, const_value=tensor))
        table = op("Cast", [graph.initializers[name]], f"{node.name}.table", to=ir.DataType.FLOAT.value)
        gathered = op("Gather", [table.outputs[0], ids], f"{node.name}.restored", axis=0)
        ir.convenience.replace_nodes_and_values(graph, node, [node], [table, gathered], node.outputs, gathered.outputs)
    passes.RemoveUnusedNodesPass()(model)


def _restored(stored: ir.Value, scales: ir.Value | None, *, pairs: bool) -> npt.NDArray[np.float16]:
    """Integers ``[V,H/block,block,...]``, or bytes that hold two each, times the scales of their blocks."""
    assert stored.const_value is not None and scales is not None and scales.const_value is not None
    integers, scale = stored.const_value.numpy(), scales.const_value.numpy()
    rows, blocks, stored_block, *columns = integers.shape
    scale = scale.reshape(rows, blocks, 1, *columns)
    table = np.empty((rows, blocks, 2 * stored_block if pairs else stored_block, *columns), np.float16)
    chunk = max(1, _CHUNK_ELEMENTS // table[0].size)
    for part in (slice(start, start + chunk) for start in range(0, rows, chunk)):
        table[part] = (split_int4(integers[part]) if pairs else integers[part]) * scale[part]
    return table
