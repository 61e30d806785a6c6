"""Biases, penalties and least lengths: at every node of a tree, and what speculation must not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from specexport.contract.tree import TokenTree
from specexport.runtime import Engine, RequestError, SamplingParams
from specexport.runtime.logits import Penalties
from specexport.runtime.speculative import PLAIN

Engines = Callable[[str], Engine]
PROMPT = (17, 180, 33, 250)
BRANCHES = TokenTree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
ALL: dict[str, Any] = {
    "logit_bias": {40: 1.5, 7: -100.0},
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.7,
    "presence_penalty": -0.4,
    "min_tokens": 4,
}


def expected(logits: np.ndarray, output: list[int]) -> np.ndarray:
    """What the definition says, token by token."""
    result = logits.astype(np.float64)
    for token in range(len(result)):
        result[token] += ALL["logit_bias"].get(token, 0.0)
        if token in PROMPT or token in output:
            result[token] *= 1 / 1.3 if result[token] > 0 else 1.3
        result[token] -= 0.7 * output.count(token) - 0.4 * (token in output)
    if len(output) < 4:
        result[1] = -np.inf
    return result


def test_every_node_counts_its_own_path() -> None:
    random = np.random.default_rng(0)
    penalties = Penalties(SamplingParams(**ALL), PROMPT, (1, 9999), 300, ALL["min_tokens"])
    text: list[int] = []
    for _ in range(4):
        logits = random.normal(size=(len(BRANCHES), 300)).astype(np.float32)
        before, draft = logits.copy(), random.choice([17, 40, 41, 42], len(BRANCHES) - 1)
        result = penalties.apply(logits, BRANCHES, draft)
        assert (logits == before).all()
        for node in range(len(BRANCHES)):
            path = [int(draft[at - 1]) for at in np.flatnonzero(BRANCHES.mask[node])[1:]]
            assert result[node] == pytest.approx(expected(logits[node], [*text, *path]), abs=1e-5)
        text += [40, int(draft[0])]
        penalties.advance(text[-2:])


@pytest.mark.parametrize("name", ["llama-near", "gpt2-tree", "qwen3-medusa"])
def test_greedy_output_is_the_same_with_and_without_speculation(name: str, engine: Engines) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, **ALL | {"min_tokens": 0})
    fast, plain = (engine(name).generate(PROMPT, params, None if on else PLAIN) for on in (True, False))
    assert fast.token_ids == plain.token_ids
    assert fast.stats.accepted > 0
    unchanged = engine(name).generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    assert fast.token_ids != unchanged.token_ids


def test_speculation_samples_the_same_penalized_distribution(engine: Engines) -> None:
    near = engine("llama-near")
    # So few tokens that they repeat, with counts that matter from the first step on.
    bias = dict.fromkeys((40, 41, 42), 12.0)
    counts, accepted = [], 0
    for speculation in (True, False):
        histogram: Counter[tuple[int, ...]] = Counter()
        for seed in range(500):
            params = SamplingParams(
                max_tokens=4,
                seed=seed + 1000 * speculation,
                ignore_eos=True,
                logit_bias=bias,
                frequency_penalty=0.9,
                presence_penalty=0.5,
                repetition_penalty=1.1,
            )
            completion = near.generate(PROMPT, params, None if speculation else PLAIN)
            accepted += completion.stats.accepted
            histogram[completion.token_ids] += 1
        counts.append(histogram)
    common = [text for text in counts[0] | counts[1] if counts[0][text] + counts[1][text] >= 10]
    assert len(common) > 5
    assert accepted > 0
    rest = [sum(histogram.values()) - sum(histogram[text] for text in common) for histogram in counts]
    table = [[*(histogram[text] for text in common), other + 1] for histogram, other in zip(counts, rest, strict=True)]
    assert chi2_contingency(table).pvalue > 1e-4


def test_an_output_is_no_shorter_than_it_has_to_be(engine: Engines) -> None:
    plain = engine("llama-near").generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    second = plain.token_ids[1]
    for least in (0, 6):
        params = SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=(second,), min_tokens=least)
        completion = engine("llama-near").generate(PROMPT, params)
        assert (completion.token_ids.index(second) if second in completion.token_ids else 30) >= least
        assert len(completion.token_ids) > least
    stop = plain.text[2:4]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=stop, min_tokens=10)
    completion = engine("llama-near").generate(PROMPT, params)
    assert completion.text.startswith(plain.text[:6])
    assert len(completion.token_ids) > 10


@pytest.mark.parametrize("wrong", [{"logit_bias": {99999: 1.0}}, {"stop_token_ids": (1, 99999)}])
def test_tokens_are_those_of_the_model(engine: Engines, wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(wrong))} has token 99999; the model has tokens 0 to"):
        engine("llama-near").stream(PROMPT, SamplingParams(**wrong))
