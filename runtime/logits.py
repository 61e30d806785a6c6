"""Changes of the target's logits at every node of a tree, before acceptance.

p is then the target's distribution after these changes, and lossless methods reproduce it. Proposers ignore the
changes: draft tokens are accepted or rejected by the changed p, whatever q they were drawn from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specexport.contract.errors import RequestError
from specexport.contract.tree import TokenTree
from specexport.runtime.params import SamplingParams

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class LogitsProcessor(Protocol):
    """Changes the logits of one output, and follows the output as it grows."""

    def applied(self, logits: Floats, tree: TokenTree, draft_tokens: Ints) -> Floats:
        """The changed logits, each node's by the output so far and the draft tokens on its path.

        Args:
            logits: float32 ``[N,V]``, at every node of the tree; not changed.
            tree: its N nodes.
            draft_tokens: int64 ``[N-1]``, those of nodes 1 to N-1.

        Returns:
            float32 ``[N,V]``.
        """

    def advance(self, tokens: Sequence[int]) -> None:
        """Advances by the tokens that a step committed."""

    def check(self) -> None:
        """Raises the error that a step could not raise, as other requests share it."""


def paths(tree: TokenTree, draft_tokens: Ints) -> Iterator[Ints]:
    """The draft tokens on the path to each node of a tree, its own included."""
    return (draft_tokens[np.flatnonzero(tree.mask[node])[1:] - 1] for node in range(len(tree)))


class Penalties:
    """Biases, penalties and the minimum length of one output; see :class:`~specexport.runtime.params.SamplingParams`.

    Args:
        params: the request's.
        prompt: its tokens; negative numbers stand for embeddings.
        ends: tokens that end the output, forbidden before it has ``min_tokens`` tokens.
        vocab_size: V.
        min_tokens: overrides that of the parameters.

    Raises:
        RequestError: a bias is for a token that the model does not have.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        ends: Sequence[int],
        vocab_size: int,
        min_tokens: int | None = None,
    ) -> None:
        self._params = params
        self._least = params.min_tokens if min_tokens is None else min_tokens
        self._prompt = np.array(sorted({token for token in prompt if token >= 0}), np.int64)
        self._ends = np.array([token for token in ends if token < vocab_size], np.int64)
        self._biased = np.array(list(params.logit_bias), np.int64)
        self._bias = np.array(list(params.logit_bias.values()), np.float32)
        self._output: list[int] = []
        if (wrong := next((token for token in params.logit_bias if token >= vocab_size), None)) is not None:
            raise RequestError(
                f"logit_bias has token {wrong}; the model has tokens 0 to {vocab_size - 1}", param="logit_bias"
            )

    def applied(self, logits: Floats, tree: TokenTree, draft_tokens: Ints) -> Floats:
        changed: Floats = logits.copy()
        changed[:, self._biased] += self._bias
        for row, path in zip(changed, paths(tree, draft_tokens), strict=True):
            self._change(row, path)
        return changed

    def advance(self, tokens: Sequence[int]) -> None:
        self._output += tokens

    def check(self) -> None:
        pass

    def _change(self, row: Floats, path: Ints) -> None:
        """Changes the logits ``[V]`` after the output so far and a path of draft tokens."""
        params, output = self._params, np.concatenate([np.array(self._output, np.int64), path])
        tokens, counts = np.unique(output, return_counts=True)
        if params.repetition_penalty != 1.0:
            repeated = np.union1d(self._prompt, tokens)
            values = row[repeated]
            row[repeated] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        row[tokens] -= params.frequency_penalty * counts + params.presence_penalty
        if len(output) < self._least:
            row[self._ends] = -np.inf
