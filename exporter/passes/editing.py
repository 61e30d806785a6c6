"""Helpers for passes: queries of a graph, and new nodes and constants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy.typing as npt
import onnx_ir as ir


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that outputs ``value``, if it is an ``op_type``."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type and node.domain == "" else None


def ancestors(values: Iterable[ir.Value | None]) -> set[ir.Value]:
    """The values and everything that they are computed from."""
    visited: set[ir.Value] = set()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if value is not None and value not in visited:
            visited.add(value)
            node = value.producer()
            waiting += node.inputs if node is not None else ()
    return visited


def needed_only_for(graph: ir.Graph, output: str) -> set[ir.Value]:
    """The values on which no other output of a graph depends."""
    matching = [value for value in graph.outputs if value.name == output]
    return ancestors(matching) - ancestors(value for value in graph.outputs if value.name != output)


def constant(graph: ir.Graph, name: str, array: npt.NDArray[Any]) -> ir.Value:
    """An initializer with this content, or the existing one of this name."""
    if name not in graph.initializers:
        graph.register_initializer(ir.val(name, const_value=ir.Tensor(array, name=name)))
    return graph.initializers[name]


def op(op_type: str, inputs: Sequence[ir.Value | None], name: str, **attributes: Any) -> ir.Node:
    """A node with one output, called ``name``; TensorRT also requires unique names of nodes."""
    return ir.node(op_type, inputs, attributes, outputs=[ir.val(name)], name=f"{name}.node")


class Nodes:
    """New nodes, in order.

    Attributes:
        name: the beginning of their outputs' names.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.list: list[ir.Node] = []

    def op(self, op_type: str, inputs: Sequence[ir.Value | None], name: str, **attributes: Any) -> ir.Value:
        """Adds a node with one output; returns it."""
        self.list.append(op(op_type, inputs, f"{self.name}.{name}", **attributes))
        return self.list[-1].outputs[0]

    def outputs(
        self, op_type: str, inputs: Sequence[ir.Value], names: Sequence[str], **attributes: Any
    ) -> Sequence[ir.Value]:
        """Adds a node with several outputs; returns them."""
        values = [ir.val(f"{self.name}.{name}") for name in names]
        self.list.append(ir.node(op_type, inputs, attributes, outputs=values))
        return self.list[-1].outputs


def insert_behind(graph: ir.Graph, value: ir.Value, node: ir.Node) -> ir.Value:
    """Inserts a node behind the one that outputs ``value``; returns the new node's output."""
    before = value.producer()
    assert before is not None
    graph.insert_after(before, node)
    return node.outputs[0]


def supersede(graph: ir.Graph, node: ir.Node, by: ir.Node) -> None:
    """Inserts a node whose output takes the place of that of ``node``."""
    graph.insert_after(node, by)
    replace_value(node.outputs[0], by.outputs[0])


def replace_value(value: ir.Value, by: ir.Value) -> None:
    """Replaces a value everywhere; the new value takes over its type if it has none, and a graph output's name."""
    returned, name = value.is_graph_output(), value.name
    value.replace_all_uses_with(by, replace_graph_outputs=True)
    if returned or by.type is None:
        by.type, by.shape = value.type, value.shape
    if returned:
        value.name, by.name = f"{name}.stored", name
