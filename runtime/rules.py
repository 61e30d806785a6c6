"""The rules of a model's ``generation_config.json`` that change logits; see ``contract.generation``.

Like penalties they change the target's logits at every node of a tree, by the node's path, so that speculation is
lossless with respect to the changed distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from specexport.contract.manifest import GenerationRules
from specexport.contract.tree import TokenTree
from specexport.runtime.logits import Floats, Ints, paths

_LARGEST_EXPONENT = 64.0
"""exp(64) times a logit is still far from the largest float32."""


class SequenceBiases:
    """Adds to the logits of tokens that would complete a sequence; before penalties, as in transformers.

    See :class:`~specexport.runtime.logits.LogitsProcessor` for its methods.

    Args:
        rules: the model's.
        prompt: its tokens; negative numbers stand for embeddings.
    """

    def __init__(self, rules: GenerationRules, prompt: Sequence[int]) -> None:
        self._biases = _Sequences(sequence for sequence, _ in rules.sequence_bias)
        self._values = [bias for _, bias in rules.sequence_bias]
        self._penalty = 1 / rules.encoder_repetition_penalty
        self._prompt = np.array(sorted({token for token in prompt if token >= 0}), np.int64)
        self._text = list(prompt)

    def applied(self, logits: Floats, tree: TokenTree, draft_tokens: Ints) -> Floats:
        changed: Floats = logits.copy()
        for row, path in zip(changed, paths(tree, draft_tokens), strict=True):
            text = np.array([*self._text, *path], np.int64)
            bias = np.zeros_like(row)
            for at, token in self._biases.completed_by(text):
                bias[token] += self._values[at]
            row += bias
            if self._penalty != 1.0:
                some = row[self._prompt]
                row[self._prompt] = np.where(some < 0, some * self._penalty, some / self._penalty)
        return changed

    def advance(self, tokens: Sequence[int]) -> None:
        self._text += tokens

    def check(self) -> None:
        pass


class Rules:
    """Forbids and forces tokens; after penalties and grammars.

    A rule is skipped if it would leave none of the tokens that a grammar and the rules before it allow.

    Args:
        rules: the model's.
        prompt: its tokens; negative numbers stand for embeddings.
        ends: tokens that end the output.
        vocab_size: V.
        limit: most tokens of the output.
    """

    def __init__(
        self, rules: GenerationRules, prompt: Sequence[int], ends: Sequence[int], vocab_size: int, limit: int
    ) -> None:
        self._rules = rules
        self._prompt = np.array(prompt, np.int64)
        self._output: list[int] = []
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

    def applied(self, logits: Floats, tree: TokenTree, draft_tokens: Ints) -> Floats:
        changed: Floats = logits.copy()
        for row, path in zip(changed, paths(tree, draft_tokens), strict=True):
            output = np.array([*self._output, *path], np.int64)
            self._change(row, np.concatenate([self._prompt, output]), len(output))
        return changed

    def advance(self, tokens: Sequence[int]) -> None:
        self._output += tokens

    def check(self) -> None:
        pass

    def _change(self, row: Floats, text: Ints, count: int) -> None:
        """Changes the logits ``[V]`` after a text of which ``count`` tokens are output."""
        rules = self._rules
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
    """Token sequences, indexed by their last token but one: of thousands, a text can complete few."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._alone: list[tuple[int, int]] = []
        self._longer: dict[int, list[tuple[int, Ints]]] = {}
        for at, sequence in enumerate(sequences):
            if len(sequence) == 1:
                self._alone.append((at, sequence[0]))
            else:
                self._longer.setdefault(sequence[-2], []).append((at, np.array(sequence, np.int64)))

    def completed_by(self, text: Ints) -> list[tuple[int, int]]:
        """Indices of the sequences that one more token would complete, with that token."""
        matches = list(self._alone)
        for at, sequence in self._longer.get(int(text[-1]), ()) if len(text) else ():
            before = len(sequence) - 1
            if len(text) >= before and (text[-before:] == sequence[:-1]).all():
                matches.append((at, int(sequence[-1])))
        return matches


def _completing(text: Ints, n: int, source: Ints) -> Ints:
    """Tokens that would end a text with an n-gram of a source."""
    if n == 0 or len(source) < n or len(text) < n - 1:
        return np.empty(0, np.int64)
    grams = np.lib.stride_tricks.sliding_window_view(source, n)
    matching = (grams[:, :-1] == text[len(text) - n + 1 :]).all(1)
    tokens = grams[matching & (grams >= 0).all(1), -1]
    return np.asarray(tokens, np.int64)
