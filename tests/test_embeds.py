"""Prompts that hold embeddings: what transformers says of them, whatever speculates, and nothing shared by mistake."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport import LLM, AsyncEngine
from specexport.contract.errors import BuildError, RequestError
from specexport.runtime import EmbedsPrompt, Engine, SamplingParams
from specexport.runtime.prompt import EncodedPrompt
from specexport.runtime.speculative import PLAIN
from specexport.tree_search import record_proposals
from tests.streams import started, tokens_of

NAMES = ("gemma2-embeds", "granite-embeds")
"""Gemma's embedding layer scales; Granite multiplies later. The second is lowered portably and has Medusa heads."""
NAME = NAMES[0]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
H = 64


def prompt(case: dict[str, Any]) -> EmbedsPrompt:
    return EmbedsPrompt([part if isinstance(part[0], int) else np.array(part) for part in case["prompt"]])


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, H))


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_equals_transformers(engine, oracle, name):
    loaded = engine(name)
    ways: list[dict[str, Any]] = [{"num_speculative_tokens": 0}, {}]
    ways += [{"method": method} for method in loaded.methods if method not in ("self_draft", "hypothesis")]
    for case in oracle(name)["embeds"]:
        expected = case["tokens"]
        params = GREEDY.replace(max_tokens=len(expected))
        if "ids" in case:
            assert list(loaded.generate(case["ids"], params, PLAIN).token_ids) == expected
        hypotheses = [{"hypothesis": [*expected[:9], 4, *expected[10:]]}] if "hypothesis" in loaded.methods else []
        for way in [*ways, *hypotheses]:
            done = loaded.generate(prompt(case), params, way)
            assert list(done.token_ids) == expected, (list(map(len, case["prompt"])), way)
        if hypotheses:
            assert done.stats.accepted > 8


def test_seeds_give_the_same_samples_after_tokens(engine, oracle):
    loaded, params = engine(NAME), SamplingParams(temperature=1.0, seed=3, max_tokens=16, ignore_eos=True)
    for case in (case for case in oracle(NAME)["embeds"] if "ids" in case):
        for method in ("ngram", "lookahead"):
            expected = loaded.generate(case["ids"], params, PLAIN).token_ids
            assert loaded.generate(prompt(case), params, PLAIN).token_ids == expected
            done = loaded.generate(prompt(case), params, method)
            assert len(done.token_ids) == len(expected)


def test_nothing_proposes_an_embedding(engine):
    """Embeddings that repeat are found like tokens that do, and what follows them is proposed up to the next one."""
    loaded = engine(NAME)
    again = rows(4)
    text = EmbedsPrompt([again, again, [7, 8, 9, 10], again, [7, 8, 9, 10], again[:2], [7, 8], again])
    for method in ("ngram", "suffix", "lookahead"):
        with record_proposals(loaded, method) as recorder:
            done = loaded.generate(text, GREEDY.replace(ignore_eos=True), method)
        proposals = [proposal for _, proposal in recorder]
        assert proposals
        assert min(int(proposal.tokens.min(initial=0)) for proposal in proposals) >= 0
        assert all(proposal.wider is None or proposal.wider.tokens.min() >= 0 for proposal in proposals)
        assert done.token_ids == loaded.generate(text, GREEDY.replace(ignore_eos=True), PLAIN).token_ids


def test_prefixes_are_shared_by_equal_embeddings_alone(bundle):
    params = GREEDY.replace(logprobs=0, max_tokens=4)

    def said(first: Engine, text: Any) -> tuple[Any, list[float]]:
        done = first.generate(text, params)
        return done, [entry.logprob for entry in done.logprobs]

    texts = [EmbedsPrompt([rows(30, seed), [5, 6]]) for seed in (1, 2)]
    with Engine.load(bundle(NAME), threads=1, prefix_cache=False) as alone:
        expected = [said(alone, text)[1] for text in texts]
    assert abs(expected[0][0] - expected[1][0]) > 1e-3
    with Engine.load(bundle(NAME), threads=1, max_batch_size=1) as loaded:
        for index, cached in ((0, 0), (1, 0), (1, 31), (0, 0)):
            done, logprobs = said(loaded, texts[index])
            assert logprobs == pytest.approx(expected[index], abs=1e-4)
            assert done.stats.cached_tokens == cached
        longer = EmbedsPrompt([rows(30, 1), [5, 6, 7]])
        assert loaded.generate(longer, params).stats.cached_tokens == 32
        # Tokens that begin alike are no embeddings that begin alike.
        assert loaded.generate([0] * 40, params).stats.cached_tokens == 0


def test_batched_requests_equal_single_ones(engine):
    loaded = engine(NAME)
    texts: list[Any] = [
        EmbedsPrompt([rows(70, 1)]),
        [int(token) for token in np.random.default_rng(5).integers(3, 300, 40)],
        EmbedsPrompt([[5, 6], rows(3, 2), [9]]),
        EmbedsPrompt([rows(1, 3)]),
    ]
    ways: list[dict[str, Any]] = [{"method": "lookahead"}, {}, {"method": "ngram"}, {"num_speculative_tokens": 0}]
    alone = [loaded.generate(text, GREEDY, PLAIN).token_ids for text in texts]
    streams = started(loaded.stream(text, GREEDY, way) for text, way in zip(texts, ways, strict=True))
    together = [tokens_of(stream) for stream in streams]
    assert together == alone


def test_a_draft_reads_no_embeddings(engine):
    loaded = engine(NAME)
    text = EmbedsPrompt(rows(4))
    with loaded.stream([5], GREEDY) as stream:
        assert stream.method == "self_draft"
    with loaded.stream(text, GREEDY) as stream:
        assert stream.method == "ngram"
    with pytest.raises(RequestError, match="'self_draft', whose model reads tokens alone"):
        loaded.stream(text, GREEDY, "self_draft")


def test_wrong_prompts_are_explained(engine):
    loaded = engine(NAME)
    good = rows(3)
    for parts, reason in (
        (good[:, :60], r"part 0 is float64\[3,60\]; expected embeddings, floating-point \[N,64\]"),
        ([good, good[0]], r"part 1 is float64\[64\]"),
        ([good, good.astype(np.int64)], r"part 1 is int64\[3,64\]"),
        ([good, good[:0]], r"part 1 is float64\[0,64\]"),
        ([good, None], r"part 1 is object\[\]"),
        ([good, [[1, 2], [3]]], "part 1: cannot be read as an array"),
        (np.full((2, H), np.nan), "part 0 has numbers that are not finite"),
        (np.full((2, H), 1e39), "part 0 has numbers that are not finite in float32"),
        ([good, [5, 4000]], "the prompt holds token 4000; the model has tokens 0 to 319"),
        ([good, [-7]], "the prompt holds token -7"),
        (["only text"], "no part holds embeddings"),
        ([], "no part holds embeddings"),
        (np.broadcast_to(np.float32(0), (2**40, H)), "positions up to part 0, but this bundle's context holds 512"),
    ):
        with pytest.raises(RequestError, match=reason):
            loaded.stream(EmbedsPrompt(parts), GREEDY)
    with pytest.raises(RequestError, match="the bundle was built without --inputs-embeds"):
        engine("qwen3-lookup").stream(EmbedsPrompt(good), GREEDY)
    # What is given is taken as it is then, and read as float32 whatever it was.
    stream = loaded.stream(EmbedsPrompt(inputs := good.astype(np.float16)), GREEDY)
    inputs[:] = 0
    tokens = list(tokens_of(stream))
    assert tokens == list(loaded.generate(EmbedsPrompt(good.astype(np.float16)), GREEDY).token_ids)
    # A part may be a batch of one, of any kind of integers.
    ids, batch = np.array([5, 6]), good[None]
    expected = loaded.encode(EmbedsPrompt([good, ids])).tokens
    for kind in (np.int64, np.uint32):
        assert loaded.encode(EmbedsPrompt([batch, ids.astype(kind)[None]])).tokens == expected
    # Only a text that comes first has the tokenizer's special tokens.
    assert loaded.encode(EmbedsPrompt(["one", good, " two"])).tokens[-1:] == loaded.encode(" two")[-1:]


def test_embeddings_lie_where_they_are_read():
    held = EncodedPrompt([0] * 5, np.arange(6, dtype=np.float32).reshape(3, 2), np.array([-1, 0, 1, -1, 2]))
    inputs, mask = np.full((3, 2), 9, np.float32), np.ones(3, np.bool_)
    for start, expected, at in ((0, [[9, 9], [0, 1], [2, 3]], [0, 1, 1]), (4, [[4, 5], [0, 1], [2, 3]], [1, 0, 0])):
        held.put(start, inputs, mask)
        assert (inputs.tolist(), mask.tolist()) == (expected, at)
    held.put(7, inputs, mask)
    assert not mask.any()


def test_llm(bundle, engine):
    inputs = rows(5)
    expected = engine(NAME).generate(EmbedsPrompt([inputs, [5]]), GREEDY).token_ids
    with LLM(bundle=bundle(NAME), threads=1, calibrate=False) as llm:
        (completion,) = llm.generate({"prompt_embeds": [inputs, [5]]}, GREEDY, use_tqdm=False)
        assert (completion.outputs[0].token_ids, completion.prompt_token_ids) == (expected, (-1, -1, -1, -1, -1, 5))
        with pytest.raises(RequestError, match="prompt 0: prompt_embeds: part 0 is float64"):
            llm.generate({"prompt_embeds": inputs[0]}, GREEDY, use_tqdm=False)


def test_run(bundle, engine, tmp_path, cli):
    inputs, folder, file = rows(5), str(bundle(NAME)), tmp_path / "sound.npy"
    np.save(file, inputs)
    words = ["run", folder, "--prompt-embeds", str(file), "-n", "24", "--temperature", "0", "--json"]
    words.append("--no-calibrate")
    for more, parts in (([], [inputs]), (["-p", " one two"], [inputs, " one two"])):
        expected = engine(NAME).generate(EmbedsPrompt(parts), GREEDY).token_ids
        assert tuple(cli(*words, *more).json["token_ids"]) == expected
    np.save(file, np.array([object()]), allow_pickle=True)
    for at, reason in ((file, "sound.npy: cannot be read as an array"), (tmp_path / "none.npy", "none.npy: cannot be")):
        assert reason in cli("run", folder, "--prompt-embeds", at, status=1).err


async def test_async_engine(bundle, engine):
    text = EmbedsPrompt([[5], rows(3)])
    async with AsyncEngine.open(bundle=bundle(NAME), threads=1, calibrate=False) as serving:
        tokens = [token async for chunk in serving.generate(text, GREEDY) for token in chunk.token_ids]
    assert tuple(tokens) == engine(NAME).generate(text, GREEDY).token_ids


@pytest.mark.exporter
def test_building(bundle, cli):
    from specexport.exporter.engines.bundle import compile_bundle
    from specexport.exporter.options import BuildOptions, CompileOptions
    from specexport.verify.bundle import verify

    folder = bundle(NAMES[1])
    report = verify(folder, prompts=("the words of all",), max_tokens=4)
    assert report.passed, report
    checks = {check.name: check for check in report.checks}
    assert checks["embeds"].passed
    assert checks["embeds"].numbers["positions"] > 3
    assert "tokens and embeddings of 64 numbers" in cli("inspect", folder).out
    with pytest.raises(BuildError, match="inputs_embeds was given with backend tensorrt"):
        BuildOptions("model", Path("out"), inputs_embeds=True, backend="tensorrt")
    with pytest.raises(BuildError, match="was built with --inputs-embeds, but engines only read tokens"):
        compile_bundle(folder, CompileOptions("tensorrt-rtx"))
