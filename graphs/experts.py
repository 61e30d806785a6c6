"""Lowers mixtures of experts of transformers models, at a cost of the experts that are used.

transformers lets an experts function be registered by name and chosen per model, as it does for attention
(:mod:`specexport.graphs.attention`): the router stays the model's own, and the experts it chose come here.
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
    """The experts function transformers calls (see ``transformers.integrations.moe.ExpertsInterface``).

    The weights of ``min(E, N*k)`` experts, all that were chosen among them, are gathered from the stacked ones and
    multiplied by all N tokens: a step of one token reads k experts, a prefill chunk reads each expert once. For CPUs
    the exporter makes a branch of each expert instead (:mod:`specexport.exporter.passes.experts`).

    Args:
        module: holds E experts' stacked weights.
        hidden_states: ``[N,H]``.
        top_k_index: int64 ``[N,k]``, each token's experts.
        top_k_weights: float32 ``[N,k]``.

    Returns:
        float32 ``[N,H]``.

    Raises:
        BuildError: the family's experts are made of something else.
    """
    if module.has_post_expert_norm:
        raise BuildError(f"{type(module).__name__} normalizes what each expert makes, which specexport cannot trace")
    tokens, chosen = top_k_index.shape
    first = module.gate_up_proj if module.has_gate else module.up_proj
    count = first.shape[0]
    # Chosen experts come first; which others fill up does not matter, as their outputs are not read.
    one_hot = (top_k_index.reshape(-1, 1) == torch.arange(count)).float()
    used_count = torch.sym_min(count, tokens * chosen)  # type: ignore[no-untyped-call]
    used = torch.topk(one_hot.amax(0), used_count).indices  # [L]
    # onnxruntime multiplies a single row with another kernel than several, whose sums round differently.
    rows = torch.cat([hidden_states, hidden_states[:1]])[None]
    products = _linear(module, "gate_up_proj" if module.has_gate else "up_proj", rows, used)
    products = module._apply_gate(products) if module.has_gate else module.act_fn(products)
    products = _linear(module, "down_proj", products, used)  # [L,N+1,H]
    # Each token's own experts, in its own order, so that a row's sum does not depend on the tokens beside it.
    place = (top_k_index[:, :, None] == used).float().argmax(-1)  # [N,k], in used
    # Of a range, not of the size itself: onnxruntime keeps sizes in host memory, and ranges where they are used.
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
    summed: torch.Tensor = sum_of_experts(total, hidden_states, rows, products, top_k_index, top_k_weights)
    return summed


def _linear(module: Any, name: str, rows: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Rows ``[1 or L,M,K]`` times the weights of the experts in ``used``: ``[L,M,N]``."""
    weight = getattr(module, name)
    # Transposed before they are gathered: as stored, not in every step.
    stacked = weight if module.is_transposed else weight.transpose(1, 2)
    product = torch.matmul(rows, stacked.index_select(0, used))
    if module.has_bias:
        product = product + getattr(module, f"{name}_bias").index_select(0, used)[:, None]
    return product


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, apply_experts)
