"""The most probable tokens of a large vocabulary."""

from __future__ import annotations

import torch

MAX_TOP_K = 10
"""Ranks a head's candidates have; published trees go no further."""
_LARGE = 1 << 14
"""Of smaller vocabularies the plain TopK is faster."""
_BLOCKS = range(128, 15, -1)


def most_probable(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest logits and their tokens, as ``torch.topk``: sorted, ties by lower id.

    A large vocabulary is divided into blocks, and only the ``count`` of them with the greatest maxima are searched: no
    other can hold one of the ``count`` greatest. For a GPU, TopK over a row is the work of one of its processors; the
    maxima are found by all. On a CPU they are found by vector instructions.

    Args:
        logits: float32 ``[..., V]``.
        count: at most V.

    Returns:
        float32 and int64 ``[..., count]``.
    """
    vocab = logits.shape[-1]
    size = next((size for size in _BLOCKS if vocab % size == 0), vocab)
    if vocab < _LARGE or vocab // size < count:
        best, ids = torch.topk(logits, count, dim=-1)
        return best, ids
    blocks = logits.reshape(*logits.shape[:-1], vocab // size, size)
    chosen = torch.topk(blocks.amax(-1), count, dim=-1).indices
    # In the order of the vocabulary again, which decides between equal logits.
    chosen = torch.topk(chosen, count, dim=-1, largest=False).values[..., None]
    gathered = blocks.gather(-2, chosen.expand(*chosen.shape[:-1], size))
    best, place = torch.topk(gathered.flatten(-2), count, dim=-1)
    ids = chosen * size + torch.arange(size)
    return best, ids.flatten(-2).gather(-1, place)
