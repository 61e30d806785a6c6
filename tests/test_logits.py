"""Log-probabilities, which are the target's own, and biases, penalties and least lengths, at every node of a tree."""

from collections import Counter
from pathlib import Path
from timeit import repeat
from typing import Any

import numpy as np
import pytest

from specexport.contract.tree import TokenTree
from specexport.runtime import RequestError, SamplingParams
from specexport.runtime.logits import Penalties, token_logprobs
from specexport.runtime.speculative import PLAIN
from tests.reference import same_p
from tests.streams import started, tokens_of

DICE_PROMPT = (5, 8, 5, 8)


def log_softmax(row: Any) -> np.ndarray[Any, Any]:
    scores = np.asarray(row, np.float64)
    return scores - np.log(np.exp(scores - scores.max()).sum()) - scores.max()


@pytest.mark.parametrize("name", ["dice-near", "dice-tree", "dice-medusa", "dice-ngram"])
def test_logprobs_equal_transformers(name, engine, oracle):
    exact = oracle(name)["next_logits"]
    for seed in range(20):
        params = SamplingParams(max_tokens=3, temperature=1.7, top_k=9, seed=seed, logprobs=4, ignore_eos=True)
        completion = engine(name).generate(DICE_PROMPT, params)
        assert len(completion.logprobs) == len(completion.token_ids) == 3
        for at, entry in enumerate(completion.logprobs):
            expected = log_softmax(exact[" ".join(map(str, completion.token_ids[:at]))])
            order = np.argsort(-expected)
            assert entry.token == completion.token_ids[at]
            assert entry.logprob == pytest.approx(expected[entry.token], abs=1e-4)
            assert order[entry.rank - 1] == entry.token
            assert [token for token, _ in entry.top] == order[:4].tolist()
            assert [value for _, value in entry.top] == pytest.approx(expected[order[:4]].tolist(), abs=1e-4)


def test_logprobs_are_optional_and_zero_gives_the_tokens(engine):
    llama = engine("llama-near")
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    assert llama.generate([17], params).logprobs == ()
    sampled = llama.generate([17], params.replace(logprobs=0)).logprobs
    assert [entry.top for entry in sampled] == [(), (), (), ()]
    assert all(entry.logprob < 0 for entry in sampled)


def test_a_tie_names_the_lower_token_first_and_padding_is_never_nan():
    row = np.array([[0.0, 2.0, 2.0, -np.inf]], np.float32)
    (entry,) = token_logprobs(row, [0], [2], 4)
    assert [token for token, _ in entry.top] == [1, 2, 0, 3]
    assert entry.rank == 1
    assert entry.top[-1][1] == -np.inf


def test_chunks_hold_those_of_their_own_tokens(engine):
    params = SamplingParams(max_tokens=20, seed=2, logprobs=1, ignore_eos=True)
    with engine("llama-near").stream([17, 180], params) as stream:
        for chunk in stream:
            assert tuple(entry.token for entry in chunk.logprobs) == chunk.token_ids


# --- of prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.exporter
@pytest.mark.parametrize("name", ["llama-near", "gemma2-equal", "qwen3-medusa", "llama-near-batch-portable"])
def test_prompt_logprobs_equal_transformers(name, bundle, engine):
    import torch
    from transformers import AutoModelForCausalLM

    loaded = engine(name)
    source = bundle(name).parent / "checkpoints" / Path(loaded.manifest.target.source).name
    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    for length, draft in ((1, 0), (2, 1), (9, 2), (150, 3)):
        prompt = np.random.default_rng(draft).integers(3, 300, length).tolist()
        with torch.no_grad():
            exact = model(torch.tensor([prompt])).logits[0].numpy()
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=3)
        # Again, when the cache holds all of it, and without any output.
        for room in (6, 6, 0):
            completion = loaded.generate(prompt, params.replace(max_tokens=room))
            assert completion.stats.cached_tokens == 0
            assert len(completion.token_ids) == room
            assert [prompt_logprob.token for prompt_logprob in completion.prompt_logprobs] == prompt[1:]
            for row, prompt_logprob in zip(exact, completion.prompt_logprobs, strict=False):
                expected = log_softmax(row)
                best = np.argsort(-expected)[:3]
                assert prompt_logprob.logprob == pytest.approx(expected[prompt_logprob.token], abs=2e-4)
                assert [value for _, value in prompt_logprob.top] == pytest.approx(expected[best].tolist(), abs=2e-4)
        plain = loaded.generate(prompt, params.replace(prompt_logprobs=None))
        assert plain.prompt_logprobs == ()
        assert plain.token_ids == loaded.generate(prompt, params).token_ids


def test_scored_prompts_run_beside_others(engine):
    loaded, params = engine("llama-near-batch"), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    texts = [[5 + at, *range(20, 120)] for at in range(6)]
    alone = [
        loaded.generate(text, params.replace(prompt_logprobs=1 if at % 2 else None)) for at, text in enumerate(texts)
    ]
    streams = started(
        loaded.stream(text, params.replace(prompt_logprobs=1 if at % 2 else None, max_tokens=0 if at == 3 else 12))
        for at, text in enumerate(texts)
    )
    for at, (stream, expected) in enumerate(zip(streams, alone, strict=True)):
        got = tokens_of(stream)
        assert got == (() if at == 3 else expected.token_ids)
        assert [prompt_logprob.token for prompt_logprob in stream.prompt_logprobs] == (texts[at][1:] if at % 2 else [])
        assert [prompt_logprob.logprob for prompt_logprob in stream.prompt_logprobs] == pytest.approx(
            [prompt_logprob.logprob for prompt_logprob in expected.prompt_logprobs], abs=1e-4
        )


def test_a_prompt_that_cannot_be_scored_is_refused(engine):
    loaded, params = engine("llama-near"), SamplingParams(max_tokens=0, prompt_logprobs=0)
    with pytest.raises(RequestError, match="the prompt has 513 tokens, but the context holds 512"):
        loaded.generate([5] * 513, params)
    assert len(loaded.generate([5] * 512, params).prompt_logprobs) == 511


def test_stop_tokens_end_the_output_as_the_end_of_text_does(engine):
    llama = engine("llama-near")
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    whole = llama.generate([17, 180, 33], params)
    end = whole.token_ids[5]
    first = whole.token_ids.index(end)
    completion = llama.generate([17, 180, 33], params.replace(stop_token_ids=(end,)))
    assert completion.token_ids == whole.token_ids[: first + 1]
    assert completion.finish_reason == "stop"
    assert whole.text.startswith(completion.text)


# --- biases, penalties and least lengths ------------------------------------------------------------------------------


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


def test_every_node_counts_its_own_path():
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


def test_penalties_do_not_count_a_long_output_again_in_every_step():
    penalties = Penalties(SamplingParams(**ALL), PROMPT, (), 300, 0)
    text = np.random.default_rng(0).choice(300, 200_000).tolist()
    penalties.advance(text)
    logits, draft = np.zeros((len(BRANCHES), 300), np.float32), np.full(len(BRANCHES) - 1, 40)
    applied, read = (
        min(repeat(run, number=1, repeat=5))
        for run in (lambda: penalties.apply(logits, BRANCHES, draft), lambda: np.array(text))
    )
    assert applied < read


@pytest.mark.parametrize("name", ["llama-near", "gpt2-tree", "qwen3-medusa"])
def test_greedy_output_is_the_same_with_and_without_speculation(name, engine):
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, **ALL | {"min_tokens": 0})
    fast, plain = (engine(name).generate(PROMPT, params, None if on else PLAIN) for on in (True, False))
    assert fast.token_ids == plain.token_ids
    assert fast.stats.accepted > 0
    unchanged = engine(name).generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    assert fast.token_ids != unchanged.token_ids


def test_speculation_samples_the_same_penalized_distribution(engine):
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
    assert accepted > 0
    assert same_p(*counts) > 1e-4


def test_an_output_is_no_shorter_than_it_has_to_be(engine):
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
def test_tokens_are_those_of_the_model(engine, wrong):
    with pytest.raises(RequestError, match=f"{next(iter(wrong))} has token 99999; the model has tokens 0 to"):
        engine("llama-near").stream(PROMPT, SamplingParams(**wrong))
