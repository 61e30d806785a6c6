"""Lookahead decoding: the window against its definition, and the whole against a plain torch implementation."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.contract.errors import BuildError, RequestError
from specexport.contract.methods import read_methods
from specexport.contract.tree import TokenTree
from specexport.methods.lookahead import Lookahead, LookaheadProposer, NgramPool, Trajectory, guess_tree
from specexport.runtime import SamplingParams
from specexport.runtime.proposal import SlotView
from specexport.runtime.speculative import PLAIN
from specexport.tree_search import record_proposals

NAME = "qwen3-lookahead"
W, N, G = 5, 4, 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
METHOD = Lookahead(trees=(guess_tree(G, N).choices,), window=W, ngram=N, guesses=G, prompt_seeding=True)


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(6)
    return [[draw.randrange(3, 300) for _ in range(24)] for _ in range(count)]


# --- the window -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "ngram"), [(5, 4), (2, 4), (1, 3), (4, 2), (15, 5)])
def test_the_window_follows_its_definition(window, ngram):
    """Level l, column i stands at l + i, and sees columns up to i of level 0 and its own column of levels up to l."""
    trajectory = Trajectory(window, ngram, list(range(100, 100 + window + ngram - 3)))
    for level in range(1, ngram - 1):
        tokens, _ = trajectory.nodes()
        assert len(tokens) + 1 == level * (window + ngram - 1 - level) <= window * (ngram - 1)
        texts = [1000 * level + at for at in range(trajectory.read)]
        assert trajectory.advance(7, texts) == []
    tokens, parents = trajectory.nodes()
    assert len(tokens) + 1 == window * (ngram - 1)
    tree = TokenTree((-1, *parents))
    place = [(0, column) for column in range(window)]
    place += [(level, column) for level in range(1, ngram - 1) for column in range(window)]
    assert tree.depths.tolist() == [level + column for level, column in place]
    for node, (level, column) in enumerate(place):
        seen = {place[other] for other in np.flatnonzero(tree.mask[node])}
        assert seen == {(0, c) for c in range(column + 1)} | {(upper, column) for upper in range(level + 1)}


def test_each_level_says_the_next_and_columns_become_n_grams():
    trajectory = Trajectory(2, 4, [10, 11, 12])
    assert trajectory.advance(1, [20, 21, 22]) == []  # what 10, 11, 12 said
    assert trajectory.nodes()[0] == [11, 12, 20, 21, 22]
    assert trajectory.advance(2, [30, 31, 32]) == []
    assert trajectory.nodes()[0] == [12, 21, 22, 31, 32]
    assert trajectory.advance(3, [41, 42]) == [(3, (21, 31, 41)), (12, (22, 32, 42))]
    assert trajectory.nodes()[0] == [22, 31, 32, 41, 42]


def test_a_pool_keeps_the_latest_of_each_token():
    pool = NgramPool(2)
    for rest in ((1, 1), (2, 2), (1, 1), (3, 3)):
        pool.add(9, rest)
    pool.add(8, (4, 4))
    assert pool.guesses(9, 5) == [(3, 3), (1, 1)]
    assert pool.guesses(9, 1) == [(3, 3)]
    assert pool.guesses(7, 5) == []


# --- proposing --------------------------------------------------------------------------------------------------------


def view(tokens: list[int], guesses: int = G, slot: int = 0) -> SlotView:
    return SlotView(slot, tokens, GREEDY, np.random.default_rng(0), guess_tree(guesses, N))


def test_guesses_precede_the_window_and_share_prefixes():
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 6, 7, 8, 9, 1]
    proposer = LookaheadProposer(METHOD)
    proposals = proposer.propose([view(text), view([5, 5, 5, 5, 9], slot=1)])
    first, other = proposals[0], proposals[1]
    assert first.tokens.tolist() == [6, 7, 8, 2, 3, 5, 4]
    assert first.tree.parents == (-1, 0, 1, 2, 0, 4, 5, 5)
    assert first.wider.tree.parents[: len(first.tree)] == first.tree.parents
    assert first.wider.tokens[:7].tolist() == first.tokens.tolist()
    assert set(first.wider.tokens[7:].tolist()) <= set(text)
    # The smallest declared step that holds the root, 7 guessed tokens, and the 6 of a window of one level.
    assert len(first.wider.tree) == 15
    assert (len(other.tokens), len(other.wider.tree)) == (0, 15)
    fewer = proposer.propose([view(text, 1)])[0]
    assert fewer.tokens.tolist() == [6, 7, 8]


def test_without_seeding_there_are_no_guesses_at_first():
    method = Lookahead(trees=METHOD.trees, window=W, ngram=N, guesses=G, prompt_seeding=False)
    assert len(LookaheadProposer(method).propose([view([1, 2, 3, 4, 1, 2, 3, 5, 1])])[0].tokens) == 0


# --- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.exporter
def test_acceptance_is_that_of_a_plain_implementation(engine):
    import torch
    from transformers import AutoModelForCausalLM

    loaded = engine(NAME)
    model = AutoModelForCausalLM.from_pretrained(loaded.manifest.target.source, attn_implementation="eager").eval()
    ours, theirs, length = [], [], 0
    for prompt in prompts(6)[1::2]:
        with record_proposals(loaded, "lookahead") as recorder:
            done = loaded.generate(prompt, GREEDY)
        assert done.token_ids == loaded.generate(prompt, GREEDY, PLAIN).token_ids
        ours.append(done.stats.steps)
        length += len(done.token_ids)
        # Both windows begin with the same tokens: which they are moves the acceptance length of a text by over 5 %.
        proposal = recorder[0][1]
        first = proposal.wider.tokens[len(proposal.tokens) :][: W + N - 3].tolist()
        with torch.no_grad():
            theirs.append(plain_lookahead(model, prompt, first, GREEDY.max_tokens))
    assert length / sum(ours) > 1.2
    assert length / sum(ours) == pytest.approx(length / sum(theirs), rel=0.05), (ours, theirs)


def plain_lookahead(model: Any, prompt: list[int], first: list[int], count: int) -> int:
    """Steps of lookahead decoding written out: no cache, no tree, every guess on its own, each step a whole pass."""
    import torch

    text = list(prompt)
    pool: dict[int, list[tuple[int, ...]]] = {}

    def enter(ngram: tuple[int, ...]) -> None:
        kept = pool.setdefault(ngram[0], [])
        if ngram[1:] in kept:
            kept.remove(ngram[1:])
        kept.append(ngram[1:])
        del kept[:-G]

    for start in range(len(prompt) - N + 1):
        enter(tuple(prompt[start : start + N]))
    levels = [first]
    steps = 0
    while len(text) - len(prompt) < count:
        last, tokens, positions = len(text) - 1, list(text), list(range(len(text)))
        sees = [set(range(at + 1)) for at in range(len(text))]
        places: dict[tuple[int, int], int] = {(0, 0): last}
        for level, row in enumerate(levels):
            for i, token in enumerate(row, start=1 if level == 0 else 0):
                places[level, i] = len(tokens)
                seen = {places[0, c] for c in range(i + 1)} | {places[up, i] for up in range(level + 1)}
                sees.append(seen | set(range(last + 1)))
                tokens.append(token)
                positions.append(last + level + i)
        guesses = []
        for guess in pool.get(text[-1], []):
            begin = len(tokens)
            guesses.append((begin, guess))
            for d, token in enumerate(guess):
                sees.append({*range(last + 1), *range(begin, begin + d + 1)})
                tokens.append(token)
                positions.append(last + 1 + d)
        mask = torch.full((1, 1, len(tokens), len(tokens)), torch.finfo(torch.float32).min)
        for row_index, seen in enumerate(sees):
            mask[0, 0, row_index, sorted(seen)] = 0.0
        out = model(
            torch.tensor([tokens]), attention_mask=mask, position_ids=torch.tensor([positions]), use_cache=False
        )
        best = out.logits[0].argmax(-1).tolist()
        texts = [best[place] for (level, _), place in sorted(places.items()) if level == len(levels) - 1]
        if len(levels) == N - 1:
            columns = [[text[-1], *levels[0]], *levels[1:], texts]
            for i in range(W):
                enter(tuple(column[i] for column in columns))
            levels = [levels[1][1:], *levels[2:], texts]
        else:
            levels = [*(level[1:] for level in levels), texts[1:]]
        new = [best[last]]
        for begin, guess in guesses:
            right = [best[last]]
            for d, token in enumerate(guess):
                if token != right[-1]:
                    break
                right.append(best[begin + d])
            new = max(new, right, key=len)
        text += new
        steps += 1
    return steps


def test_steps_have_declared_widths(engine):
    loaded = engine(NAME)
    widths = set(loaded.manifest.methods[0].widths())
    assert widths == {15, 18, 21, 27}
    with record_proposals(loaded, "lookahead") as recorder:
        loaded.generate(prompts(1)[0] * 2, GREEDY)
    seen = {len(proposal.wider.tree) for _, proposal in recorder if proposal.wider is not None}
    assert seen <= widths
    assert len(seen) > 1


def test_a_text_leaves_nothing_behind(engine):
    loaded = engine(NAME)
    proposer = loaded.proposers["lookahead"]
    with loaded.stream([4, 5], GREEDY) as stream:
        next(stream)
        assert len(proposer._slots) == 1
    # What is left behind goes when the next request takes its step.
    loaded.generate([4, 5], GREEDY)
    assert proposer._slots == {}


def test_requests_may_set_fewer_guesses(engine):
    loaded = engine(NAME)
    prompt = prompts(1)[0] * 3
    plain = loaded.generate(prompt, GREEDY, PLAIN).token_ids
    for guesses in (1, 2, 4):
        with record_proposals(loaded, "lookahead") as recorder:
            done = loaded.generate(prompt, GREEDY, {"num_speculative_tokens": guesses * (N - 1)})
        assert done.token_ids == plain
        assert max(len(proposal.tokens) for _, proposal in recorder) <= guesses * (N - 1)
    with pytest.raises(RequestError, match="num_speculative_tokens is 4; the bundle was built for 3, 6, 12"):
        loaded.stream(prompt, None, {"num_speculative_tokens": 4})


# --- the bundle -------------------------------------------------------------------------------------------------------


@pytest.mark.exporter
def test_sizes_that_are_built():
    from specexport.exporter.method import TargetInfo, exporter_of

    def planned(wanted: str, parameters: float = 1) -> Lookahead:
        (method,) = read_methods(f"lookahead:{wanted}")
        return exporter_of(method).plan(method, TargetInfo(300, int(parameters), 2, 64, Path(), "fp32", 64))

    result = planned("5,4,4")
    assert (result.window, result.ngram, result.guesses) == (5, 4, 4)
    assert [len(tree) - 1 for tree in result.token_trees()] == [12, 6, 3]
    assert planned("window=5,ngram=4,guesses=4") == result
    assert [planned("gpu", size).window for size in (7e9, 13e9, 33e9)] == [15, 10, 7]
    assert planned("gpu").widths()[0] == 120
    for wanted, reason in (
        ("fast", "expected W,N,G or one of gpu, cpu, small, medium, large"),
        ("1,2,x", "expected W,N,G or one of gpu, cpu, small, medium, large"),
        ("0,3,1", "W and G are at least 1"),
        ("32,5,33", "260 nodes a step, at most 256"),
        ("2,5,2", "window 2, with n-grams of 5; the window fills only with 3"),
    ):
        with pytest.raises(BuildError, match=reason):
            planned(wanted)
