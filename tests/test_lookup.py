"""N-gram lookup and the suffix automaton: what they find, against a slow search, and that nothing stays behind."""

import shutil
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport.contract.errors import BuildError, RequestError
from specexport.contract.reading import read_manifest, write_manifest
from specexport.contract.tree import TokenTree
from specexport.methods.ngram import Ngram, NgramIndex, NgramProposer
from specexport.methods.suffix import OutputStore, Suffix, SuffixAutomaton, SuffixProposer
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.proposal import SlotView, longest_chain
from specexport.runtime.speculative import PLAIN
from specexport.tree_search import record_proposals
from tests.fixtures import Bundles
from tests.manifests import curve
from tests.serving import served

NAME = "qwen3-lookup"
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
COPY = [*range(20, 60), *range(20, 30)]
RANDOM = [int(token) for token in np.random.default_rng(5).integers(3, 300, 40)]
WAYS = [(method, size) for method in ("ngram", "suffix") for size in (8, 4, 2)]

texts = st.lists(st.integers(0, 3), min_size=1, max_size=31)
short_texts = st.lists(st.integers(0, 2), max_size=24)


def chains(*sizes: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(TokenTree.chain(size + 1).choices for size in sizes)


def view(tokens: list[int], size: int, slot: int = 0) -> SlotView:
    return SlotView(slot, tokens, SamplingParams(), np.random.default_rng(0), TokenTree.chain(size + 1))


def occurrences(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """Where each occurrence of a part ends."""
    return [at + len(part) for at in range(len(text) - len(part) + 1) if list(text[at : at + len(part)]) == list(part)]


def longest_suffix(text: Sequence[int], within: Sequence[int], least: int) -> int:
    """The length of the longest suffix of a text that occurs ``least`` times in another."""
    return max(n for n in range(len(text) + 1) if n == 0 or len(occurrences(within, text[len(text) - n :])) >= least)


# --- the n-gram index -------------------------------------------------------------------------------------------------


@given(texts, st.integers(1, 3), st.integers(0, 3), st.data())
def test_the_index_equals_a_scan(text, shortest, more, data):
    longest = shortest + more
    index = NgramIndex(shortest, longest)
    cut = data.draw(st.integers(0, len(text)))
    index.extend(text[:cut])
    index.extend(text[cut:])
    assert len(index) == len(text)
    expected = None
    for n in range(longest, shortest - 1, -1):
        ends = [end for end in occurrences(text, text[-n:]) if end < len(text)] if n <= len(text) else []
        if ends:
            expected = (n, ends[-1])
            break
    assert index.match() == expected


def test_a_lookup_of_long_n_grams_takes_no_more_memory_and_bounded_time():
    text = [int(token) for token in np.random.default_rng(3).integers(0, 50, 4000)]
    sizes = []
    for longest in (2, 32):
        tracemalloc.start()
        index = NgramIndex(2, longest)
        index.extend(text)
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert sizes[1] < 1.1 * sizes[0]
    index.extend(text[500:600])
    assert index.match() == (32, 600)
    index = NgramIndex(1, 3)
    index.extend([7, 8, *[5, 8] * 200, 1, 7, 8])
    assert index.match() == (2, 2)
    index.extend([*[5, 8] * 300, 1, 7, 8])
    assert index.match() == (1, 1005)  # the 256 latest occurrences are preceded by 5


@given(texts, st.integers(1, 12))
def test_a_continuation_is_the_texts_own_and_then_periodic(text, count):
    index = NgramIndex(1, 3)
    index.extend(text)
    if (match := index.match()) is not None:
        grown = list(text)
        for _ in range(count):
            grown.append(grown[match[1] + len(grown) - len(text)])
        assert index.continuation(match[1], count) == grown[len(text) :]


# --- the suffix automaton ---------------------------------------------------------------------------------------------


def automaton(text: Sequence[int]) -> SuffixAutomaton:
    suffixes = SuffixAutomaton()
    for token in text:
        suffixes.append(token)
    return suffixes


@given(texts)
def test_the_automaton_holds_every_substring_with_its_count(text):
    suffixes = automaton(text)
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            state = suffixes.find(text[start:end])
            assert state is not None
            assert suffixes.count(state) == len(occurrences(text, text[start:end]))
    assert suffixes.repeated_suffix()[1] == longest_suffix(text, text, 2)


@given(texts, st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_the_automaton_holds_nothing_else(text, part):
    assert (automaton(text).find(part) is not None) == bool(occurrences(text, part))


@given(st.lists(st.integers(0, 1), min_size=60, max_size=90), st.integers(1, 4))
def test_counts_of_long_texts_never_exceed_the_truth(text, length):
    suffixes = automaton(text)
    for start in range(len(text) - length + 1):
        state = suffixes.find(text[start : start + length])
        assert state is not None
        assert 1 <= suffixes.count(state) <= len(occurrences(text, text[start : start + length]))


def test_counts_fall_behind_only_where_one_pattern_fills_the_text():
    periodic = automaton([7] * 100)
    state = periodic.find([7])
    assert state is not None
    assert periodic.count(state) < 100
    ordinary = [int(token) for token in np.random.default_rng(2).integers(0, 40, 2000)]
    suffixes = automaton(ordinary)
    for token, count in Counter(ordinary).items():
        state = suffixes.find([token])
        assert state is not None
        assert suffixes.count(state) == count


@given(short_texts, short_texts)
def test_a_match_is_the_longest_suffix_that_occurs(held, text):
    suffixes = automaton(held)
    state = length = 0
    for end, token in enumerate(text, start=1):
        state, length = suffixes.step(state, length, token)
        assert length == longest_suffix(text[:end], held, 1)
        assert state == suffixes.find(text[end - length : end])


@given(texts, st.integers(1, 6), st.sampled_from([0.0, 0.3, 0.6]))
def test_continuations_are_the_most_frequent(text, limit, least):
    suffixes = automaton(text)
    state, length = suffixes.repeated_suffix()
    tokens, expected = suffixes.continuation(state, limit, least)
    assert len(tokens) <= limit
    matched, chance, total = text[len(text) - length :], 1.0, 0.0
    for token in tokens:
        after: Counter[int] = Counter()
        while not after:  # at the text's end nothing follows; a shorter suffix of the match is gone on from
            after = Counter(text[end] for end in occurrences(text, matched) if end < len(text))
            matched = matched if after else matched[1:]
            assert matched
        assert after[token] == max(after.values())
        chance *= after[token] / after.total()
        assert chance >= least
        total += chance
        matched = [*matched, token]
    assert expected == pytest.approx(total)


# --- the store --------------------------------------------------------------------------------------------------------


def test_a_store_forgets_the_oldest_and_keeps_its_bound():
    store = OutputStore(40)
    for start in range(0, 300, 10):
        store.add(list(range(start, start + 7)))
        assert len(store) <= 40
        held = [automaton for automaton in store.automata if automaton.find([start, start + 1, start + 2]) is not None]
        assert held
    assert all(automaton.find([0, 1]) is None for automaton in store.automata)
    assert any(automaton.find([280, 281]) is not None for automaton in store.automata)
    # A match never goes from one output into the next.
    assert all(automaton.find([286, 290]) is None for automaton in store.automata)
    store.add(list(range(1000, 1100)))
    assert len(store) <= 40
    assert any(automaton.find([1098, 1099]) is not None for automaton in store.automata)


def test_outputs_too_short_to_match_are_not_stored():
    store = OutputStore(40)
    store.add([1, 2])
    assert len(store) == 0
    with pytest.raises(RequestError, match="suffix: store_tokens is 5; expected 0 for no store, or 8 or more"):
        OutputStore(5)


# --- proposing --------------------------------------------------------------------------------------------------------


def test_the_longest_chain_that_fits():
    chains = [TokenTree.chain(size + 1) for size in (4, 8, 2)]
    for request, length, size in ((8, 20, 8), (8, 7, 4), (4, 20, 4), (8, 2, 2), (8, 1, None), (2, 8, 2)):
        proposal = longest_chain(chains, TokenTree.chain(request + 1), range(length))
        assert (None if proposal is None else len(proposal.tree) - 1) == size
        assert proposal is None or proposal.tokens.tolist() == list(range(len(proposal.tree) - 1))


def test_ngram_trusts_longer_matches_with_longer_chains():
    proposer = NgramProposer(Ngram(trees=chains(8, 4, 2), prompt_lookup_max=4, prompt_lookup_min=2))
    for matched, size in ((1, None), (2, 4), (3, 4), (4, 8), (9, 8)):
        text = [*range(100, 130), 7, 8, *range(100, 100 + matched)]
        proposals = proposer.propose([view(text, 8)])
        proposer.release(0)
        if size is None:
            assert proposals == {}
        else:
            assert proposals[0].tokens.tolist() == [*range(100 + matched, 100 + matched + size)]
            assert proposals[0].tree == TokenTree.chain(size + 1)
            assert proposals[0].q is None
            assert proposals[0].candidates.shape == (size, 1)


def test_suffix_proposes_more_for_longer_matches_and_surer_continuations():
    proposer = SuffixProposer(Suffix(trees=chains(8, 4, 2, 1), max_spec_factor=1.0, min_token_prob=0.5))
    for matched, size in ((1, 1), (2, 2), (3, 2), (4, 4), (8, 8)):
        proposals = proposer.propose([view([*range(100, 130), 7, *range(100, 100 + matched)], 8)])[0]
        proposer.release(0)
        assert proposals.tokens.tolist() == [*range(100 + matched, 100 + matched + size)]
    # After 1 2 3 4 comes 5 twice and then 6 or 7: the second is not sure enough.
    text = [1, 2, 3, 4, 5, 6, 8, 1, 2, 3, 4, 5, 7, 8, 1, 2, 3, 4, 9, 1, 2, 3, 4]
    assert proposer.propose([view(text, 8)])[0].tokens.tolist() == [5]


def test_slots_do_not_see_each_other():
    text = [*range(10, 30), 10, 11, 12, 13]
    for proposer in (
        NgramProposer(Ngram(trees=chains(4), prompt_lookup_max=4, prompt_lookup_min=2)),
        SuffixProposer(Suffix(trees=chains(4), max_spec_factor=1.0, min_token_prob=0.1)),
    ):
        proposals = proposer.propose([view(list(text), 4, 0), view(list(range(4)), 4, 1), view([*text, 14], 4, 2)])
        proposed = {slot: proposal.tokens.tolist() for slot, proposal in proposals.items()}
        assert proposed == {0: [14, 15, 16, 17], 2: [15, 16, 17, 18]}


def test_a_store_lets_a_request_use_another_ones_output():
    method = Suffix(trees=chains(4, 2), max_spec_factor=1.0, min_token_prob=0.1)
    store = OutputStore(200)
    proposer = SuffixProposer(method, store)
    text = [1, 2, 3]
    assert proposer.propose([view(text, 4)]) == {}
    text += range(50, 80)  # what the request goes on with; the prompt is not stored
    proposer.release(0)
    assert len(store) == 31
    assert proposer.propose([view([9, 1, 2, 3], 4)]) == {}
    other = [9, 1, 2, 3, 50, 51, 52, 53]
    assert proposer.propose([view(other, 4)])[0].tokens.tolist() == [54, 55, 56, 57]
    store.add([52, 53, 60, 61, 62])  # something is added while a request runs
    assert proposer.propose([view(other, 4)])[0].tokens.tolist()[0] == 54
    assert SuffixProposer(method).propose([view(other, 4)]) == {}


# --- decoding ---------------------------------------------------------------------------------------------------------


def test_repetitions_take_fewer_steps(engine):
    loaded = engine(NAME)
    long = GREEDY.replace(max_tokens=120)
    for method in ("ngram", "suffix"):
        done = loaded.generate(COPY, long, method)
        assert done.stats.acceptance_length > 1.5, done.stats
        sampled = loaded.generate(COPY, long.replace(temperature=1.0, seed=4), method)
        assert sampled.token_ids == loaded.generate(COPY, long.replace(temperature=1.0, seed=4), method).token_ids


def test_steps_verify_declared_chains_up_to_the_requested_size(engine):
    loaded = engine(NAME)
    for method, size in WAYS:
        with record_proposals(loaded, method) as recorder:
            loaded.generate(COPY, GREEDY.replace(max_tokens=100), {"method": method, "num_speculative_tokens": size})
        sizes_drafted = {len(proposal.tokens) for _, proposal in recorder}
        assert sizes_drafted
        assert sizes_drafted <= {k for k in (8, 4, 2) if k <= size}
        assert all(proposal.tree.is_chain for _, proposal in recorder)


def state(engine: Engine) -> list[dict[int, Any]]:
    ngram, suffix = (engine.proposers[name] for name in ("ngram", "suffix"))
    return [ngram._slots, suffix._slots]


def test_requests_mix_methods_and_leave_nothing_behind(engine):
    loaded = engine(NAME)
    sampled = GREEDY.replace(temperature=0.9, seed=6)
    methods = ("draft_model", "ngram", "suffix")
    first = {method: loaded.generate(COPY, sampled, method).token_ids for method in methods}
    for method in (*methods, "suffix", "ngram"):
        loaded.generate(RANDOM, sampled.replace(seed=7), method)
        assert loaded.generate(COPY, sampled, method).token_ids == first[method]
        assert state(loaded) == [{}, {}]


def test_cancelled_requests_leave_nothing_behind(engine):
    loaded = engine(NAME)
    for method, slots in zip(("ngram", "suffix"), state(loaded), strict=True):
        whole = loaded.generate(COPY, GREEDY, method).token_ids
        stream = loaded.stream(COPY, GREEDY, method)
        next(stream)
        assert list(slots) == [0]
        stream.cancel()
        assert [chunk.finish_reason for chunk in stream] == ["cancelled"]
        assert slots == {}
        with loaded.stream(RANDOM, GREEDY, method) as left:
            next(left)
        # A stream that was left goes before the next step, whoever takes it.
        assert loaded.generate(COPY, GREEDY, method).token_ids == whole
        assert slots == {}


def test_an_engine_keeps_earlier_outputs_on_request(bundle, engine):
    with Engine.load(bundle(NAME), threads=1, methods={"method": "suffix", "store_tokens": 400}) as loaded:
        plain = loaded.generate(RANDOM, GREEDY, PLAIN)
        runs = [loaded.generate(RANDOM, GREEDY, "suffix") for _ in range(3)]
        assert all(run.token_ids == plain.token_ids for run in runs)
        # From the third token on the second request says what the first one said.
        assert runs[1].stats.steps < runs[0].stats.steps
        proposer = loaded.proposers["suffix"]
        assert 0 < len(proposer._store) <= 400
    with pytest.raises(RequestError, match="store_tokens is 5; expected 0 for no store"):
        Engine.load(bundle(NAME), methods={"method": "suffix", "store_tokens": 5})
    with pytest.raises(BuildError, match="store_tokens"):
        Engine.load(bundle(NAME), methods={"method": "suffix", "store_tokens": -1})


# --- the bundle -------------------------------------------------------------------------------------------------------


@pytest.mark.exporter
def test_verify_covers_look_ups(bundle):
    from specexport.verify.bundle import verify

    report = verify(bundle(NAME), prompts=("one two three one two three one", "some words"), max_tokens=24)
    assert report.verdict == "passed", report
    names = [check.name for check in report.checks]
    assert names == ["files", "graphs", "logits", "quality", "draft_model", "speculation"]


@pytest.mark.exporter
def test_a_method_is_built_once():
    from specexport.exporter.options import BuildOptions

    with pytest.raises(BuildError, match="method 'ngram' was given twice"):
        BuildOptions("x", Path("y"), ["ngram", {"method": "ngram", "prompt_lookup_max": 3}])


# --- by default, where a bundle was built without a method ------------------------------------------------------------


REPEATED = [5, 6, 7, 8, 9] * 8
LONG = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module", params=[(), ("hypothesis",)], ids=["none", "hypothesis"])
def folder(request: pytest.FixtureRequest, bundle: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that is built for nothing, or for hypotheses alone, which no request has by itself."""
    folder = shutil.copytree(bundle("qwen3-lookup"), tmp_path_factory.mktemp("default") / "bundle")
    manifest = read_manifest(folder)
    methods = tuple(method for method in manifest.methods if method.name in request.param)
    write_manifest(folder, msgspec.structs.replace(manifest, methods=methods))
    return folder


@pytest.fixture(scope="module")
def free(folder: Path) -> Iterator[Engine]:
    """Where a step of many tokens takes as long as one of few."""
    with Engine.load(folder, threads=1, costs=curve(read_manifest(folder), lambda *_: 1.0)) as engine:
        yield engine


def test_repeated_text_is_looked_up(free):
    plain = free.generate(REPEATED, LONG, PLAIN)
    assert plain.stats.drafted == 0
    for arguments in (None, "auto", {"method": "auto"}):
        done = free.generate(REPEATED, LONG, arguments)
        assert done.token_ids == plain.token_ids
        assert done.stats.accepted > 0
        assert done.stats.steps < plain.stats.steps
        assert set(done.stats.steps_by_draft) <= {"plain", "ngram"}
    few = free.generate(REPEATED, LONG, {"num_speculative_tokens": 2})
    assert few.token_ids == plain.token_ids
    assert few.stats.accepted > 0


def test_it_is_left_where_it_does_not_pay(folder):
    dear = curve(read_manifest(folder), lambda _, tokens: float(tokens) ** 2)
    with Engine.load(folder, threads=1, costs=dear) as engine:
        done = engine.generate(REPEATED, LONG)
        assert done.token_ids == engine.generate(REPEATED, LONG, PLAIN).token_ids
        # What is tried now and then is little.
        assert done.stats.steps > 0.8 * len(done.token_ids)


def test_nothing_is_looked_up_where_nothing_was_measured(folder):
    with Engine.load(folder, threads=1, calibrate=False) as engine:
        assert engine.costs is None
        assert engine.generate(REPEATED, LONG).stats.drafted == 0
        with pytest.raises(RequestError, match="num_speculative_tokens is 2, but the bundle was built without a way"):
            engine.stream(REPEATED, LONG, {"num_speculative_tokens": 2})


def test_it_is_measured_when_it_is_first_opened(folder, tmp_path, monkeypatch, cli):
    monkeypatch.setenv("SPECEXPORT_CACHE", str(tmp_path))
    monkeypatch.setitem(Engine.load.__func__.__kwdefaults__, "calibrate", True)
    with Engine.load(folder, threads=1) as engine:
        assert engine.costs is not None
        assert engine.costs.curve.steps
        assert engine.costs.curve.methods == ()  # look-ups take next to nothing
    rows = cli("bench", folder, "--prompts", "1", "--prompt-tokens", "32", "-n", "8", "--json").json["rows"]
    assert {row["method"] for row in rows} == {"default", "hypothesis", "ngram", "suffix"}
    assert all(row["lossless"] for row in rows)


def test_inspect_says_so(folder, cli):
    shown = cli("inspect", folder).out
    assert ("text is looked up where that pays" in shown) == (not read_manifest(folder).methods)


def test_the_server_lists_every_method(folder, bundle):
    with served(folder) as server:
        model, *_ = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert {method["name"]: method["num_speculative_tokens"] for method in model["methods"]} == {
            name: sorted(len(tree) - 1 for tree in server.service.engine.frontend.engine.methods[name].token_trees())
            for name in ("ngram", "suffix")
        }
        for method in model["methods"]:
            body = {"prompt": REPEATED, "max_tokens": 4, "speculative": {"method": method["name"]}}
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    with served(bundle("qwen3-lookup")) as server:
        model, *_ = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [method["name"] for method in model["methods"]] == ["draft_model", "ngram", "suffix"]
