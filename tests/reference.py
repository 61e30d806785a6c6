"""What the runtime is compared with: its definitions written out slowly, and the statistics of sampled texts."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from scipy import stats

from specexport.contract.tree import TokenTree
from specexport.runtime.params import SamplingParams
from specexport.runtime.sampling import Distribution, Distributions, accept_greedy, accept_sampled, target_distribution

Text = tuple[int, ...]


def plain_session(graph: Path | bytes) -> ort.InferenceSession:
    """A graph on onnxruntime's own kernels, kept from rounding activations to integers before quantized products."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = graph if isinstance(graph, bytes) else str(graph)
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def warped(logits: Sequence[float] | npt.NDArray[np.floating], params: SamplingParams) -> npt.NDArray[np.float64]:
    """The distribution a token is drawn from: temperature, then top-k, then top-p, then min-p, one token at a time."""
    values = [float(value) for value in logits]
    if params.greedy:
        return np.eye(len(values))[values.index(max(values))]
    scaled = [value / params.temperature for value in values]
    most = max(scaled)
    weights = {token: math.exp(value - most) for token, value in enumerate(scaled)}
    if params.top_k > 0:
        ranked = sorted(weights.values(), reverse=True)
        worst = ranked[min(params.top_k, len(ranked)) - 1]
        weights = {token: weight for token, weight in weights.items() if weight >= worst}
    if params.top_p < 1.0:
        total, so_far, worst = sum(weights.values()), 0.0, 0.0
        for weight in sorted(weights.values(), reverse=True):
            so_far, worst = so_far + weight / total, weight
            if so_far >= params.top_p:
                break
        weights = {token: weight for token, weight in weights.items() if weight >= worst}
    if params.min_p > 0.0:
        best = max(weights.values())
        weights = {token: weight for token, weight in weights.items() if weight >= params.min_p * best}
    total = sum(weights.values())
    return np.array([weights.get(token, 0.0) / total for token in range(len(values))])


def text_distribution(next_token: Callable[[Text], npt.NDArray[np.float64]], length: int) -> dict[Text, float]:
    """The probability of every text of ``length`` tokens, by the chain rule; impossible ones are left out."""
    texts: dict[Text, float] = {(): 1.0}
    for _ in range(length):
        texts = {
            (*text, token): probability * p
            for text, probability in texts.items()
            for token, p in enumerate(next_token(text).tolist())
            if p > 0
        }
    return texts


def chi_square_p(texts: Sequence[Text], exact: dict[Text, float]) -> float:
    """How probable it is that ``texts`` are no closer to ``exact`` if they were drawn from it.

    Texts expected fewer than five times share one bin. A text that cannot occur makes the answer 0.
    """
    histogram = Counter(texts)
    if any(text not in exact for text in histogram):
        return 0.0
    bins = sorted((len(texts) * probability, histogram[text]) for text, probability in exact.items())
    pooled: list[tuple[float, int]] = []
    for expected, count in bins:
        if pooled and (expected < 5 or pooled[0][0] < 5):
            pooled[0] = (pooled[0][0] + expected, pooled[0][1] + count)
        else:
            pooled.append((expected, count))
    assert len(pooled) > 3, "too few bins to tell distributions apart"
    expected_counts, counts = np.array(pooled).T
    return float(stats.chisquare(counts, expected_counts * (len(texts) / expected_counts.sum())).pvalue)


def same_p(*counts: Counter[Any]) -> float:
    """How probable it is that histograms differ as they do if one distribution made them; what is rare is left out."""
    common = [text for text in set().union(*counts) if sum(histogram[text] for histogram in counts) >= 10]
    assert len(common) > 1
    return float(stats.chi2_contingency([[histogram[text] for text in common] for histogram in counts]).pvalue)


def prefix_p_values(texts: Sequence[Text], exact: dict[Text, float]) -> list[float]:
    """:func:`chi_square_p` of the texts' first token, of their first two, and so on up to the whole texts."""
    p_values = []
    for length in range(1, len(next(iter(exact))) + 1):
        beginnings: dict[Text, float] = {}
        for text, probability in exact.items():
            beginnings[text[:length]] = beginnings.get(text[:length], 0.0) + probability
        p_values.append(chi_square_p([text[:length] for text in texts], beginnings))
    return p_values


def exact_texts(next_logits: dict[str, Sequence[float]], params: SamplingParams, length: int) -> dict[Text, float]:
    """How probable each text is.

    Args:
        next_logits: the target's logits after every text of fewer tokens; see ``tests.make_bundles``.
        params: temperature and filters.
        length: tokens of a text.
    """
    return text_distribution(lambda text: warped(next_logits[" ".join(map(str, text))], params), length)


def everywhere(p: Distribution, size: int) -> npt.NDArray[np.float64]:
    """A distribution over all of a vocabulary."""
    whole = np.zeros(size)
    whole[slice(None) if p.ids is None else p.ids] = p.probs
    return whole


def p_of(logits: npt.NDArray[np.float32], params: SamplingParams) -> npt.NDArray[np.float64]:
    """What the engine takes p to be, over all of the vocabulary."""
    return everywhere(target_distribution(logits, params), len(logits))


def draw_candidates(
    logits: npt.NDArray[np.float32], uniform: npt.NDArray[np.float32], params: SamplingParams, candidates: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """What ``graphs.propose.draw_candidate`` does to many rows of logits, in numpy: tokens, candidates, q."""
    count = min(candidates, logits.shape[1])
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    best = np.take_along_axis(logits, ids, -1)
    rank = np.arange(count)[None]
    first = np.float32(1)

    def normalised(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return weights / weights.sum(-1, keepdims=True)

    temperature, top_k = (first, 1) if params.greedy else (np.float32(params.temperature), max(params.top_k, 0))
    scaled = best / temperature
    probs = normalised(np.exp(scaled - scaled[:, :1]))
    probs = normalised(np.where((rank < top_k) | (top_k == 0), probs, np.float32(0)))
    before = probs.cumsum(-1) - probs
    keep = (before < np.float32(params.top_p)) & (probs >= np.float32(params.min_p) * probs[:, :1])
    probs = normalised(np.where(keep | (rank == 0), probs, np.float32(0)))
    below = (probs.cumsum(-1) <= uniform[:, None]).sum(-1)
    choice = np.minimum(below, (probs > 0).sum(-1) - 1)
    return np.take_along_axis(ids, choice[:, None], 1)[:, 0], ids, probs


def accept_chain(
    logits: npt.NDArray[np.float32],
    draft_tokens: npt.NDArray[np.int64],
    q: Distributions | None,
    params: SamplingParams,
    uniform: npt.NDArray[np.float64],
) -> tuple[int, int]:
    """``accept_sampled`` on a chain, or ``accept_greedy``: how many tokens are accepted, and the one after them."""
    chain = TokenTree.chain(len(draft_tokens) + 1)
    if params.greedy:
        path, bonus = accept_greedy(logits, chain, draft_tokens)
    else:
        path, bonus = accept_sampled(logits, chain, draft_tokens, q, params, uniform)
    assert path == list(range(1, len(path) + 1))
    return len(path), bonus
