"""Values as callers have them: NumPy's and torch's numbers and arrays, and what is no text or no token."""

import importlib.util
from typing import Any

import numpy as np
import pytest

from specexport import LLM, SamplingParams
from specexport.contract.errors import RequestError
from specexport.contract.values import token_ids
from tests.fixtures import Bundles

NAME = "llama-near"
IDS = [5, 6, 7, 8]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SURROGATE = "cut here \ud83d"


@pytest.fixture(scope="module")
def llm(bundle: Bundles) -> LLM:
    return LLM(bundle=bundle(NAME), threads=1, calibrate=False)


def _arrays() -> list[Any]:
    several: list[Any] = [
        np.array(IDS),
        np.array(IDS, np.int32),
        np.array(IDS, np.uint16),
        np.array([IDS]),
        [IDS],
        [np.int64(token) for token in IDS],
        tuple(IDS),
        range(5, 9),
    ]
    if importlib.util.find_spec("torch") is not None:
        import torch

        several += [torch.tensor(IDS), torch.tensor([IDS], dtype=torch.int32), list(torch.tensor(IDS))]
    return several


@pytest.mark.parametrize("ids", _arrays(), ids=lambda ids: f"{type(ids).__module__}.{type(ids).__name__}")
def test_token_ids_come_in_arrays(llm, engine, ids):
    expected = engine(NAME).generate(IDS, GREEDY).token_ids
    assert engine(NAME).generate(ids, GREEDY).token_ids == expected
    for prompts in (ids, {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}], [ids]):
        (output,) = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == tuple(IDS)
        assert output.outputs[0].token_ids == expected
        assert all(type(token) is int for token in (*output.prompt_token_ids, *output.outputs[0].token_ids))


def test_lists_and_arrays_of_rows_are_a_prompt_each(llm):
    rows = np.array([[5, 6, 7], [8, 9, 10]])
    outputs = llm.generate(rows, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [(5, 6, 7), (8, 9, 10)]
    texts = llm.generate(np.array(["one", "two"]), GREEDY, use_tqdm=False)
    assert [output.prompt for output in texts] == ["one", "two"]
    for prompts, count in (([[5, 6], [7]], 2), ({"prompt": "one"}, 1), ([], 0)):
        assert len(llm.generate(prompts, GREEDY, use_tqdm=False)) == count
    with pytest.raises(RequestError, match="prompt 0: prompt_token_ids is 2 lists; expected one of token ids"):
        llm.generate({"prompt_token_ids": rows}, GREEDY)


def test_a_hypothesis_is_an_array(engine):
    completion = engine("qwen3-lookup").generate(IDS, GREEDY).token_ids
    for hypothesis in (np.array(completion), np.array([completion])):
        chosen = {"hypothesis": hypothesis}
        done = engine("qwen3-lookup").generate(IDS, GREEDY, chosen)
        assert done.token_ids == completion
        assert done.stats.accepted > 0
    done = engine(NAME).generate(IDS, GREEDY, {"num_speculative_tokens": np.int64(2)})
    assert done.stats.drafted


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([1.5, 2], "token 0 is 1.5; expected a token id, a whole number"),
        ([5, 2.0], "token 1 is 2.0"),
        (np.array([1.5]), "token 0 is 1.5"),
        ([np.float32(1.5)], "token 0 is 1.5"),
        ([5, True], "token 1 is True"),
        ([5, "a"], "token 1 is 'a'"),
        ([5, None], "token 1 is None"),
        ([5, float("nan")], "token 1 is nan"),
        ([5, [6]], r"token 1 is \[6\]"),
        ([[5], [6]], "is 2 lists; expected one of token ids"),
        ([5, 10**30], "the prompt holds token 1000000000000000000000000000000; the model has tokens 0 to "),
        ([3, -1, 4], "the prompt holds token -1"),
        ([320], "the prompt holds token 320; the model has tokens 0 to 319"),
    ],
)
def test_invalid_token_ids_are_refused(llm, engine, prompt, named):
    with pytest.raises(RequestError, match=named):
        engine(NAME).encode(prompt)
    with pytest.raises(RequestError, match=f"prompt 0: .*({named})"):
        llm.generate({"prompt_token_ids": prompt}, GREEDY)


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        (5, "prompts is 5; expected text or token ids, or a list of either"),
        (1.5, "prompts is 1.5"),
        (None, "prompts is None"),
        (np.int64(5), r"prompts is (np\.int64\(5\)|5)"),
        (b"one", "prompts is b'one'"),
        ({5, 6}, "prompts is {5, 6}"),
        (["one", 5], "prompt 1: the prompt is 5; expected text, token ids or an EmbedsPrompt"),
        ([b"one"], "prompt 0: the prompt is b'one'"),
        ([None], "prompt 0: the prompt is None"),
        ({"prompt": 5}, "prompt 0: its text is 5; token ids are called prompt_token_ids"),
        ({"prompt": IDS}, r"prompt 0: its text is \[5, 6, 7, 8\]"),
        ({"prompt_token_ids": 5}, "prompt 0: prompt_token_ids is 5"),
        ({"prompt_token_ids": "one"}, "prompt 0: prompt_token_ids is 'one'; expected a list of token ids"),
        ({"text": "one"}, r"prompt 0 has the keys \['text'\]"),
    ],
)
def test_invalid_prompts_are_refused(llm, prompts, named):
    with pytest.raises(RequestError, match=named):
        llm.generate(prompts, GREEDY)


def test_unknown_parameters_are_refused(llm):
    for wrong in (5, "greedy", [GREEDY, 5]):
        with pytest.raises(RequestError, match=r"sampling_params is (5|'greedy'); expected SamplingParams"):
            llm.generate(["one", "two"], wrong)
    with pytest.raises(RequestError, match="speculative is 5; expected Speculative or Mapping or str"):
        llm.generate("one", GREEDY, speculative=5)
    for messages in (5, "hello", [5]):
        with pytest.raises(RequestError, match="messages"):
            llm.chat(messages)


@pytest.mark.parametrize("levels", [65, 5000])
def test_deep_nesting_is_refused_by_name(engine, levels):
    deep: Any = 1
    for _ in range(levels):
        deep = {"a": [deep]}
    with pytest.raises(RequestError, match=r"logit_bias is .*; expected"):
        SamplingParams(logit_bias=deep)
    with pytest.raises(RequestError, match=r"hypothesis_entropy is .*; expected"):
        engine(NAME).generate(IDS, GREEDY, {"hypothesis": [5], "hypothesis_entropy": deep})


def test_numbers_of_numpy_are_numbers(engine):
    fields: dict[str, tuple[Any, Any]] = {
        "max_tokens": (np.int64(6), 6),
        "temperature": (np.float32(0.5), 0.5),
        "top_p": (np.float64(0.9), 0.9),
        "top_k": (np.int32(4), 4),
        "seed": (np.uint64(3), 3),
        "stop": (np.array(["xyz"]), ("xyz",)),
        "stop_token_ids": (np.array([9]), (9,)),
        "logit_bias": ({np.int64(8): np.float32(0.5)}, {8: 0.5}),
        "logprobs": (np.array(2), 2),
        "ignore_eos": (np.bool_(True), True),
    }
    params, same = (SamplingParams(**{name: pair[at] for name, pair in fields.items()}) for at in (0, 1))
    assert params == same
    assert engine(NAME).generate(IDS, params).token_ids == engine(NAME).generate(IDS, same).token_ids
    schema = SamplingParams(json_schema={"enum": [np.int64(3), np.float32(0.5)], "items": np.array([1, 2])})
    assert schema.json_schema == '{"enum": [3, 0.5], "items": [1, 2]}'
    for field, value in (
        ("max_tokens", np.float64(6)),
        ("top_k", np.float32(1.5)),
        ("temperature", np.float32("nan")),
        ("temperature", 10**400),
        ("seed", np.array([1, 2])),
        ("logit_bias", {np.float64(1.5): 1.0}),
        ("logit_bias", [5]),
        ("stop", 5),
        ("stop_token_ids", 5),
        ("stop_token_ids", np.array([1.5])),
        ("json_schema", {"const": {1}}),
        ("json_schema", 5),
        ("grammar", b"start"),
    ):
        with pytest.raises(RequestError, match=field):
            SamplingParams(**{field: value})


# --- how many tokens --------------------------------------------------------------------------------------------------


def test_no_most_is_the_rest_of_the_context(llm, engine):
    context = engine(NAME).manifest.max_seq_len
    rest = GREEDY.replace(max_tokens=None)
    prompt = [5 + at % 7 for at in range(context - 20)]
    for done in (engine(NAME).generate(prompt, rest), llm.generate([prompt], rest, use_tqdm=False)[0].outputs[0]):
        assert (len(done.token_ids), done.finish_reason) == (20, "length")
    with pytest.raises(RequestError, match="the context holds"):
        llm.generate([prompt + [5] * 20], rest)
    with pytest.raises(RequestError, match="the context holds"):
        engine(NAME).generate(prompt + [5] * 20, rest)


@pytest.mark.parametrize(("least", "most"), [(50, 100), (21, None), (20, 20), (10_000, None)])
def test_the_context_limits_minimum_lengths(llm, engine, least, most):
    context = engine(NAME).manifest.max_seq_len
    ends = engine(NAME).manifest.tokenizer.eos_token_ids
    prompt = [5 + at % 7 for at in range(context - 20)]
    # The end token would come at once.
    params = SamplingParams(temperature=0.0, max_tokens=most, min_tokens=least, logit_bias=dict.fromkeys(ends, 100.0))
    for done in (engine(NAME).generate(prompt, params), llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]):
        assert (len(done.token_ids), done.finish_reason) == (20, "length")


# --- text -------------------------------------------------------------------------------------------------------------


def test_half_a_character_is_refused(llm, engine):
    named = r"U\+D83D, half of a character, at position 9 is not UTF-8; send text in UTF-8"
    with pytest.raises(RequestError, match=f"prompt 0: the prompt: {named}"):
        llm.generate(SURROGATE, GREEDY)
    for prompt in (SURROGATE, {"prompt": SURROGATE}, ["one", SURROGATE]):
        with pytest.raises(RequestError, match=named):
            llm.generate(prompt, GREEDY)
    with pytest.raises(RequestError, match=named):
        engine(NAME).generate(SURROGATE, GREEDY)
    with pytest.raises(RequestError, match=f"hypothesis: {named}"):
        engine(NAME).generate("one", GREEDY, {"hypothesis": SURROGATE})
    for field in ("stop", "grammar", "json_schema"):
        with pytest.raises(RequestError, match=f"{field}: {named}"):
            SamplingParams(**{field: SURROGATE})


def test_values_without_ids_are_refused():
    assert token_ids([], "ids") == []
    assert token_ids(np.zeros((1, 0), np.int64), "ids") == []
    with pytest.raises(RequestError, match="ids is b'abc'; expected a list of token ids"):
        token_ids(b"abc", "ids")
