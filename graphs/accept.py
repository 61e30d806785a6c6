"""The accept graph: which draft tokens of a verified tree stay, and the token after them, decided on the device."""

from __future__ import annotations

import torch

_LOWEST = -40.0
"""Logits this far below the best are never told apart: together they hold less than 1e-17 of the probability each."""
_HALVINGS = 32
"""Narrows a threshold to 40 / 2^32, far less than what float32 logits resolve."""


def _threshold(scores: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The greatest of ``scores`` such that those not below it weigh at least ``wanted``, by halving an interval.

    Sorting a vocabulary would be the obvious way, but TensorRT's TopK stops at 3840 elements. Scores ``[B,N,V]`` are at
    most 0, ``wanted`` is ``[B,N]``; the result ``[B,N,1]`` is minus infinity where even all of them weigh too little.
    """
    # The bounds have no last axis of one: with it TensorRT-RTX 1.7 did not finish compiling the graph in minutes.
    low = torch.full_like(wanted, _LOWEST)
    high = torch.full_like(wanted, 1.0)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = torch.where(scores >= middle[..., None], weights, 0.0).sum(-1) >= wanted
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    enough = torch.where(scores >= low[..., None], weights, 0.0).sum(-1) >= wanted
    at = torch.where(scores < high[..., None], scores, float("-inf")).amax(-1)
    return torch.where(enough, at, float("-inf"))[..., None]


def target_distribution(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """P after temperature, top-k, top-p and min-p; tokens tied at a threshold are kept together.

    ``runtime.sampling.target_distribution`` is its NumPy twin.

    Args:
        logits: float32 ``[B,N,V]``.
        temperature: float32 ``[B]``, above 0.
        top_k: int64 ``[B]``; 0 keeps all, 1 is greedy: p is then 1 at the first of the most probable tokens.
        top_p: float32 ``[B]``.
        min_p: float32 ``[B]``, relative to the most probable token.

    Returns:
        float32 ``[B,N,V]``; rows sum to 1.
    """
    scores = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None, None]
    ones = torch.ones_like(scores)
    k = top_k[:, None].expand(-1, logits.shape[1])
    in_top_k = (scores >= _threshold(scores, ones, k.to(scores.dtype))) | (k == 0)[..., None]
    weights = torch.where(in_top_k, scores.exp(), 0.0)
    share = top_p[:, None] * weights.sum(-1)
    in_nucleus = (scores >= _threshold(scores, weights, share)) | (top_p >= 1.0)[:, None, None]
    weights = torch.where(in_nucleus & (scores.exp() >= min_p[:, None, None]), weights, 0.0)
    p = weights / weights.sum(-1, keepdim=True)
    tokens = torch.arange(logits.shape[-1])
    best = (tokens == logits.argmax(-1, keepdim=True)).to(p.dtype)
    return torch.where((top_k == 1)[:, None, None], best, p)


class AcceptModule(torch.nn.Module):
    """Greedy and lossless acceptance over token trees by multi-round rejection (SpecInfer, arXiv 2305.09781).

    At each node the children are tried in order; a child x ~ q stays with probability min(1, p(x)/q(x)), else p becomes
    norm(max(0, p - q)) for the next. Where no child stays, the next token is drawn from what is left of p. All nodes
    are decided at once, and the walk from the root is read off afterwards. ``runtime.sampling.accept_sampled`` is the
    NumPy twin: same noise, same tokens.

    Args:
        max_children: most children a node of any tree has; 1 for chains.
    """

    def __init__(self, max_children: int) -> None:
        super().__init__()
        self.max_children = max_children

    def forward(
        self,
        logits: torch.Tensor,
        parents: torch.Tensor,
        tree_mask: torch.Tensor,
        draft_tokens: torch.Tensor,
        draft_ids: torch.Tensor,
        draft_probs: torch.Tensor,
        uniform: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Decides one step of ``B`` slots over trees of ``N`` nodes, the root included.

        Args:
            logits: float32 ``[B,N,V]``, the target's at every node.
            parents: int64 ``[B,N]``; -1 for the root.
            tree_mask: bool ``[B,N,N]``, ancestors and itself.
            draft_tokens: int64 ``[B,N-1]``, those of nodes 1 to N-1.
            draft_ids: int64 ``[B,N-1,M]``, the tokens each was drawn from; all different within a row.
            draft_probs: float32 ``[B,N-1,M]``, their q; a token chosen without drawing has q = 1.
            uniform: float32 ``[B,N]`` noise in [0,1): one number a draft token, the last for the final draw.
            temperature: see :func:`target_distribution`, as are the others.
            top_k: see there.
            top_p: see there.
            min_p: see there.

        Returns:
            Draft tokens accepted, int64 ``[B]``; accepted tokens, then the bonus token, then 0, int64 ``[B,N]``; the
            nodes they come from, int64 ``[B,N]``: the root, then the accepted nodes, then 0.
        """
        left = target_distribution(logits, temperature, top_k, top_p, min_p)  # [B,N,V]: what each node may still say
        nodes = torch.arange(logits.shape[1])
        siblings = parents[:, :, None] == parents[:, None, :]
        rank = (siblings & (nodes[None, :] < nodes[:, None])).sum(-1)  # [B,N], among its siblings
        chosen = torch.zeros_like(parents)  # of each node: the child that stays, 0 for none
        for turn in range(self.max_children):
            is_child = (parents[:, None, :] == nodes[None, :, None]) & (rank[:, None, :] == turn)  # [B, parent, child]
            has_child = is_child.any(-1) & (chosen == 0)
            child = (is_child * nodes).sum(-1)  # [B,N]
            row = (child - 1).clamp(min=0)
            ids = draft_ids.gather(1, row[..., None].expand(-1, -1, draft_ids.shape[-1]))
            q = draft_probs.gather(1, row[..., None].expand(-1, -1, draft_probs.shape[-1]))
            token = draft_tokens.gather(1, row)[..., None]
            q_x = torch.where(ids == token, q, 0.0).sum(-1)
            p_x = left.gather(2, token)[..., 0]
            # u < p/q without dividing: p >= q always accepts, p = 0 never does.
            stays = has_child & (uniform.gather(1, row) * q_x < p_x)
            chosen = torch.where(stays, child, chosen)
            rest = left.scatter(2, ids, (left.gather(2, ids) - q).clamp(min=0.0))
            total = rest.sum(-1)
            rejected = has_child & ~stays & (total > 0)
            left = torch.where(rejected[..., None], rest / total.clamp(min=1e-30)[..., None], left)
        stayed = (parents < 0) | (chosen.gather(1, parents.clamp(min=0)) == nodes)
        on_path = (stayed[:, None, :] | ~tree_mask).all(-1)  # [B,N]: so did every ancestor
        return _outcome(on_path, tree_mask, left, draft_tokens, uniform[:, -1:])


class TypicalModule(torch.nn.Module):
    """Typical acceptance over token trees; ``runtime.sampling.accept_typical`` is the NumPy twin."""

    def forward(
        self,
        logits: torch.Tensor,
        parents: torch.Tensor,
        tree_mask: torch.Tensor,
        draft_tokens: torch.Tensor,
        uniform: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        posterior_threshold: torch.Tensor,
        posterior_alpha: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As :meth:`AcceptModule.forward`, but for ``uniform [B,1]`` and float32 ``[B]`` epsilon and alpha."""
        p = target_distribution(logits, temperature, top_k, top_p, min_p)
        entropy = -torch.where(p > 0, p * p.clamp(min=1e-38).log(), 0.0).sum(-1)  # [B,N]
        limit = torch.minimum(posterior_threshold[:, None], posterior_alpha[:, None] * (-entropy).exp())
        above = parents[:, 1:]
        chance = p.gather(1, above[..., None].expand(-1, -1, p.shape[-1])).gather(2, draft_tokens[..., None])[..., 0]
        root = torch.ones_like(chance[:, :1])
        likely = torch.cat([root, torch.where(chance > limit.gather(1, above), 1.0, 0.0)], 1) > 0
        log_p = torch.cat([root.log(), chance.clamp(min=1e-38).log()], 1)
        stayed = (likely[:, None, :] | ~tree_mask).all(-1)
        depth = tree_mask.sum(-1)
        deepest = torch.where(stayed, depth, 0).amax(-1, keepdim=True)
        total = torch.where(tree_mask, log_p[:, None, :], 0.0).sum(-1)
        last = torch.where(stayed & (depth == deepest), total, float("-inf")).argmax(-1)
        on_path = tree_mask.gather(1, last[:, None, None].expand(-1, -1, tree_mask.shape[-1]))[:, 0]
        return _outcome(on_path, tree_mask, p, draft_tokens, uniform)


def _outcome(
    on_path: torch.Tensor, tree_mask: torch.Tensor, p: torch.Tensor, draft_tokens: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a step returns, from the nodes that stay ``[B,N]``, p at every node, and ``[B,1]`` noise for the last."""
    nodes = torch.arange(on_path.shape[1])
    depth = tree_mask.sum(-1) - 1
    accepted = on_path.sum(-1) - 1
    at_depth = on_path[:, None, :] & (depth[:, None, :] == nodes[None, :, None])  # [B, depth, node]
    path = (at_depth * nodes).sum(-1)
    last = path.gather(1, accepted[:, None])
    p = p.gather(1, last[..., None].expand(-1, -1, p.shape[-1]))[:, 0]
    cumulative = p.cumsum(-1)
    below = (cumulative <= uniform * cumulative[:, -1:]).sum(-1)
    final = torch.where(p > 0, torch.arange(p.shape[-1]), 0).amax(-1)
    bonus = torch.minimum(below, final)
    drafted = draft_tokens.gather(1, (path[:, 1:] - 1).clamp(min=0))
    tokens = torch.cat([drafted, torch.zeros_like(bonus)[:, None]], 1)
    tokens = torch.where(nodes < accepted[:, None], tokens, 0)
    return accepted, torch.where(nodes == accepted[:, None], bonus[:, None], tokens), path
