"""Outputs bound to JSON schemas: the mask at every node, and what speculation must not change."""

import itertools
import json
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import hypothesis
import llguidance
import numpy as np
import pytest
from hypothesis import strategies as st

from specexport.contract.tree import TokenTree
from specexport.runtime import Engine, RequestError, SamplingParams
from specexport.runtime.constraint import MAX_SCHEMA, Grammars
from specexport.runtime.json_schema import prepared
from specexport.runtime.proposal import Proposal, SlotView
from specexport.runtime.speculative import PLAIN
from specexport.runtime.step import StepProgram
from tests.reference import same_p

PROMPT = (17, 180, 33, 250)
# Random models like whitespace as much as anything else, and would never come to an end.
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "alive": {"type": "boolean"},
        "kind": {"enum": ["cat", "dog", "horse"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["alive", "kind", "age"],
    "additionalProperties": False,
    **COMPACT,
}
BRANCHES = TokenTree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])


def fits(text: str) -> bool:
    value = json.loads(text)
    assert list(value) == ["alive", "kind", "age"]
    assert isinstance(value["alive"], bool)
    assert value["kind"] in ("cat", "dog", "horse")
    return type(value["age"]) is int and 0 <= value["age"] <= 99


def grammars(engine: Engine) -> Grammars:
    return Grammars(engine.tokenizer, engine.manifest.target.vocab_size, engine.manifest.tokenizer.eos_token_ids)


def accepts(engine: Engine, kind: str, bound: str, text: str | list[int], **options: bool) -> bool:
    """Whether a whole text, or one of these tokens, fits a schema or a grammar."""
    matcher = grammars(engine).constraint(kind, bound, **options)._matcher
    tokens = engine.tokenizer.encode(text, add_special_tokens=False).ids if isinstance(text, str) else text
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("seed", range(4))
def test_every_node_has_the_mask_of_its_own_path(engine, seed):
    factory, schema, random = grammars(engine("llama-near")), json.dumps(PERSON), np.random.default_rng(seed)
    vocab = engine("llama-near").manifest.target.vocab_size
    text: list[int] = []
    bound = factory.constraint("json_schema", schema)
    while len(text) < 40 and (not text or text[-1] != 1):
        logits = random.normal(size=(len(BRANCHES), vocab)).astype(np.float32)
        before = logits.copy()
        # Some of the draft is what the grammar allows there, and some is anything.
        likely = np.flatnonzero(np.isfinite(bound.apply(logits[:1], TokenTree.chain(1), np.empty(0, np.int64))[0]))
        draft = np.where(
            random.random(len(BRANCHES) - 1) < 0.7,
            random.choice(likely, len(BRANCHES) - 1),
            random.integers(0, vocab, len(BRANCHES) - 1),
        )
        masked = bound.apply(logits, BRANCHES, draft)
        assert (logits == before).all()
        for node in range(len(BRANCHES)):
            path = [int(draft[at - 1]) for at in np.flatnonzero(BRANCHES.mask[node])[1:]]
            alone = factory.constraint("json_schema", schema)
            expected = alone.apply(logits[:1], TokenTree.chain(1), np.empty(0, np.int64))[0]
            reached = True
            for token in (*text, *path):
                reached = reached and bool(np.isfinite(expected[token])) and token != 1
                if not reached:
                    break
                alone.advance([token])
                expected = alone.apply(logits[node : node + 1], TokenTree.chain(1), np.empty(0, np.int64))[0]
            if reached:
                assert (np.isfinite(masked[node]) == np.isfinite(expected)).all()
        token = int(masked[0].argmax())
        bound.advance([token])
        text.append(token)
    assert fits(engine("llama-near").tokenizer.decode(text))


def test_a_tokenizer_is_read_once_and_beforehand(engine, spy):
    factory = grammars(engine("llama-near"))
    read = spy(llguidance, "LLTokenizer", lambda *_, **__: True)
    waiting = [threading.Thread(target=factory.prepare) for _ in range(4)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    assert len(read) == 3  # its texts, and the texts with special tokens and without
    factory.constraint("json_schema", "{}")
    factory.constraint("grammar", 'start: "a"', skip_special_tokens=False)
    assert len(read) == 3
    Grammars(engine("llama-near").tokenizer, 320, []).prepare()  # without an end there is nothing to prepare


def test_outputs_of_one_grammar_share_its_compilation(engine, monkeypatch, spy):
    factory, from_lark = grammars(engine("llama-near")), llguidance.LLMatcher.grammar_from_lark
    compiled = spy(llguidance, "LLMatcher", lambda *_, **__: True)
    monkeypatch.setattr(llguidance.LLMatcher, "grammar_from_lark", from_lark, raising=False)
    first, second = (factory.constraint("grammar", "start: /[a-c]+/") for _ in range(2))
    letters = [engine("llama-near").tokenizer.token_to_id(letter) for letter in "ab"]
    first.advance(letters)
    second.advance(letters[:1])
    assert len(compiled) == 1
    factory.constraint("grammar", "start: /[a-c]+/", skip_special_tokens=False)
    assert len(compiled) == 2


@pytest.mark.parametrize("name", ["llama-near", "gpt2-tree", "qwen3-medusa"])
def test_greedy_output_is_the_same_with_and_without_speculation(name, engine):
    params = SamplingParams(temperature=0.0, max_tokens=60, json_schema=PERSON)
    fast, plain = (engine(name).generate(PROMPT, params, None if on else PLAIN) for on in (True, False))
    assert fast.token_ids == plain.token_ids
    assert fast.finish_reason == "stop"
    assert fits(fast.text)
    assert fast.stats.drafted > 0


@pytest.mark.parametrize("acceptance", ["lossless", "typical"])
def test_whatever_is_sampled_fits(engine, acceptance):
    kinds = set()
    for seed in range(12):
        params = SamplingParams(
            temperature=1.5, max_tokens=60, seed=seed, acceptance=acceptance, json_schema=json.dumps(PERSON)
        )
        completion = engine("llama-near").generate(PROMPT, params)
        assert completion.finish_reason == "stop"
        assert fits(completion.text)
        kinds.add(json.loads(completion.text)["kind"])
    assert len(kinds) > 1


def test_speculation_samples_the_same_masked_distribution(engine):
    schema = json.dumps({"enum": ["a", "b", "cd", "ce", 7]} | COMPACT)
    counts = []
    for speculation in (True, False):
        histogram: Counter[str] = Counter()
        for seed in range(200):
            params = SamplingParams(temperature=1.0, max_tokens=12, seed=seed + 1000 * speculation, json_schema=schema)
            histogram[engine("llama-near").generate(PROMPT, params, None if speculation else PLAIN).text] += 1
        counts.append(histogram)
    assert same_p(*counts) > 1e-4


def test_stop_texts_and_logprobs_go_with_it(engine):
    params = SamplingParams(temperature=0.0, max_tokens=60, logprobs=1, stop='"kind"', json_schema=json.dumps(PERSON))
    completion = engine("llama-near").generate(PROMPT, params)
    assert completion.text.startswith('{"alive":')
    assert completion.text.endswith(",")
    # They are the model's own, which would have said something else.
    assert any(entry.rank > 1 for entry in completion.logprobs)
    assert all(np.isfinite(entry.logprob) for entry in completion.logprobs)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("{", "the JSON schema cannot be used: it is not JSON: .* line 1 column 2"),
        ('{"type": "magic"}', "Invalid type: magic"),
        ('{"$ref": "http://localhost/secret"}', "cannot be used"),
        ('{"type": "string", "pattern": "("}', "cannot be used: regex parse error.*unclosed group"),
        ('{"not": {"const": 1}}', "Unimplemented keys"),
        ('{"not": {}}', "Unsatisfiable schema"),
        ("3", "cannot be used"),
        ('{"const": "\ud83d"}', "half of a character"),
        (json.dumps({"enum": ["x" * 1000 + str(at) for at in range(70)]}), "characters; expected at most 65536"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused(engine, schema, words):
    with pytest.raises(RequestError, match=words):
        engine("llama-near").stream(PROMPT, SamplingParams(json_schema=schema))


def test_keywords_that_constrain_nothing_are_accepted(engine):
    """As generators of schemas write them; llguidance refuses them."""
    idle = {"uniqueItems": False, "propertyNames": {"type": "string"}, "format": "password"}
    used = {"format": "date", "minLength": 10, "enum": [{"format": "password"}]}
    schema = {
        **idle,
        "properties": {"format": {**used, **idle, "format": "date"}, "uniqueItems": {"anyOf": [idle]}},
        "additionalProperties": {"type": "array", "items": idle, "minContains": 0},
    }
    compiled = grammars(engine("llama-near"))
    optional = {"anyOf": [{"not": {}}, {"type": "string"}]}
    for accepted in ({"type": "object", **idle}, {"properties": {"a": optional}, "additionalProperties": {"not": {}}}):
        compiled.constraint("json_schema", json.dumps(accepted))
    assert prepared(schema) == {
        "properties": {"format": used, "uniqueItems": {"anyOf": [{}]}},
        "additionalProperties": {"type": "array", "items": {}},
    }
    for other in ({"format": "regex"}, {"uniqueItems": True}, {"propertyNames": {"pattern": "a"}}):
        with pytest.raises(RequestError, match=r"Unknown format|Unimplemented keys"):
            compiled.constraint("json_schema", json.dumps({"type": "string", **other}))


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["0", f"{2**63 - 1}"], [f"{2**63}"]),
        ({"type": "integer", "minimum": 2**53 + 1}, [f"{2**53 + 2}"], [f"{2**53}"]),
        ({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, ["-1.5", "9" * 18], []),
        ({"type": "integer", "exclusiveMinimum": 0, "maximum": 2**64 - 1}, ["1", f"{2**62}"], ["0", f"{2**64}"]),
        ({"const": 2**63 - 1}, [f"{2**63 - 1}"], []),
        ({"type": "integer", "multipleOf": 25000}, ["50000"], ["10000"]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[1]"], ["[1,1]"]),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, ["[1,1]"], []),
        ({"pattern": r"^(?=.*[A-Z])(?=\D*\d).{3,}$"}, ['"aA1"', '"A1b"'], ['"A1"', '"aa1"', '"aaA"']),
        # zod's pattern of e-mail addresses
        (
            {"pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z\-]*\.)+[a-z]{2,}$"},
            ['"a.b@c.de"', '"a@c.de"'],
            ['".a@c.de"', '"a..b@c.de"', '"a@c..de"'],
        ),
        ({"pattern": "^(?![^ab])(?!a)[abc]$"}, ['"b"'], ['"a"', '"c"']),
    ],
)
def test_what_llguidance_does_not_follow_is_rewritten(engine, schema, allowed, refused):
    schema = {"type": "string", **schema} if "pattern" in schema else schema
    for text in allowed + refused:
        assert accepts(engine("llama-near"), "json_schema", json.dumps(schema), text) == (text in allowed), text


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"const": -(2**63)}, "const has the number -9223372036854775808, which a double does not hold"),  # a crash
        ({"enum": [[{"a": -9.223372036854775808e18}]]}, "enum has the number -9.2"),
        ({"enum": [1, 2**53 + 1]}, "write it as a text"),  # it would write another number
        ({"const": 10**400}, "does not hold"),
        ({"type": "integer", "minimum": 2**63}, "minimum is 9223372036854775808; .* too many digits"),
        ({"type": "integer", "multipleOf": 2**31}, "multipleOf is 2147483648; expected at most 100000"),  # minutes
        ({"type": "number", "multipleOf": 1.000003}, "multipleOf is 1.000003"),
        ({"type": "array", "uniqueItems": True}, '"uniqueItems".*leave them out, or .*"lenient": true}'),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 'write anyOf, or .*"coerce_one_of": true'),
        ({"type": "string", "pattern": "^(?=a)a|b$"}, "look-ahead at a pattern's start"),
        ({"type": "string", "pattern": "^(?!ab)a"}, "look-ahead at a pattern's start"),
        ({"type": "string", "pattern": "^(?=a"}, "regex parse error"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_a_way_out(engine, schema, words):
    for text in ({"json_schema": json.dumps(schema)}, {"grammar": f"start: %json {json.dumps(schema)}"}):
        with pytest.raises(RequestError, match=words):
            engine("llama-near").stream(PROMPT, SamplingParams(**text))


def test_long_chains_of_rules_do_not_overflow_the_stack(engine):
    """Which would end the process."""
    names = ["".join(letters) for letters in itertools.product("bcdefghijklmnopqrstuvwxyz", repeat=3)]
    lark = "start: bbb\n" + "\n".join(f"{name}:{after}" for name, after in itertools.pairwise(names[:8000]))
    chain = {name: {"$ref": f"#/$defs/{after}"} for name, after in itertools.pairwise(names[:2100])}
    schema = {"$defs": chain | {names[2099]: {"const": 1}}, "$ref": "#/$defs/bbb"}
    texts = {"grammar": f'{lark}\n{names[7999]}:"1"', "json_schema": json.dumps(schema, separators=(",", ":"))}
    for param, text in texts.items():
        assert 0.9 * MAX_SCHEMA < len(text) <= MAX_SCHEMA
        bound = grammars(engine("llama-near")).constraint(param, text)
        (one,) = engine("llama-near").tokenizer.encode("1", add_special_tokens=False).ids
        assert bound._matcher.consume_token(one)


def test_a_grammar_that_cannot_be_used_is_refused(engine):
    with pytest.raises(RequestError, match="the grammar cannot be used"):
        engine("llama-near").stream(PROMPT, SamplingParams(grammar="start: nothing"))


# --- the end of a text in a draft ------------------------------------------------------------------------------------

PAIR: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"const": 1}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
EOS = 1
_LEAVES = st.sampled_from(
    [
        {"const": 1},
        {"const": "</s>"},
        {"enum": ["x", "y", 'a"b', "xy"]},
        {"type": "boolean"},
        {"type": "integer", "minimum": 0, "maximum": 99},
        {"type": "string", "maxLength": 3},
        {"type": "string", "pattern": "^[ab]{1,2}$"},
    ]
)
SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(
            lambda fields: {
                "type": "object",
                "properties": dict(zip("abc", fields, strict=False)),
                "required": list("abc"[: len(fields)]),
                "additionalProperties": False,
            }
        )
        | inner.map(lambda item: {"type": "array", "items": item, "maxItems": 2})
    ),
    max_leaves=4,
)
TREES = st.lists(st.integers(0, 5), min_size=1, max_size=9).map(
    lambda parents: TokenTree((-1, *(min(parent, at) for at, parent in enumerate(parents))), (0,) * (len(parents) + 1))
)


def model(text: Sequence[int], seed: int, vocab: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits that depend on the whole text, and leave no doubt at a temperature of 1."""
    random = np.random.default_rng([seed, *text])
    return 1e4 * random.permutation(vocab).astype(np.float32)


def decoded(
    checkpoint: Grammars,
    schema: Any,
    vocab: int,
    seed: int,
    temperature: float,
    trees: Sequence[TokenTree],
    stop: int | None,
) -> tuple[list[int], bool]:
    """A text and whether it ended, as the step's acceptance makes it; drafts are right, wrong or the end at random."""
    bound = checkpoint.constraint("json_schema", json.dumps(schema), stop_token_ids=() if stop is None else (stop,))
    params = SamplingParams(temperature=temperature, max_tokens=80)
    random, text, ends = np.random.default_rng(seed), list[int](), {EOS, stop}
    while len(text) < params.max_tokens:
        tree = trees[len(text) % len(trees)]
        rows, drafted = np.empty((len(tree), vocab), np.float32), np.zeros(len(tree) - 1, np.int64)
        for node in range(len(tree)):
            path = [int(drafted[at - 1]) for at in np.flatnonzero(tree.mask[node])[1:]]
            rows[node] = model([*text, *path], seed, vocab)
            likely = bound.apply(rows, tree, drafted)[node].argmax()
            for child in tree.children[node]:
                drafted[child - 1] = random.choice([likely, likely, likely, EOS, random.integers(vocab)])
        proposal = Proposal(drafted, tree, None, drafted[:, None])
        view = SlotView(0, [5, *text], params, random, tree, processors=[bound])
        path, bonus = StepProgram._accept(view, proposal, rows)
        new = [*(int(drafted[node - 1]) for node in path), bonus]
        bound.advance(new)
        bound.check()
        for token in new[: params.max_tokens - len(text)]:
            text.append(token)
            if token in ends:
                return text, True
    return text, False


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@hypothesis.settings(max_examples=40)
@hypothesis.given(
    schema=SCHEMAS,
    seed=st.integers(0, 1 << 20),
    trees=st.lists(TREES, min_size=1, max_size=3),
    stop=st.none() | st.integers(3, 319),
)
def test_a_draft_changes_no_bound_text(engine, temperature, schema, seed, trees, stop):
    factory, vocab = grammars(engine("llama-near")), engine("llama-near").manifest.target.vocab_size
    plain = decoded(factory, schema, vocab, seed, temperature, [TokenTree.chain(1)], stop)
    assert decoded(factory, schema, vocab, seed, temperature, trees, stop) == plain
    if plain[1] and stop is None:
        json.loads(engine("llama-near").tokenizer.decode(plain[0]))


def conversation(engine: Engine) -> list[int]:
    """Three turns that were answered by the same JSON, each with the end token behind it."""
    answered = engine.tokenizer.encode('{"a":1,"b":"x"}', add_special_tokens=False).ids
    request = engine.tokenizer.encode("say it", add_special_tokens=False).ids
    return [*([*request, *answered, EOS] * 3), *request]


@pytest.mark.parametrize("name", ["llama-near", "gpt2-tree", "qwen3-medusa", "qwen3-lookup"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prompt_with_end_tokens_is_answered(name, temperature, engine):
    """Look-ups draft the answers before, with the end token and what came behind it."""
    loaded, drafted = engine(name), 0
    prompt, answer = conversation(loaded), '{"a":1,"b":"x"}'
    bias = {} if temperature else dict.fromkeys(loaded.tokenizer.encode(answer + "</s>").ids, 60.0)
    params = SamplingParams(
        temperature=temperature, max_tokens=120, json_schema=json.dumps(PAIR), logit_bias=bias, logprobs=2, seed=1
    )
    plain = loaded.generate(prompt, params, PLAIN)
    for method in loaded.methods:
        expected = {"hypothesis": f"{answer}</s>say it{answer}"} if method == "hypothesis" else {}
        completion = loaded.generate(prompt, params, {"method": method, **expected})
        assert completion.finish_reason == "stop", method
        assert json.loads(completion.text)["a"] == 1
        drafted += completion.stats.accepted
        if not temperature:
            assert completion.token_ids == plain.token_ids, method
            assert (completion.text, completion.logprobs) == (plain.text, plain.logprobs), method
    assert drafted > 0


def test_a_stop_token_ends_a_bound_text_where_it_may_end(engine):
    loaded = engine("llama-near")
    stop, letter = (loaded.tokenizer.encode(text).ids[0] for text in ("!", "b"))
    for grammar, text in (('start: "abc" "d"?', "abc"), ('start: "ab!c"', "ab"), ('start: "a" /b+/', "ab")):
        bias = {stop: 100.0, letter: 60.0}
        for method in (PLAIN, None, "ngram"):
            params = SamplingParams(
                temperature=0.0, max_tokens=20, grammar=grammar, stop_token_ids=(stop,), logit_bias=bias
            )
            completion = loaded.generate(loaded.tokenizer.encode("ab!cab!cab").ids, params, method)
            assert (completion.text, completion.token_ids[-1], completion.finish_reason) == (text, stop, "stop")


@pytest.mark.parametrize(
    "bound",
    [{"json_schema": json.dumps(PAIR)}, {"grammar": f'start: "a" %json {json.dumps(PAIR)} "%json {{}}" // %json {{}}'}],
)
def test_white_space_is_bounded(engine, bound):
    """A model that likes nothing better comes to an end."""
    loaded = engine("llama-near")
    white = [token for token in range(3, 318) if not loaded.tokenizer.decode([token]).strip(" \n\t\r")]
    params = SamplingParams(temperature=0.0, max_tokens=200, logit_bias=dict.fromkeys(white, 100.0), **bound)
    completion = loaded.generate(PROMPT, params)
    assert completion.finish_reason == "stop"
    assert json.loads(completion.text.removeprefix("a").removesuffix("%json {}"))["a"] == 1
    assert "\n" in completion.text or "  " not in completion.text


def test_a_schema_chooses_its_white_space(engine):
    def taken(schema: Any, text: str) -> bool:
        return accepts(engine("llama-near"), "json_schema", json.dumps(schema), text)

    pretty = json.dumps({"a": 1, "b": "x"}, indent=4)
    for text, default, flexible, compact in (
        ('{"a":1,"b":"x"}', True, True, True),
        ('{"a": 1, "b": "x"}', True, True, False),
        (pretty, True, True, False),
        (pretty.replace("    ", " " * 17), False, True, False),
        ('{"a":   1, "b": "x"}', False, True, False),
    ):
        assert taken(PAIR, text) == default, text
        assert taken(PAIR | {"x-guidance": {"whitespace_flexible": True}}, text) == flexible, text
        assert taken(PAIR | COMPACT, text) == compact, text
    assert taken(True, '{"a": [1, "x"]}')
