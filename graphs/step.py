"""The step graph: one forward pass of a model over T new tokens and a static cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specexport.graphs.attention import Lowering, NativeLowering, PassThroughCache, lowering


def pairs(flat: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``[key.0, value.0, key.1, ...]`` as ``[(key.0, value.0), ...]``."""
    return list(zip(flat[0::2], flat[1::2], strict=True))


def flat(layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """The inverse of :func:`pairs`."""
    return [tensor for layer in layers for tensor in layer]


def run_model(
    model: torch.nn.Module,
    active: Lowering,
    layers: int,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    logits_rows: torch.Tensor,
) -> torch.Tensor:
    """Runs a transformers causal LM under a lowering.

    The language-model head sees only the rows asked for: for a prefill chunk that is one row instead of T, which for a
    vocabulary of 150,000 is most of the head's cost.

    Args:
        model: loaded with ``attn_implementation=ATTENTION_NAME``.
        active: the lowering; it holds the cache.
        layers: number of attention layers.
        input_ids: int64 ``[B,T]``.
        position_ids: int64 ``[B,T]``.
        logits_rows: int64 ``[B,R]``, indices into T.

    Returns:
        float32 logits ``[B,R,V]``.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[operator]

    def keep_rows(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden = args[0]
        return (torch.gather(hidden, 1, logits_rows[:, :, None].expand(-1, -1, hidden.shape[-1])), *args[1:])

    hook = head.register_forward_pre_hook(keep_rows)
    try:
        with lowering(active):
            out = model(
                input_ids=input_ids,
                position_ids=position_ids,
                past_key_values=PassThroughCache(layers),
                use_cache=True,
            )
    finally:
        hook.remove()
    logits: torch.Tensor = out.logits
    return logits.float()


class StepModule(torch.nn.Module):
    """The target's graph: prefill, decode and verify are this module at different T (see ``contract.tensors``)."""

    def __init__(self, model: torch.nn.Module, layers: int) -> None:
        super().__init__()
        self.model = model
        self.layers = layers

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        tree_mask: torch.Tensor,
        past_length: torch.Tensor,
        logits_rows: torch.Tensor,
        past: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Returns ``(logits, present_key.0, present_value.0, ...)``."""
        native = NativeLowering(pairs(past), tree_mask, position_ids, past_length)
        logits = run_model(self.model, native, self.layers, input_ids, position_ids, logits_rows)
        return (logits, *flat(native.present))
