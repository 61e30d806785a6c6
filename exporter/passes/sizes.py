"""Fixes symbolic dimensions of a graph's inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir


def fix_sizes(model: ir.Model, sizes: Mapping[str, int]) -> None:
    """Gives symbolic dimensions their sizes; those without one stay symbolic."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.shape is not None:
            dims = [dim if isinstance(dim, int) else sizes.get(str(dim.value), dim) for dim in value.shape]
            value.shape = ir.Shape(dims)
