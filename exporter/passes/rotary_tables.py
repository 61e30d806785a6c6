"""Rotary angles of all positions as tables, which ONNX Runtime computes once when it opens a graph."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from specexport.contract import tensors
from specexport.exporter.passes.editing import ancestors, constant, op, producer

_VIEWS = {"Reshape", "Squeeze", "Unsqueeze"}


class Tables:
    """Values that depend on tokens' positions, computed for positions 0 to N - 1.

    Args:
        positions: the values ``[B,T]`` that hold positions.
        count: N.
        name: suffix of the names of the tables' values.
    """

    def __init__(self, graph: ir.Graph, positions: Collection[ir.Value], count: int, name: str) -> None:
        self._graph = graph
        self._positions = positions
        self._count = count
        self._name = name
        self._copies: dict[ir.Value, ir.Value | None] = {}
        self._tables: dict[ir.Value, ir.Value | None] = {}

    def of(self, angles: ir.Value | None) -> ir.Value | None:
        """Cosines or sines ``[B,T,D/2]`` as a table ``[N,D/2]``; None if they depend on more than positions."""
        assert angles is not None
        if angles not in self._tables:
            copy = self._copy(angles)
            if copy is not None:
                flat = constant(self._graph, f"table.{self._count}", np.array([self._count, -1]))
                table = op("Reshape", [copy, flat], f"{angles.name}.{self._name}.rows")
                self._graph.append(table)
                copy = table.outputs[0]
            self._tables[angles] = copy
        return self._tables[angles]

    def _copy(self, value: ir.Value) -> ir.Value | None:
        if value not in self._copies:
            node = value.producer()
            if value in self._positions:
                self._copies[value] = constant(self._graph, f"positions.{self._count}", np.arange(self._count)[None])
            elif node is None:
                self._copies[value] = None if value.is_graph_input() else value
            else:
                self._copies |= self._copied(node)
        return self._copies[value]

    def _copied(self, node: ir.Node) -> dict[ir.Value, ir.Value | None]:
        inputs = [value if value is None else self._copy(value) for value in node.inputs]
        if None in [copy for copy, value in zip(inputs, node.inputs, strict=True) if value is not None]:
            return dict.fromkeys(node.outputs)
        if inputs == list(node.inputs):
            return {value: value for value in node.outputs}
        outputs = [ir.val(f"{value.name}.{self._name}") for value in node.outputs]
        self._graph.insert_after(node, ir.node(node.op_type, inputs, node.attributes, outputs=outputs))
        return dict(zip(node.outputs, outputs, strict=True))


def look_angles_up(graph: ir.Graph) -> None:
    """Makes each RotaryEmbedding look up its angles in tables, if they depend on nothing but positions.

    Computing the angles in each run takes nine launches.
    """
    cache = next((value for value in graph.inputs if str(value.name).startswith(tensors.CACHES)), None)
    rows = cache.shape[2] if cache is not None and cache.shape is not None else None
    if not isinstance(rows, int):
        return
    tables: dict[ir.Value, Tables] = {}
    for node in list(graph):
        if node.op_type != "RotaryEmbedding" or len(node.inputs) != 3:
            continue
        positions = _positions(node.inputs[1:])
        if positions is None or positions.shape is None or len(positions.shape) != 2:
            continue
        # Positions of a text are rows of the cache; positions of a block of drafts may lie behind the last row.
        count = rows if positions.is_graph_input() else 2 * rows
        of_these = tables.setdefault(positions, Tables(graph, [positions], count, f"table.{len(tables)}"))
        looked_up = [of_these.of(angles) for angles in node.inputs[1:]]
        if None not in looked_up:
            node.replace_input_with(1, looked_up[0])
            node.replace_input_with(2, looked_up[1])
            node.resize_inputs(4)
            node.replace_input_with(3, positions)


def _positions(angles: Collection[ir.Value | None]) -> ir.Value | None:
    """The only integers that angles are computed from, ``[B,T]``; None if there are several."""
    casts = [cast for value in ancestors(angles) if (cast := producer(value, "Cast")) is not None]
    sources = [cast.inputs[0] for cast in casts]
    integers = {
        source_of_view(source) for source in sources if source is not None and source.dtype == ir.DataType.INT64
    }
    return integers.pop() if len(integers) == 1 else None


def source_of_view(value: ir.Value) -> ir.Value:
    """The value that holds the numbers of a view; the value itself if it is no view."""
    while (node := value.producer()) is not None and node.op_type in _VIEWS and node.inputs[0] is not None:
        value = node.inputs[0]
    return value
