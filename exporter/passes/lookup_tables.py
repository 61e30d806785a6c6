"""Undoes the quantization of tables that rows are looked up in: TensorRT gathers from no integers but indices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnx_ir.passes.common as passes

from specexport.exporter.passes.compute_type import Store
from specexport.exporter.passes.editing import op, producer
from specexport.exporter.quantize import split_int4

_CHUNK_ELEMENTS = 4 << 20


def restore_tables(model: ir.Model, store: Store) -> None:
    """``Mul(Cast(Gather(integers, ids)), Gather(scales, ids))`` becomes ``Cast(Gather(fp16 table, ids))``.

    Of rows the scales ``[V,G]`` may be cast before they are gathered, and get a last axis after it. Experts' bytes may
    hold two integers: then a Concat puts these together before the Mul.
    """
    graph = model.graph
    for node in list(graph):
        if node.op_type != "Mul":
            continue
        columns, pairs = producer(node.inputs[1], "Reshape"), producer(node.inputs[0], "Concat")
        scales = producer(node.inputs[1] if columns is None else columns.inputs[0], "Gather")
        apart = producer(pairs.inputs[1], "Sub") if pairs is not None else None
        wide = producer(node.inputs[0] if apart is None else apart.inputs[0], "Cast")
        rows = producer(wide.inputs[0], "Gather") if wide is not None else None
        if wide is None or scales is None or rows is None:
            continue
        stored, ids = rows.inputs
        assert stored is not None
        name = f"{stored.name}.restored"
        if name not in graph.initializers:
            cast = producer(scales.inputs[0], "Cast")
            array = _restored(stored, scales.inputs[0] if cast is None else cast.inputs[0], pairs=apart is not None)
            tensor = store(name, ir.DataType.FLOAT16, array)
            graph.register_initializer(ir.val(name, const_value=tensor))
        table = op("Cast", [graph.initializers[name]], f"{node.name}.table", to=ir.DataType.FLOAT.value)
        gathered = op("Gather", [table.outputs[0], ids], f"{node.name}.restored", axis=0)
        ir.convenience.replace_nodes_and_values(graph, node, [node], [table, gathered], node.outputs, gathered.outputs)
    passes.RemoveUnusedNodesPass()(model)


def _restored(stored: ir.Value, scales: ir.Value | None, *, pairs: bool) -> npt.NDArray[np.float16]:
    """Integers ``[V,H/block,block,...]``, or pairs of them, times the scales of their blocks."""
    assert stored.const_value is not None and scales is not None and scales.const_value is not None
    integers, scale = stored.const_value.numpy(), scales.const_value.numpy()
    rows, blocks, held, *columns = integers.shape
    scale = scale.reshape(rows, blocks, 1, *columns)
    table = np.empty((rows, blocks, 2 * held if pairs else held, *columns), np.float16)
    chunk = max(1, _CHUNK_ELEMENTS // table[0].size)
    for part in (slice(start, start + chunk) for start in range(0, rows, chunk)):
        table[part] = (split_int4(integers[part]) if pairs else integers[part]) * scale[part]
    return table
