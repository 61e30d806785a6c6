"""The accept graphs: which draft tokens of a verified tree stay, and the token after them, decided on the device.

On a GPU every operator is a launch, and each over ``[B,N,V]`` moves tens of megabytes: these graphs have few of both.
Nothing is sorted, summed up or searched over a whole vocabulary at once, since TensorRT's TopK stops at 3840 elements,
and ONNX Runtime gives a row's TopK to one block and takes quadratic time for a CumSum.
"""

from __future__ import annotations

import torch

from specexport.contract.engines import LARGEST_TOP_K

_LOWEST, _RANGE = -39.0, 40.0
"""Logits this far below the best are never told apart: together they hold less than 1e-11 of the probability."""
_ROUNDS, _PARTS = 5, 8
"""Narrow a threshold to 40 / 8^5 = 0.0012, within which tokens are sorted."""
_CHUNK, _BLOCK = 4096, 512
_FAR = 2.0**20
"""Added to the level of a node for each ancestor that does not stay: above all depths."""


def _chunks(values: torch.Tensor, size: int, filler: float) -> torch.Tensor:
    """``[...,V]`` as ``[...,C,size]``, filled up."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % size), value=filler)
    return padded.unflatten(-1, (padded.shape[-1] // size, size))


def _rows(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Of ``[B,R,...]`` the rows ``[B,I,...]`` that an index ``[B,I]`` names in the second axis."""
    flat = index + torch.arange(values.shape[0])[:, None] * values.shape[1]
    return values.flatten(0, 1).index_select(0, flat.flatten()).unflatten(0, index.shape)


def _weight_above(scores: torch.Tensor, weights: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """What those weigh that are not below each of some thresholds ``[B,N,J]``."""
    above = scores[:, :, None] >= thresholds[..., None]
    return torch.where(above, weights[:, :, None], 0.0).sum(-1)


def _bracket(scores: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds ``[B,N,1]`` of the greatest score such that those not below it weigh at least ``wanted`` ``[B,N,1]``."""
    low, step = torch.full_like(wanted, _LOWEST), _RANGE
    for _ in range(_ROUNDS):
        step /= _PARTS
        pivots = low + torch.arange(1, _PARTS) * step
        enough = _weight_above(scores, weights, pivots) >= wanted
        low = low + torch.where(enough, step, 0.0).sum(-1, keepdim=True)
    return low, low + step


def _largest(values: torch.Tensor) -> torch.Tensor:
    """The largest of ``[B,N,V]``, descending, ``[B,N,LARGEST_TOP_K]``; minus infinity where there are no more."""
    winners = _chunks(values, _CHUNK, float("-inf")).topk(LARGEST_TOP_K).values
    return winners.flatten(2).topk(LARGEST_TOP_K).values


def target_weights(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """P after temperature, top-k, top-p and min-p, times a weight of each row.

    ``runtime.sampling.target_distribution`` is its NumPy twin. Tokens tied at a threshold are kept together. So are
    those within 0.0012 of top-p's (their probability is off by that factor at most) where they are more than
    ``LARGEST_TOP_K``.

    Args:
        logits: float32 ``[B,N,V]``.
        temperature: float32 ``[B]``, above 0.
        top_k: int64 ``[B]``, at most ``LARGEST_TOP_K``; 0 keeps all.
        top_p: float32 ``[B]``.
        min_p: float32 ``[B]``, relative to the most probable token.

    Returns:
        Weights float32 ``[B,N,V]``, what each row weighs, ``[B,N,1]``, and the most probable tokens, int64 ``[B,N,1]``.
    """
    k, share = top_k[:, None, None], top_p[:, None, None]
    best = logits.argmax(-1, keepdim=True)
    scores = (logits - logits.gather(2, best)) / temperature[:, None, None]
    weights = scores.exp()
    low, high = _bracket(scores, weights, share * weights.sum(-1, keepdim=True))
    # The tokens that top-k leaves are sorted all; of a whole vocabulary those are that lie below the upper bound.
    few = k > 0
    below = torch.where(few, _RANGE, high)
    ordered = _largest(torch.where(scores < below, scores, float("-inf")))
    place = (k - 1).clamp(min=0).expand(-1, logits.shape[1], -1)
    kth = torch.where(few, ordered.gather(2, place), float("-inf"))
    total, before = _weight_above(scores, weights, torch.cat([kth, below], -1)).split(1, -1)
    short = before + ordered.exp().cumsum(-1) < share * total
    last = torch.where(short, 1.0, 0.0).sum(-1, keepdim=True).long()
    nucleus = torch.cat([ordered, torch.where(few, kth, low)], -1).gather(2, last)
    nucleus = torch.where(share < 1, nucleus, float("-inf"))
    lowest = torch.maximum(torch.maximum(nucleus, kth), min_p.log()[:, None, None])
    weights = torch.where(scores >= lowest, weights, 0.0)
    return weights, weights.sum(-1, keepdim=True), best


def _child_of(parents: torch.Tensor, most: int) -> torch.Tensor:
    """The children of every node in order, int64 ``[B,N,C]``; 0 where it has fewer. Parents are int64 ``[B,N]``."""
    nodes, place = torch.arange(parents.shape[1]), parents
    if most > 1:
        earlier = torch.where(nodes < nodes[:, None], 1.0, 0.0)
        rank = torch.where(parents[:, :, None] == parents[:, None, :], earlier, 0.0).sum(-1)
        place = parents * most + rank.long()
    matches = place[:, None, :] == torch.arange(parents.shape[1] * most)[:, None]
    return torch.where(matches, 1.0, 0.0).argmax(-1).unflatten(1, (parents.shape[1], most))


def _levels(stays: torch.Tensor, tree_mask: torch.Tensor) -> torch.Tensor:
    """Depth + 1 of the nodes that stay with all their ancestors, float32 ``[B,N]``; of others above N."""
    weight = torch.where(stays, 1.0, _FAR)
    return torch.where(tree_mask, weight[:, None, :], 0.0).sum(-1)


def _walk(levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many draft tokens were accepted, int64 ``[B,1]``, and the nodes, int64 ``[B,N]``: the root, those, then 0."""
    depth = torch.arange(1, levels.shape[1] + 1)
    there = torch.where(levels[:, None, :] == depth[:, None], 1.0, 0.0)  # [B, depth, node]
    # The same token twice below a node would stay twice: the first one counts.
    path = there.argmax(-1)
    return torch.where(path > 0, 1.0, 0.0).sum(-1, keepdim=True).long(), path


def _draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative weight first exceeds ``uniform`` of all; never one that weighs nothing.

    Args:
        weights: float32 ``[B,V]``.
        uniform: float32 ``[B,1]`` noise in [0,1).

    Returns:
        int64 ``[B,1]``.
    """
    blocks = _chunks(weights, _BLOCK, 0.0)
    sums = blocks.sum(-1)
    through = sums.cumsum(-1)
    # Less than all there is, whatever is rounded: the last block that weighs something ends above it.
    wanted = uniform.clamp(max=1 - 2.0**-22) * through[:, -1:]
    block = torch.where(through > wanted, 1.0, 0.0).argmax(-1, keepdim=True)
    before = torch.where(through > wanted, 0.0, sums).sum(-1, keepdim=True)
    within = _rows(blocks, block)[:, 0].cumsum(-1)
    first = (within <= wanted - before) & (within < within[:, -1:])
    return block * _BLOCK + torch.where(first, 1.0, 0.0).sum(-1, keepdim=True).long()


def _tokens(
    draft_tokens: torch.Tensor, path: torch.Tensor, accepted: torch.Tensor, bonus: torch.Tensor
) -> torch.Tensor:
    """Accepted tokens, then the bonus token, then 0, int64 ``[B,N]``."""
    depth = torch.arange(path.shape[1])
    drafted = draft_tokens.gather(1, (path[:, 1:] - 1).clamp(min=0))
    drafted = torch.cat([drafted, torch.zeros_like(bonus)], 1)
    return torch.where(depth < accepted, drafted, torch.where(depth == accepted, bonus, 0))


class GreedyModule(torch.nn.Module):
    """Greedy acceptance over token trees; ``runtime.sampling.accept_greedy`` is the NumPy twin."""

    def forward(
        self, logits: torch.Tensor, parents: torch.Tensor, tree_mask: torch.Tensor, draft_tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As :meth:`AcceptModule.forward`. A node that is its own parent never stays."""
        best, nodes = logits.argmax(-1), torch.arange(parents.shape[1])
        said = best.gather(1, parents.clamp(min=0))
        drafted = torch.cat([parents[:, :1], draft_tokens], 1)  # the root's is never looked at
        stays = (nodes == 0) | ((drafted == said) & (parents < nodes))
        accepted, path = _walk(_levels(stays, tree_mask))
        return accepted[:, 0], torch.where(nodes <= accepted, best.gather(1, path), 0), path


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
            temperature: see :func:`target_weights`, as are the others.
            top_k: see there; 1 is greedy: p is 1 at the first of the most probable tokens.
            top_p: see there.
            min_p: see there.

        Returns:
            Draft tokens accepted, int64 ``[B]``; accepted tokens, then the bonus token, then 0, int64 ``[B,N]``; the
            nodes they come from, int64 ``[B,N]``: the root, then the accepted nodes, then 0.
        """
        p, mass, best = target_weights(logits, temperature, top_k, top_p, min_p)
        greedy = (top_k == 1)[:, None, None]
        child = _child_of(parents, self.max_children)  # [B,N,C]
        has_child, row = child > 0, (child - 1).clamp(min=0).flatten(1)
        # u * q(x) of every draft token
        needed = uniform[:, :-1] * torch.where(draft_ids == draft_tokens[..., None], draft_probs, 0.0).sum(-1)
        ids = _rows(draft_ids, row).unflatten(1, child.shape[1:])
        q = torch.where(has_child[..., None], _rows(draft_probs, row).unflatten(1, child.shape[1:]), 0.0)
        tokens, needed = (_rows(of_row, row).unflatten(1, child.shape[1:]) for of_row in (draft_tokens, needed))
        left, p_x, masses = p, [], [mass]
        for turn, (token, others, of_others) in enumerate(
            zip(tokens.split(1, -1), ids.unbind(2), q.unbind(2), strict=True)
        ):
            p_x.append(left.gather(2, token))
            if turn + 1 < self.max_children:  # what the last child would leave is only needed where it is drawn from
                left = left.scatter(2, others, (left.gather(2, others) - masses[-1] * of_others).clamp(min=0.0))
                masses.append(left.sum(-1, keepdim=True))
        mass = torch.cat(masses, -1)
        chance = torch.where(greedy, torch.where(tokens == best, mass, 0.0), torch.cat(p_x, -1))
        # u < p/q without dividing: p >= q always accepts, p = 0 never does.
        stays = torch.where(has_child & (needed * mass < chance), child, 0)
        first = torch.where(stays > 0, 1.0, 0.0).argmax(-1, keepdim=True)
        chosen = stays.gather(2, first)[..., 0]  # of each node: the child that stays, 0 for none
        nodes = torch.arange(parents.shape[1])
        stayed = (nodes == 0) | (chosen.gather(1, parents.clamp(min=0)) == nodes)
        accepted, path = _walk(_levels(stayed, tree_mask))
        last = path.gather(1, accepted)
        whole, rest = (_rows(of_node, last)[:, 0] for of_node in (p, left))
        others, of_others, mass = (_rows(of_node, last)[:, 0] for of_node in (ids[:, :, -1], q[:, :, -1], masses[-1]))
        rest = rest.scatter(1, others, (rest.gather(1, others) - mass * of_others).clamp(min=0.0))
        # Where q covers p up to rounding nothing is left, and p itself is drawn from: a rejection has probability 0.
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, whole)
        bonus = torch.where(greedy[:, 0], best[..., 0].gather(1, last), _draw(rest, uniform[:, -1:]))
        return accepted[:, 0], _tokens(draft_tokens, path, accepted, bonus), path


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
        p, mass, _ = target_weights(logits, temperature, top_k, top_p, min_p)
        mass = mass[..., 0]
        entropy = mass.log() - (p * p.clamp(min=1e-38).log()).sum(-1) / mass  # [B,N]
        limit = torch.minimum(posterior_threshold[:, None], posterior_alpha[:, None] * (-entropy).exp())
        above, nodes = parents.clamp(min=0), torch.arange(parents.shape[1])
        drafted = torch.cat([above[:, :1], draft_tokens], 1)  # the root's is never looked at
        chance = p.flatten(1).gather(1, above * p.shape[2] + drafted) / mass.gather(1, above)
        levels = _levels((nodes == 0) | (chance > limit.gather(1, above)), tree_mask)
        log_p = torch.where(nodes == 0, 0.0, chance.clamp(min=1e-38).log())
        total = torch.where(tree_mask, log_p[:, None, :], 0.0).sum(-1)
        depth = torch.where(levels < _FAR, levels, 0.0)
        deepest = depth.gather(1, depth.argmax(-1, keepdim=True))
        last = torch.where(depth == deepest, total, float("-inf")).argmax(-1, keepdim=True)
        on_path = _rows(tree_mask, last)[:, 0]
        accepted, path = _walk(torch.where(on_path, levels, _FAR))
        bonus = _draw(_rows(p, last)[:, 0], uniform)
        return accepted[:, 0], _tokens(draft_tokens, path, accepted, bonus), path
