"""The graphs of a device's step besides its models: fill a tree, accept draft tokens, commit their path.

On a GPU every operator is a launch, and an operator over ``[B,N,V]`` moves tens of megabytes, so accept graphs have few
of either. They never sort, sum up or search a whole vocabulary at once: TensorRT's TopK is limited to 3840 elements,
and ONNX Runtime computes the TopK of a row in one block, and CumSum in quadratic time.

``contract/signature.py`` declares the inputs and outputs of the modules.
"""

from __future__ import annotations

import torch

from specexport.contract.engines import LARGEST_TOP_K
from specexport.graphs.ops import take_rows, tensor_scatter
from specexport.graphs.propose import place_of_rank

_LOWEST, _RANGE = -39.0, 40.0
"""Logits this far below the best are not told apart: together they have less than 1e-11 of the probability."""
_ROUNDS, _PARTS = 5, 8
"""Rounds of dividing the range of a threshold by parts, down to 40 / 8^5 = 0.0012, within which tokens are sorted."""
_CHUNK, _BLOCK = 4096, 512
_RESIDUAL_FLOOR = 1e-30
"""Weight of p added to its residual, so that the token is drawn from p if the residual is empty."""
_REJECTED = 2.0**20
"""Added to the level of a node for each rejected ancestor; greater than all depths."""


def _chunks(values: torch.Tensor, size: int, filler: float) -> torch.Tensor:
    """``[...,V]`` as ``[...,C,size]``, padded with ``filler``."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % size), value=filler)
    return padded.unflatten(-1, (padded.shape[-1] // size, size))  # type: ignore[no-untyped-call]


def _weight_above(scores: torch.Tensor, weights: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """The total weight of the scores at or above each of the thresholds ``[B,N,J]``."""
    above = scores[:, :, None] >= thresholds[..., None]
    return torch.where(above, weights[:, :, None], 0.0).sum(-1)


def _bracket(scores: torch.Tensor, weights: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds of the greatest threshold above which scores weigh at least ``target``, ``[B,N,1]`` each."""
    low, step = torch.full((1, 1, 1), _LOWEST), _RANGE
    for _ in range(_ROUNDS):
        step /= _PARTS
        pivots = low + torch.arange(1, _PARTS) * step
        enough = _weight_above(scores, weights, pivots) >= target
        low = low + torch.where(enough, step, 0.0).sum(-1, keepdim=True)
    return low, low + step


def _largest(values: torch.Tensor) -> torch.Tensor:
    """The largest values of ``[B,N,V]``, descending, ``[B,N,LARGEST_TOP_K]``; padded with minus infinity."""
    winners = _chunks(values, _CHUNK, float("-inf")).topk(LARGEST_TOP_K).values
    return winners.flatten(2).topk(LARGEST_TOP_K).values


def target_weights(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The unnormalized p after temperature, top-k, top-p and min-p.

    ``runtime.sampling.target_distribution`` is the NumPy version. All tokens tied at a threshold are kept. If the
    logits of more than ``LARGEST_TOP_K`` tokens are within 0.0012 of the threshold of top-p, all of these are kept.

    Args:
        logits: float32 ``[B,N,V]``.
        temperature: float32 ``[B]``, above 0.
        top_k: int64 ``[B]``, at most ``LARGEST_TOP_K``; 0 keeps all.
        top_p: float32 ``[B]``.
        min_p: float32 ``[B]``, relative to the most probable token.

    Returns:
        Weights, float32 ``[B,N,V]``; their sums ``[B,N,1]``; and the most probable tokens, int64 ``[B,N,1]``.
    """
    k, share = top_k[:, None, None], top_p[:, None, None]
    best = logits.argmax(-1, keepdim=True)
    scores = (logits - logits.gather(2, best)) / temperature[:, None, None]
    weights = scores.exp()
    low, high = _bracket(scores, weights, share * weights.sum(-1, keepdim=True))
    # With top-k, all remaining tokens are sorted; otherwise only those below the upper bound.
    top_k_set = k > 0
    below = torch.where(top_k_set, _RANGE, high)
    ordered = _largest(torch.where(scores < below, scores, float("-inf")))
    kth = torch.where(k == torch.arange(1, LARGEST_TOP_K + 1), ordered, 0.0).sum(-1, keepdim=True)
    kth = torch.where(top_k_set, kth, float("-inf"))
    total, above = _weight_above(scores, weights, torch.cat([kth, below], -1)).chunk(2, -1)
    short = above + ordered.exp().cumsum(-1) < share * total
    last = torch.where(short, 1, 0).sum(-1, keepdim=True)
    nucleus = torch.cat([ordered, torch.where(top_k_set, kth, low)], -1).gather(2, last)
    nucleus = torch.where(share < 1, nucleus, float("-inf"))
    lowest = torch.maximum(torch.maximum(nucleus, kth), min_p.log()[:, None, None])
    weights = torch.where(scores >= lowest, weights, 0.0)
    return weights, weights.sum(-1, keepdim=True), best


def _child_of(parents: torch.Tensor, most: int) -> torch.Tensor:
    """The children of every node in order, int64 ``[B,N,C]``, padded with 0, from parents ``[B,N]``."""
    nodes, place = torch.arange(parents.shape[1]), parents
    if most > 1:
        earlier = torch.where(nodes < nodes[:, None], 1, 0)
        rank = torch.where(parents[:, :, None] == parents[:, None, :], earlier, 0).sum(-1)
        place = parents * most + rank
    matches = place[:, None, :] == torch.arange(parents.shape[1] * most)[:, None]
    return torch.where(matches, 1.0, 0.0).argmax(-1).reshape(*parents.shape, most)


def _levels(stays: torch.Tensor, tree_mask: torch.Tensor) -> torch.Tensor:
    """Depth + 1 of the root and of nodes that stay with all their ancestors, else more than N: float32 ``[B,N]``."""
    weight = torch.where(stays, 1.0, torch.where(torch.arange(stays.shape[1]) == 0, 1.0, _REJECTED))
    return torch.where(tree_mask, weight[:, None, :], 0.0).sum(-1)


def _walk(levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of accepted draft tokens, int64 ``[B,1]``, and their path, int64 ``[B,N+1]``: root, nodes, then 0."""
    depth = torch.arange(1, levels.shape[1] + 2)
    # If a node has two children with the same token, both stay, and the first one counts.
    path = torch.where(levels[:, None, :] == depth[:, None], 1.0, 0.0).argmax(-1)
    return path.clamp(max=1).sum(-1, keepdim=True), path


def _draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draws the token at which the cumulative weight first exceeds the share ``uniform``; its weight is never 0.

    Weights are float32 ``[B,V]``, the noise is float32 ``[B,1]`` in [0,1), and tokens are int64 ``[B,1]``.
    """
    blocks = _chunks(weights, _BLOCK, 0.0)
    sums = blocks.sum(-1)
    through = sums.cumsum(-1)
    threshold = uniform * through[:, -1:]  # below the total even after rounding
    beyond = through > threshold
    block = torch.where(beyond, 1.0, 0.0).argmax(-1, keepdim=True)
    earlier = torch.where(beyond, 0.0, sums).sum(-1, keepdim=True)
    within = take_rows(blocks, block).squeeze(1).cumsum(-1)
    below = (within <= threshold - earlier) & (within < within[:, -1:])
    return block * _BLOCK + torch.where(below, 1, 0).sum(-1, keepdim=True)


def _outcome(
    draft_tokens: torch.Tensor, path: torch.Tensor, accepted: torch.Tensor, bonus: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The results of a step, given those of :func:`_walk` and the bonus token, int64 ``[B,1]``."""
    following = torch.cat([bonus, draft_tokens], 1).gather(1, path[:, 1:])
    depth = torch.arange(following.shape[1])
    return accepted.squeeze(1), torch.where(depth <= accepted, following, 0), path[:, :-1]


class GreedyModule(torch.nn.Module):
    """Greedy acceptance over token trees; ``runtime.sampling.accept_greedy`` is the NumPy version."""

    def forward(
        self, logits: torch.Tensor, parents: torch.Tensor, tree_mask: torch.Tensor, draft_tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Decides a step; a node that is its own parent never stays."""
        best, nodes = logits.argmax(-1), torch.arange(parents.shape[1])
        predicted = best.gather(1, parents.clamp(min=0))
        drafted = torch.cat([parents[:, :1], draft_tokens], 1)  # the root's entry is never used
        accepted, path = _walk(_levels((drafted == predicted) & (parents < nodes), tree_mask))
        path = path[:, :-1]
        return accepted.squeeze(1), torch.where(nodes <= accepted, best.gather(1, path), 0), path


class AcceptModule(torch.nn.Module):
    """Greedy and lossless acceptance over token trees by multi-round rejection (SpecInfer, arXiv 2305.09781).

    At each node the children are tried in order: a child x ~ q stays with probability min(1, p(x)/q(x)); otherwise p
    becomes the residual norm(max(0, p - q)) for the next child. If no child stays, the next token is drawn from the
    residual. All nodes are decided at once, and then the accepted path is followed from the root.
    ``runtime.sampling.accept_sampled`` is the NumPy version, with the same tokens for the same noise.

    Args:
        max_children: maximum number of children of a node in any tree; 1 for chains.
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
        """Decides a step of ``B`` slots over trees of ``N`` nodes, the root included.

        If M > 1, siblings have the same ids. The noise has a number for each draft token and a last one for the final
        draw. A top-k of 1 is greedy: p is then 1 at the first of the most probable tokens.
        """
        p, mass, best = target_weights(logits, temperature, top_k, top_p, min_p)
        greedy, nodes = (top_k == 1)[:, None, None], torch.arange(parents.shape[1])
        child = _child_of(parents, self.max_children)  # [B,N,C]
        has_child, row = child > 0, (child - 1).clamp(min=0).flatten(1)

        def of_child(of_row: torch.Tensor) -> torch.Tensor:
            return take_rows(of_row, row).reshape(*child.shape, *of_row.shape[2:])

        noise = of_child(uniform[:, :-1])
        q = torch.where(has_child[..., None], of_child(draft_probs), 0.0)  # [B,N,C,M]
        if draft_ids.shape[2] == 1:
            # All children were chosen, not drawn: q = 1. A rejection removes just the child's own token from p, and so
            # the residuals for all children follow at once.
            tokens = of_child(draft_ids.squeeze(2))
            tokens = torch.where(has_child, tokens, tokens[..., :1])
            of_x, earlier = p.gather(2, tokens), torch.ones(self.max_children, self.max_children).tril(-1) > 0
            again = (tokens[..., None] == tokens[..., None, :]) & earlier
            p_x = torch.where(torch.where(again, 1.0, 0.0).sum(-1) > 0, 0.0, of_x)
            mass, q_x = (mass - (p_x.cumsum(-1) - p_x)).clamp(min=0.0), q.squeeze(3)
            others, p_others, rest = tokens, of_x, torch.where(has_child[..., :1], 0.0, of_x)
        else:
            # Siblings have the same ids, so the residual is only tracked at the ids of the first child.
            tokens, others = of_child(draft_tokens), of_child(draft_ids)[:, :, 0]
            p_others = rest = p.gather(2, others)
            beside, each, masses = (mass - rest.sum(-1, keepdim=True)).clamp(min=0.0), [rest], [mass]
            for q_of_child in q.unbind(2):
                rest = (rest - masses[-1] * q_of_child).clamp(min=0.0)
                each.append(rest)
                masses.append(beside + rest.sum(-1, keepdim=True))
            is_x = tokens[..., None] == others[:, :, None]
            remaining, mass = torch.cat(each[:-1], -1).reshape(q.shape), torch.cat(masses[:-1], -1)
            p_x, q_x = (torch.where(is_x, of_id, 0.0).sum(-1) for of_id in (remaining, q))
        chance = torch.where(greedy, torch.where(tokens == best, mass, 0.0), p_x)
        # u < p/q without dividing: p >= q always accepts, p = 0 never does. Missing children come last, as 0.
        stays = noise * q_x * mass < chance
        first = torch.where(stays, 1.0, 0.0).argmax(-1, keepdim=True)
        chosen = torch.where(stays, child, 0).gather(2, first).squeeze(2)  # of each node: the child that stays, or 0
        stayed = chosen.gather(1, parents.clamp(min=0)) == nodes
        accepted, path = _walk(_levels(stayed, tree_mask))
        last = path.gather(1, accepted)
        # The residual after the last child is needed only at the node where the next token is drawn. If q covers p up
        # to rounding, the residual is empty and p itself is used: such a rejection has probability 0.
        at_last = (take_rows(of_node, last).squeeze(1) for of_node in (p, others, rest + _RESIDUAL_FLOOR * p_others))
        whole, others, rest = at_last
        after = whole.scatter(1, others, rest)
        drawn = torch.where(greedy.squeeze(2), best.squeeze(2).gather(1, last), _draw(after, uniform[:, -1:]))
        return _outcome(draft_tokens, path, accepted, drawn)


class TypicalModule(torch.nn.Module):
    """Typical acceptance over token trees; ``runtime.sampling.accept_typical`` is the NumPy version."""

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
        """Decides a step; the noise is for the bonus token."""
        p, mass, _ = target_weights(logits, temperature, top_k, top_p, min_p)
        mass = mass.squeeze(2)
        entropy = mass.log() - (p * p.clamp(min=1e-38).log()).sum(-1) / mass  # [B,N]
        limit = torch.minimum(posterior_threshold[:, None], posterior_alpha[:, None] * (-entropy).exp())
        above, nodes = parents.clamp(min=0), torch.arange(parents.shape[1])
        drafted = torch.cat([above[:, :1], draft_tokens], 1)  # the root's entry is never used
        chance = p.flatten(1).gather(1, above * p.shape[2] + drafted) / mass.gather(1, above)
        levels = _levels(chance > limit.gather(1, above), tree_mask)
        log_p = torch.where(nodes == 0, 0.0, chance.clamp(min=1e-38).log())
        total = torch.where(tree_mask, log_p[:, None, :], 0.0).sum(-1)
        depth = torch.where(levels < _REJECTED, levels, 0.0)
        deepest = depth.gather(1, depth.argmax(-1, keepdim=True))
        last = torch.where(depth == deepest, total, float("-inf")).argmax(-1, keepdim=True)
        on_path = take_rows(tree_mask, last).squeeze(1)
        accepted, path = _walk(torch.where(on_path, levels, _REJECTED))
        return _outcome(draft_tokens, path, accepted, _draw(take_rows(p, last).squeeze(1), uniform))


class FillModule(torch.nn.Module):
    """Fills a tree with tokens and their q, given drawn tokens and the candidates from which they were drawn.

    The child of rank 0 is the drawn token; its siblings are the most probable remaining candidates, which are chosen,
    not drawn (q = 1). ``runtime.proposal.drawn`` is the NumPy version.

    A draft's tensors are lists of one, with an axis for its tokens first; those of stages begin with the slots' axis.
    """

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.stages = stages

    def forward(
        self,
        draft_tokens: list[torch.Tensor],
        draft_ids: list[torch.Tensor],
        draft_probs: list[torch.Tensor],
        tree_rows: torch.Tensor,
        tree_ranks: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        drawn, ids, probs = map(self._by_slot, (draft_tokens, draft_ids, draft_probs))  # [B,R], [B,R,M], [B,R,M]
        of_node = tree_rows[..., None].expand(-1, -1, ids.shape[-1])
        ids, probs, drawn = ids.gather(1, of_node), probs.gather(1, of_node), drawn.gather(1, tree_rows)
        tokens = ids.gather(2, place_of_rank(ids, drawn, tree_ranks)[..., None])
        chosen = torch.where(ids == tokens, 1.0, 0.0)
        return tokens[..., 0], ids, torch.where((tree_ranks == 0)[..., None], probs, chosen)

    def _by_slot(self, drafted: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(drafted, 1) if self.stages else drafted[0].transpose(0, 1)


class CommitModule(torch.nn.Module):
    """Moves the rows of an accepted path to the end of the text, in all layers.

    A verify step wrote the rows of all nodes from ``past_length`` on. The rows of the path are moved to
    ``past_length + 0, 1, ...``; later rows are never seen, and the next step overwrites them.
    """

    def forward(
        self, past_length: torch.Tensor, path: torch.Tensor, past: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Returns the caches, which are bound to the memory of ``past``."""
        rows = past_length[:, None] + path
        moved = []
        for cache in past:
            index = rows[:, None, :, None].expand(-1, cache.shape[1], -1, cache.shape[3])
            moved.append(tensor_scatter(cache, cache.gather(2, index), past_length))
        return tuple(moved)
