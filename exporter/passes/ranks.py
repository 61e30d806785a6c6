"""Rewrites the operators that combine the parts of ranks: to cuts of the graph, or to TensorRT's collectives."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnx_ir.convenience import extract

from specexport.contract.tensors import CARRIED, COLLECTIVE_DOMAIN, COLLECTIVES
from specexport.exporter.passes.editing import constant, op

_KINDS = dict(zip(("SumOfRanks", "JoinOfRanks"), COLLECTIVES, strict=True))


def cut(model: ir.Model, *, repeat_sizes: bool = False) -> list[ir.Model]:
    """Cuts a graph into segments (see ``specexport.contract.model.RankFiles``).

    A node is in the first segment in which all its inputs are known; results that later segments read are outputs.
    Nodes that depend on nothing but weights are in every segment that reads them.

    Args:
        repeat_sizes: also repeat nodes that depend on nothing but sizes of inputs; the host would otherwise send their
            results to the device for every segment.
    """
    passes.ShapeInferencePass()(model)  # segments' inputs need types, which rewrites leave out
    graph = model.graph
    _copy_returned_results(graph)
    repeated, stages = _repeated(graph, repeat_sizes), _collectives_before(graph)
    segments: list[dict[ir.Node, None]] = [{} for _ in range(1 + max(stages.values()))]
    outputs: list[list[ir.Value]] = [[] for _ in segments]
    collectives = 0
    for node, stage in stages.items():
        if node.domain == COLLECTIVE_DOMAIN:
            part, whole = _part(node), node.outputs[0]
            whole.name = part.name = f"{_KINDS[node.op_type]}{collectives}"
            outputs[stage].append(part)
            collectives += 1
        elif not all(value in repeated for value in node.outputs):
            segments[stage][node] = None
    inputs = []
    for nodes in segments:
        read = dict.fromkeys(
            value for node in nodes for value in node.inputs if value and value.producer() not in nodes
        )
        inputs.append(list(dict.fromkeys(source for value in read for source in repeated.get(value, (value,)))))
    for value in dict.fromkeys([*(value for read in inputs for value in read), *graph.outputs]):
        producer = value.producer()
        if producer is not None and producer.domain != COLLECTIVE_DOMAIN:
            outputs[stages[producer]].append(value)
            if not value.is_graph_output():
                value.name = f"{CARRIED}{value.name}"
    models = []
    for at, (needed, returned) in enumerate(zip(inputs, outputs, strict=True)):
        segment = extract(graph, needed, returned)
        segment.name = f"segment_{at}"
        segment.opset_imports.pop(COLLECTIVE_DOMAIN, None)
        models.append(ir.Model(segment, ir_version=model.ir_version, producer_name="specexport"))
    return models


def _copy_returned_results(graph: ir.Graph) -> None:
    """Puts an Identity after each output that is a combination of ranks, so that the last segment returns it."""
    for at, value in enumerate(graph.outputs):
        if (producer := value.producer()) is not None and producer.domain == COLLECTIVE_DOMAIN:
            last = op("Identity", [value], str(value.name))
            last.outputs[0].shape, last.outputs[0].type = value.shape, value.type
            graph.append(last)
            graph.outputs[at] = last.outputs[0]


def _repeated(graph: ir.Graph, repeat_sizes: bool) -> dict[ir.Value, frozenset[ir.Value]]:
    """The values that every reading segment computes, with the inputs whose sizes they depend on."""
    repeated: dict[ir.Value, frozenset[ir.Value]] = dict.fromkeys(graph.initializers.values(), frozenset())
    for node in graph:
        read = [value for value in node.inputs if value is not None]
        is_size = repeat_sizes and node.op_type == "Shape" and read[0].is_graph_input()
        if is_size or all(value in repeated for value in read):
            sized_by = frozenset(read) if is_size else frozenset[ir.Value]().union(*(repeated[value] for value in read))
            if not sized_by or all(map(_may_hold_sizes, node.outputs)):
                repeated |= dict.fromkeys(node.outputs, sized_by)
    return repeated


def _may_hold_sizes(value: ir.Value) -> bool:
    """Whether a value is an int64 tensor of fixed shape."""
    return value.dtype == ir.DataType.INT64 and value.shape is not None and value.shape.is_static()


def _collectives_before(graph: ir.Graph) -> dict[ir.Node, int]:
    """The nodes in order, with the number of successive collectives that their inputs depend on."""
    stages: dict[ir.Node, int] = {}
    reached: dict[ir.Value, int] = {}
    for node in graph:
        stages[node] = max((reached.get(value, 0) for value in node.inputs if value is not None), default=0)
        reached |= dict.fromkeys(node.outputs, stages[node] + (node.domain == COLLECTIVE_DOMAIN))
    return stages


def use_collectives(model: ir.Model, ranks: int) -> None:
    """Replaces the operators that combine ranks with TensorRT's ``DistCollective``.

    All ranks must run collectives in the same order, but engines order nodes only by their data. Independent sums, as
    in layers with parallel attention and MLP, therefore become one sum.
    """
    passes.ShapeInferencePass()(model)  # later rewrites read the types and ranks of the new nodes
    graph = model.graph
    collectives: dict[int, list[ir.Node]] = {}
    for node, stage in _collectives_before(graph).items():
        if node.domain == COLLECTIVE_DOMAIN:
            collectives.setdefault(stage, []).append(node)
    for nodes_at_stage in collectives.values():
        parts, wholes = [_part(node) for node in nodes_at_stage], [node.outputs[0] for node in nodes_at_stage]
        (kind,) = {node.op_type for node in nodes_at_stage}
        if kind == "JoinOfRanks":
            (part,) = parts
            nodes, results = _joined(graph, part, f"{wholes[0].name}.joined", ranks)
        else:
            nodes, results = _summed(graph, parts, f"{wholes[0].name}.summed", ranks)
        for value, whole in zip(results, wholes, strict=True):
            value.shape, value.type = whole.shape, whole.type
        ir.convenience.replace_nodes_and_values(graph, nodes_at_stage[-1], nodes_at_stage, nodes, wholes, results)
    graph.sort()  # a reader of a sum may have preceded the last of its parts
    graph.opset_imports.pop(COLLECTIVE_DOMAIN, None)


def join_along_first(model: ir.Model, ranks: int) -> None:
    """Joins the parts of ranks along a new first axis, as NCCL does; the graph then moves that axis."""
    passes.ShapeInferencePass()(model)
    graph = model.graph
    for node in [node for node in graph if node.op_type == "JoinOfRanks"]:
        part, whole = _part(node), node.outputs[0]
        assert part.shape is not None
        combined = ir.node(node.op_type, [part], domain=COLLECTIVE_DOMAIN, outputs=[ir.val(f"{whole.name}.parts")])
        combined.outputs[0].shape = ir.Shape([ranks, *part.shape])
        nodes, results = _side_by_side(graph, combined.outputs[0], part, f"{whole.name}.joined")
        results[0].shape, results[0].type = whole.shape, whole.type
        ir.convenience.replace_nodes_and_values(graph, node, [node], [combined, *nodes], [whole], results)


def _part(node: ir.Node) -> ir.Value:
    part = node.inputs[0]
    assert part is not None
    return part


def _summed(graph: ir.Graph, parts: list[ir.Value], name: str, ranks: int) -> tuple[list[ir.Node], list[ir.Value]]:
    """Sums several parts of the same width over the ranks, by one collective; returns the nodes and the sums."""
    if len(parts) == 1:
        node = _collective(parts[0], name, "all_reduce", "sum", ranks)
        return [node], list(node.outputs)
    (width,) = {part.shape[-1] for part in parts if part.shape is not None}
    rows = constant(graph, f"sizes.rows.{width}", np.array([-1, width]))
    flat = [op("Reshape", [part, rows], f"{name}.{at}.rows") for at, part in enumerate(parts)]
    joined = op("Concat", [node.outputs[0] for node in flat], f"{name}.beside", axis=-1)
    combined = _collective(joined.outputs[0], name, "all_reduce", "sum", ranks)
    split = ir.node(
        "Split", combined.outputs, {"axis": -1, "num_outputs": len(parts)}, num_outputs=len(parts), name=f"{name}.apart"
    )
    for at, value in enumerate(split.outputs):
        value.name = f"{name}.{at}.apart"
    shapes = [op("Shape", [part], f"{name}.{at}.shape") for at, part in enumerate(parts)]
    back = [
        op("Reshape", [value, shape.outputs[0]], f"{name}.{at}.back")
        for at, (value, shape) in enumerate(zip(split.outputs, shapes, strict=True))
    ]
    for node in (*flat, joined, combined, split):
        for value in node.outputs:
            value.type = parts[0].type
    for shape in shapes:
        shape.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    return [*flat, joined, combined, split, *shapes, *back], [node.outputs[0] for node in back]


def _joined(graph: ir.Graph, part: ir.Value, name: str, ranks: int) -> tuple[list[ir.Node], list[ir.Value]]:
    """Concatenates the parts of ranks along the last axis; returns the nodes and the result.

    Collectives gather along the first axis: each part gets an additional first axis, which then moves before the last.
    """
    first = op("Unsqueeze", [part, constant(graph, "axes.0", np.array([0]))], f"{name}.part")
    first.outputs[0].type = part.type
    combined = _collective(first.outputs[0], f"{name}.parts", "all_gather", "none", ranks)
    nodes, results = _side_by_side(graph, combined.outputs[0], part, name)
    return [first, combined, *nodes], results


def _side_by_side(
    graph: ir.Graph, combined: ir.Value, part: ir.Value, name: str
) -> tuple[list[ir.Node], list[ir.Value]]:
    """Concatenates the parts of ranks, stacked along the first axis, along the last; returns nodes and result."""
    assert part.shape is not None
    last = len(part.shape) - 1
    joined = op("Transpose", [combined], f"{name}.beside", perm=[*range(1, last + 1), 0, last + 1])
    combined.type = joined.outputs[0].type = part.type
    flat = constant(graph, f"sizes.kept.{last}", np.array([0] * last + [-1]))
    whole = op("Reshape", [joined.outputs[0], flat], name)
    return [joined, whole], list(whole.outputs)


def _collective(value: ir.Value, name: str, operation: str, reduction: str, ranks: int) -> ir.Node:
    """A collective operation of all ranks, without a root or groups."""
    sizes = {"root": -1, "group_size": 0, "nb_rank": ranks}
    return op("DistCollective", [value], name, collective_operation=operation, reduce_op=reduction, **sizes)
