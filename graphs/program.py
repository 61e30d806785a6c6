"""What a step does on the device besides its models and acceptance: fill a draft's tree, commit the accepted path."""

from __future__ import annotations

import torch

from specexport.graphs.ops import tensor_scatter
from specexport.graphs.propose import place_of_rank


class FillModule(torch.nn.Module):
    """The tokens of a draft model's tree, and q of each.

    The drawn chain is the tree's spine (rank 0); beside each of its tokens are the most probable others, which are
    chosen, not drawn (q = 1). ``runtime.proposal.drawn`` does the same in NumPy.
    """

    def forward(
        self,
        draft_tokens: torch.Tensor,
        draft_ids: torch.Tensor,
        draft_probs: torch.Tensor,
        tree_depths: torch.Tensor,
        tree_ranks: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Fills the nodes of a tree but the root.

        Args:
            draft_tokens: int64 ``[K,B]``, the drawn chain, as the propose graph gives it.
            draft_ids: int64 ``[K,B,M]``, the tokens q gives probability to, most probable first.
            draft_probs: float32 ``[K,B,M]``, q of them.
            tree_depths: int64 ``[B,N-1]``, at most K; the root's children have 1.
            tree_ranks: int64 ``[B,N-1]``, each among its siblings.

        Returns:
            Tokens int64 ``[B,N-1]``, and ids int64 and q float32 ``[B,N-1,M]`` as the accept graph takes them.
        """
        row = tree_depths - 1
        of_node = row[..., None].expand(-1, -1, draft_ids.shape[-1])
        ids = draft_ids.transpose(0, 1).gather(1, of_node)
        probs = draft_probs.transpose(0, 1).gather(1, of_node)
        drawn = draft_tokens.transpose(0, 1).gather(1, row)
        index = place_of_rank(ids, drawn, tree_ranks)
        tokens = ids.gather(2, index[..., None])
        chosen = torch.where(ids == tokens, 1.0, 0.0)
        return tokens[..., 0], ids, torch.where((tree_ranks == 0)[..., None], probs, chosen)


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
