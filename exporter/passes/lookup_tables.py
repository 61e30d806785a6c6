"""Undoes the quantization of tables that rows are looked up in: TensorRT gathers from no integers but indices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specexport.exporter.passes.compute_type import Store
from specexport.exporter.passes.editing import op, producer


def restore_tables(graph: ir.Graph, store: Store) -> None:
    """``Mul(Cast(Gather(integers, ids)), Gather(scales, ids))`` becomes ``Cast(Gather(fp16 table, ids))``."""
    for node in list(graph):
        if node.op_type != "Mul":
            continue
        wide, scales = producer(node.inputs[0], "Cast"), producer(node.inputs[1], "Gather")
        rows = producer(wide.inputs[0], "Gather") if wide is not None else None
        if wide is None or scales is None or rows is None:
            continue
        stored, ids = rows.inputs
        assert stored is not None
        name = f"{stored.name}.restored"
        if name not in graph.initializers:
            tensor = store(name, ir.DataType.FLOAT16, _restored(stored, scales.inputs[0]))
            graph.register_initializer(ir.val(name, const_value=tensor))
        table = op("Cast", [graph.initializers[name]], f"{node.name}.table", to=ir.DataType.FLOAT.value)
        found = op("Gather", [table.outputs[0], ids], f"{node.name}.restored", axis=0)
        old = [node, wide, rows, scales]
        ir.convenience.replace_nodes_and_values(graph, node, old, [table, found], node.outputs, found.outputs)


def _restored(stored: ir.Value, scales: ir.Value | None) -> npt.NDArray[np.float16]:
    """Integers ``[V,H/block,block]`` times their blocks' scales ``[V,H/block,1]``."""
    assert stored.const_value is not None and scales is not None and scales.const_value is not None
    integers, scale = stored.const_value.numpy(), scales.const_value.numpy()
    table = np.empty(integers.shape, np.float16)
    for start in range(0, len(table), 4096):
        rows = slice(start, start + 4096)
        table[rows] = integers[rows] * scale[rows]
    return table
