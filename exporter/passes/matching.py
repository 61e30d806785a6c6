"""What the rewrites ask of a graph, and constants they add to it."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import onnx_ir as ir


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes ``value``, if it is an ``op_type``."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type and node.domain == "" else None


def scalar(value: ir.Value | None) -> float | None:
    """The number a one-element constant holds, or None."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return float(tensor.numpy().reshape(-1)[0]) if tensor is not None and tensor.size == 1 else None


def needed_only_for(graph: ir.Graph, output: str) -> set[ir.Value]:
    """The values that one output of a graph depends on and no other output does."""
    needed: dict[bool, set[ir.Value]] = {True: set(), False: set()}
    for wanted, found in needed.items():
        waiting: list[ir.Value | None] = [value for value in graph.outputs if (value.name == output) is wanted]
        while waiting:
            value = waiting.pop()
            if value is None or value in found:
                continue
            found.add(value)
            node = value.producer()
            if node is not None:
                waiting += node.inputs
    return needed[True] - needed[False]


def constant(graph: ir.Graph, name: str, array: npt.NDArray[Any]) -> ir.Value:
    """An initializer that holds an array; one that is there already by that name is used again."""
    if name not in graph.initializers:
        tensor = ir.Tensor(array, name=name)
        graph.register_initializer(
            ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        )
    return graph.initializers[name]
