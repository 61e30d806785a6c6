"""Operators that torch lacks, with their ONNX translations; and a cheap gather."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import onnx
import onnxscript
import torch

from specexport.contract.tensors import COLLECTIVE_DOMAIN

_OPSET = onnxscript.values.Opset("", 24)


def take_rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows of tables ``[B,N,...]`` at an int64 index ``[...,B,K]``: ``[...,B,K,...]``, in few ONNX operators."""
    flat = index + torch.arange(table.shape[0])[:, None] * table.shape[1]
    return table.flatten(0, 1).index_select(0, flat.flatten()).reshape(*index.shape, *table.shape[2:])


@torch.library.custom_op("specexport::tensor_scatter", mutates_args=())
def tensor_scatter(cache: torch.Tensor, update: torch.Tensor, write_indices: torch.Tensor) -> torch.Tensor:
    """Writes rows into a static cache (ONNX ``TensorScatter``, opset 24, axis -2).

    Args:
        cache: ``[B,H,S,D]``.
        update: ``[B,H,T,D]``, written to the rows ``write_indices[b] .. write_indices[b] + T - 1``.
        write_indices: int64 ``[B]``.
    """
    rows = write_indices[:, None] + torch.arange(update.shape[2], device=update.device)  # [B,T]
    index = rows[:, None, :, None].expand(update.shape)
    return cache.scatter(2, index, update)


@tensor_scatter.register_fake
def _(cache: torch.Tensor, update: torch.Tensor, write_indices: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(cache)


def _tensor_scatter_onnx(cache: Any, update: Any, write_indices: Any) -> Any:
    return _OPSET.TensorScatter(cache, update, write_indices, axis=-2)


Combine = Callable[[torch.Tensor, bool], torch.Tensor]
"""Combines the parts of all ranks, given this rank's: sums them, or joins them along the last axis if true."""
_combining = threading.local()


def combine_by(combine: Combine) -> None:
    """Sets how the rank of this thread combines parts in torch; by default, it uses nothing but its own."""
    _combining.combine = combine


@torch.library.custom_op("specexport::sum_of_ranks", mutates_args=())
def sum_of_ranks(part: torch.Tensor) -> torch.Tensor:
    """The sum of the parts of all ranks, given this rank's."""
    combine: Combine | None = getattr(_combining, "combine", None)
    return part.clone() if combine is None else combine(part, False)


@sum_of_ranks.register_fake
def _(part: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(part)


@torch.library.custom_op("specexport::join_of_ranks", mutates_args=())
def join_of_ranks(part: torch.Tensor, ranks: int) -> torch.Tensor:
    """The parts of all ranks joined along the last axis, given this rank's."""
    combine: Combine | None = getattr(_combining, "combine", None)
    return torch.cat([part] * ranks, -1) if combine is None else combine(part, True)


@join_of_ranks.register_fake
def _(part: torch.Tensor, ranks: int) -> torch.Tensor:
    return part.new_empty(*part.shape[:-1], part.shape[-1] * ranks)


EXPERTS_DOMAIN = "specexport.experts"
"""Domain of the operator that marks the experts of a mixture; the exporter replaces it."""


@torch.library.custom_op("specexport::sum_of_experts", mutates_args=())
def sum_of_experts(
    total: torch.Tensor,
    hidden: torch.Tensor,
    rows: torch.Tensor,
    products: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of the outputs of experts; the arguments after it tell the exporter how it was computed.

    Args:
        total: the sum, ``[N,H]``.
        hidden: the input of the experts, ``[N,H]``.
        rows: the rows that are multiplied by weights gathered from stacks, ``[1,M,H]``.
        products: the output of each gathered expert, ``[L,M,H]``.
        index: the experts of each token, int64 ``[N,k]``.
        weights: the weights of these, ``[N,k]``.
    """
    return total.clone()


@sum_of_experts.register_fake
def _(total: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(total)


def _op(domain: str, name: str, output: str, **kinds: str) -> onnxscript.values.Op:
    """An operator that the exporter replaces, with the types of its inputs by name."""
    parameter = onnx.defs.OpSchema.FormalParameter
    inputs = [parameter(key, f"tensor({kind})") for key, kind in kinds.items()]
    schema = onnx.defs.OpSchema(name, domain, 1, inputs=inputs, outputs=[parameter(output, "tensor(float)")])
    return onnxscript.values.Op(onnxscript.values.Opset(domain, 1), name, schema)


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The translations of the operators above, for ``torch.onnx.export(custom_translation_table=...)``.

    Combinations of ranks or experts become operators of our own, which the exporter replaces.
    """
    add, join = (_op(COLLECTIVE_DOMAIN, name, "whole", part="float") for name in ("SumOfRanks", "JoinOfRanks"))
    inputs = dict.fromkeys(("total", "hidden", "rows", "products"), "float")
    sum_of_experts = _op(EXPERTS_DOMAIN, "SumOfExperts", "sum", **inputs, index="int64", weights="float")
    return {
        torch.ops.specexport.tensor_scatter.default: _tensor_scatter_onnx,
        torch.ops.specexport.sum_of_ranks.default: lambda part: add(part),
        torch.ops.specexport.join_of_ranks.default: lambda part, ranks: join(part),
        torch.ops.specexport.sum_of_experts.default: lambda *inputs: sum_of_experts(*inputs),
    }
