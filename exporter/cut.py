"""Cuts a rank's graph where ranks meet: segments of standard operators, which are run one after the other."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnx_ir.convenience import extract

from specexport.contract.tensors import CARRIED, MEETING_DOMAIN, MEETINGS
from specexport.exporter.passes.editing import op

_KINDS = dict(zip(("SumOfRanks", "JoinOfRanks"), MEETINGS, strict=True))


def cut(model: ir.Model, *, sizes_apart: bool = False) -> list[ir.Model]:
    """The segments of a graph (see ``specexport.contract.model.RankFiles``).

    A node is in the first segment in which all that it reads is known; what later ones read of it is an output. What
    is made of weights alone is in every segment that reads it.

    Args:
        model: changed in place.
        sizes_apart: whether that holds also for what is made of the inputs' sizes, which a device would else be given
            back by the host in every segment.
    """
    passes.ShapeInferencePass()(model)  # inputs need types, which rewrites leave out
    graph = model.graph
    for at, value in enumerate(graph.outputs):
        if (made_by := value.producer()) is not None and made_by.domain == MEETING_DOMAIN:
            last = op("Identity", [value], str(value.name))
            last.outputs[0].shape, last.outputs[0].type = value.shape, value.type
            graph.append(last)
            graph.outputs[at] = last.outputs[0]
    stages: dict[ir.Value, int] = {}  # by value, the first segment that has it
    segments: list[list[ir.Node]] = []
    outputs: list[list[ir.Value]] = []
    meetings: list[ir.Node] = []
    # What is made wherever it is read, with the inputs whose sizes it says.
    anywhere: dict[ir.Value, frozenset[ir.Value]] = dict.fromkeys(graph.initializers.values(), frozenset())
    for node in graph:
        read = [value for value in node.inputs if value is not None]
        of_input = sizes_apart and node.op_type == "Shape" and read[0].is_graph_input()
        if of_input or all(value in anywhere for value in read):
            said = frozenset(read) if of_input else frozenset[ir.Value]().union(*(anywhere[value] for value in read))
            if not said or all(map(_is_of_sizes, node.outputs)):
                anywhere |= dict.fromkeys(node.outputs, said)
                continue
        stage = max((stages.get(value, 0) for value in node.inputs if value is not None), default=0)
        while stage >= len(segments):
            segments.append([])
            outputs.append([])
        if node.domain == MEETING_DOMAIN:
            part, whole = node.inputs[0], node.outputs[0]
            assert part is not None
            whole.name = part.name = f"{_KINDS[node.op_type]}{len(meetings)}"
            outputs[stage].append(part)
            meetings.append(node)
            stage += 1
        else:
            segments[stage].append(node)
        stages |= dict.fromkeys(node.outputs, stage)
    inputs = [
        list({value: None for node in nodes for value in node.inputs if value and value.producer() not in nodes})
        for nodes in map(dict.fromkeys, segments)
    ]
    inputs = [
        list(dict.fromkeys(source for value in read_by for source in anywhere.get(value, (value,))))
        for read_by in inputs
    ]
    for value in dict.fromkeys([*(value for read_by in inputs for value in read_by), *graph.outputs]):
        made_by = value.producer()
        if made_by is not None and made_by.domain != MEETING_DOMAIN:
            outputs[stages[value]].append(value)
            if not value.is_graph_output():
                value.name = f"{CARRIED}{value.name}"
    models = []
    for at, (read_by, returned) in enumerate(zip(inputs, outputs, strict=True)):
        segment = extract(graph, read_by, returned)
        segment.name = f"segment_{at}"
        segment.opset_imports.pop(MEETING_DOMAIN, None)
        models.append(ir.Model(segment, ir_version=model.ir_version, producer_name="specexport"))
    return models


def _is_of_sizes(value: ir.Value) -> bool:
    """Whether it is a few integers, always as many."""
    return value.dtype == ir.DataType.INT64 and value.shape is not None and value.shape.is_static()
