"""Undoes the quantization of tables that rows are looked up in: TensorRT gathers from no integers but indices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specexport.exporter.passes.compute_type import Store
from specexport.exporter.passes.matching import producer


def restore_tables(graph: ir.Graph, store: Store) -> int:
    """``DequantizeLinear(Gather(integers, ids), Gather(scales, ids))`` becomes ``Cast(Gather(fp16 table, ids))``.

    Args:
        graph: changed in place.
        store: called with each restored table.

    Returns:
        How many tables there were.
    """
    found = 0
    for node in list(graph):
        if node.op_type != "DequantizeLinear":
            continue
        rows, scales = (producer(value, "Gather") for value in node.inputs[:2])
        if rows is None or scales is None:
            continue
        stored, ids = rows.inputs
        assert stored is not None and ids is not None
        name = f"{stored.name}.restored"
        if name not in graph.initializers:
            tensor = store(name, ir.DataType.FLOAT16, _restored(stored, scales.inputs[0]))
            value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=stored.shape, const_value=tensor)
            graph.register_initializer(value)
            found += 1
        wide = ir.node(
            "Cast", [graph.initializers[name]], attributes={"to": ir.DataType.FLOAT.value}, name=f"{node.name}.cast"
        )
        wide.outputs[0].name = f"{node.name}.table"
        looked_up = ir.node("Gather", [wide.outputs[0], ids], attributes={"axis": 0}, name=f"{node.name}.rows")
        looked_up.outputs[0].name = f"{node.name}.restored"
        looked_up.outputs[0].type, looked_up.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
        ir.convenience.replace_nodes_and_values(graph, node, [node], [wide, looked_up], node.outputs, looked_up.outputs)
    return found


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
