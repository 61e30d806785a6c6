"""What graphs take and return: type and shape of every tensor, for the runtime's buffers and for ``verify`` alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specexport.contract import tensors
from specexport.contract.model import LoweredAs, Model, StateLayer
from specexport.contract.shapes import ShapePoint
from specexport.contract.states import CELL

Dim = int | str
"""A size, or a symbol of :attr:`~specexport.contract.shapes.ShapePoint.sizes`."""


@dataclass(frozen=True)
class Spec:
    """A tensor's type and shape.

    Attributes:
        dtype: of its elements.
        dims: its shape.
        stage: the stage of a propose graph that makes it; points that run fewer stages have no such output.
    """

    dtype: Literal["int64", "float32", "bool"]
    dims: tuple[Dim, ...]
    stage: int = 0

    def shape(self, point: ShapePoint) -> tuple[int, ...]:
        """The sizes at a shape point."""
        return tuple(point.sizes[dim] if isinstance(dim, str) else dim for dim in self.dims)


Signature = dict[str, Spec]
"""The inputs or the outputs of a graph by name, caches aside."""


@dataclass(frozen=True)
class GraphSignature:
    """Of one graph.

    Attributes:
        inputs: caches aside.
        outputs: caches and new rows aside.
        fed: symbol of the tokens fed in a call, each of which makes a cache row.
    """

    inputs: Signature
    outputs: Signature
    fed: Literal["T", "F"] = "T"


SAMPLING: Signature = {
    tensors.TEMPERATURE: Spec("float32", ("B",)),
    tensors.TOP_K: Spec("int64", ("B",)),
    tensors.TOP_P: Spec("float32", ("B",)),
    tensors.MIN_P: Spec("float32", ("B",)),
}


def step_signature(
    outputs: Signature, embedding_size: int | None = None, states: Sequence[StateLayer] = ()
) -> GraphSignature:
    """A step graph that makes these outputs, and reads embeddings of H = ``embedding_size`` instead of tokens."""
    inputs: Signature = {
        tensors.INPUT_IDS: Spec("int64", ("B", "T")),
        tensors.POSITION_IDS: Spec("int64", ("B", "T")),
        tensors.TREE_MASK: Spec("bool", ("B", "T", "T")),
        tensors.PAST_LENGTH: Spec("int64", ("B",)),
        tensors.LOGITS_ROWS: Spec("int64", ("B", "R")),
    }
    if embedding_size is not None:
        inputs[tensors.INPUTS_EMBEDS] = Spec("float32", ("B", "T", embedding_size))
        inputs[tensors.EMBEDS_MASK] = Spec("bool", ("B", "T"))
    if any(layer.recurrence for layer in states):
        inputs[tensors.KNOWN_TOKENS] = Spec("int64", ("B",))
    return GraphSignature(inputs, outputs)


def candidates(depths: int, ranks: int) -> Signature:
    """The output of Medusa heads: the most probable tokens at each depth."""
    return {tensors.CANDIDATES: Spec("int64", ("B", depths, "R", ranks))}


def target_signature(target: Model, observed: Signature) -> GraphSignature:
    """The target's step graph; ``observed`` are the outputs that methods ask for beside its logits."""
    logits = {tensors.LOGITS: Spec("float32", ("B", "R", target.vocab_size))}
    return step_signature(logits | observed, target.embedding_size, target.states)


def caches(model: Model) -> Signature:
    """The caches and states a model's graph takes."""
    made = _of_layers(model, tensors.cache_names(len(model.cache)), "S")
    if any(layer.recurrence for layer in model.states):
        made[tensors.CELL_ROWS] = Spec("int64", ("C", "B", CELL))
    return made | states(model.states)


def states(layers: Sequence[StateLayer]) -> Signature:
    """What a graph takes of layers without attention."""
    shapes: list[tuple[Dim, ...]] = []
    for layer in layers:
        shapes.append(("B", layer.kept_rows, layer.conv_size))
        if (state := layer.recurrence) is not None:
            shapes.append(("B", state.rows, state.update_size))
            shapes.append(("B", state.heads, state.key_size, state.value_size))
    return {name: Spec("float32", dims) for name, dims in zip(tensors.state_names(layers), shapes, strict=True)}


def returned(model: Model, lowering: LoweredAs, fed: str) -> Signature:
    """What a model's graph returns of its cache; ``fed`` is the symbol of the tokens fed in a call."""
    rows = "S" if lowering == "native" else fed
    names = zip(tensors.returned_state_names(model.states), states(model.states).values(), strict=True)
    made = {name: Spec("float32", ("B", fed, s.dims[2])) if len(s.dims) == 3 else s for name, s in names}
    return _of_layers(model, tensors.returned_names(len(model.cache), lowering), rows) | made


def _of_layers(model: Model, names: list[str], rows: str) -> Signature:
    sizes = [(layer.heads, size) for layer in model.cache for size in (layer.key_size, layer.value_size)]
    return {name: Spec("float32", ("B", heads, rows, size)) for name, (heads, size) in zip(names, sizes, strict=True)}
