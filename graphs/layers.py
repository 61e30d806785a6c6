"""A model cut off after its first layers: the final norm and the head then read what those made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch


def keep_first_layers(model: Any, count: int) -> Callable[[], None]:
    """Leaves out all but the first decoder layers of a transformers causal LM, in place.

    Returns:
        What puts the others back.

    Raises:
        ValueError: the model has no more layers than that, or keeps them in no list, or in several.
    """
    total = model.config.get_text_config().num_hidden_layers
    if not 1 <= count < total:
        raise ValueError(f"it has {total} layers; expected 1 to {total - 1} of them")
    lists = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, torch.nn.ModuleList) and len(child) == total
    ]
    if len(lists) != 1:
        raise ValueError(f"it has {len(lists)} lists of {total} layers; expected one")
    ((parent, name, layers),) = lists
    setattr(parent, name, layers[:count])
    return partial(setattr, parent, name, layers)


@contextlib.contextmanager
def first_layers(model: Any, count: int) -> Iterator[None]:
    """As :func:`keep_first_layers`, while the block runs."""
    put_back = keep_first_layers(model, count)
    try:
        yield
    finally:
        put_back()
