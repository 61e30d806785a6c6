"""The input and output arrays of graphs, without caches, by their signatures."""

from __future__ import annotations

from collections.abc import Mapping

from specexport.contract import tensors
from specexport.contract.shapes import ShapePoint
from specexport.contract.signature import GraphSignature
from specexport.runtime.backend import Array, Buffers
from specexport.runtime.params import SamplingParams


def buffers(signature: GraphSignature) -> Buffers:
    """Returns a function that creates a graph's arrays at a shape point."""

    def make(point: ShapePoint) -> tuple[dict[str, Array], dict[str, Array]]:
        sizes = point.sizes
        outputs = (tensor for tensor in signature.outputs if not tensor.stage or tensor.stage < point.drafts)
        return (
            {str(tensor): tensor.array(sizes) for tensor in signature.inputs},
            {str(tensor): tensor.zeros(sizes) for tensor in outputs},
        )

    return make


def write_sampling(inputs: Mapping[str, Array], at: int, params: SamplingParams) -> None:
    """Writes a slot's sampling parameters into a graph's inputs; greedy decoding is top-k of 1."""
    inputs[tensors.TEMPERATURE][at] = 1.0 if params.greedy else params.temperature
    inputs[tensors.TOP_K][at] = 1 if params.greedy else min(max(params.top_k, 0), 2**31)
    inputs[tensors.TOP_P][at] = params.top_p
    inputs[tensors.MIN_P][at] = params.min_p
