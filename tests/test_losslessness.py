"""The proof: whatever the draft says, the target's own text comes out, token for token or in distribution."""

import argparse
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks import exactness, losslessness
from specexport.contract import methods as all_methods
from specexport.contract.tree import TokenTree
from specexport.runtime import Engine, SamplingParams
from specexport.runtime import step as step_module
from specexport.runtime.sampling import Distributions, accept_sampled, target_distribution
from specexport.runtime.speculative import PLAIN, Speculative
from tests.reference import Text, draw_candidates, exact_texts, prefix_p_values, text_distribution, warped

RUNS, ENGINE_RUNS = 3_000, 1_200
"""Texts of a test of acceptance, and of one of the engine; with the fewer every fault below is found, far beyond
``SIGNIFICANCE``. ``benchmarks losslessness`` settles it with 100,000.
"""
LENGTH = 3
SIGNIFICANCE = 1e-4
"""So few alarms are false, with a hundred comparisons; every fault below is found out beyond it."""
TIE = 1e-4
"""Logits this close are a tie: which of two tokens is first then depends on how sums are rounded."""

Floats = npt.NDArray[np.float32]
Accepted = tuple[list[int], int]
Accept = Callable[..., Accepted]

GREEDY_BUNDLES = ("llama-near", "qwen3-bad", "gemma2-equal", "gpt2-near")
QUICK_BUNDLES = ("llama-near", "qwen3-medusa")
TREE_BUNDLES = ("qwen3-medusa", "qwen3-medusa-draft", "gpt2-tree")
OTHER_BUNDLES = ("qwen3-mlp", "gemma2-self", "qwen3-lookup", "qwen3-lookahead")
HYBRID_BUNDLES = ("lfm2-hybrid", "qwen3_5_text-hybrid", "granitemoehybrid-hybrid", "lfm2-hybrid-portable")
PORTABLE_BUNDLES = tuple(f"{name}-portable" for name in ("llama-near", "gemma2-equal", *TREE_BUNDLES))

# --- greedy -----------------------------------------------------------------------------------------------------------


ALL_BUNDLES = GREEDY_BUNDLES + TREE_BUNDLES + OTHER_BUNDLES + HYBRID_BUNDLES + PORTABLE_BUNDLES


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK_BUNDLES else pytest.mark.slow) for name in ALL_BUNDLES]
)
def test_greedy_text_equals_transformers(name, engine, oracle):
    """For every tree of every method, and without speculation; ``oracle`` is ``generate(do_sample=False)``."""
    cases = oracle(name)["greedy"]
    assert len(cases) >= 20
    for speculation in (PLAIN, *ways(engine(name))):
        whole = 0
        for case in cases:
            params = SamplingParams(temperature=0.0, max_tokens=len(case["tokens"]))
            tokens = engine(name).generate(case["prompt"], params, speculation).token_ids
            whole += same_but_for_ties(case, tokens)
        assert whole >= len(cases) - 1


def same_but_for_ties(case: dict[str, Any], tokens: tuple[int, ...]) -> bool:
    """Whether a text is transformers'; a difference that does not begin with a tie of two logits is an error."""
    expected = tuple(case["tokens"])
    if tokens == expected:
        return True
    at = next(i for i, pair in enumerate(zip(tokens, expected, strict=True)) if len(set(pair)) > 1)
    assert case["gaps"][at] < TIE, f"after {len(case['prompt'])} tokens, token {at} is {tokens[at]}, not {expected[at]}"
    return False


@pytest.mark.slow
def test_greedy_drafts_are_accepted_as_far_as_they_are_good(engine, oracle):
    """The texts above were made in all the ways there are: drafts mostly rejected, mixed, and all accepted."""
    rates = {}
    for name in GREEDY_BUNDLES:
        drafted = accepted = 0
        for case in oracle(name)["greedy"]:
            done = engine(name).generate(case["prompt"], SamplingParams(temperature=0.0, max_tokens=30))
            drafted += done.stats.drafted
            accepted += done.stats.accepted
        rates[name] = accepted / drafted
    assert rates["qwen3-bad"] < 0.1
    assert 0.1 < rates["llama-near"] < 0.9
    assert 0.1 < rates["gpt2-near"] < 0.9
    assert rates["gemma2-equal"] > 0.999


@pytest.mark.slow
def test_trees_are_walked(engine, oracle):
    """Every depth is reached, and none always: what the texts above are made of."""
    for name in (*TREE_BUNDLES, "qwen3-mlp"):
        reached = np.zeros(3)
        steps = 0
        for case in oracle(name)["greedy"]:
            stats = engine(name).generate(case["prompt"], SamplingParams(temperature=0.0, max_tokens=30)).stats
            reached[: len(stats.accepted_at)] += stats.accepted_at[:3]
            steps += stats.steps_with_draft
        assert (reached > 0.05 * steps).all(), (name, reached / steps)
        assert reached[2] < 0.95 * steps


def ways(engine: Engine) -> list[Speculative]:
    """Every method the engine's bundle was built for, with every number of draft tokens."""
    return [
        Speculative(method=method.name, num_speculative_tokens=len(tree) - 1)
        for method in engine.manifest.methods
        if not method.takes_hypothesis  # see test_hypothesis.py
        for tree in method.token_trees()
    ]


@pytest.mark.parametrize("name", ["llama-near", "qwen3-medusa"])
def test_methods_that_need_no_graph_work_in_every_bundle(name, engine, oracle):
    """A bundle that was built without them verifies their chains too."""
    loaded = engine(name)
    sizes = {"ngram": (8, 4, 2), "suffix": (8, 4, 2), "hypothesis": (8, 4, 2)}
    assert not sizes.keys() & {method.name for method in loaded.manifest.methods}
    for method, known in sizes.items():
        assert [len(tree) - 1 for tree in loaded.methods[method].token_trees()] == list(known)
        whole = accepted = 0
        cases = oracle(name)["greedy"]
        for at, case in enumerate(cases):
            expected = case["tokens"] if method == "hypothesis" else None
            speculation = Speculative(method=method, num_speculative_tokens=known[at % len(known)], hypothesis=expected)
            params = SamplingParams(temperature=0.0, max_tokens=len(case["tokens"]))
            done = loaded.generate(case["prompt"], params, speculation)
            whole += same_but_for_ties(case, done.token_ids)
            accepted += done.stats.accepted
        assert whole >= len(cases) - 1
        assert accepted > 0


# --- sampling: the engine ---------------------------------------------------------------------------------------------
# A model of twelve tokens has 1728 texts of three, few enough to know how often each must come. The engine's whole way
# there costs most of a millisecond, so it goes that way for one setting of each K and draft; the acceptance function
# alone goes through all of them further down.


@dataclass(frozen=True)
class Setting:
    """How texts are drawn: by which proposer, with how many draft tokens, and what of p and q is kept."""

    draft: str
    K: int
    params: SamplingParams
    hypothesis: Text | None = None

    def __str__(self) -> str:
        p = self.params
        return f"{self.draft}-k{self.K}-t{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}"


ENGINE_SETTINGS = (
    Setting("near", 1, SamplingParams()),
    Setting("bad", 3, SamplingParams(temperature=0.8, top_k=9, top_p=0.95)),
    Setting("near", 5, SamplingParams(temperature=1.4, min_p=0.1)),
    Setting("equal", 5, SamplingParams(top_p=0.9)),
    Setting("tree", 8, SamplingParams(temperature=0.9)),
    Setting("medusa", 10, SamplingParams(temperature=1.2, top_p=0.97)),
    Setting("medusa-draft", 10, SamplingParams()),
    Setting("mlp", 10, SamplingParams(temperature=0.9)),
    Setting("eagle3", 8, SamplingParams(temperature=0.9)),
    Setting("eagle3", 3, SamplingParams(top_p=0.9)),
    Setting("mtp", 8, SamplingParams(temperature=0.9)),
    Setting("mtp", 3, SamplingParams(top_p=0.9)),
    Setting("hybrid", 5, SamplingParams(temperature=0.9)),
    Setting("hybrid-draft", 5, SamplingParams(temperature=0.9)),
    Setting("dflash", 10, SamplingParams()),
    Setting("dflash", 5, SamplingParams(temperature=0.8, top_p=0.95)),
    Setting("ngram", 5, SamplingParams(temperature=0.8)),
    Setting("ngram", 1, SamplingParams(top_p=0.9)),
    Setting("suffix", 5, SamplingParams()),
    Setting("suffix", 3, SamplingParams(temperature=0.7, top_k=8)),
    Setting("self", 3, SamplingParams(temperature=0.9)),
    Setting("lookahead", 6, SamplingParams(temperature=0.9)),
    Setting("lookahead", 2, SamplingParams(top_k=6)),
    Setting("hypothesis", 5, SamplingParams(temperature=0.9), hypothesis=(8, 5, 8, 5, 8, 5)),
    Setting("hypothesis", 1, SamplingParams(top_p=0.9), hypothesis=(3, 8, 11, 8)),
)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ENGINE_SETTINGS, ids=str)
def test_the_engine_samples_the_target_distribution(setting, engine, oracle):
    texts, rate = engine_texts(engine(f"dice-{setting.draft}"), setting)
    exact = exact_texts(oracle(f"dice-{setting.draft}")["next_logits"], setting.params, LENGTH)
    assert_distributed(texts, exact)
    assert rate > 0.999 if setting.draft == "equal" else 0.02 < rate < 0.95


@pytest.mark.slow
def test_a_store_of_earlier_outputs_changes_nothing(bundle, oracle):
    setting = Setting("suffix", 5, SamplingParams(temperature=0.9))
    with Engine.load(bundle("dice-suffix"), threads=1, methods={"method": "suffix", "store_tokens": 200}) as engine:
        texts, _ = engine_texts(engine, setting)
    assert_distributed(texts, exact_texts(oracle("dice-suffix")["next_logits"], setting.params, LENGTH))


def engine_texts(engine: Engine, setting: Setting) -> tuple[list[Text], float]:
    """The first tokens of a seeded request each, and the share of draft tokens accepted."""
    texts, drafted, accepted = [], 0, 0
    for seed in range(ENGINE_RUNS):
        params = setting.params.replace(max_tokens=LENGTH, seed=seed, ignore_eos=True)
        request = Speculative(num_speculative_tokens=setting.K, hypothesis=setting.hypothesis)
        done = engine.generate(PROMPT, params, request)
        texts.append(done.token_ids)
        drafted += done.stats.drafted
        accepted += done.stats.accepted
    return texts, accepted / drafted


PROMPT = (5, 8, 5, 8)


def assert_distributed(texts: list[Text], exact: dict[Text, float]) -> None:
    """Checks the texts, and what they begin with, against their exact distribution."""
    assert sum(exact.values()) == pytest.approx(1.0)
    assert min(prefix_p_values(texts, exact)) > SIGNIFICANCE


# --- sampling: every setting, through the acceptance function ---------------------------------------------------------

SHARP, CUT = SamplingParams(temperature=0.7, top_k=7), SamplingParams(temperature=1.3, top_p=0.85, min_p=0.05)
FILTERS = (SamplingParams(), SHARP, CUT)
DRAFTS = ("bad", "near", "equal")
ALL_SETTINGS = tuple(
    Setting(draft, K, FILTERS[(row + column) % 3])
    for row, draft in enumerate(DRAFTS)
    for column, K in enumerate((1, 3, 5))
)


class Tables:
    """A target and a draft whose logits depend on the last two tokens alone, so that a table holds them.

    Args:
        draft: ``bad``, ``near`` or ``equal``.
    """

    vocab = 9
    start: Text = (0, 1)

    def __init__(self, draft: str) -> None:
        random = np.random.default_rng(11)
        shape = (self.vocab,) * 3
        self.target = random.normal(0, 1.2, shape).astype(np.float32)
        noise = random.normal(0, 1.2, shape).astype(np.float32)
        self.draft = {"bad": noise, "near": self.target + noise / 3, "equal": self.target}[draft]

    def exact(self, params: SamplingParams) -> dict[Text, float]:
        """The probability of every text."""
        return text_distribution(lambda text: warped(self.target[(*self.start, *text)[-2:]], params), LENGTH)

    def texts(
        self,
        tree: TokenTree,
        params: SamplingParams,
        runs: int = RUNS,
        accept: Accept = accept_sampled,
        *,
        candidates: int = 64,
        drawn: bool = True,
    ) -> list[Text]:
        """Generates many texts side by side as the engine does one: draft a tree, accept a path, go on after it.

        Args:
            tree: of the draft tokens.
            params: temperature and filters.
            runs: how many texts.
            accept: what decides.
            candidates: most tokens that q knows.
            drawn: whether siblings are drawn from q one by one, or its most probable tokens (q = 1).
        """
        random = np.random.default_rng(7)
        texts = [self.start] * runs
        end = len(self.start) + LENGTH
        while unfinished := [run for run, text in enumerate(texts) if len(text) < end]:
            last = np.zeros((len(tree), len(unfinished), 2), np.int64)  # the last two tokens at every node
            last[0] = np.array([texts[run][-2:] for run in unfinished])
            drafts: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]] = []
            for node, parent in enumerate(tree.parents[1:], start=1):
                logits = self.draft[last[parent, :, 0], last[parent, :, 1]]
                noise = random.random(len(unfinished), np.float32)
                tokens, ids, probs = draw_candidates(logits, noise, params, candidates)
                if not drawn:
                    tokens = ids[:, tree.children[parent].index(node)]
                drafts.append((tokens, ids, probs))
                last[node] = np.stack([last[parent, :, 1], tokens], 1)
            tokens, ids, probs = (np.stack(part, 1) for part in zip(*drafts, strict=True))
            uniform = random.random((len(unfinished), len(tree)))
            for i, run in enumerate(unfinished):
                q = Distributions(ids[i], probs[i]) if drawn else None
                rows = self.target[last[:, i, 0], last[:, i, 1]]
                path, bonus = accept(rows, tree, tokens[i], q, params, uniform[i])
                texts[run] = (*texts[run], *(int(tokens[i, node - 1]) for node in path), bonus)[:end]
        return [text[len(self.start) :] for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize("setting", ALL_SETTINGS, ids=str)
def test_acceptance_keeps_the_target_distribution(setting):
    tables = Tables(setting.draft)
    assert_distributed(tables.texts(TokenTree.chain(setting.K + 1), setting.params), tables.exact(setting.params))


@pytest.mark.slow
def test_a_draft_that_considers_few_candidates_changes_nothing():
    tables, params = Tables("near"), SamplingParams()
    assert_distributed(tables.texts(TokenTree.chain(4), params, candidates=3), tables.exact(params))


@pytest.mark.slow
def test_tokens_chosen_without_drawing_change_nothing():
    """Any fixed choice is a draft with q = 1; so is one made by chance that has nothing to do with the text."""

    def without_q(logits: Floats, tree: Any, tokens: Any, _: Any, params: Any, noise: Any) -> Accepted:
        return accept_sampled(logits, tree, tokens, None, params, noise)

    tables, params = Tables("near"), FILTERS[2]
    assert_distributed(tables.texts(TokenTree.chain(4), params, accept=without_q), tables.exact(params))


TREE = TokenTree((-1, 0, 0, 0, 1, 1, 2, 4, 4))


@pytest.mark.slow
@pytest.mark.parametrize("params", FILTERS, ids=lambda p: f"t{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}")
@pytest.mark.parametrize("draft", DRAFTS)
def test_acceptance_over_a_tree_keeps_the_target_distribution(draft, params):
    """Siblings are drawn or the most probable ones in turn: each draft and each filter meets both."""
    tables, drawn = Tables(draft), (DRAFTS.index(draft) + FILTERS.index(params)) % 2 == 0
    assert_distributed(tables.texts(TREE, params, drawn=drawn), tables.exact(params))


# --- the tests above would notice -------------------------------------------------------------------------------------


def without_residual(logits: Floats, tree: Any, tokens: Any, q: Any, params: Any, noise: Any) -> Accepted:
    """Wrong: after a rejection, draws from p instead of what p has and q has not."""
    path, bonus = accept_sampled(logits, tree, tokens, q, params, noise)
    return path, bonus if len(path) == len(tokens) else target_distribution(logits[len(path)], params).draw(noise[-1])


def with_one_noise(logits: Floats, tree: Any, tokens: Any, q: Any, params: Any, noise: Any) -> Accepted:
    """Wrong: what decided a rejection also decides what is drawn after it."""
    return accept_sampled(logits, tree, tokens, q, params, np.full_like(noise, noise[0]))


def always(logits: Floats, tree: Any, tokens: Any, q: Any, params: Any, noise: Any) -> Accepted:
    """Wrong: accepts whatever the target might have said."""
    return accept_sampled(logits, tree, tokens, q, params, np.append(np.zeros(len(tokens)), noise[-1]))


def off_by_one(logits: Floats, tree: Any, tokens: Any, q: Any, params: Any, noise: Any) -> Accepted:
    """Wrong: compares with the q of the token before."""
    return accept_sampled(logits, tree, tokens, Distributions(q.ids[[0, 0, 1]], q.probs[[0, 0, 1]]), params, noise)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [without_residual, with_one_noise, always, off_by_one])
@pytest.mark.parametrize("draft", ["bad", "near"])
def test_a_wrong_acceptance_is_found_out(draft, wrong):
    tables, params = Tables(draft), SamplingParams()
    with pytest.raises(AssertionError):
        assert_distributed(tables.texts(TokenTree.chain(4), params, ENGINE_RUNS, wrong), tables.exact(params))


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [without_residual, with_one_noise, always])
def test_an_engine_that_accepts_wrongly_is_found_out(engine, oracle, monkeypatch, wrong):
    monkeypatch.setattr(step_module, "accept_sampled", wrong)
    setting = ENGINE_SETTINGS[1]
    texts, _ = engine_texts(engine(f"dice-{setting.draft}"), setting)
    with pytest.raises(AssertionError):
        assert_distributed(texts, exact_texts(oracle(f"dice-{setting.draft}")["next_logits"], setting.params, LENGTH))


# --- the benchmarks that do this at a size that settles it -----------------------------------------------------------


@pytest.mark.exporter
@pytest.mark.slow
def test_the_benchmark_resumes(tmp_path, capsys):
    def run(*flags: str) -> int:
        arguments = argparse.ArgumentParser()
        losslessness.add_arguments(arguments)
        always = ("--work", str(tmp_path), "--json", str(tmp_path / "results.json"))
        return losslessness.main(arguments.parse_args([*always, *flags]))

    assert run("--samples", "1000", "--only", "suffix, chain, batch, T") == 0
    document = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [row["sampling"] for row in document["rows"]] == ["T 0.7", "T 1.0"]
    for row in document["rows"]:
        assert row["accepted_at"][0] > row["accepted_at"][1] > 0
        assert {"1", "3"} <= row["drafts"].keys()  # as many as the batch allows
    assert run("--samples", "1000", "--only", "suffix, chain, batch") == 0
    more = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert more["rows"][:2] == document["rows"]
    assert len(more["rows"]) == 5
    assert "3 cells to go" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"results\.json: rows of \[1000\] samples, and --samples is 400"):
        run("--samples", "400")


def test_benchmark_cells_are_unique_with_disjoint_seeds():
    cells = losslessness.cells()
    true = [cell for cell in cells if not cell.bias]
    assert len(set(true)) == len(true) == len(losslessness.WAYS) * 2 * len(losslessness.SAMPLING)
    ways = len(losslessness.WAYS)
    assert {cell.way for cell in true[:ways]} == set(losslessness.WAYS)
    assert len({(cell.way, cell.load) for cell in true[: 2 * ways]}) == 2 * ways
    assert len({zlib.crc32(str(cell).encode()) for cell in cells}) == len(cells)
    methods = {way.method for way in losslessness.WAYS.values()}
    assert methods == set(all_methods.known())


@pytest.mark.parametrize(("bias", "share"), [("", 0.5), (losslessness.SHIFT, 0.51), (losslessness.FACTOR, 0.505)])
def test_biased_acceptance_has_its_bias(bias, share):
    logits, q = np.zeros((2, 2), np.float32), Distributions(np.array([[0, 1]]), np.array([[1.0, 0.0]], np.float32))
    steps = [
        losslessness.ACCEPT[bias](
            logits, TokenTree.chain(2), np.array([0]), q, SamplingParams(), np.array([(at + 0.5) / 1000, 0.5])
        )
        for at in range(1000)
    ]
    assert np.mean([len(path) for path, _ in steps]) == pytest.approx(share)


def test_p_values_that_are_too_small_or_not_uniform_are_found():
    def rows(p: npt.NDArray[np.float64]) -> list[losslessness.Row]:
        row = ("ngram, chain", "alone", "T 1.0", "", 1)
        return [losslessness.Row(*row, column.tolist(), 1, 1, [1, 0, 0], {}, 0.0) for column in p]

    uniform = np.random.default_rng(0).random((60, 3))
    assert losslessness.summary(rows(uniform))["overall"] > 0.05
    first = uniform.copy()
    first[7, 1] = 1e-6
    assert losslessness.summary(rows(first))["overall"] < losslessness.LEVEL
    assert losslessness.summary(rows(uniform**2))["overall"] < losslessness.LEVEL


def test_the_benchmark_of_exactness_decodes_in_every_way_and_says_where_texts_part(engine, bundle):
    name, prompts = "qwen3-lookup-batch", [[5, 6, 7, 8, 5, 6, 7], [9, 10, 11], [40], [5, 6, 5, 6], [70, 71]]
    loaded, cells = engine(name), exactness.cells(bundle(name), "fp32")
    plain = exactness._plain(loaded, prompts, 12)
    assert {(cell.method, cell.load) for cell in cells} == {
        ("plain", "batch"),
        *((method, load) for method in ("draft_model", "ngram", "suffix", "hypothesis") for load in ("alone", "batch")),
    }
    for cell in cells:
        row = exactness.run(loaded, cell, prompts, plain)
        assert (row.equal, row.texts, row.first) == (5, 5, None), row
        assert (row.drafted > 0) == (cell.method != "plain")
    (tokens, gaps), *others = plain
    wrong = [((*tokens[:7], tokens[7] + 1, *tokens[8:]), gaps), *others]
    row = exactness.run(loaded, cells[0], prompts, wrong)
    assert row.equal == 4
    assert row.first == {"prompt": 0, "after": 7, "plain": tokens[7] + 1, "said": tokens[7], "gap": gaps[7]}
