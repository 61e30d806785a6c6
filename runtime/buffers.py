"""The input and output arrays of graphs, caches aside, as their signatures say."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from specexport.contract import tensors
from specexport.contract.shapes import ShapePoint
from specexport.contract.signature import GraphSignature, Signature
from specexport.runtime.graph import Array, Buffers
from specexport.runtime.params import SamplingParams

_AT_FIRST: dict[str, Callable[[ShapePoint], Array]] = {
    tensors.TREE_MASK: lambda point: np.tri(point.tokens, dtype=np.bool_),
    tensors.LOGITS_ROWS: lambda point: np.arange(point.rows),
    tensors.LAST_ROW: lambda point: np.array(point.tokens - 1),
    tensors.NUM_DRAFT_TOKENS: lambda point: np.array(point.drafts),
    tensors.TEMPERATURE: lambda point: np.array(1.0),
    tensors.TOP_K: lambda point: np.array(1),
    tensors.TOP_P: lambda point: np.array(1.0),
}
"""What inputs hold until something is written into them; the others hold zeros."""


def buffers(signature: GraphSignature) -> Buffers:
    """What makes a graph's arrays at a shape point."""

    def make(point: ShapePoint) -> tuple[dict[str, Array], dict[str, Array]]:
        inputs = _arrays(signature.inputs, point)
        for name in inputs.keys() & _AT_FIRST.keys():
            inputs[name][...] = _AT_FIRST[name](point)
        return inputs, _arrays(signature.outputs, point)

    return make


def _arrays(signature: Signature, point: ShapePoint) -> dict[str, Array]:
    return {
        name: np.zeros(spec.shape(point), spec.dtype)
        for name, spec in signature.items()
        if not spec.stage or spec.stage < point.drafts
    }


def write_sampling(given: Mapping[str, Array], at: int, params: SamplingParams) -> None:
    """Writes how a slot samples into a graph's inputs; greedy decoding is top-k of 1."""
    given[tensors.TEMPERATURE][at] = 1.0 if params.greedy else params.temperature
    given[tensors.TOP_K][at] = 1 if params.greedy else min(max(params.top_k, 0), 2**31)
    given[tensors.TOP_P][at] = params.top_p
    given[tensors.MIN_P][at] = params.min_p
