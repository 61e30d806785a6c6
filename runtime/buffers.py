"""The input and output arrays of graphs, caches aside, as their signatures say."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from specexport.contract import tensors
from specexport.contract.shapes import ShapePoint
from specexport.contract.signature import GraphSignature, Signature
from specexport.runtime.backend import Array, Buffers
from specexport.runtime.params import SamplingParams

_INITIAL_VALUES: dict[str, Callable[[ShapePoint], Array]] = {
    tensors.TREE_MASK: lambda point: np.tri(point.tokens, dtype=np.bool_),
    tensors.LOGITS_ROWS: lambda point: np.arange(point.rows),
    tensors.LAST_ROW: lambda point: np.array(point.tokens - 1),
    tensors.NUM_DRAFT_TOKENS: lambda point: np.array(point.drafts),
    tensors.TEMPERATURE: lambda point: np.array(1.0),
    tensors.TOP_K: lambda point: np.array(1),
    tensors.TOP_P: lambda point: np.array(1.0),
}
"""Initial input values; other inputs start as zeros."""


def buffers(signature: GraphSignature) -> Buffers:
    """Returns a function that creates a graph's arrays at a shape point."""

    def make(point: ShapePoint) -> tuple[dict[str, Array], dict[str, Array]]:
        inputs = _arrays(signature.inputs, point)
        for name in inputs.keys() & _INITIAL_VALUES.keys():
            inputs[name][...] = _INITIAL_VALUES[name](point)
        return inputs, _arrays(signature.outputs, point)

    return make


def _arrays(signature: Signature, point: ShapePoint) -> dict[str, Array]:
    return {
        name: np.zeros(spec.shape(point), spec.dtype)
        for name, spec in signature.items()
        if not spec.stage or spec.stage < point.drafts
    }


def write_sampling(inputs: Mapping[str, Array], at: int, params: SamplingParams) -> None:
    """Writes a slot's sampling parameters into a graph's inputs; greedy decoding is top-k of 1."""
    inputs[tensors.TEMPERATURE][at] = 1.0 if params.greedy else params.temperature
    inputs[tensors.TOP_K][at] = 1 if params.greedy else min(max(params.top_k, 0), 2**31)
    inputs[tensors.TOP_P][at] = params.top_p
    inputs[tensors.MIN_P][at] = params.min_p
