"""Operators the step graph needs that torch has no name for, each with eager semantics and its ONNX translation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnxscript
import torch

_OPSET = onnxscript.values.Opset("", 24)


@torch.library.custom_op("specexport::tensor_scatter", mutates_args=())
def tensor_scatter(cache: torch.Tensor, update: torch.Tensor, write_indices: torch.Tensor) -> torch.Tensor:
    """Writes rows into a static cache (ONNX ``TensorScatter``, opset 24, axis -2).

    Args:
        cache: ``[B,H,S,D]``.
        update: ``[B,H,T,D]``, written at rows ``write_indices[b] .. write_indices[b] + T - 1``.
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


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The table ``torch.onnx.export(custom_translation_table=...)`` needs for the operators above."""
    return {torch.ops.specexport.tensor_scatter.default: _tensor_scatter_onnx}
