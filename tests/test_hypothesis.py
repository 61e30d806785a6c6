"""A text given up front: it is followed, found again after a rejection, and never changes what is said."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport.contract.errors import RequestError
from specexport.contract.tree import TokenTree
from specexport.methods.hypothesis import GUESS, TRUST, Hypothesis, HypothesisProposer, Tracker
from specexport.runtime import SamplingParams
from specexport.runtime.proposal import SlotView
from specexport.runtime.sampling import accept_relaxed
from specexport.runtime.speculative import PLAIN

NAME = "qwen3-lookup"
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
SIZES = (16, 8, 4, 2)
TEXT = list(range(100, 160))
RELAXED = SamplingParams(acceptance="relaxed")


def follow(hypothesis: list[int], message: list[int]) -> list[int]:
    result = Tracker(hypothesis)
    result.extend(message)
    return result.following()


# --- following --------------------------------------------------------------------------------------------------------


def test_correct_hypotheses_are_followed():
    assert follow(TEXT, []) == TEXT
    assert follow(TEXT, TEXT[:20]) == TEXT[20:]
    assert follow(TEXT, TEXT) == []
    assert follow([], [1, 2]) == []


@pytest.mark.parametrize("at", [0, 7, 30])
def test_a_differing_token_replaces_one(at):
    """Nothing is known yet but that a token was another: the next ones are guessed, few of them."""
    assert follow(TEXT, [*TEXT[:at], 7]) == TEXT[at + 1 : at + 1 + GUESS]
    assert follow(TEXT, [*TEXT[:at], 7, 8]) == []


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ([*TEXT[:20], 7, *TEXT[21:23]], 23),  # a token replaced
        ([*TEXT[:20], 7, 8, 9, *TEXT[20:22]], 22),  # tokens put in
        ([*TEXT[:20], *TEXT[26:28]], 28),  # tokens left out
        ([*TEXT[:20], 7, 8, *TEXT[40:42]], 42),  # a passage left out
        ([*TEXT[:20], 7, 8, *TEXT[3:5]], 5),  # something said again
        ([*TEXT[:20], 7, 8, *TEXT[10:14], 9, *TEXT[30:32]], 32),  # said again, then on
    ],
)
def test_it_is_found_again(message, place):
    assert follow(TEXT, message) == TEXT[place : place + 2 * TRUST]


def test_of_several_places_the_nearest_ahead_is_taken():
    text = [1, 2, 50, 51, 52, 53, 1, 2, 60, 61, 62, 63, 1, 2, 70, 71, 72, 73]
    assert follow(text, [1, 2, 50, 51, 9, 9, 1, 2])[:2] == [60, 61]
    assert follow(text, [*text[:10], 9, 9, 1, 2])[:2] == [70, 71]
    # None ahead: the last one behind.
    assert follow(text, [*text[:17], 9, 9, 1, 2])[:2] == [70, 71]
    # A single token that is common is not taken for a place far off.
    assert follow([*range(10, 20), *range(100, 160), 5, 6], [10, 11, 9, 9, 5]) == []


def test_a_wrong_place_does_not_lead_further_astray():
    """What was found is only where to look from once it has proved right."""
    text = [*range(10, 40), 1, 2, *range(40, 70)]
    texts = [*range(10, 20), 1, 2, 9, 9, 22, 23]  # 1 2 is a chance match far ahead
    assert follow(text, texts)[:2] == [24, 25]


@given(st.lists(st.integers(0, 5), max_size=30), st.lists(st.integers(0, 5), max_size=30))
def test_continuations_are_parts_of_the_hypothesis(text, message):
    following = follow(text, message)
    assert not following or any(text[at : at + len(following)] == following for at in range(len(text)))
    pieces = Tracker(text)
    for token in message:
        pieces.extend([token])
    assert pieces.following() == following


def test_slots_are_independent():
    trees = tuple(TokenTree.chain(size + 1).choices for size in (4, 2))
    proposer = HypothesisProposer(Hypothesis(trees=trees))

    def view(slot: int, tokens: list[int], hypothesis: list[int]) -> SlotView:
        return SlotView(slot, tokens, GREEDY, np.random.default_rng(0), TokenTree.chain(5), hypothesis)

    first, second, third = [1, 2], [3, 4], [5]
    views = [view(0, first, TEXT), view(1, second, TEXT[30:]), view(2, third, [])]
    proposals = proposer.propose(views)
    assert {slot: proposal.tokens.tolist() for slot, proposal in proposals.items()} == {0: TEXT[:4], 1: TEXT[30:34]}
    first += TEXT[:3]
    second += [7, 8]
    proposals = proposer.propose(views)
    assert {slot: proposal.tokens.tolist() for slot, proposal in proposals.items()} == {0: TEXT[3:7]}
    proposer.release(0)
    assert proposer.propose([view(0, [9], TEXT[5:])])[0].tokens.tolist() == TEXT[5:9]
    assert proposals[0].q is None


# --- decoding ---------------------------------------------------------------------------------------------------------


def test_greedy_text_equals_transformers(engine, oracle):
    """Whatever is expected: the text itself, with slips, without some of it, with more in it, or another text."""
    loaded, draw = engine(NAME), np.random.default_rng(1)
    for case in oracle(NAME)["greedy"]:
        expected = case["tokens"]
        slips = [token if draw.random() > 0.15 else 3 for token in expected]
        holes = [token for token in expected if draw.random() > 0.15]
        more = [token for right in expected for token in ([right] if draw.random() > 0.15 else [right, 4])]
        params = SamplingParams(temperature=0.0, max_tokens=len(expected))
        for size, hypothesis in zip((16, 8, 4, 2, 16), (expected, slips, holes, more, TEXT), strict=True):
            done = loaded.generate(case["prompt"], params, {"hypothesis": hypothesis, "num_speculative_tokens": size})
            assert list(done.token_ids) == expected, (len(case["prompt"]), size)


def test_a_right_hypothesis_takes_few_steps(engine):
    loaded = engine(NAME)
    prompt = [int(token) for token in np.random.default_rng(5).integers(3, 300, 40)]
    plain = loaded.generate(prompt, GREEDY, PLAIN)
    done = loaded.generate(prompt, GREEDY, {"hypothesis": plain.token_ids})
    assert done.token_ids == plain.token_ids
    assert done.stats.steps <= math.ceil(60 / 17) + 3  # shorter chains at the end
    # One slip costs a step or two, not the rest.
    slipped = [*plain.token_ids[:20], 4, *plain.token_ids[21:]]
    again = loaded.generate(prompt, GREEDY, {"hypothesis": slipped})
    assert again.token_ids == plain.token_ids
    assert again.stats.steps <= done.stats.steps + 5
    # Nothing to go by: plain decoding.
    none = loaded.generate(prompt, GREEDY, {"hypothesis": []})
    assert (none.token_ids, none.stats.drafted) == (plain.token_ids, 0)


def test_text_is_read_as_it_follows_the_prompt(engine):
    loaded = engine(NAME)
    prompt, text = "one two three", " four five one two"
    with loaded.stream(prompt, GREEDY, {"hypothesis": text}) as stream:
        whole = loaded.encode(prompt + text)
        assert whole[: len(loaded.encode(prompt))] == loaded.encode(prompt)
        assert [*stream.tokens, *stream.hypothesis] == whole
    with loaded.stream(loaded.encode(prompt), GREEDY, {"hypothesis": text}) as stream:
        assert stream.hypothesis == loaded.tokenizer.encode(text, add_special_tokens=False).ids


def test_incompatible_options_are_refused(engine):
    loaded = engine(NAME)
    for words, reason in (
        ({"method": "hypothesis"}, "no hypothesis was given"),
        ({"hypothesis": [4], "method": "ngram"}, "a hypothesis was given with method 'ngram'"),
        ({"hypothesis": [4], "num_speculative_tokens": 0}, "a hypothesis was given with num_speculative_tokens 0"),
        ({"hypothesis": [4], "num_speculative_tokens": 5}, "the bundle was built for 2, 4, 8, 16"),
        ({"hypothesis": [4000]}, "token 4000"),
        ({"hypothesis": [4], "hypothesis_entropy": -1.0}, "hypothesis_entropy is -1.0; expected a number >= 0"),
        ({"hypothesis_entropy": 1.0}, "hypothesis_entropy was given without a hypothesis"),
    ):
        with pytest.raises(RequestError, match=reason):
            loaded.stream([5], None, words)
    with pytest.raises(RequestError, match="acceptance is 'relaxed', but no hypothesis was given"):
        loaded.stream([5], RELAXED)
    alone = engine("dice-hypothesis")
    assert alone.generate([5], GREEDY.replace(max_tokens=4)).stats.drafted == 0
    with pytest.raises(RequestError, match="num_speculative_tokens is 4"):
        alone.stream([5], None, {"hypothesis": [4], "num_speculative_tokens": 4})


# --- relaxed acceptance -----------------------------------------------------------------------------------------------


def test_relaxed_acceptance_is_a_threshold_on_likelihood():
    logits = np.log(np.array([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.25, 0.25, 0.5], [0.9, 0.05, 0.05]], np.float32))
    tree, tokens = TokenTree.chain(4), np.array([1, 0, 2])

    def accepted(threshold: float, **changes: Any) -> tuple[list[int], int]:
        params = RELAXED.replace(likelihood_threshold=threshold, temperature=0.0, **changes)
        return accept_relaxed(logits, tree, tokens, params, 0.99)

    assert accepted(0.4) == ([], 0)
    assert accepted(0.2) == ([1], 1)  # 0.1 for the second is too little
    assert accepted(0.05) == ([1, 2, 3], 0)
    # The threshold looks at the model's own distribution; only what follows is drawn as asked.
    assert accept_relaxed(logits, tree, tokens, RELAXED.replace(top_k=1, likelihood_threshold=0.2), 0.99) == ([1], 1)
    assert accept_relaxed(logits, tree, tokens, RELAXED.replace(likelihood_threshold=0.2), 0.99) == ([1], 2)


def test_relaxed_acceptance_keeps_likely_tokens(engine):
    loaded = engine(NAME)
    hypothesis = [int(token) for token in np.random.default_rng(8).integers(3, 300, 30)]
    params = GREEDY.replace(acceptance="relaxed", max_tokens=30)
    prompt = [5, 6, 7]
    plain = loaded.generate(prompt, GREEDY.replace(max_tokens=30), PLAIN).token_ids
    kept = loaded.generate(prompt, params.replace(likelihood_threshold=0.0), {"hypothesis": hypothesis})
    assert list(kept.token_ids[:16]) == hypothesis[:16]  # the seventeenth is the model's own
    assert kept.stats.accepted == kept.stats.drafted
    assert (
        loaded.generate(prompt, params.replace(likelihood_threshold=1.0), {"hypothesis": hypothesis}).token_ids == plain
    )


def test_certain_hypotheses_skip_the_model(engine):
    loaded = engine(NAME)
    gate = GREEDY.replace(acceptance="relaxed", entropy_threshold=0.7)
    text = " some words that nobody checks"
    done = loaded.generate("one", gate, {"hypothesis": text, "hypothesis_entropy": 0.3})
    assert (done.text, done.finish_reason, done.stats.steps) == (text, "stop", 0)
    assert done.stats.output_tokens == len(done.token_ids)
    cut = loaded.generate("one", gate.replace(max_tokens=2), {"hypothesis": text, "hypothesis_entropy": 0.3})
    assert (len(cut.token_ids), cut.finish_reason) == (2, "length")
    stopped = loaded.generate("one", gate.replace(stop=(" that",)), {"hypothesis": text, "hypothesis_entropy": 0.3})
    assert (stopped.text, stopped.finish_reason) == (" some words", "stop")
    ended = loaded.generate(
        "one", gate.replace(ignore_eos=False), {"hypothesis": [5, 6, 1, 7], "hypothesis_entropy": 0.0}
    )
    assert (ended.token_ids, ended.finish_reason) == ((5, 6, 1), "stop")
    unlogged, ungated = gate.replace(logprobs=0), gate.replace(entropy_threshold=None)
    for params, entropy in ((unlogged, 0.1), (gate, 0.7), (gate, None), (ungated, 0.0)):
        assert loaded.generate("one", params, {"hypothesis": text, "hypothesis_entropy": entropy}).stats.steps > 0
    # Without the opt-in it is verified, however sure it is.
    lossless = gate.replace(acceptance="lossless")
    checked = loaded.generate("one", lossless, {"hypothesis": text, "hypothesis_entropy": 0.0})
    assert checked.token_ids == loaded.generate("one", GREEDY, PLAIN).token_ids


# --- the commands -----------------------------------------------------------------------------------------------------


def test_run(bundle, tmp_path, cli):
    words = ["run", str(bundle(NAME)), "-p", "one two", "-n", "24", "--temperature", "0", "--ignore-eos", "--json"]
    words.append("--no-calibrate")
    plain = cli(*words, "--no-speculation").json
    file = tmp_path / "expected.txt"
    file.write_text(plain["text"], encoding="utf-8")
    # A fixed size, as measured costs may say on a busy machine that drafting does not pay.
    done = cli(*words, "--hypothesis", file, "--num-speculative-tokens", "16").json
    assert done["token_ids"] == plain["token_ids"]
    assert done["stats"]["steps"] < plain["stats"]["steps"]
    relaxed = ["--acceptance", "relaxed", "--entropy-threshold", "0.7", "--hypothesis-entropy", "0.1"]
    assert cli(*words, "--hypothesis", file, *relaxed).json["stats"]["steps"] == 0
    for more, reason in (
        (
            ["--hypothesis", str(tmp_path / "none.txt")],
            "none.txt: No such file or directory; expected the likely output",
        ),
        (["--hypothesis", str(file), "--no-speculation"], "--hypothesis was given with --no-speculation"),
        (["--entropy-threshold", "0.7"], "--entropy-threshold was given without --acceptance relaxed"),
        (["--method", "hypothesis"], "no hypothesis was given"),
    ):
        assert reason in cli(*words, *more, status=1 if "none.txt" in reason else 2).err
