"""``specexport verify`` on the graphs alone: valid, standard, and of the shapes that were promised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import TensorProto

from specexport.contract import tensors
from specexport.contract.errors import BundleError
from specexport.contract.methods import DraftModel, Medusa, MedusaDraft, MlpSpeculator
from specexport.contract.model import OPSETS, LoweredAs, Model
from specexport.contract.shapes import ShapePoint
from specexport.contract.tensors import cache_names, returned_names
from specexport.runtime.bundle import Bundle

Dims = tuple[int | str, ...]
Signature = dict[str, tuple[int, Dims]]
"""Type and shape of each input or output."""

_INT64, _FLOAT, _BOOL = TensorProto.INT64, TensorProto.FLOAT, TensorProto.BOOL
_SAMPLING: Signature = {
    tensors.TOP_K: (_INT64, ("B",)),
    **dict.fromkeys((tensors.TEMPERATURE, tensors.TOP_P, tensors.MIN_P), (_FLOAT, ("B",))),
}


def check_graphs(bundle: Bundle, progress: Callable[[int, int], None]) -> int:
    """Checks every graph of a bundle: the masters and those of all shape points.

    Args:
        bundle: the bundle.
        progress: called with how many graphs are done, and how many there are.

    Returns:
        How many graphs there are.

    Raises:
        BundleError: names the first graph that is not valid ONNX, is not of its lowering's opset, uses an operator
            outside the standard, has other inputs, outputs or shapes than ``contract.tensors`` and its shape point say,
            or weights elsewhere.
    """
    manifest = bundle.manifest
    medusa = manifest.method("medusa")
    extra: Signature = {tensors.CANDIDATES: _candidates(medusa.heads, medusa)} if isinstance(medusa, Medusa) else {}
    speculator = manifest.method("mlp_speculator")
    if isinstance(speculator, MlpSpeculator):
        extra[tensors.HIDDEN] = (_FLOAT, ("B", "R", speculator.hidden))
    logits: Signature = {tensors.LOGITS: (_FLOAT, ("B", "R", manifest.target.vocab_size))}
    lowering = manifest.lowering
    models = [(manifest.target, *_step_signature(manifest.target, logits | extra, lowering))]
    for method in manifest.methods:
        if isinstance(method, DraftModel):
            models.append((method.draft, *_propose_signature(method, lowering)))
        elif isinstance(method, MlpSpeculator):
            models.append((method.draft, *_speculator_signature(method)))
        elif isinstance(method, MedusaDraft):
            made: Signature = {tensors.CANDIDATES: _candidates(method.heads + 1, method)}
            models.append((method.draft, *_step_signature(method.draft, made, lowering)))
    work = [
        (bundle.file(file), bundle.file(model.weights), _pinned(inputs, point), _pinned(outputs, point))
        for model, inputs, outputs in models
        for file, point in [(model.graph.master, None), *((at.file, at.point) for at in model.graph.points)]
    ]
    for done, (path, weights, inputs, outputs) in enumerate(work, start=1):
        _check_graph(path, OPSETS[lowering], weights, inputs, outputs)
        progress(done, len(work))
    return len(work)


def _check_graph(path: Path, opset: int, weights: Path, inputs: Signature, outputs: Signature) -> None:
    try:
        # By path, so that the weights file is looked for where the graph says.
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise BundleError(f"{path}: not a valid ONNX graph: {error}; build the bundle again") from error
    model = onnx.load(path, load_external_data=False)
    found_opset = {entry.domain: entry.version for entry in model.opset_import}.get("")
    if found_opset != opset:
        raise BundleError(f"{path}: opset {found_opset}, expected {opset}; build the bundle again")
    foreign = sorted(
        {f"{node.domain}.{node.op_type}" for node in _nodes(model.graph) if node.domain not in ("", "ai.onnx")}
    )
    if foreign or model.functions:
        raise BundleError(f"{path}: operators outside the ONNX standard: {', '.join(foreign) or 'local functions'}")
    for kind, values, expected in (("input", model.graph.input, inputs), ("output", model.graph.output, outputs)):
        found = {value.name: _signature(value) for value in values}
        for name in sorted(found.keys() | expected.keys()):
            if found.get(name) != expected.get(name):
                raise BundleError(
                    f"{path}: {kind} {name} is {_words(found.get(name))}, expected {_words(expected.get(name))}"
                )
    size = weights.stat().st_size
    for tensor in _initializers(model.graph):
        if tensor.data_location == TensorProto.EXTERNAL:
            entry = {item.key: item.value for item in tensor.external_data}
            if entry["location"] != weights.name or int(entry.get("offset", 0)) + int(entry.get("length", 0)) > size:
                raise BundleError(f"{path}: weight {tensor.name} is not inside {weights.name}; build the bundle again")


def _subgraphs(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    """A graph and those in its nodes' attributes, all the way down."""
    inner = [a.g for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    return [graph, *(deeper for one in inner for deeper in _subgraphs(one))]


def _nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    return [node for one in _subgraphs(graph) for node in one.node]


def _initializers(graph: onnx.GraphProto) -> list[onnx.TensorProto]:
    return [tensor for one in _subgraphs(graph) for tensor in one.initializer]


def _signature(value: onnx.ValueInfoProto) -> tuple[int, Dims]:
    kind = value.type.tensor_type
    return kind.elem_type, tuple(dim.dim_param or dim.dim_value for dim in kind.shape.dim)


def _words(signature: tuple[int, Dims] | None) -> str:
    if signature is None:
        return "absent"
    return f"{TensorProto.DataType.Name(signature[0]).lower()}[{', '.join(map(str, signature[1]))}]"


def _candidates(depths: int, method: Medusa | MedusaDraft) -> tuple[int, Dims]:
    return _INT64, ("B", depths, "R", method.candidates)


def _step_signature(model: Model, outputs: Signature, lowering: LoweredAs) -> tuple[Signature, Signature]:
    inputs: Signature = {
        tensors.INPUT_IDS: (_INT64, ("B", "T")),
        tensors.POSITION_IDS: (_INT64, ("B", "T")),
        tensors.TREE_MASK: (_BOOL, ("B", "T", "T")),
        tensors.PAST_LENGTH: (_INT64, ("B",)),
        tensors.LOGITS_ROWS: (_INT64, ("B", "R")),
    }
    if model.embedding_size is not None:
        inputs[tensors.INPUTS_EMBEDS] = (_FLOAT, ("B", "T", model.embedding_size))
        inputs[tensors.EMBEDS_MASK] = (_BOOL, ("B", "T"))
    return {**inputs, **_caches(model)}, {**outputs, **_returned(model, lowering, "T")}


def _propose_signature(method: DraftModel, lowering: LoweredAs) -> tuple[Signature, Signature]:
    inputs: Signature = {
        tensors.INPUT_IDS: (_INT64, ("B", "T")),
        tensors.PAST_LENGTH: (_INT64, ("B",)),
        tensors.LAST_ROW: (_INT64, ("B",)),
        tensors.NUM_DRAFT_TOKENS: (_INT64, ()),
        tensors.UNIFORM: (_FLOAT, ("B", "K")),
        **_SAMPLING,
    }
    outputs: Signature = {
        tensors.DRAFT_TOKENS: (_INT64, ("K", "B")),
        tensors.DRAFT_IDS: (_INT64, ("K", "B", method.candidates)),
        tensors.DRAFT_PROBS: (_FLOAT, ("K", "B", method.candidates)),
    }
    return {**inputs, **_caches(method.draft)}, {**outputs, **_returned(method.draft, lowering, "F")}


def _speculator_signature(method: MlpSpeculator) -> tuple[Signature, Signature]:
    levels = ("B", method.stages, "T")
    inputs: Signature = {
        tensors.HIDDEN_STATE: (_FLOAT, ("B", method.hidden)),
        tensors.INPUT_IDS: (_INT64, ("B", 1)),
        tensors.LEVEL_PARENTS: (_INT64, levels),
        tensors.LEVEL_RANKS: (_INT64, levels),
        tensors.UNIFORM: (_FLOAT, levels),
        **_SAMPLING,
    }
    outputs: Signature = {}
    for stage in range(method.stages):
        rows = "T" if stage else 1
        outputs[tensors.of_stage(tensors.DRAFT_TOKENS, stage)] = (_INT64, ("B", rows))
        outputs[tensors.of_stage(tensors.DRAFT_IDS, stage)] = (_INT64, ("B", rows, method.candidates))
        outputs[tensors.of_stage(tensors.DRAFT_PROBS, stage)] = (_FLOAT, ("B", rows, method.candidates))
    return inputs, outputs


def _caches(model: Model) -> Signature:
    return _of_layers(model, cache_names(len(model.cache)), "S")


def _returned(model: Model, lowering: LoweredAs, fed: str) -> Signature:
    """What a graph returns of its cache; ``fed`` is the symbol of the tokens fed in a call."""
    return _of_layers(model, returned_names(len(model.cache), lowering), "S" if lowering == "native" else fed)


def _of_layers(model: Model, names: list[str], rows: str) -> Signature:
    sizes = [(shape.heads, size) for shape in model.cache for size in (shape.key_size, shape.value_size)]
    return {name: (_FLOAT, ("B", heads, rows, size)) for name, (heads, size) in zip(names, sizes, strict=True)}


def _pinned(signature: Signature, point: ShapePoint | None) -> Signature:
    """A signature at a shape point; a draft's number of passes is then part of the graph, and no input."""
    if point is None:
        return signature
    sizes = point.sizes
    return {
        name: (kind, tuple(sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in dims))
        for name, (kind, dims) in signature.items()
        if name != tensors.NUM_DRAFT_TOKENS and not _beyond(name, point.drafts)
    }


def _beyond(name: str, stages: int) -> bool:
    """Whether an output is of a stage of an MLP speculator behind those that a point runs."""
    _, _, stage = name.partition(".")
    return name.startswith(tensors.DRAFTED) and stage != "" and int(stage) >= stages
