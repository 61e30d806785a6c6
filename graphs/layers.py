"""Access to the layers of a model: records states between layers and before the head, and removes layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch


def _decoder_layers(model: Any) -> tuple[torch.nn.Module, str, torch.nn.ModuleList]:
    """The module that holds a model's decoder layers, the name of their list there, and the list.

    Raises:
        ValueError: the model has no such list, or several.
    """
    total = model.config.num_hidden_layers
    lists = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, torch.nn.ModuleList) and len(child) == total
    ]
    if len(lists) != 1:
        raise ValueError(f"it has {len(lists)} lists of {total} layers; expected one")
    return lists[0]


@contextlib.contextmanager
def recorded_states(model: Any, layers: Iterable[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Context in which a transformers causal LM records its residual stream, ``[B,T,H]``, after so many ``layers``.

    0 records the input of the first layer.
    """
    recorded: dict[int, torch.Tensor] = {}
    counts = sorted(set(layers))
    stack = _decoder_layers(model)[2] if counts else torch.nn.ModuleList()
    if counts and not 0 <= counts[0] <= counts[-1] <= len(stack):
        raise ValueError(f"it has {len(stack)} layers; expected the states after 0 to {len(stack)} of them")

    def record_input(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorded[0] = args[0] if args else kwargs["hidden_states"]

    def record_output(count: int, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        recorded[count] = output[0] if isinstance(output, tuple) else output

    with contextlib.ExitStack() as hooks:
        for count in counts:
            hooks.enter_context(
                stack[count - 1].register_forward_hook(partial(record_output, count))
                if count
                else stack[0].register_forward_pre_hook(record_input, with_kwargs=True)
            )
        yield recorded


def hidden_and_logits(
    model: Any, ids: torch.Tensor, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a transformers causal LM, and computes logits, most of the cost, only at selected positions.

    Args:
        ids: int64 ``[B,L]``.
        rows: mask of the M positions whose logits to return, bool ``[B,L]``; none by default.

    Returns:
        Hidden states after the final norm, ``[B,L,H]``, and logits, ``[M,V]``.
    """
    hidden: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden.append(args[0])
        # At least one row, as some models do not accept an empty selection.
        return (args[0][:1, :1] if rows is None else args[0][rows][None], *args[1:])

    with model.get_output_embeddings().register_forward_pre_hook(keep):
        logits = model(input_ids=ids, use_cache=False).logits
    return hidden[0], logits[0] if rows is not None else logits[:0, 0]


def keep_first_layers(model: Any, count: int) -> Callable[[], None]:
    """Removes all but the first decoder layers of a transformers causal LM; returns a function that puts them back.

    Raises:
        ValueError: the model has too few layers, or does not have a single list of them.
    """
    total = model.config.num_hidden_layers
    if not 1 <= count < total:
        raise ValueError(f"it has {total} layers; expected 1 to {total - 1} of them")
    parent, name, layers = _decoder_layers(model)
    setattr(parent, name, layers[:count])
    return partial(setattr, parent, name, layers)


@contextlib.contextmanager
def first_layers(model: Any, count: int) -> Iterator[None]:
    """Context of :func:`keep_first_layers`."""
    put_back = keep_first_layers(model, count)
    try:
        yield
    finally:
        put_back()
