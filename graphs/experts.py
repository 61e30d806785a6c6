"""Lowers the mixtures of experts of transformers models, so that only the chosen experts cost time.

As for attention (:mod:`specexport.graphs.attention`), transformers lets models use a function that is registered by
name: the model's own router chooses, and :func:`apply_experts` runs the experts.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from specexport.contract.errors import BuildError
from specexport.graphs.ops import sum_of_experts

EXPERTS_NAME = "specexport"


def apply_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts function that transformers calls (see ``transformers.integrations.moe.ExpertsInterface``).

    The weights of ``min(E, N*k)`` experts, among them all chosen experts, are gathered from their stack and multiplied
    by all N tokens: a step of one token reads k experts, and a prefill chunk reads each expert once. For CPUs, the
    exporter puts each expert into a branch instead (:mod:`specexport.exporter.passes.experts`).

    Hidden states and the result are float32 ``[N,H]``; the experts of each token are int64 ``[N,k]``, and their weights
    float32 ``[N,k]``.
    """
    if module.has_post_expert_norm:
        raise BuildError(f"{type(module).__name__} normalizes the output of each expert, which specexport cannot trace")
    tokens, chosen = top_k_index.shape
    first = module.gate_up_proj if module.has_gate else module.up_proj
    count = first.shape[0]
    # Chosen experts come first; the rest may be any experts, as their outputs are not read.
    one_hot = (top_k_index.reshape(-1, 1) == torch.arange(count)).float()
    used_count = torch.sym_min(count, tokens * chosen)  # type: ignore[no-untyped-call]
    used = torch.topk(one_hot.amax(0), used_count).indices  # [L]
    # At least two rows: onnxruntime multiplies a single row by another kernel, whose sums round differently.
    rows = torch.cat([hidden_states, hidden_states[:1]])[None]
    products = _linear(module, "gate_up_proj" if module.has_gate else "up_proj", rows, used)
    products = module._apply_gate(products) if module.has_gate else module.act_fn(products)
    products = _linear(module, "down_proj", products, used)  # [L,N+1,H]
    # Experts in the token's own order, so that its sum does not depend on other tokens.
    place = (top_k_index[:, :, None] == used).float().argmax(-1)  # [N,k], in used
    # From a range instead of the size itself, which onnxruntime would keep in host memory.
    row = torch.arange(tokens + 1)
    flat = place * (row[-1:] + 1) + row[:-1, None]
    flat_products = (
        products.reshape(-1, products.shape[-1])
        .index_select(0, flat.reshape(-1))
        .reshape(tokens, chosen, products.shape[-1])
    )
    weighted = flat_products * top_k_weights[:, :, None]
    total = weighted[:, 0]
    for rank in range(1, chosen):
        total = total + weighted[:, rank]
    return sum_of_experts(total, hidden_states, rows, products, top_k_index, top_k_weights)


def _linear(module: Any, name: str, rows: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """The rows ``[1,M,K]`` or ``[L,M,K]`` times the weights of the L experts ``used``: ``[L,M,N]``."""
    weight = getattr(module, name)
    # Transposed before the gather: once, when weights are stored, instead of in every step.
    stacked = weight if module.is_transposed else weight.transpose(1, 2)
    product = torch.matmul(rows, stacked.index_select(0, used))
    if module.has_bias:
        product = product + getattr(module, f"{name}_bias").index_select(0, used)[:, None]
    return product


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, apply_experts)
