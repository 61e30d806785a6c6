"""Replaces the seven primitive operators torch makes of an RMS norm by one RMSNormalization (opset 23)."""

from __future__ import annotations

import onnx_ir as ir
from specexport.exporter.passes.matching import producer, scalar


def fuse_rms_norm(model: ir.Model) -> int:
    """``x * rsqrt(mean(x^2) + eps) * weight`` over the last axis becomes ``RMSNormalization(x, weight)``.

    Returns:
        How many norms were replaced.
    """
    fused = 0
    for node in list(model.graph):
        found = _match(node)
        if found is None:
            continue
        x, weight, epsilon = found
        norm = ir.node(
            "RMSNormalization",
            [x, weight],
            attributes={"axis": -1, "epsilon": epsilon},
            outputs=[ir.Value(name=node.outputs[0].name, type=node.outputs[0].type, shape=node.outputs[0].shape)],
        )
        node.outputs[0].name = f"{node.outputs[0].name}.unfused"
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], [norm], node.outputs, norm.outputs)
        fused += 1
    return fused


def _match(node: ir.Node) -> tuple[ir.Value, ir.Value, float] | None:
    """The input, weight and epsilon of the norm that ends in ``node``, or None."""
    if node.op_type != "Mul":
        return None
    for weight, scaled in (node.inputs, reversed(node.inputs)):
        if weight is None or scaled is None or weight.shape is None or len(weight.shape) != 1:
            continue
        inner = producer(scaled, "Mul")
        if inner is None:
            continue
        for x, inverse in (inner.inputs, reversed(inner.inputs)):
            epsilon = _inverse_rms(x, inverse)
            if x is not None and epsilon is not None and weight.const_value is not None:
                return x, weight, epsilon
    return None


def _inverse_rms(x: ir.Value | None, inverse: ir.Value | None) -> float | None:
    """The epsilon if ``inverse`` is ``1 / sqrt(mean(x^2, last axis) + epsilon)``, else None."""
    reciprocal = producer(inverse, "Reciprocal")
    root = producer(reciprocal.inputs[0], "Sqrt") if reciprocal else None
    shifted = producer(root.inputs[0], "Add") if root else None
    mean = producer(shifted.inputs[0], "ReduceMean") if shifted else None
    power = producer(mean.inputs[0], "Pow") if mean else None
    if shifted is None or mean is None or power is None or power.inputs[0] is not x:
        return None
    if scalar(power.inputs[1]) != 2 or scalar(mean.inputs[1]) != -1:
        return None
    return scalar(shifted.inputs[1])
