"""Moves loop-invariant nodes before the loop."""

from __future__ import annotations

import onnx_ir as ir

from specexport.exporter.passes.editing import constant

_LARGEST_CONSTANT = 1024
"""Elements; what is larger is a parameter, and stays where it is multiplied."""
_FUSED = frozenset({"Transpose"})
"""ONNX Runtime makes these part of the product after them, which costs less than a copy made once."""


def hoist_invariants(graph: ir.Graph, loop: ir.Node) -> None:
    """Moves nodes of a loop's body that depend on the graph around it, and on nothing of a pass, into that graph.

    What depends on constants alone stays: those are weights, and a backend packs them where they are multiplied. So do
    nodes that hold a graph, which may read values of a pass that are not among their inputs.
    """
    body = loop.attributes["body"].as_graph()
    constants = {value: value.const_value for value in body.initializers.values() if value.const_value is not None}
    varying = set(body.inputs)
    for node in list(body):
        read = {value for value in node.inputs if value is not None}
        small = all(constants[value].size <= _LARGEST_CONSTANT for value in read & constants.keys())
        invariant = small and not read & varying and not read <= constants.keys()
        holds_graph = any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values())
        returned = any(value.is_graph_output() for value in node.outputs)
        if not invariant or holds_graph or returned or node.op_type in _FUSED:
            varying.update(node.outputs)
            continue
        for at, value in enumerate(node.inputs):
            if value in constants:
                node.replace_input_with(at, constant(graph, f"every.{value.name}", constants[value].numpy()))
        body.remove(node)
        graph.insert_before(loop, node)
    for value in constants:
        if not value.uses() and value.name is not None:
            del body.initializers[value.name]
