"""Operators the step graph needs that torch has no name for, each with eager semantics and its ONNX translation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import onnx
import onnxscript
import torch

from specexport.contract.tensors import MEETING_DOMAIN

_OPSET = onnxscript.values.Opset("", 24)
_MEETINGS = onnxscript.values.Opset(MEETING_DOMAIN, 1)


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


Meet = Callable[[torch.Tensor, bool], torch.Tensor]
"""Puts a rank's part together with the others': added up, or joined along the last axis."""
_meeting = threading.local()


def met_by(meet: Meet) -> None:
    """Has the ranks that this thread runs meet in torch; without it each goes on with its own part."""
    _meeting.meet = meet


@torch.library.custom_op("specexport::sum_of_ranks", mutates_args=())
def sum_of_ranks(part: torch.Tensor) -> torch.Tensor:
    """The sum of what the ranks have, of one rank's part."""
    meet: Meet | None = getattr(_meeting, "meet", None)
    return part.clone() if meet is None else meet(part, False)


@sum_of_ranks.register_fake
def _(part: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(part)


@torch.library.custom_op("specexport::join_of_ranks", mutates_args=())
def join_of_ranks(part: torch.Tensor, ranks: int) -> torch.Tensor:
    """What the ranks have, side by side along the last axis."""
    meet: Meet | None = getattr(_meeting, "meet", None)
    return torch.cat([part] * ranks, -1) if meet is None else meet(part, True)


@join_of_ranks.register_fake
def _(part: torch.Tensor, ranks: int) -> torch.Tensor:
    return part.new_empty(*part.shape[:-1], part.shape[-1] * ranks)


def _schema(name: str) -> onnx.defs.OpSchema:
    one, kinds = onnx.defs.OpSchema.FormalParameter, [("T", ["tensor(float)"], "")]
    return onnx.defs.OpSchema(
        name, MEETING_DOMAIN, 1, inputs=[one("part", "T")], outputs=[one("whole", "T")], type_constraints=kinds
    )


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The table ``torch.onnx.export(custom_translation_table=...)`` needs for the operators above.

    Where ranks meet there are operators that no runtime knows: the graph is cut there.
    """
    add, join = (onnxscript.values.Op(_MEETINGS, name, _schema(name)) for name in ("SumOfRanks", "JoinOfRanks"))
    return {
        torch.ops.specexport.tensor_scatter.default: _tensor_scatter_onnx,
        torch.ops.specexport.sum_of_ranks.default: lambda part: add(part),
        torch.ops.specexport.join_of_ranks.default: lambda part, ranks: join(part),
    }
