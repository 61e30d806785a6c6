"""What generation_config.json says of a model's texts holds as in transformers, with speculation and without."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GenerationConfig

from specexport.contract.errors import BuildError
from specexport.contract.manifest import GenerationDefaults, GenerationRules
from specexport.contract.tree import TokenTree
from specexport.exporter.checkpoints.config import read_model_config
from specexport.exporter.checkpoints.generation import read_generation
from specexport.runtime import Engine, RequestError, SamplingParams
from specexport.runtime.logits import Rules
from specexport.runtime.sampling import target_distribution
from specexport.runtime.speculative import PLAIN, Speculative
from tests.checkpoints import EOS
from tests.fixtures import Bundles, Engines
from tests.test_constraint import grammars

pytestmark = pytest.mark.exporter

PROMPT = [17, 180, 33, 250, 33, 250, 61]
LENGTH = 40
Said = dict[str, Any]
Check = Callable[..., list[int]]

RULES: list[Said] = [
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 3},
    {"encoder_no_repeat_ngram_size": 2},
    {"encoder_repetition_penalty": 1.7},
    {"encoder_repetition_penalty": 1.2, "repetition_penalty": 0.9, "no_repeat_ngram_size": 2},
    {"exponential_decay_length_penalty": [5, 1.3]},
    {"min_new_tokens": 30, "exponential_decay_length_penalty": [2, 1.5]},
    {"min_length": 30, "exponential_decay_length_penalty": [2, 1.5]},
    {"forced_bos_token_id": 77},
    {"forced_eos_token_id": 90},
    {"forced_eos_token_id": [91, 90]},
]


@pytest.fixture(scope="module")
def target(bundle: Bundles) -> Path:
    return bundle("llama-near").parent / "checkpoints" / "llama"


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager").eval()


@pytest.fixture
def with_settings(target: Path, tmp_path: Path) -> Callable[[Said], Path]:
    """Gives a checkpoint without weights whose generation_config.json says something."""

    def write(document: Said) -> Path:
        shutil.copy(target / "config.json", tmp_path)
        full = {"bos_token_id": 0, "eos_token_id": EOS, "pad_token_id": 2, **document}
        (tmp_path / "generation_config.json").write_text(json.dumps(full), encoding="utf-8")
        return tmp_path

    return write


@pytest.fixture
def with_defaults(
    engine: Engines, with_settings: Callable[[Said], Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Said], Engine]:
    """Gives an engine whose model's generation_config.json says something."""

    def get(document: Said) -> Engine:
        folder = with_settings(document)
        near = engine("llama-near")
        defaults, ends = read_generation(folder, read_model_config(folder))
        assert ends == (EOS,)
        monkeypatch.setattr(near, "manifest", msgspec.structs.replace(near.manifest, generation=defaults))
        return near

    return get


@pytest.fixture
def expected(model: Any, with_settings: Callable[[Said], Path]) -> Check:
    """Gives the tokens that transformers generates with what a generation_config.json says."""

    def generate(document: Said, prompt: list[int], **more: Any) -> list[int]:
        model.generation_config = GenerationConfig.from_pretrained(with_settings(document))
        ids = torch.tensor([prompt])
        with torch.no_grad():
            completion = model.generate(ids, attention_mask=torch.ones_like(ids), **more)
        return list(completion[0, len(prompt) :].tolist())

    return generate


# --- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", RULES, ids=str)
def test_texts_are_transformers(document, with_defaults, expected):
    for prompt in (PROMPT, PROMPT[:1]):
        near = with_defaults(document)
        params = near.params(max_tokens=LENGTH)
        assert params.temperature == 0.0
        fast, plain = near.generate(prompt, params), near.generate(prompt, params, PLAIN)
        assert list(plain.token_ids) == expected(document, prompt, max_new_tokens=LENGTH)
        assert fast.token_ids == plain.token_ids


def test_lists_of_tokens_are_transformers(engine, with_defaults, expected):
    """Rules about the very tokens that the model would say."""
    greedy = SamplingParams(temperature=0.0, max_tokens=LENGTH)
    words = list(engine("llama-near").generate(PROMPT, greedy, PLAIN).token_ids)
    documents: list[Said] = [
        {"suppress_tokens": [*words[2:4], -1, 100_000]},
        {"begin_suppress_tokens": [words[0], words[3]]},
        {"begin_suppress_tokens": [words[0]], "forced_bos_token_id": words[1]},
        {"bad_words_ids": [[words[1]], words[3:5], words[5:8], [EOS], [*PROMPT, *PROMPT, *words, words[0]]]},
        {"bad_words_ids": [[PROMPT[-1], words[0]]]},
        {"sequence_bias": [[words[2:4], -9.0], [[words[6]], -2.5], [[5], 1.5]], "repetition_penalty": 1.1},
        {"sequence_bias": [[words[2:4], float("-inf")]]},
        {"stop_strings": "nowhere", "suppress_tokens": [words[0]]},
    ]
    for document in documents:
        near = with_defaults(document)
        params = near.params(max_tokens=LENGTH)
        fast, plain = near.generate(PROMPT, params), near.generate(PROMPT, params, PLAIN)
        checked = {key: value for key, value in document.items() if key != "stop_strings"}
        assert list(plain.token_ids) == expected(checked, PROMPT, max_new_tokens=LENGTH), document
        assert fast.token_ids == plain.token_ids
        assert list(plain.token_ids) != words


def test_speculation_is_used_under_rules(with_defaults):
    near = with_defaults({"repetition_penalty": 1.2, "no_repeat_ngram_size": 4})
    assert near.generate(PROMPT, near.params(max_tokens=60, ignore_eos=True)).stats.accepted > 0


def test_rules_that_leave_no_token_yield():
    """Each alone: others hold there."""
    inf = np.inf

    def left(row: list[float], room: int = 4, **rules: Any) -> list[float]:
        apply = Rules(GenerationRules(**rules), [1, 1], (), 3, room).apply
        return list(apply(np.array([row], np.float32), TokenTree.chain(1), np.empty(0, np.int64))[0].tolist())

    assert left([1.0, 2.0, 3.0], suppress_tokens=(0, 1, 2)) == [1.0, 2.0, 3.0]
    assert left([-inf, 2.0, -inf], suppress_tokens=(1,)) == [-inf, 2.0, -inf]
    assert left([-inf, 2.0, 3.0], suppress_tokens=(1, 2), no_repeat_ngram_size=1) == [-inf, -inf, 3.0]
    assert left([1.0, 2.0, -inf], room=1, forced_eos_token_id=2, bad_words_ids=((0,),)) == [-inf, 2.0, -inf]
    assert left([1.0, 2.0, 3.0], room=1, forced_eos_token_id=2, suppress_tokens=(2,)) == [-inf, -inf, 0.0]


SOME = st.lists(st.integers(0, 319), min_size=1, max_size=200).map(tuple)
ANY_RULES = st.fixed_dictionaries(
    {},
    optional={
        "no_repeat_ngram_size": st.integers(1, 3),
        "encoder_no_repeat_ngram_size": st.integers(1, 2),
        "suppress_tokens": SOME,
        "begin_suppress_tokens": SOME,
        "bad_words_ids": st.lists(st.lists(st.integers(3, 319), min_size=1, max_size=2).map(tuple)).map(tuple),
        "forced_bos_token_id": st.integers(3, 319),
        "forced_eos_token_id": st.sampled_from([EOS, 77]),
        "exponential_decay_length_penalty": st.tuples(st.integers(0, 20), st.sampled_from([0.5, 1.5])),
    },
)
GRAMMARS = st.one_of(
    st.sampled_from(
        ['start: ("a" | "b" | "cd")+', r"start: /[0-9]{2,9}/", 'start: "{" start? "}"', "start: /(.|\n)*/"]
    ),
    st.lists(st.text("abc 1", min_size=1, max_size=8), min_size=1, max_size=4).map(
        lambda words: "start: " + " | ".join(json.dumps(word) for word in words)
    ),
)


def test_rules_behind_a_grammar_change_no_text_by_speculation(engine):
    """And the text is the grammar's, whatever they forbid."""
    loaded = engine("llama-near")

    @hypothesis.settings(max_examples=30, database=None)
    @hypothesis.given(ANY_RULES, GRAMMARS, st.lists(st.integers(3, 319), min_size=1, max_size=12), st.integers(1, 24))
    def check(stated: Said, grammar: str, prompt: list[int], most: int) -> None:
        params = SamplingParams(
            temperature=0.0, max_tokens=most, grammar=grammar, rules=GenerationRules(**stated), logprobs=1
        )
        plain = loaded.generate(prompt, params, PLAIN)
        for method in loaded.methods:
            details = {"hypothesis": plain.text or "x"} if method == "hypothesis" else {}
            fast = loaded.generate(prompt, params, Speculative(method=method, **details))
            assert (fast.token_ids, fast.finish_reason) == (plain.token_ids, plain.finish_reason), method
        if plain.finish_reason == "stop":
            matched = grammars(loaded).constraint("grammar", grammar)
            for token in plain.token_ids:
                mask = matched.apply(np.zeros((1, 320), np.float32), TokenTree.chain(1), np.empty(0, np.int64))[0]
                assert mask[token] == 0, plain.text
                matched.advance([token])

    check()


def test_a_grammar_comes_before_the_models_rules(with_defaults):
    near = with_defaults({"no_repeat_ngram_size": 1, "forced_eos_token_id": EOS, "min_new_tokens": 9, "min_length": 99})
    completion = near.generate(PROMPT, near.params(max_tokens=30, grammar='start: "aaaa"'))
    assert completion.text == "aaaa"


# --- lengths and stops ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "length"),
    [
        ({"max_new_tokens": 9}, 9),
        ({"max_length": 12}, 5),
        ({"max_length": 12, "max_new_tokens": 9}, 9),
        ({"max_length": 300, "suppress_tokens": [EOS]}, 293),
    ],
)
def test_lengths_are_transformers(document, length, with_defaults, expected):
    near = with_defaults(document)
    completion = near.generate(PROMPT)
    assert len(completion.token_ids) == length
    assert list(completion.token_ids) == expected(document, PROMPT)
    assert len(near.generate(PROMPT, near.params(max_tokens=7, ignore_eos=True)).token_ids) == 7


def test_a_prompt_longer_than_max_length_is_refused_by_name(with_defaults):
    near = with_defaults({"max_length": 5})
    with pytest.raises(RequestError, match="7 tokens, but the model's own max_length is 5"):
        near.generate(PROMPT)
    assert near.generate(PROMPT, near.params(max_tokens=3, ignore_eos=True)).token_ids


def test_the_models_least_length_yields_to_a_request(with_defaults):
    near = with_defaults({"min_new_tokens": 20})
    assert near.params().min_tokens == 20
    assert near.params(max_tokens=4).min_tokens == 4
    assert near.params(max_tokens=40, min_tokens=0).min_tokens == 0
    with pytest.raises(RequestError, match="min_tokens is 9; expected 0 to max_tokens"):
        near.params(max_tokens=4, min_tokens=9)


def test_stop_strings_end_the_text(with_defaults):
    whole = with_defaults({}).generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=LENGTH)).text
    stop = whole[5:8]
    near = with_defaults({"stop_strings": [stop, "nowhere"]})
    completion = near.generate(PROMPT)
    assert (completion.text, completion.finish_reason) == (whole[: whole.index(stop)], "stop")
    assert near.generate(PROMPT, near.params(stop=())).text.startswith(whole)


def test_without_the_file_older_configurations_say_it(target, tmp_path):
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config |= {"repetition_penalty": 1.2, "max_length": 60}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    defaults, ends = read_generation(tmp_path, read_model_config(tmp_path))
    assert (defaults.repetition_penalty, defaults.rules.max_length, ends) == (1.2, 60, (EOS,))
    (tmp_path / "generation_config.json").write_text('{"do_sample": true}', encoding="utf-8")
    assert read_generation(tmp_path, read_model_config(tmp_path)) == (GenerationDefaults(temperature=1.0), (EOS,))


@pytest.mark.parametrize(
    ("key", "value", "place"),
    [
        ("repetition_penalty", 0, "repetition_penalty"),
        ("no_repeat_ngram_size", -1, "no_repeat_ngram_size"),
        ("bad_words_ids", [[]], "bad_words_ids[0]"),
        ("bad_words_ids", [[3, -1]], "bad_words_ids[0][1]"),
        ("bad_words_ids", [[99999]], "bad_words_ids is 99999"),
        ("forced_eos_token_id", 99999, "forced_eos_token_id is 99999"),
        ("sequence_bias", [[[99999], 1.0]], "sequence_bias is 99999"),
        ("suppress_tokens", [1.5], "suppress_tokens[0]"),
        ("typical_p", 0, "typical_p"),
        ("max_new_tokens", 0, "max_new_tokens"),
        ("stop_strings", [""], "stop_strings"),
        ("stop_strings", "a\ud800", "stop_strings"),
        ("eos_token_id", "\ud800", "eos_token_id has U+D800, half of a character"),
        ("no_repeat_ngram_size", 10**30, "no_repeat_ngram_size"),
    ],
)
def test_faults_are_named_with_their_file(key, value, place, with_settings):
    folder = with_settings({"do_sample": True, key: value})
    with pytest.raises(BuildError) as caught:
        read_generation(folder, read_model_config(folder))
    assert "generation_config.json" in str(caught.value) and place in str(caught.value)


# --- filters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "document",
    [
        {"typical_p": 0.7},
        {"epsilon_cutoff": 0.01},
        {"epsilon_cutoff": 0.9},
        {"eta_cutoff": 0.02},
        {"top_h": 0.4},
        {"top_p": 0.0},
        {"top_h": 0.8, "temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
        {"typical_p": 0.9, "epsilon_cutoff": 0.002, "eta_cutoff": 0.004, "temperature": 0.8, "top_p": 0.95},
    ],
    ids=str,
)
def test_filters_are_transformers(document, model, with_defaults):
    params = with_defaults({"do_sample": True, **document}).params()
    config = GenerationConfig(do_sample=True, **document)
    model._prepare_special_tokens(config)
    filters = model._get_logits_processor(config, input_ids_seq_length=1)
    random = np.random.default_rng(0)
    for spread in (0.5, 2.0, 6.0):
        logits = (spread * random.normal(size=320)).astype(np.float32)
        probs = filters(torch.tensor([[1]]), torch.tensor(logits)[None].double()).softmax(-1)[0].numpy()
        p = target_distribution(logits, params)
        whole = np.zeros(320)
        whole[slice(None) if p.ids is None else p.ids] = p.probs
        assert whole == pytest.approx(probs, abs=1e-6)


def test_filters_do_not_matter_where_nothing_is_drawn(with_defaults):
    assert with_defaults({"typical_p": 0.2, "top_h": 0.3}).params() == with_defaults({}).params()
