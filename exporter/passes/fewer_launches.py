"""Saves kernel launches on GPUs where sizes are known, mostly with a single slot.

Views (Reshape, Squeeze, Unsqueeze) launch nothing, except before an output of the graph, which has its own memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from specexport.exporter.passes.editing import constant, op, producer, replace_value, supersede
from specexport.exporter.passes.rotary_tables import source_of_view


def use_fewer_launches(model: ir.Model, sizes: Mapping[str, int]) -> None:
    """Replaces copies with views, gathered elements with gathered rows, and differences of sums with sums.

    ``sizes`` are those of symbolic dimensions that are the same in every run.
    """
    views = _Views(model.graph, sizes)
    for node in list(model.graph):
        if node.op_type == "Gather":
            views.squeeze(node)
        elif node.op_type == "GatherElements":
            views.gather(node)
        elif node.op_type == "Sub":
            _sum_before(model.graph, node)
    for value in list(model.graph.outputs):
        views.drop_last_view(value)
    passes.TopologicalSortPass()(model)
    passes.RemoveUnusedNodesPass()(model)


def _sum_before(graph: ir.Graph, difference: ir.Node) -> None:
    """Replaces ``cumsum(x) - x`` with an exclusive sum."""
    total, x = difference.inputs
    through = producer(total, "CumSum")
    if through is None or through.inputs[0] is not x:
        return
    if through.attributes.get_int("exclusive", 0) or through.attributes.get_int("reverse", 0):
        return
    supersede(graph, difference, op("CumSum", through.inputs, f"{difference.outputs[0].name}.before", exclusive=1))


class _Views:
    def __init__(self, graph: ir.Graph, sizes: Mapping[str, int]) -> None:
        self._graph = graph
        self._sizes = sizes
        self._views: dict[tuple[ir.Value, tuple[int, ...]], ir.Value] = {}

    def _shape(self, value: ir.Value | None) -> list[int] | None:
        """A value's shape, with -1 for unknown sizes; None if the rank is unknown."""
        if value is None or value.shape is None:
            return None
        return [dim if isinstance(dim, int) else self._sizes.get(str(dim.value), -1) for dim in value.shape]

    def _view(self, value: ir.Value, *shape: int) -> ir.Value:
        value = source_of_view(value)
        if (value, shape) not in self._views:
            name = "x".join(map(str, shape))
            sizes = constant(self._graph, f"view.{name}", np.array(shape))
            node = op("Reshape", [value, sizes], f"{value.name}.{name}")
            self._graph.append(node)
            self._views[value, shape] = node.outputs[0]
        return self._views[value, shape]

    def squeeze(self, gather: ir.Node) -> None:
        """Replaces a Gather of the only element of an axis with a Squeeze."""
        data, index = gather.inputs
        shape, axis = self._shape(data), gather.attributes.get_int("axis", 0)
        at = ir.convenience.get_const_tensor(index) if index is not None else None
        if data is None or shape is None or shape[axis] != 1 or at is None or at.shape.rank() or at.numpy().item():
            return
        axes = constant(self._graph, f"view.axis.{axis}", np.array([axis]))
        supersede(self._graph, gather, op("Squeeze", [data, axes], f"{gather.outputs[0].name}.view"))

    def gather(self, gather: ir.Node) -> None:
        """Replaces a GatherElements whose indices are the same along all other axes with a Gather."""
        data, places = gather.inputs
        expanded = producer(places, "Expand")
        index = places if expanded is None else expanded.inputs[0]
        shape, wanted, at = (self._shape(value) for value in (data, places, index))
        if data is None or index is None or not shape or not wanted or not at or len(at) != len(wanted):
            return
        axis = gather.attributes.get_int("axis", 0) % len(shape)
        behind = shape[axis + 1 :]
        if {*at[:axis], *at[axis + 1 :], *shape[:axis]} - {1} or -1 in behind or behind != wanted[axis + 1 :]:
            return
        rows = op("Gather", [data, self._view(index, -1)], f"{gather.outputs[0].name}.rows", axis=axis)
        supersede(self._graph, gather, rows)

    def drop_last_view(self, output: ir.Value) -> None:
        """Replaces an output that is a view with its source, or computes the source in the output's shape."""
        source, shape = source_of_view(output), self._shape(output)
        node = source.producer()
        if source is output or shape is None or -1 in shape or node is None:
            return
        if source.is_graph_output() or self._shape(source) != shape:
            self._gather_into(output, node, shape)
        else:
            replace_value(output, source)

    def _gather_into(self, output: ir.Value, gather: ir.Node, shape: list[int]) -> None:
        """Gathers numbers of a single row directly in the shape of the output."""
        data, index = gather.inputs[:2] if gather.op_type == "Gather" else (None, None)
        row, axis = self._shape(data), gather.attributes.get_int("axis", 0)
        if data is None or index is None or not row or axis % len(row) != len(row) - 1 or set(row[:-1]) - {1}:
            return
        inputs = [self._view(data, -1), self._view(index, *shape)]
        node = op("Gather", inputs, f"{gather.outputs[0].name}.shaped")
        self._graph.insert_after(gather, node)
        replace_value(output, node.outputs[0])
