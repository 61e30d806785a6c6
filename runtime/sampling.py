"""Speculative sampling on the host: what p is, and which draft tokens are accepted.

Notation is that of Leviathan et al. 2023 and Chen et al. 2023: p is the target's distribution and q the draft's, both
after temperature, top-k, top-p and min-p; K is the number of draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specexport.contract.tree import TokenTree
from specexport.runtime.params import SamplingParams

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Distributions:
    """q of each draft token of one slot, by its most probable tokens.

    Attributes:
        ids: int64 ``[K,M]``; all different within a row.
        probs: float32 ``[K,M]``; each row sums to 1.
    """

    ids: Ints
    probs: Floats


def target_distribution(logits: Floats, params: SamplingParams) -> Doubles:
    """p: float64 ``[V]`` from float32 logits ``[V]``; tokens tied at a threshold are kept together."""
    if params.greedy:
        p = np.zeros(logits.shape[0])
        p[int(logits.argmax())] = 1.0
        return p
    scaled = logits.astype(np.float64) / params.temperature
    if 0 < params.top_k < scaled.shape[0]:
        threshold = np.partition(scaled, -params.top_k)[-params.top_k]
        scaled = np.where(scaled >= threshold, scaled, -np.inf)
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    if params.top_p < 1.0:
        p = np.where(p >= _nucleus_threshold(p, params.top_p), p, 0.0)
        p /= p.sum()
    if params.min_p > 0.0:
        p = np.where(p >= params.min_p * p.max(), p, 0.0)
        p /= p.sum()
    return np.asarray(p)


def _nucleus_threshold(p: Doubles, top_p: float) -> float:
    """The probability of the least probable token in the smallest set of most probable ones that holds ``top_p``."""
    for size in (256, p.shape[0]):
        # A nucleus is small as a rule: the largest few are set apart first, and all are sorted only if they don't do.
        largest = np.partition(p, -size)[-size:] if size < p.shape[0] else p
        ordered = np.sort(largest)[::-1]
        cumulative = np.cumsum(ordered)
        if size >= p.shape[0] or cumulative[-1] >= top_p:
            break
    return float(ordered[min(int(np.searchsorted(cumulative, top_p)), len(ordered) - 1)])


def draw(p: Doubles, uniform: float) -> int:
    """The token at which the cumulative probability first exceeds ``uniform * sum(p)``; never one of probability 0."""
    cumulative = np.cumsum(p)
    token = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(token, int(np.flatnonzero(p)[-1]))


def residual(p: Doubles, ids: Ints, q: Floats) -> Doubles:
    """norm(max(0, p - q)): what to draw from when a draft token was rejected.

    Where q covers p up to rounding nothing is left, and p itself is returned: a rejection then has probability 0.
    """
    left = p.copy()
    left[ids] = np.maximum(left[ids] - q, 0.0)
    total = float(left.sum())
    return left / total if total > 0 else p


def accept_greedy(logits: Floats, tree: TokenTree, draft_tokens: Ints) -> tuple[list[int], int]:
    """Follows the tree from the root while a child is the target's most probable token.

    Args:
        logits: float32 ``[N,V]``, at every node of the tree.
        tree: its N nodes.
        draft_tokens: int64 ``[N-1]``, those of nodes 1 to N-1.

    Returns:
        The nodes accepted, in order, and the token that follows them.
    """
    best = logits.argmax(axis=-1).tolist()
    path: list[int] = []
    node, tokens = 0, draft_tokens.tolist()
    while (child := next((c for c in tree.children[node] if tokens[c - 1] == best[node]), 0)) != 0:
        path.append(child)
        node = child
    return path, best[node]


def accept_sampled(
    logits: Floats,
    tree: TokenTree,
    draft_tokens: Ints,
    q: Distributions | None,
    params: SamplingParams,
    uniform: Doubles,
) -> tuple[list[int], int]:
    """Multi-round rejection over a tree (SpecInfer, arXiv 2305.09781), which for a chain is speculative sampling.

    At each node the children are tried in order. A child x ~ q is accepted with probability min(1, p(x)/q(x)); if not,
    p becomes norm(max(0, p - q)) and the next is tried. Where none is accepted, the next token is drawn from what p
    has become.

    Args:
        logits: float32 ``[N,V]``.
        tree: its N nodes.
        draft_tokens: int64 ``[N-1]``, those of nodes 1 to N-1.
        q: the distributions they were drawn from; None where they were chosen without drawing (q = 1).
        params: gives p.
        uniform: float64 ``[N]`` noise in [0,1): one number a draft token, the last for the final draw.

    Returns:
        The nodes accepted, in order, and the token that follows them. Together they are distributed as if every token
        had been drawn from p.
    """
    path: list[int] = []
    node = 0
    while True:
        p = target_distribution(logits[node], params)
        for child in tree.children[node]:
            row, x = child - 1, int(draft_tokens[child - 1])
            ids, probs = (np.array([x]), np.ones(1, np.float32)) if q is None else (q.ids[row], q.probs[row])
            q_x = float(probs[ids == x].sum())
            # u < p/q without dividing: p >= q always accepts, p = 0 never does.
            if uniform[row] * q_x < p[x]:
                path.append(child)
                node = child
                break
            p = residual(p, ids, probs)
        else:
            return path, draw(p, uniform[-1])


def accept_typical(
    logits: Floats, tree: TokenTree, draft_tokens: Ints, params: SamplingParams, uniform: float
) -> tuple[list[int], int]:
    """Typical acceptance (Medusa, arXiv 2401.10774, section 3.3): a token likely enough under p stays. Not lossless.

    A draft token x stays if p(x) > min(epsilon, alpha * exp(-H(p))) with p the target's distribution before it, H its
    entropy in nats, and everything before x on its path stayed. Of the paths that end deepest the most probable one is
    taken; the token after it is drawn from p.

    Args:
        logits: float32 ``[N,V]``.
        tree: its N nodes.
        draft_tokens: int64 ``[N-1]``, those of nodes 1 to N-1.
        params: gives p, epsilon (``posterior_threshold``) and alpha (``posterior_alpha``), both set.
        uniform: noise in [0,1) for the token after the path.

    Returns:
        The nodes accepted, in order, and the token that follows them.
    """
    epsilon, alpha = params.posterior_threshold, params.posterior_alpha
    assert epsilon is not None and alpha is not None  # the engine fills in the bundle's
    found: dict[int, Doubles] = {}

    def p_at(node: int) -> Doubles:
        if node not in found:
            found[node] = target_distribution(logits[node], params)
        return found[node]

    best = (0, 0.0, 0)  # depth, log-probability and node of the best path
    stays: dict[int, tuple[int, float]] = {0: (0, 0.0)}
    for node, parent in enumerate(tree.parents[1:], start=1):
        if parent in stays:
            p = p_at(parent)
            chance = float(p[int(draft_tokens[node - 1])])
            if chance > min(epsilon, alpha * float(np.exp(-entropy(p)))):
                depth, log_p = stays[parent]
                stays[node] = (depth + 1, log_p + float(np.log(chance)))
                if (depth + 1, stays[node][1]) > best[:2]:
                    best = (*stays[node], node)
    node = best[2]
    path = np.flatnonzero(tree.mask[node])[1:].tolist()
    return path, draw(p_at(node), uniform)


def accept_relaxed(
    logits: Floats, tree: TokenTree, draft_tokens: Ints, params: SamplingParams, uniform: float
) -> tuple[list[int], int]:
    """Likelihood acceptance of a hypothesis (arXiv 2603.11243): a token the model finds likely stays. Not lossless.

    A token x stays if p(x) > ``likelihood_threshold``, with p the model's distribution at temperature 1, unfiltered,
    and everything before x stayed. The token after the last that stayed is drawn as the request says.

    Args:
        logits: float32 ``[N,V]``.
        tree: its N nodes, a chain.
        draft_tokens: int64 ``[N-1]``, those of nodes 1 to N-1.
        params: gives the threshold, and how the token after the path is drawn.
        uniform: noise in [0,1) for that token.

    Returns:
        The nodes accepted, in order, and the token that follows them.
    """
    path: list[int] = []
    for node in range(1, len(tree)):
        row = logits[node - 1].astype(np.float64)
        log_p = row[int(draft_tokens[node - 1])] - row.max() - np.log(np.exp(row - row.max()).sum())
        if not np.exp(log_p) > params.likelihood_threshold:
            break
        path.append(node)
    return path, draw(target_distribution(logits[len(path)], params), uniform)


def entropy(p: Doubles) -> float:
    """Entropy of a distribution in nats."""
    some = p[p > 0]
    return float(-(some * np.log(some)).sum())
