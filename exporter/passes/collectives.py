"""Has the ranks of a split model meet inside their graphs, by the collective layers that TensorRT has for it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from specexport.contract.errors import BuildError
from specexport.contract.tensors import MEETING_DOMAIN
from specexport.exporter.passes.editing import ancestors, constant, op


def use_collectives(model: ir.Model, ranks: int) -> None:
    """Puts ``DistCollective`` nodes, which TensorRT's ONNX parser knows, where ranks add up or join their parts.

    What is gathered is joined along the first axis, and a part has to be joined along its last: it gets a first axis of
    its own, which then moves before the last.

    Args:
        model: a rank's graph as it was traced; changed in place.
        ranks: how many there are.

    Raises:
        BuildError: nothing says which of two meetings comes first, so that an engine of another rank might exchange
            them.
    """
    passes.ShapeInferencePass()(model)  # later rewrites ask for ranks and types of what is made here
    graph = model.graph
    before: ir.Value | None = None
    for node in list(graph):
        if node.domain != MEETING_DOMAIN:
            continue
        part, whole = node.inputs[0], node.outputs[0]
        assert part is not None
        assert whole.shape is not None
        if before is not None and before not in ancestors([part]):
            raise BuildError(
                f"{part.name}: its layers have the ranks meet twice at once, and TensorRT's engines may do so in any "
                "order; build with --backend onnxruntime, or without --tensor-parallel"
            )
        name, last = str(whole.name), len(whole.shape) - 1
        if node.op_type == "SumOfRanks":
            nodes = [_collective(part, f"{name}.sum", "all_reduce", "sum", ranks)]
        else:
            first = op("Unsqueeze", [part, constant(graph, "axes.0", np.array([0]))], f"{name}.part")
            every = _collective(first.outputs[0], f"{name}.parts", "all_gather", "none", ranks)
            beside = op("Transpose", [every.outputs[0]], f"{name}.beside", perm=[*range(1, last + 1), 0, last + 1])
            flat = constant(graph, f"sizes.kept.{last}", np.array([0] * last + [-1]))
            nodes = [first, every, beside, op("Reshape", [beside.outputs[0], flat], f"{name}.joined")]
        for made in nodes:
            made.outputs[0].type = whole.type
        nodes[-1].outputs[0].shape = whole.shape
        ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, [whole], nodes[-1].outputs)
        (before,) = nodes[-1].outputs
    graph.opset_imports.pop(MEETING_DOMAIN, None)


def _collective(value: ir.Value, name: str, operation: str, reduction: str, ranks: int) -> ir.Node:
    """What all ranks do with it, without a root or groups."""
    how = {"collective_operation": operation, "reduce_op": reduction, "root": -1, "group_size": 0, "nb_rank": ranks}
    return op("DistCollective", [value], name, **how)
