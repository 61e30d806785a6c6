"""Speculative sampling on the host: computes p and decides which draft tokens are accepted.

The notation follows Leviathan et al. 2023 and Chen et al. 2023: p is the target's distribution and q the draft's, both
after temperature, top-k, top-p and min-p; K is the number of draft tokens.

The acceptance functions take a tree of N nodes, the target's ``logits`` at every node, float32 ``[N,V]``, and the
``draft_tokens`` of nodes 1 to N-1, int64 ``[N-1]``. They return the accepted nodes in order, and the next token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specexport.contract.manifest import GenerationRules
from specexport.contract.tree import TokenTree
from specexport.runtime.params import SamplingParams

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_BLOCK = 1024
"""Number of probabilities that are summed together."""
_FEW = 4096
"""Up to this many numbers, sorting all of them is as fast as selecting some first."""
_GROUP = 64
"""Logits in a group; the groups' maxima bound the k-th largest logit."""
_BINS = 4096
"""Bins of a histogram of tokens by probability, so that only one bin has to be sorted."""
_MOST_OF_TOP_H = 100
"""Most tokens that top-H keeps."""
_UNDERFLOW = 750.0
"""exp(-750) is 0 in float64."""


@dataclass(frozen=True)
class Distributions:
    """q of each draft token of one slot, by its most probable tokens.

    Attributes:
        ids: int64 ``[K,M]``, different within a row.
        probs: float32 ``[K,M]``, their probabilities; each row sums to 1.
    """

    ids: Ints
    probs: Floats


@dataclass(frozen=True)
class Distribution:
    """p at one node of a tree; top-k, top-p and min-p leave few tokens of a large vocabulary.

    Attributes:
        ids: int64 ``[M]``, the tokens that may have probability, ascending; None for the whole vocabulary.
        probs: float64 ``[M]``, their probabilities.
    """

    ids: Ints | None
    probs: Doubles

    def of(self, token: int) -> float:
        """The probability of a token."""
        at, _ = self._places(np.array([token]))
        return float(self.probs[at].sum())

    def _places(self, tokens: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Indices in ``probs`` of the tokens that may have probability, and a mask of these tokens."""
        if self.ids is None:
            return tokens, np.ones(len(tokens), np.bool_)
        at = np.searchsorted(self.ids, tokens)
        present = self.ids[np.minimum(at, len(self.ids) - 1)] == tokens
        return at[present], present

    def residual(self, tokens: Ints, q: Floats) -> Distribution:
        """norm(max(0, p - q)): the distribution to draw from after a draft token was rejected.

        If q covers p up to rounding, the residual is empty and p is returned: a rejection then has probability 0.

        Args:
            tokens: int64 ``[C]``, all different.
            q: float32 ``[C]``, their probabilities; other tokens have none.
        """
        at, present = self._places(tokens)
        residual = self.probs.copy()
        residual[at] = np.maximum(residual[at] - q[present], 0.0)
        total = float(residual.sum())
        return Distribution(self.ids, residual / total) if total > 0 else self

    def draw(self, uniform: float) -> int:
        """The token at which the cumulative probability first exceeds the share ``uniform`` of the total."""
        at = _first_above(self.probs, uniform)
        return at if self.ids is None else int(self.ids[at])

    def entropy(self) -> float:
        """The entropy in nats."""
        return _entropy(self.probs)


def _first_above(weights: Doubles, uniform: float) -> int:
    """The index at which the cumulative weight first exceeds ``uniform * sum(weights)``; never one of weight 0."""
    # Cumulative sums take ten times as long as sums: one over blocks, then one within a block.
    through = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)))
    goal = uniform * through[-1]
    block = _first_beyond(through, goal)
    start = block * _BLOCK
    before = through[block - 1] if block else 0.0
    return start + _first_beyond(np.cumsum(weights[start : start + _BLOCK]), goal - before)


def _first_beyond(cumulative: Doubles, value: float) -> int:
    """The index of the first of ascending numbers above ``value``, or of the first largest if rounding leaves none."""
    return min(int(np.searchsorted(cumulative, value, "right")), int(np.searchsorted(cumulative, cumulative[-1])))


def target_distribution(logits: Floats, params: SamplingParams) -> Distribution:
    """The target's p from logits, float32 ``[V]``; tokens tied at a threshold are kept together.

    NaN logits give NaN probabilities, from which some token is drawn, as other requests share the step and must not
    fail.
    """
    if params.greedy:
        return Distribution(np.array([logits.argmax()]), np.ones(1))
    best = float(logits.max())
    if not math.isfinite(best):
        return Distribution(None, np.full(len(logits), math.nan))
    rules = params.rules
    if rules.top_h is not None:
        logits = np.where(_within_entropy(_weights(logits, best, params), rules.top_h), logits, -np.inf)
    # Without tokens that a grammar forbids, as partitioning many equal numbers is slow.
    threshold = max(best - _UNDERFLOW * params.temperature, float(np.finfo(np.float32).min))
    ids = np.flatnonzero(logits >= threshold) if logits.min() < threshold else None
    remaining = logits if ids is None else logits[ids]
    if 0 < params.top_k < len(remaining):
        at = _top_k(remaining, params.top_k)
        ids, remaining = at if ids is None else ids[at], remaining[at]
    candidates, threshold = None, -math.inf
    if params.top_p < 1.0:
        candidates, threshold = _nucleus(remaining, best, params)
    if params.min_p > 0.0:
        threshold = max(threshold, best + params.temperature * math.log(params.min_p))
    if threshold > -math.inf:
        at = (
            np.flatnonzero(remaining >= threshold)
            if candidates is None
            else candidates[remaining[candidates] >= threshold]
        )
        ids, remaining = at if ids is None else ids[at], remaining[at]
    weights = _weights(remaining, best, params)
    weights /= weights.sum()
    for stays in _filters(rules):
        at = np.flatnonzero(stays(weights))
        ids, weights = at if ids is None else ids[at], weights[at] / weights[at].sum()
    return Distribution(ids, weights)


def _filters(rules: GenerationRules) -> Iterator[Callable[[Doubles], npt.NDArray[np.bool_]]]:
    """Transformers' filters, in its order: each maps probabilities, float64 ``[M]``, to the tokens that it keeps."""
    if rules.typical_p < 1.0:
        yield lambda probs: _typical(probs, rules.typical_p)
    if rules.epsilon_cutoff > 0.0:
        yield lambda probs: probs >= min(rules.epsilon_cutoff, probs.max())
    if rules.eta_cutoff > 0.0:
        root = math.sqrt(rules.eta_cutoff)
        yield lambda probs: probs >= min(rules.eta_cutoff, root * math.exp(-_entropy(probs)), probs.max())


def _typical(probs: Doubles, mass: float) -> npt.NDArray[np.bool_]:
    """Locally typical sampling (arXiv 2202.00666): tokens with information closest to the entropy, up to ``mass``."""
    with np.errstate(divide="ignore"):
        distance = np.abs(-np.log(probs) - _entropy(probs))
    order = np.argsort(distance, kind="stable")
    last = min(int((np.cumsum(probs[order]) < mass).sum()), len(probs) - 1)
    return np.asarray(distance <= distance[order[last]], np.bool_)


def _within_entropy(weights: Doubles, share: float) -> npt.NDArray[np.bool_]:
    """Top-H (arXiv 2509.02510): the most probable tokens whose part of the entropy is at most a share of it."""
    order = np.argsort(-weights, kind="stable")[:_MOST_OF_TOP_H]
    probs = weights[order] / weights[order].sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = np.where(probs > 0, -probs * np.log(probs), 0.0)
    within = np.zeros(len(weights), np.bool_)
    within[order] = np.cumsum(parts) <= share * parts.sum()
    within[order[0]] = True
    return within


def _entropy(probs: Doubles) -> float:
    positive = probs[probs > 0]
    return float(-(positive * np.log(positive)).sum())


def _weights(logits: Floats, best: float, params: SamplingParams, kind: Any = np.float64) -> npt.NDArray[Any]:
    """Probabilities relative to the best token's."""
    scaled = np.subtract(logits, best, dtype=kind)
    scaled /= params.temperature
    return np.exp(scaled, out=scaled)


def _top_k(logits: Floats, k: int) -> Ints:
    """Indices of the k largest logits, ascending, including ties with the last."""
    at = None
    if len(logits) > _FEW and k <= len(logits) // _GROUP:
        # At least k logits reach the k-th largest of the groups' maxima, and hardly more.
        groups = logits[: len(logits) // _GROUP * _GROUP].reshape(_GROUP, -1).max(0)
        at = np.flatnonzero(logits >= np.partition(groups, -k)[-k])
    candidates = logits if at is None else logits[at]
    largest = np.flatnonzero(candidates >= np.partition(candidates, -k)[-k])
    return largest if at is None else at[largest]


def _nucleus(logits: Floats, best: float, params: SamplingParams) -> tuple[Ints, float]:
    """The smallest set that holds ``top_p``: indices of candidates, ascending, that include it, and its least logit."""
    # Doubles take twice as long, and only the boundary of the nucleus needs them.
    weights = _weights(logits, best, params, np.float64 if len(logits) <= _FEW else np.float32)
    total = float(weights.sum(dtype=np.float64))
    # All tokens below this together hold less than top-p leaves out; 0.999, as sums are rounded.
    threshold = 0.999 * (1.0 - params.top_p) * total / len(logits)
    candidates = at = np.flatnonzero(weights >= threshold)
    before = 0.0
    if len(at) > _FEW:
        place = ((logits[at] - best) * (_BINS / params.temperature / math.log(threshold))).astype(np.int32)
        through = np.cumsum(np.bincount(place, weights[at]))
        end = min(int(np.searchsorted(through, params.top_p * total)), len(through) - 1)
        at, before = at[place == end], float(through[end - 1]) if end else 0.0
    ordered = np.sort(logits[at])[::-1]
    mass = before / total + np.cumsum(_weights(ordered, best, params) / total)
    return candidates, float(ordered[min(int(np.searchsorted(mass, params.top_p)), len(ordered) - 1)])


def accept_greedy(logits: Floats, tree: TokenTree, draft_tokens: Ints) -> tuple[list[int], int]:
    """Follows the tree from the root while a child is the target's most probable token."""
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
    """Multi-round rejection sampling over a tree (SpecInfer, arXiv 2305.09781); for a chain, speculative sampling.

    At each node the children are tried in order. A child x ~ q is accepted with probability min(1, p(x)/q(x)); if it is
    rejected, p becomes norm(max(0, p - q)) and the next child is tried. If none is accepted, the next token is drawn
    from that p. The result is distributed as if every token had been drawn from p.

    ``q`` is None if the draft tokens were chosen without drawing (q = 1). ``uniform`` is noise in [0,1), float64
    ``[N]``: a number for each draft token, and the last for the final draw.
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
            if uniform[row] * q_x < p.of(x):
                path.append(child)
                node = child
                break
            p = p.residual(ids, probs)
        else:
            return path, p.draw(uniform[-1])


def accept_typical(
    logits: Floats, tree: TokenTree, draft_tokens: Ints, params: SamplingParams, uniform: float
) -> tuple[list[int], int]:
    """Typical acceptance (Medusa, arXiv 2401.10774, section 3.3): keeps tokens that are likely enough. Not lossless.

    A draft token x stays if the tokens before it on its path stayed and p(x) > min(epsilon, alpha * exp(-H(p))), where
    H is the entropy of p in nats. Of the deepest paths the most probable one is chosen; the token after it is drawn
    from p, with ``uniform`` in [0,1). Epsilon and alpha are the request's ``posterior_threshold`` and
    ``posterior_alpha``, which must be set.
    """
    epsilon, alpha = params.posterior_threshold, params.posterior_alpha
    assert epsilon is not None and alpha is not None  # the engine has filled in the bundle's
    distributions: dict[int, Distribution] = {}

    def p_at(node: int) -> Distribution:
        if node not in distributions:
            distributions[node] = target_distribution(logits[node], params)
        return distributions[node]

    best = (0, 0.0, 0)  # depth, log-probability and node of the best path
    stays: dict[int, tuple[int, float]] = {0: (0, 0.0)}
    for node, parent in enumerate(tree.parents[1:], start=1):
        if parent in stays:
            p = p_at(parent)
            chance = p.of(int(draft_tokens[node - 1]))
            if chance > min(epsilon, alpha * math.exp(-p.entropy())):
                depth, log_p = stays[parent]
                stays[node] = (depth + 1, log_p + float(np.log(chance)))
                if (depth + 1, stays[node][1]) > best[:2]:
                    best = (*stays[node], node)
    node = best[2]
    path = np.flatnonzero(tree.mask[node])[1:].tolist()
    return path, p_at(node).draw(uniform)


def accept_relaxed(
    logits: Floats, tree: TokenTree, draft_tokens: Ints, params: SamplingParams, uniform: float
) -> tuple[list[int], int]:
    """Likelihood acceptance of a hypothesis (arXiv 2603.11243): keeps tokens that the model finds likely. Not lossless.

    The tree is a chain. A token x stays if all tokens before it stayed and p(x) > ``likelihood_threshold``, where p is
    the model's distribution at temperature 1, unfiltered. The token after them is sampled by the request's parameters,
    with ``uniform`` in [0,1).
    """
    path: list[int] = []
    for node in range(1, len(tree)):
        row = logits[node - 1].astype(np.float64)
        log_p = row[int(draft_tokens[node - 1])] - row.max() - np.log(np.exp(row - row.max()).sum())
        if not np.exp(log_p) > params.likelihood_threshold:
            break
        path.append(node)
    return path, target_distribution(logits[len(path)], params).draw(uniform)
