"""Log-probabilities of the output's tokens and of alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TokenLogprobs:
    """The target's log-probabilities where a token was chosen, before temperature and filters.

    Attributes:
        logprob: that of the chosen token, in nats.
        rank: its rank among all tokens, 1 for the most probable.
        top: the most probable tokens with their log-probabilities, best first.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def token_logprobs(
    logits: npt.NDArray[np.float32], nodes: Sequence[int], tokens: Sequence[int], top: int
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of the tokens a step committed.

    Args:
        logits: float32 ``[N,V]``, at every node of the verified tree.
        nodes: the node after which each token came: the root, then the accepted path.
        tokens: the tokens; fewer than nodes where the output ended.
        top: number of most probable tokens to list.
    """
    return tuple(_at(logits[node], token, top) for node, token in zip(nodes, tokens, strict=False))


def _at(row: npt.NDArray[np.float32], token: int, top: int) -> TokenLogprobs:
    scores = row.astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    top = min(top, len(scores))
    best = np.argpartition(scores, -top)[-top:] if top else np.empty(0, np.int64)
    # Ties go to the lower token, as in greedy decoding.
    best = best[np.lexsort((best, -scores[best]))]
    return TokenLogprobs(
        token,
        float(scores[token]),
        1 + int((scores > scores[token]).sum()),
        tuple((int(alternative), float(scores[alternative])) for alternative in best),
    )
