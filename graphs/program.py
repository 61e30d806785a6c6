"""Graphs of a step on the device besides its models and acceptance: fill a tree, commit the accepted path."""

from __future__ import annotations

import torch

from specexport.graphs.ops import tensor_scatter
from specexport.graphs.propose import place_of_rank


class FillModule(torch.nn.Module):
    """The tokens of a tree, and q of each, from drawn tokens and the candidates they were drawn from.

    Of the children of a node the one of rank 0 is the drawn token; the others are the most probable beside it, which
    are chosen, not drawn (q = 1). ``runtime.proposal.drawn`` does the same in NumPy.
    """

    def forward(
        self,
        draft_tokens: torch.Tensor,
        draft_ids: torch.Tensor,
        draft_probs: torch.Tensor,
        tree_rows: torch.Tensor,
        tree_ranks: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Fills the nodes of a tree but the root.

        Args:
            draft_tokens: int64 ``[K,B]``, drawn, as the propose graph gives them.
            draft_ids: int64 ``[K,B,M]``, the tokens q gives probability to, most probable first.
            draft_probs: float32 ``[K,B,M]``, q of them.
            tree_rows: int64 ``[B,N-1]``, which of the K rows is each node's.
            tree_ranks: int64 ``[B,N-1]``, each among its siblings.

        Returns:
            Tokens int64 ``[B,N-1]``, and ids int64 and q float32 ``[B,N-1,M]`` as the accept graph takes them.
        """
        drafted = (draft_tokens.transpose(0, 1), draft_ids.transpose(0, 1), draft_probs.transpose(0, 1))
        return _filled(*drafted, tree_rows, tree_ranks)


class StagesFillModule(torch.nn.Module):
    """The same from several stages with tensors of their own: one row in the first, T in each other."""

    def forward(
        self,
        draft_tokens: list[torch.Tensor],
        draft_ids: list[torch.Tensor],
        draft_probs: list[torch.Tensor],
        tree_rows: torch.Tensor,
        tree_ranks: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :class:`FillModule`; a stage's tensors are ``[B,T]``, and ``[B,T,M]`` of q."""
        drafted = (torch.cat(draft_tokens, 1), torch.cat(draft_ids, 1), torch.cat(draft_probs, 1))
        return _filled(*drafted, tree_rows, tree_ranks)


def _filled(
    drawn: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, rows: torch.Tensor, ranks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :class:`FillModule`; drafted tokens are ``[B,R]``, candidates and q ``[B,R,M]``."""
    of_node = rows[..., None].expand(-1, -1, ids.shape[-1])
    ids, probs, drawn = ids.gather(1, of_node), probs.gather(1, of_node), drawn.gather(1, rows)
    tokens = ids.gather(2, place_of_rank(ids, drawn, ranks)[..., None])
    chosen = torch.where(ids == tokens, 1.0, 0.0)
    return tokens[..., 0], ids, torch.where((ranks == 0)[..., None], probs, chosen)


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
