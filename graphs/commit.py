"""The commit graph: an accepted path through a tree is made contiguous in the cache, on the device."""

from __future__ import annotations

import torch

from specexport.graphs.ops import tensor_scatter


class CommitModule(torch.nn.Module):
    """Moves the rows of an accepted path to where the text ends, in all layers.

    A verify step wrote the rows of a tree's nodes at ``past_length`` and after. Those of the path are moved to
    ``past_length + 0, 1, ...``; rows behind them are never seen, and the next step writes over them.
    """

    def forward(
        self, past_length: torch.Tensor, path: torch.Tensor, past: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Returns the caches, to be bound to the memory of ``past``.

        Args:
            past_length: int64 ``[B]``, the step's.
            path: int64 ``[B,N]``, the accept graph's: the root, the accepted nodes in order, then 0.
            past: each layer's key and value cache ``[B,Hkv,S,D]``.
        """
        rows = past_length[:, None] + path
        moved = []
        for cache in past:
            index = rows[:, None, :, None].expand(-1, cache.shape[1], -1, cache.shape[3])
            moved.append(tensor_scatter(cache, cache.gather(2, index), past_length))
        return tuple(moved)
