"""Changes the target's logits at every node of a tree before acceptance, and computes log-probabilities.

p is the target's distribution after these changes, and lossless methods reproduce it. Proposers ignore the changes:
draft tokens are accepted or rejected by the changed p, whatever q they were drawn from.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, get_args

import numpy as np

from specexport.contract.errors import RequestError
from specexport.contract.manifest import GenerationRules
from specexport.contract.tree import TokenTree
from specexport.runtime.constraint import Grammars, Kind
from specexport.runtime.params import SamplingParams
from specexport.runtime.sampling import Floats, Ints

_LARGEST_EXPONENT = 64.0
"""exp(64) times a logit is still far from the largest float32."""


class LogitsProcessor(Protocol):
    """Changes the logits of one output, and follows the output as it grows."""

    def apply(self, logits: Floats, tree: TokenTree, draft_tokens: Ints) -> Floats:
        """Changes each node's logits by the output so far and the draft tokens on the node's path.

        ``logits``, float32 ``[N,V]``, are those at every node of the tree, and not modified; ``draft_tokens``, int64
        ``[N-1]``, are the tokens of nodes 1 to N-1. Returns the changed logits.
        """

    def advance(self, tokens: Sequence[int]) -> None:
        """Extends the output by the tokens that a step committed."""

    def check(self) -> None:
        """Raises an error of :meth:`apply`, which must not raise, as other requests share the step; none by default."""
        return


class _OutputProcessor(LogitsProcessor):
    """Changes each node's logits by the prompt, the output so far and the draft tokens on the node's path.

    Negative numbers in ``prompt`` stand for embeddings.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt: Ints = np.array(prompt, np.int64)
        self._text = self._prompt

    def apply(self, logits: Floats, tree: TokenTree, draft_tokens: Ints) -> Floats:
        changed: Floats = logits.copy()
        for node, row in enumerate(changed):
            self._change(row, draft_tokens[np.flatnonzero(tree.mask[node])[1:] - 1])
        return changed

    def advance(self, tokens: Sequence[int]) -> None:
        self._text = np.concatenate([self._text, np.array(tokens, np.int64)])

    def _count(self, path: Ints) -> int:
        """The length of an output that continues with these draft tokens."""
        return len(self._text) - len(self._prompt) + len(path)

    @abstractmethod
    def _change(self, row: Floats, path: Ints) -> None:
        """Changes the logits ``[V]`` of the token after a path of draft tokens, int64 ``[D]``, in place."""


class Penalties(_OutputProcessor):
    """Applies biases, penalties and the minimum length; see :class:`~specexport.runtime.params.SamplingParams`.

    Biases of sequences and the penalty of the prompt's tokens come first, as in transformers. Tokens in ``ends`` are
    forbidden before the output has ``min_tokens`` tokens. A text's tokens are counted as they come, as it may be long.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], ends: Sequence[int], vocab_size: int, min_tokens: int
    ) -> None:
        super().__init__(prompt)
        rules = params.rules
        self._params = params
        self._min_tokens = min_tokens
        self._ends = _in_vocabulary(ends, vocab_size)
        self._biased = np.array(list(params.logit_bias), np.int64)
        self._bias = np.array(list(params.logit_bias.values()), np.float32)
        self._sequences = _Sequences(sequence for sequence, _ in rules.sequence_bias)
        self._sequence_bias = [bias for _, bias in rules.sequence_bias]
        self._encoder_penalty = 1 / rules.encoder_repetition_penalty
        self._prompt_tokens = np.unique(self._prompt[self._prompt >= 0])
        self._counts = np.zeros(vocab_size, np.int64)  # in the output
        self._output_tokens = np.empty(0, np.int64)

    def advance(self, tokens: Sequence[int]) -> None:
        super().advance(tokens)
        new, counts = np.unique(np.array(tokens, np.int64), return_counts=True)
        self._output_tokens = np.concatenate([self._output_tokens, new[self._counts[new] == 0]])
        self._counts[new] += counts

    def _change(self, row: Floats, path: Ints) -> None:
        params = self._params
        if self._sequence_bias:
            bias = np.zeros_like(row)
            for at, token in self._sequences.completed_by(np.concatenate([self._text, path])):
                bias[token] += self._sequence_bias[at]
            row += bias
        if self._encoder_penalty != 1.0:
            _penalize(row, self._prompt_tokens, self._encoder_penalty)
        row[self._biased] += self._bias
        # A token may be listed twice, as its logit is read before it is written.
        tokens = np.concatenate([self._output_tokens, path])
        if params.repetition_penalty != 1.0:
            _penalize(row, np.concatenate([self._prompt_tokens, tokens]), params.repetition_penalty)
        if params.frequency_penalty or params.presence_penalty:
            np.add.at(self._counts, path, 1)
            row[tokens] -= params.frequency_penalty * self._counts[tokens] + params.presence_penalty
            np.add.at(self._counts, path, -1)
        if self._count(path) < self._min_tokens:
            row[self._ends] = -np.inf


def _penalize(row: Floats, tokens: Ints, penalty: float) -> None:
    """Divides positive logits of tokens by a penalty, and multiplies the others by it."""
    values = row[tokens]
    row[tokens] = np.where(values > 0, values / penalty, values * penalty)


class Rules(_OutputProcessor):
    """Forbids and forces tokens; after penalties and grammars.

    A rule is skipped if it would leave none of the tokens that a grammar and the rules before it allow.

    ``ends`` are the tokens that end the output, ``limit`` is its greatest length.
    """

    def __init__(
        self, rules: GenerationRules, prompt: Sequence[int], ends: Sequence[int], vocab_size: int, limit: int
    ) -> None:
        super().__init__(prompt)
        self._rules = rules
        self._limit = limit
        self._ends = _in_vocabulary(ends, vocab_size)
        self._suppressed = _in_vocabulary(rules.suppress_tokens, vocab_size)
        self._begin = _in_vocabulary(rules.begin_suppress_tokens, vocab_size)
        alone = len(prompt) == 1 and rules.forced_bos_token_id is not None
        self._begins_at = 1 if alone else 0
        last = rules.forced_eos_token_id
        self._last = None if last is None else np.array([last] if isinstance(last, int) else last, np.int64)
        exempt = set(ends)
        self._bad = _Sequences(
            sequence for sequence in rules.bad_words_ids if len(sequence) > 1 or sequence[0] not in exempt
        )

    def _change(self, row: Floats, path: Ints) -> None:
        rules, text, count = self._rules, np.concatenate([self._text, path]), self._count(path)
        _forbid(row, _completing(text, rules.no_repeat_ngram_size, text))
        _forbid(row, _completing(text, rules.encoder_no_repeat_ngram_size, self._prompt))
        _forbid(row, np.array([token for _, token in self._bad.completed_by(text)], np.int64))
        forced = np.empty(0, np.int64)
        if rules.forced_bos_token_id is not None and len(text) == 1:
            forced = np.array([rules.forced_bos_token_id])
        if self._last is not None and count == self._limit - 1:
            forced = self._last
        forced = forced[row[forced] > -np.inf]
        if len(forced):
            row[:] = -np.inf
            row[forced] = 0.0
        elif rules.exponential_decay_length_penalty is not None:
            start, factor = rules.exponential_decay_length_penalty
            if count > start:
                ends = self._ends[np.isfinite(row[self._ends])]
                grown = math.exp(min(_LARGEST_EXPONENT, (count - start) * math.log(factor)))
                row[ends] += np.abs(row[ends]) * (grown - 1)
        _forbid(row, self._suppressed)
        if count == self._begins_at:
            _forbid(row, self._begin)


def _forbid(row: Floats, tokens: Ints) -> None:
    """Removes tokens from logits, unless no others are left."""
    before = row[tokens]
    row[tokens] = -np.inf
    if len(tokens) and not (row > -np.inf).any():
        row[tokens] = before


def _in_vocabulary(tokens: Sequence[int], vocab_size: int) -> Ints:
    """The tokens that the model has."""
    return np.array([token for token in tokens if 0 <= token < vocab_size], np.int64)


class _Sequences:
    """Token sequences, indexed by their last token but one, as a text can complete only a few of thousands."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._alone: list[tuple[int, int]] = []
        self._longer: dict[int, list[tuple[int, Ints]]] = {}
        for at, sequence in enumerate(sequences):
            if len(sequence) == 1:
                self._alone.append((at, sequence[0]))
            else:
                self._longer.setdefault(sequence[-2], []).append((at, np.array(sequence, np.int64)))

    def completed_by(self, text: Ints) -> list[tuple[int, int]]:
        """The sequences that one more token would complete: their indices, and that token."""
        matches = list(self._alone)
        for at, sequence in self._longer.get(int(text[-1]), ()) if len(text) else ():
            before = len(sequence) - 1
            if len(text) >= before and (text[-before:] == sequence[:-1]).all():
                matches.append((at, int(sequence[-1])))
        return matches


def _completing(text: Ints, n: int, source: Ints) -> Ints:
    """The tokens that would end a text with an n-gram of the source."""
    if n == 0 or len(source) < n or len(text) < n - 1:
        return np.empty(0, np.int64)
    grams = np.lib.stride_tricks.sliding_window_view(source, n)
    matching = (grams[:, :-1] == text[len(text) - n + 1 :]).all(1)
    tokens = grams[matching & (grams >= 0).all(1), -1]
    return np.asarray(tokens, np.int64)


@dataclass(frozen=True)
class TokenLogprobs:
    """The target's log-probabilities at a token of the output, before temperature and filters.

    Attributes:
        logprob: its log-probability in nats.
        rank: its rank among all tokens; 1 for the most probable.
        top: the most probable tokens with their log-probabilities, best first.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Floats, nodes: Sequence[int], tokens: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of the tokens a step committed.

    Args:
        logits: float32 ``[N,V]``, at every node of the verified tree.
        nodes: the node before each token: the root, then the accepted path.
        tokens: fewer than nodes if the output ended.
        top: number of most probable tokens to list.
    """
    return tuple(_at(logits[node], token, top) for node, token in zip(nodes, tokens, strict=False))


def _at(row: Floats, token: int, top: int) -> TokenLogprobs:
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


def processors(
    params: SamplingParams,
    prompt: Sequence[int],
    ends: Sequence[int],
    vocab_size: int,
    min_tokens: int,
    remaining: int,
    grammars: Grammars,
) -> list[LogitsProcessor]:
    """The logits processors of a request, in order: biases and penalties, grammars, rules.

    Tokens in ``ends`` are forbidden in the first ``min_tokens``; the output has at most ``remaining`` tokens.

    Raises:
        RequestError: a token is not the model's, or see :meth:`Grammars.constraint`.
    """
    for name in ("logit_bias", "stop_token_ids"):
        if wrong := [token for token in getattr(params, name) if token >= vocab_size]:
            raise RequestError(f"{name} has token {wrong[0]}; the model has tokens 0 to {vocab_size - 1}", param=name)
    chain: list[LogitsProcessor] = []
    if params.penalized:
        chain.append(Penalties(params, prompt, ends, vocab_size, min_tokens))
    stops, skips = params.stop_token_ids, params.skip_special_tokens
    chain += [
        grammars.constraint(param, text, stop_token_ids=stops, skip_special_tokens=skips)
        for param in get_args(Kind)
        if (text := getattr(params, param)) is not None
    ]
    if params.rules.change_logits:
        chain.append(Rules(params.rules, prompt, ends, vocab_size, remaining))
    return chain
