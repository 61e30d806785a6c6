"""``LLM``: what vLLM's users type, and what they get back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import specexport
from specexport import LLM, SamplingParams
from specexport.contract.errors import BuildError, RequestError
from specexport.runtime import Engine
from specexport.speculative import build_options, choice, read_config

NAME = "llama-near"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPTS = ["one two three", "the of and", "what"]


@pytest.fixture(scope="module")
def llm(bundle: Callable[[str], Path]) -> LLM:
    return LLM(bundle=bundle(NAME), threads=1)


def test_importing_it_loads_neither_engine_nor_exporter() -> None:
    program = "import sys, specexport; specexport.LLM; print({'torch','onnxruntime','transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = specexport.Nothing  # type: ignore[attr-defined]


def test_outputs_are_the_engines_in_order(llm: LLM, engine: Callable[[str], Engine]) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for index, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        expected = engine(NAME).generate(prompt, GREEDY)
        (made,) = output.outputs
        assert (output.request_id, output.prompt, output.finished) == (str(index), prompt, True)
        assert output.prompt_token_ids == tuple(engine(NAME).encode(prompt))
        assert (made.index, made.text, made.token_ids) == (0, expected.text, expected.token_ids)
        assert (made.finish_reason, made.logprobs, made.cumulative_logprob) == ("length", None, None)
        assert made.metrics.output_tokens == 16
        assert made.metrics.accepted > 0


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("one two", 1),
        ([5, 6, 7], 1),
        ([[5, 6], [7]], 2),
        ({"prompt": "one"}, 1),
        ([{"prompt_token_ids": [5]}], 1),
        ([], 0),
    ],
)
def test_prompts_come_in_every_form(llm: LLM, prompts: Any, count: int) -> None:
    assert len(llm.generate(prompts, GREEDY.replace(max_tokens=2), use_tqdm=False)) == count


def test_each_prompt_may_have_its_own_parameters(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = llm.generate(PROMPTS, [GREEDY.replace(max_tokens=count) for count in (1, 2, 3)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    assert capsys.readouterr().out == ""
    with pytest.raises(RequestError, match="2 sampling_params for 3 prompts"):
        llm.generate(PROMPTS, [GREEDY, GREEDY])


def test_n_outputs_differ_and_a_seed_reproduces_them(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=12, ignore_eos=True)
    first, again = (llm.generate("one two", params, use_tqdm=False)[0] for _ in range(2))
    assert [made.index for made in first.outputs] == [0, 1, 2]
    assert len({made.token_ids for made in first.outputs}) == 3
    assert [made.token_ids for made in first.outputs] == [made.token_ids for made in again.outputs]


def test_logprobs_are_by_token_with_their_text(llm: LLM) -> None:
    (output,) = llm.generate("one two", SamplingParams(seed=1, max_tokens=5, logprobs=2), use_tqdm=False)
    (made,) = output.outputs
    assert made.logprobs is not None
    assert made.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for entry, token in zip(made.logprobs, made.token_ids, strict=True))
    )
    for entry, token in zip(made.logprobs, made.token_ids, strict=True):
        assert {1, 2} <= {value.rank for value in entry.values()}
        assert token in entry
        assert all(isinstance(value.decoded_token, str) for value in entry.values())


def test_an_engine_seed_reproduces_requests_by_their_order(bundle: Callable[[str], Path]) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    texts = []
    for seed in (1, 1, 2):
        with LLM(bundle=bundle(NAME), seed=seed, threads=1) as llm:
            texts.append([out.outputs[0].token_ids for out in llm.generate(["one"] * 3, params, use_tqdm=False)])
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) == 3


def test_max_model_len_bounds_prompt_and_output(bundle: Callable[[str], Path]) -> None:
    with LLM(bundle=bundle(NAME), max_model_len=20, threads=1) as llm:
        (output,) = llm.generate([5] * 15, GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 5
        assert output.outputs[0].finish_reason == "length"
        with pytest.raises(RequestError, match=r"prompt 1: the prompt has 20 tokens, but the context holds 20"):
            llm.generate([[5], [5] * 20], GREEDY, use_tqdm=False)
    for wrong in (1, 513):
        with pytest.raises(BuildError, match=f"max_model_len is {wrong}; this bundle was built for 2 to 512"):
            LLM(bundle=bundle(NAME), max_model_len=wrong, threads=1)


def test_nothing_runs_if_one_request_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 1: the prompt holds token 9999"):
        llm.generate([[5], [9999]], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match=r"keys \['text'\]"):
        llm.generate([{"text": "one"}], GREEDY, use_tqdm=False)


def test_a_bundle_may_be_named_as_the_model(bundle: Callable[[str], Path]) -> None:
    with LLM(str(bundle(NAME)), speculative_config={"method": "draft_model", "num_speculative_tokens": 2}) as llm:
        (output,) = llm.generate("one two", GREEDY, use_tqdm=False)
        assert output.outputs[0].metrics.drafted <= 2 * output.outputs[0].metrics.steps_with_draft


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give one of them"),
        ({"model": "a", "bundle": "b"}, "give one of them"),
        ({"bundle": "{}", "tensor_parallel_size": 2}, "tensor_parallel_size is 2; expected 1"),
        ({"bundle": "{}", "gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
        ({"bundle": "{}", "seed": -1}, "seed is -1"),
        ({"bundle": "{}", "presicion": "int8"}, "presicion was given with a bundle"),
        ({"bundle": "{}", "speculative_config": {"method": "ngram"}}, "method is 'ngram'; the bundle was built for"),
        ({"bundle": "{}", "speculative_config": {"model": "x"}}, "model was given with a bundle"),
        (
            {"bundle": "{}", "speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}},
            "num_speculative_tokens is 3; the bundle was built for 1, 2, 4, 7",
        ),
    ],
)
def test_wrong_options_are_named(bundle: Callable[[str], Path], options: dict[str, Any], words: str) -> None:
    given = {key: value.format(bundle(NAME)) if isinstance(value, str) else value for key, value in options.items()}
    with pytest.raises(BuildError, match=words):
        LLM(**given)


# --- speculative_config -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"model": "d"}, {"draft": "d"}),
        (
            '{"model": "d", "num_speculative_tokens": 5, "method": "draft_model"}',
            {"draft": "d", "num_speculative_tokens": 5},
        ),
        ({"method": "medusa", "model": "h"}, {"medusa": "h"}),
        ({"method": "mlp_speculator", "model": "s"}, {"mlp_speculator": "s"}),
        ({"method": "suffix"}, {"suffix": True}),
        (
            {"method": "ngram", "prompt_lookup_max": 6, "prompt_lookup_min": 3},
            {"ngram": True, "prompt_lookup_max": 6, "prompt_lookup_min": 3},
        ),
        ({"model": "[ngram]"}, {"ngram": True, "prompt_lookup_max": 4, "prompt_lookup_min": 2}),
        ({"method": "ngram", "prompt_lookup_max": 1}, {"ngram": True, "prompt_lookup_max": 1, "prompt_lookup_min": 1}),
        ({"method": "lookahead"}, {"lookahead": "cpu"}),
        (
            '{"method": "lookahead", "lookahead": [5, 4, 4], "lookahead_seeding": false}',
            {"lookahead": (5, 4, 4), "lookahead_seeding": False},
        ),
        (
            {"method": "self_draft", "self_draft_layers": 8, "num_speculative_tokens": 3},
            {"self_draft_layers": 8, "num_speculative_tokens": 3},
        ),
        ({"method": "universal_draft", "model": "d"}, {"universal_draft": "d"}),
    ],
)
def test_a_config_says_what_to_build(given: Any, options: dict[str, Any]) -> None:
    assert build_options(read_config(given)) == options


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "ngram", "top": 1}, "unknown field `top`"),
        ({"method": "magic"}, "method is 'magic'; expected one of draft_model, medusa"),
        ({}, "method is missing"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": "5"}, "num_speculative_tokens"),
        ({"method": "medusa"}, "model is missing"),
        ({"method": "suffix", "model": "d"}, "proposes without a model"),
        ({"model": "d", "prompt_lookup_max": 4}, "it is for ngram"),
        ({"model": "d", "lookahead": "gpu"}, "lookahead was given with method 'draft_model'; it is for lookahead"),
        ({"method": "lookahead", "lookahead": [5, 4]}, "lookahead"),
        ({"method": "lookahead", "num_speculative_tokens": 4}, "whose steps follow from W, N and G"),
        ({"method": "self_draft"}, "self_draft_layers is missing; method 'self_draft' needs one"),
        ({"method": "self_draft", "self_draft_layers": 2, "model": "d"}, "proposes without a model"),
        ({"method": "universal_draft"}, "model is missing"),
        ({"model": "d", "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
        ("{", "speculative_config"),
        ("[]", "speculative_config"),
    ],
)
def test_a_wrong_config_is_named(given: Any, words: str) -> None:
    with pytest.raises(BuildError, match=words):
        build_options(read_config(given))


def test_with_a_bundle_a_config_only_chooses() -> None:
    assert choice(read_config({"method": "ngram", "num_speculative_tokens": 4})) == {
        "method": "ngram",
        "num_speculative_tokens": 4,
    }
    with pytest.raises(BuildError, match="lookahead was given with a bundle"):
        choice(read_config({"method": "lookahead", "lookahead": "gpu"}))
    with pytest.raises(BuildError, match="prompt_lookup_max was given with a bundle"):
        choice(read_config({"method": "ngram", "prompt_lookup_max": 4}))
