"""``specexport verify`` of graphs: they must be valid, of standard operators, and of the declared shapes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import onnx
from onnx import TensorProto

from specexport.contract.engines import FUSED_OPERATORS
from specexport.contract.errors import BundleError
from specexport.contract.model import OPSETS, RankFiles
from specexport.contract.signature import Interface, cache_inputs, cache_outputs, describe, interfaces
from specexport.contract.tensors import CARRIED, COLLECTIVES, Tensor
from specexport.contract.values import Progress
from specexport.runtime.bundle import Bundle, without_links

_TYPES: dict[int, str] = {TensorProto.INT64: "int64", TensorProto.FLOAT: "float32", TensorProto.BOOL: "bool"}


def check_graphs(bundle: Bundle, progress: Progress) -> int:
    """Checks all graphs of a bundle: the masters, and graphs that GPUs or ranks open instead.

    Returns:
        The number of graphs.

    Raises:
        BundleError: a graph is not valid ONNX or not of its lowering's opset, uses operators outside the standard, has
            other inputs, outputs or shapes than declared, or weights in other files; names the first such graph.
    """
    manifest = bundle.manifest
    lowering = manifest.lowering
    described = [(manifest.target, manifest.target_signature)]
    described += [(m.written_draft, m.signature) for m in manifest.methods if m.signature is not None]
    sources = [(engine, m) for m, _ in described for engine in m.engines if engine.file == engine.source]
    count = len(described) + len(sources)
    for done, (model, signature) in enumerate(described, start=1):
        for files in model.ranks or (
            RankFiles(weights=model.weights, master=model.graph.master, segments=(model.graph.master,)),
        ):
            weights = [bundle.file(files.weights)]
            graphs = [_check_graph(bundle.file(name), OPSETS[lowering], weights) for name in files.segments]
            inner = {value.name for graph in graphs for value in graph.output}
            inputs = {value.name: value for graph in graphs for value in graph.input if value.name not in inner}
            produced = (value for graph in graphs for value in graph.output)
            final = [value for value in produced if not value.name.startswith((CARRIED, *COLLECTIVES))]
            path = bundle.file(files.segments[0])
            part = model.of_rank(0)
            _check_interface(path, (*signature.inputs, *cache_inputs(part)), "input", inputs.values())
            returned = cache_outputs(part.cache, part.states, lowering, signature.fed)
            _check_interface(path, (*signature.outputs, *returned), "output", final)
        progress("graphs", done, count)
    for done, (engine, model) in enumerate(sources, start=len(described) + 1):
        weights = [bundle.file(model.of_rank(engine.rank).weights)]
        if (converted := bundle.file(engine.source).with_suffix(".bin")).is_file():
            weights.append(converted)
        for name in engine.segments or (engine.file,):
            _check_graph(bundle.file(name), OPSETS[lowering], weights, FUSED_OPERATORS)
        progress("graphs", done, count)
    return count


def _check_graph(
    path: Path, opset: int, weights: Sequence[Path], additional: Collection[tuple[str, str]] = ()
) -> onnx.GraphProto:
    """Reads and checks a graph of standard and ``additional`` operators, given by domain and type."""
    try:
        # By path, so that weights are found relative to the graph.
        with without_links(path, weights) as plain:
            onnx.checker.check_model(str(plain), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise BundleError(f"{path}: not a valid ONNX graph: {error}; build the bundle again") from error
    model = onnx.load(path, load_external_data=False)
    version = {entry.domain: entry.version for entry in model.opset_import}.get("")
    if version != opset:
        raise BundleError(f"{path}: opset {version}, expected {opset}; build the bundle again")
    graphs = _subgraphs(model.graph)
    nodes = [node for graph in graphs for node in graph.node]
    others = {(node.domain, node.op_type) for node in nodes if node.domain not in ("", "ai.onnx")}
    foreign = sorted(map(".".join, others.difference(additional)))
    if foreign or model.functions:
        raise BundleError(f"{path}: operators outside the ONNX standard: {', '.join(foreign) or 'local functions'}")
    sizes = {file.name: file.stat().st_size for file in weights}
    for tensor in (tensor for graph in graphs for tensor in graph.initializer):
        if tensor.data_location == TensorProto.EXTERNAL:
            entry = {item.key: item.value for item in tensor.external_data}
            end = int(entry.get("offset", 0)) + int(entry.get("length", 0))
            if end > sizes.get(entry["location"], -1):
                inside = " or ".join(sizes)
                raise BundleError(f"{path}: weight {tensor.name} is not inside {inside}; build the bundle again")
    return model.graph


def _check_interface(path: Path, signature: Iterable[Tensor], kind: str, values: Iterable[onnx.ValueInfoProto]) -> None:
    expected = interfaces(signature)
    actual = {value.name: _interface(value) for value in values}
    for name in sorted(actual.keys() | expected.keys()):
        if actual.get(name) != expected.get(name):
            raise BundleError(
                f"{path}: {kind} {name} is {describe(actual.get(name))}, expected {describe(expected.get(name))}"
            )


def _subgraphs(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    """The graph and all graphs in the attributes of its nodes."""
    inner = [a.g for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    return [graph, *(deeper for nested in inner for deeper in _subgraphs(nested))]


def _interface(value: onnx.ValueInfoProto) -> Interface:
    kind = value.type.tensor_type
    name = _TYPES.get(kind.elem_type) or TensorProto.DataType.Name(kind.elem_type).lower()
    return name, tuple(dim.dim_param or dim.dim_value for dim in kind.shape.dim)
