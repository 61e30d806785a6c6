"""Pins a master's symbolic dimensions: the static-shape graph of one shape point."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from specexport.contract.shapes import ShapePoint
from specexport.exporter.unroll import fix_drafts


def pin(master: Path, point: ShapePoint, output: Path) -> None:
    """Writes the graph of one shape point: graph only, its weights stay in the master's weights file.

    A propose graph drafts as many tokens as the point says. ``output`` is in the master's folder, as both refer to the
    same weights file.
    """
    model = ir.load(master)
    if point.drafts:
        fix_drafts(model, point.drafts)
    fix(model.graph, point.sizes)
    model.graph.name = f"{model.graph.name}.{point}"
    ir.save(model, output)


def fix(graph: ir.Graph, sizes: dict[str, int]) -> None:
    """Gives symbolic dimensions of a graph's inputs and outputs their sizes; those not named stay symbolic."""
    for value in (*graph.inputs, *graph.outputs):
        if value.shape is not None:
            dims = [dim if isinstance(dim, int) else sizes.get(str(dim.value), dim) for dim in value.shape]
            value.shape = ir.Shape(dims)
