"""Undoes the quantization of tables that rows are looked up in: TensorRT gathers from no integers but indices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specexport.exporter.passes.compute_type import Store
from specexport.exporter.passes.editing import op, producer


def restore_tables(graph: ir.Graph, store: Store) -> None:
    """``DequantizeLinear(Gather(integers, ids), Gather(scales, ids))`` becomes ``Cast(Gather(fp16 table, ids))``."""
    for node in list(graph):
        if node.op_type != "DequantizeLinear":
            continue
        rows, scales = (producer(value, "Gather") for value in node.inputs[:2])
        if rows is None or scales is None:
            continue
        stored, ids = rows.inputs
        assert stored is not None
        name = f"{stored.name}.restored"
        if name not in graph.initializers:
            tensor = store(name, ir.DataType.FLOAT16, _restored(stored, scales.inputs[0]))
            graph.register_initializer(ir.val(name, const_value=tensor))
        wide = op("Cast", [graph.initializers[name]], f"{node.name}.table", to=ir.DataType.FLOAT.value)
        found = op("Gather", [wide.outputs[0], ids], f"{node.name}.restored", axis=0)
        ir.convenience.replace_nodes_and_values(graph, node, [node], [wide, found], node.outputs, found.outputs)


def _restored(stored: ir.Value, scales: ir.Value | None) -> npt.NDArray[np.float16]:
    """Integers ``[V,H]`` times their blocks' scales ``[V,H/block]``."""
    assert stored.const_value is not None and scales is not None and scales.const_value is not None
    integers, scale = stored.const_value.numpy(), scales.const_value.numpy()
    block = integers.shape[1] // scale.shape[1]
    table = np.empty(integers.shape, np.float16)
    for start in range(0, len(table), 4096):
        rows = slice(start, start + 4096)
        table[rows] = integers[rows] * np.repeat(scale[rows], block, axis=1)
    return table
