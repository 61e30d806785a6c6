"""Caches and other inputs by name, for code that calls a session itself instead of using the runtime's buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from specexport.contract import tensors
from specexport.contract.model import CacheLayer, Model

Array = npt.NDArray[Any]
Caches = dict[str, Array]
"""float32 ``[1,Hkv,S,D]`` by input name."""


def new_caches(layers: tuple[CacheLayer, ...], rows: int, fill: float) -> Caches:
    """Caches of ``rows`` rows for one slot, filled with a number."""
    return {
        name: np.full((1, layer.heads, rows, size), fill, np.float32)
        for index, layer in enumerate(layers)
        for name, size in ((tensors.past_key(index), layer.key_size), (tensors.past_value(index), layer.value_size))
    }


def no_embeddings(model: Model, tokens: int) -> dict[str, Array]:
    """What a step graph that may read embeddings is given besides, where ``tokens`` token ids are read."""
    if model.embedding_size is None:
        return {}
    return {
        tensors.INPUTS_EMBEDS: np.zeros((1, tokens, model.embedding_size), np.float32),
        tensors.EMBEDS_MASK: np.zeros((1, tokens), np.bool_),
    }


def after_call(caches: Caches, outputs: Mapping[str, Array], past: int) -> Caches:
    """The caches after a call at ``past`` rows whose tokens are all kept.

    The graph's outputs hold whole caches, or new rows ``[1,Hkv,F,D]`` where it was lowered portably.
    """
    after = {}
    for name, cache in caches.items():
        whole = outputs.get(name.replace("past_", "present_", 1))
        if whole is None:
            rows = outputs[name.replace("past_", "new_", 1)]
            whole = cache.copy()
            whole[:, :, past : past + rows.shape[2]] = rows
        after[name] = whole
    return after
