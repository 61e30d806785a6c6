"""Replaces the seven primitive operators torch makes of an RMS norm by one RMSNormalization (opset 23)."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from specexport.exporter.passes.matching import constant, producer, scalar


def fuse_rms_norm(model: ir.Model) -> int:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis becomes ``RMSNormalization(x, weight)``.

    A norm without weight gets ones.

    Returns:
        How many norms were replaced.
    """
    fused = 0
    for match in (_weighted, _bare):
        for node in list(model.graph):
            found = match(node)
            if found is None:
                continue
            x, weight, epsilon = found
            norm = ir.node(
                "RMSNormalization",
                [x, weight if weight is not None else _ones(model.graph, x)],
                attributes={"axis": -1, "epsilon": epsilon},
                outputs=[ir.Value(name=node.outputs[0].name, type=node.outputs[0].type, shape=node.outputs[0].shape)],
            )
            node.outputs[0].name = f"{node.outputs[0].name}.unfused"
            ir.convenience.replace_nodes_and_values(model.graph, node, [node], [norm], node.outputs, norm.outputs)
            fused += 1
    return fused


def _weighted(node: ir.Node) -> tuple[ir.Value, ir.Value | None, float] | None:
    """The input, weight and epsilon of the norm that ends in ``node``, a multiplication by its weight; or None."""
    if node.op_type != "Mul":
        return None
    for weight, scaled in (node.inputs, reversed(node.inputs)):
        if weight is None or weight.const_value is None or weight.shape is None or len(weight.shape) != 1:
            continue
        inner = producer(scaled, "Mul")
        found = _normalized(inner) if inner is not None else None
        if found is not None and (found[0].shape is None or found[0].shape[-1] == weight.shape[0]):
            return found[0], weight, found[1]
    return None


def _bare(node: ir.Node) -> tuple[ir.Value, ir.Value | None, float] | None:
    """The same of a norm without weight whose last axis has a known length."""
    if node.op_type != "Mul" or not (node.outputs[0].uses() or node.outputs[0].is_graph_output()):
        return None
    found = _normalized(node)
    if found is None or found[0].shape is None or not isinstance(found[0].shape[-1], int):
        return None
    return found[0], None, found[1]


def _normalized(node: ir.Node) -> tuple[ir.Value, float] | None:
    """The ``x`` and epsilon of ``x / sqrt(mean(x^2) + epsilon)``, or None."""
    for x, inverse in (node.inputs, reversed(node.inputs)):
        epsilon = _inverse_rms(x, inverse)
        if x is not None and epsilon is not None:
            return x, epsilon
    return None


def _inverse_rms(x: ir.Value | None, inverse: ir.Value | None) -> float | None:
    """The epsilon if ``inverse`` is ``1 / sqrt(mean(x^2, last axis) + epsilon)``, else None."""
    reciprocal, power = producer(inverse, "Reciprocal"), producer(inverse, "Pow")
    root = producer(reciprocal.inputs[0], "Sqrt") if reciprocal else None
    if power is not None and scalar(power.inputs[1]) == -0.5:
        root = power
    shifted = producer(root.inputs[0], "Add") if root else None
    mean = producer(shifted.inputs[0], "ReduceMean") if shifted else None
    square = producer(mean.inputs[0], "Pow") if mean else None
    if shifted is None or mean is None or square is None or square.inputs[0] is not x:
        return None
    if scalar(square.inputs[1]) != 2 or scalar(mean.inputs[1]) != -1:
        return None
    return scalar(shifted.inputs[1])


def _ones(graph: ir.Graph, x: ir.Value) -> ir.Value:
    assert x.shape is not None
    size = int(str(x.shape[-1]))
    return constant(graph, f"ones.{size}", np.ones(size, np.float32))
