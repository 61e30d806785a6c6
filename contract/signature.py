"""The signatures of graphs: the inputs and outputs of each kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from specexport.contract import tensors
from specexport.contract.engines import AcceptRule
from specexport.contract.model import CELL, CacheLayer, LoweredAs, Model, StateLayer
from specexport.contract.shapes import ShapePoint
from specexport.contract.tensors import Array, Dim, Tensor


@dataclass(frozen=True)
class GraphSignature:
    """Inputs and outputs of a graph.

    Attributes:
        inputs: all but caches and states.
        outputs: all but caches, states and their new rows.
        fed: symbol of the number of tokens fed in a run; each adds a cache row.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    fed: Literal["T", "F"] = "T"

    def buffers(self, point: ShapePoint) -> tuple[dict[str, Array], dict[str, Array]]:
        """New arrays for a run at a shape point: the inputs with their initial values, and the outputs."""
        outputs = (tensor for tensor in self.outputs if not tensor.stage or tensor.stage < point.drafts)
        return (
            {str(tensor): tensor.array(point.sizes) for tensor in self.inputs},
            {str(tensor): tensor.zeros(point.sizes) for tensor in outputs},
        )


STEP_INPUTS = (tensors.INPUT_IDS, tensors.POSITION_IDS, tensors.TREE_MASK, tensors.PAST_LENGTH, tensors.LOGITS_ROWS)


def step_signature(
    outputs: Sequence[Tensor], embedding_size: Dim | None = None, states: Sequence[StateLayer] = ()
) -> GraphSignature:
    """The signature of a step graph; with an ``embedding_size`` H it can read embeddings instead of tokens."""
    return GraphSignature((*STEP_INPUTS, *embedding_inputs(embedding_size), *known_tokens(states)), tuple(outputs))


def embedding_inputs(embedding_size: Dim | None) -> tuple[Tensor, ...]:
    """The inputs through which a step graph reads embeddings of H = ``embedding_size``; none if that is None."""
    return () if embedding_size is None else (tensors.INPUTS_EMBEDS.sized(H=embedding_size), tensors.EMBEDS_MASK)


def target_signature(target: Model, observed: Sequence[Tensor]) -> GraphSignature:
    """The signature of the target's step graph; ``observed`` are the outputs that methods read besides its logits."""
    logits = tensors.LOGITS.sized(V=target.vocab_size)
    return step_signature((logits, *dict.fromkeys(observed)), target.embedding_size, target.states)


def propose_signature(candidates: Dim, states: Sequence[StateLayer] = ()) -> GraphSignature:
    """The signature of the propose graph of a draft that draws a token in each pass; ``candidates`` is M of q."""
    inputs = (
        tensors.INPUT_IDS,
        tensors.PAST_LENGTH,
        tensors.LAST_ROW,
        tensors.NUM_DRAFT_TOKENS,
        tensors.UNIFORM,
        *tensors.SAMPLING,
        *known_tokens(states),
    )
    return GraphSignature(inputs, tuple(tensor.sized(M=candidates) for tensor in tensors.DRAFTED), "F")


def accept_signature(rule: AcceptRule, candidates: Dim) -> GraphSignature:
    """The signature of a rule's accept graph; ``candidates`` is M of q, which lossless acceptance reads."""
    inputs = [
        tensors.LOGITS.shaped("B", "N", "V"),
        tensors.PARENTS,
        tensors.TREE_MASK.shaped("B", "N", "N"),
        tensors.DRAFT_TOKENS.shaped("B", "N-1"),
    ]
    if rule == "lossless":
        inputs += [tensor.shaped("B", "N-1", candidates) for tensor in (tensors.DRAFT_IDS, tensors.DRAFT_PROBS)]
        inputs += [tensors.UNIFORM.shaped("B", "N"), *tensors.SAMPLING]
    elif rule == "typical":
        inputs += [tensors.UNIFORM.shaped("B", 1), *tensors.SAMPLING, tensors.THRESHOLD, tensors.ALPHA]
    return GraphSignature(tuple(inputs), (tensors.NUM_ACCEPTED, tensors.TOKENS, tensors.PATH))


def fill_signature(candidates: Dim, stages: int = 0) -> GraphSignature:
    """The signature of the fill graph for drafts with M = ``candidates``.

    It follows a propose graph with K rows, or with ``stages`` outputs if that is not 0.
    """
    drafted = [tensor.sized(M=candidates) for tensor in tensors.DRAFTED]
    if stages:
        drafted = stage_outputs(candidates, stages, "R")
    filled = (tensors.TREE_TOKENS, tensors.TREE_IDS, tensors.TREE_PROBS)
    outputs = tuple(tensor.sized(M=candidates) for tensor in filled)
    return GraphSignature((*drafted, tensors.TREE_ROWS, tensors.TREE_RANKS), outputs)


def stage_outputs(candidates: Dim, stages: int, rows: Dim) -> list[Tensor]:
    """``tensors.DRAFTED`` of each stage of an MLP speculator: one row in the first stage, ``rows`` in the others."""
    return [
        tensor.of_stage(stage).shaped("B", rows if stage else 1, *(() if len(tensor.dims) == 2 else (candidates,)))
        for stage in range(stages)
        for tensor in tensors.DRAFTED
    ]


COMMIT = GraphSignature((tensors.PAST_LENGTH, tensors.PATH), ())
"""The signature of the commit graph, which also takes the caches and returns them in the same memory."""


Interface = tuple[str, tuple[Dim | None, ...]]
"""A tensor's type and sizes, as a manifest or a graph declares them."""


def interfaces(signature: Iterable[Tensor]) -> dict[str, Interface]:
    """The types and sizes of tensors, by name."""
    return {str(tensor): (tensor.dtype, tensor.dims) for tensor in signature}


def describe(interface: Interface | None) -> str:
    """Describes a tensor's type and sizes, for an error."""
    return "absent" if interface is None else f"{interface[0]}[{', '.join(map(str, interface[1]))}]"


# --- caches and states ------------------------------------------------------------------------------------------------
def cache_inputs(model: Model) -> tuple[Tensor, ...]:
    """The caches and states that a model's graph reads."""
    return (*caches(model.cache), *cells(model.states), *states(model.states))


def cache_outputs(
    cache: Sequence[CacheLayer], layers: Sequence[StateLayer], lowering: LoweredAs, fed: str
) -> tuple[Tensor, ...]:
    """The caches and states that a graph returns: natively whole caches, portably the rows of the tokens ``fed``."""
    if lowering == "native":
        return (*caches(cache, tensors.PRESENT_KEY, tensors.PRESENT_VALUE), *new_states(layers, fed))
    key, value = (tensor.sized(F=fed) for tensor in (tensors.NEW_KEY, tensors.NEW_VALUE))
    return (*caches(cache, key, value), *new_states(layers, fed))


def caches(
    layers: Sequence[CacheLayer], key: Tensor = tensors.PAST_KEY, value: Tensor = tensors.PAST_VALUE
) -> tuple[Tensor, ...]:
    """``past_key.0, past_value.0, past_key.1, ...``, or others of that shape."""
    return tuple(
        tensor.at(index).sized(Hkv=layer.heads, D=size)
        for index, layer in enumerate(layers)
        for tensor, size in ((key, layer.key_size), (value, layer.value_size))
    )


def cells(layers: Sequence[StateLayer]) -> tuple[Tensor, ...]:
    """``cell_rows``, if there are recurrent layers."""
    return (tensors.CELL_ROWS.sized(G=CELL),) if any(layer.recurrence for layer in layers) else ()


def known_tokens(layers: Sequence[StateLayer]) -> tuple[Tensor, ...]:
    """``known_tokens``, if there are recurrent layers."""
    return (tensors.KNOWN_TOKENS,) if any(layer.recurrence for layer in layers) else ()


def states(layers: Sequence[StateLayer]) -> tuple[Tensor, ...]:
    """``past_conv.0, past_updates.0, past_state.0, past_conv.1, ...``; a convolution alone has the first of them."""
    return _states(layers, tensors.PAST_CONV, tensors.PAST_UPDATES, tensors.PAST_STATE)


def new_states(layers: Sequence[StateLayer], fed: str = "T") -> tuple[Tensor, ...]:
    """``new_conv.0, new_updates.0, new_state.0, new_conv.1, ...``, as a graph returns them."""
    return _states(layers, tensors.NEW_CONV, tensors.NEW_UPDATES, tensors.NEW_STATE, fed)


def _states(
    layers: Sequence[StateLayer], conv: Tensor, updates: Tensor, state: Tensor, fed: str = "F"
) -> tuple[Tensor, ...]:
    # All symbols in one call: ``fed`` may be R, which is not the number of rows that a layer keeps.
    declared: list[Tensor] = []
    for index, layer in enumerate(layers):
        sizes: dict[str, Dim] = {"W-1": layer.kept_rows, "C": layer.conv_size, "F": fed}
        declared.append(conv.at(index).sized(**sizes))
        if (recurrence := layer.recurrence) is not None:
            sizes = {"H": recurrence.heads, "Dk": recurrence.key_size, "Dv": recurrence.value_size}
            declared.append(updates.at(index).sized(R=recurrence.rows, U=recurrence.update_size, F=fed))
            declared.append(state.at(index).sized(**sizes))
    return tuple(declared)
