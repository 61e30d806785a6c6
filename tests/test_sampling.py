"""What is accepted, and what p is: properties that hold for every p, q and noise."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from specexport.contract.tree import TokenTree
from specexport.runtime import RequestError, SamplingParams
from specexport.runtime.sampling import Distribution, Distributions, accept_sampled, target_distribution
from tests.reference import accept_chain, everywhere, p_of, warped

GREEDY = SamplingParams(temperature=0.0)
NO_NOISE = np.empty(0)
LAST_BEFORE_ONE = math.nextafter(1.0, 0.0)

uniforms = st.one_of(st.floats(0.0, LAST_BEFORE_ONE), st.sampled_from([0.0, LAST_BEFORE_ONE]))
# Whole numbers make ties.
some_logits = st.integers(2, 40).flatmap(
    lambda size: hnp.arrays(
        np.float32, size, elements=st.one_of(st.floats(-12, 12, width=32), st.integers(-4, 4).map(float))
    )
)
# Sparse, so that zeros are common.
distributions = (
    st.integers(2, 30)
    .flatmap(lambda size: hnp.arrays(np.float64, size, elements=st.one_of(st.just(0.0), st.floats(1e-6, 1.0))))
    .filter(lambda weights: weights.sum() > 0)
    .map(lambda weights: weights / weights.sum())
)


@st.composite
def sampling(draw_value: Any) -> SamplingParams:
    return SamplingParams(
        temperature=draw_value(st.floats(0.05, 5.0)),
        top_k=draw_value(st.integers(-1, 45)),
        top_p=draw_value(st.one_of(st.just(1.0), st.floats(0.01, 1.0))),
        min_p=draw_value(st.one_of(st.just(0.0), st.floats(0.0, 1.0))),
    )


@st.composite
def p_and_q(draw_value: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A target's p, and a draft's q over some candidate tokens."""
    p = draw_value(distributions)
    size = draw_value(st.integers(1, len(p)))
    ids = np.array(draw_value(st.permutations(range(len(p)))), np.int64)[:size]
    weights = draw_value(hnp.arrays(np.float32, size, elements=st.floats(0.0, 1.0, width=32)))
    assume(weights.sum() > 1e-3)
    return p, ids, weights / weights.sum()


def forms(p: np.ndarray) -> list[Distribution]:
    """A distribution given by all tokens, and by those that have probability."""
    some = np.flatnonzero(p)
    return [Distribution(None, p), Distribution(some, p[some])]


def as_logits(p: np.ndarray) -> np.ndarray:
    """Logits whose distribution at temperature 1 is p."""
    with np.errstate(divide="ignore"):
        return np.log(p).astype(np.float32)


def one_draft(p: np.ndarray, token: int, ids: np.ndarray, q: np.ndarray, noise: tuple[float, float]) -> tuple[int, int]:
    """Accepts or rejects a single draft token; the position after it has the same p."""
    logits = np.stack([as_logits(p)] * 2)
    return accept_chain(logits, np.array([token]), Distributions(ids[None], q[None]), SamplingParams(), np.array(noise))


# --- p ----------------------------------------------------------------------------------------------------------------


@given(some_logits, sampling())
@example(np.zeros(7, np.float32), SamplingParams(top_k=3))
@example(np.zeros(4, np.float32), SamplingParams(top_p=0.5))
@example(np.array([1, 1, 0, 0], np.float32), SamplingParams(top_k=1))
@example(np.array([3, 1, 3, 1, 0], np.float32), SamplingParams(top_k=3, top_p=0.9, min_p=0.1))
def test_target_distribution_is_the_one_written_out_slowly(logits, params):
    assume(not on_the_edge(logits, params))
    np.testing.assert_allclose(p_of(logits, params), warped(logits, params), rtol=1e-9, atol=1e-12)


def on_the_edge(logits: np.ndarray, params: SamplingParams) -> bool:
    """Whether rounding decides what top-p or min-p keep (by chance only: ties in whole numbers do not round)."""
    if params.greedy:
        return False
    p = warped(logits, params.replace(top_k=0, top_p=1.0, min_p=0.0))
    if len(set(logits[p > 0].tolist())) > len(set(p[p > 0].tolist())):  # logits that differ by less than p can tell
        return True
    after_top_k = np.sort(warped(logits, params.replace(top_p=1.0, min_p=0.0)))[::-1]
    reached = np.abs(np.cumsum(after_top_k) - params.top_p).min() < 1e-9
    relative = after_top_k / after_top_k[0]
    uneven = len(set(logits.tolist())) > 1
    return uneven and bool((reached and params.top_p < 1) or np.abs(relative - params.min_p).min() < 1e-9)


@given(hnp.arrays(np.int64, st.integers(2, 40), elements=st.integers(-400, 400), unique=True), st.data())
def test_top_p_reached_exactly_is_enough(hundredths, data):
    logits = (hundredths / 100).astype(np.float32)
    cumulative = np.cumsum(np.sort(p_of(logits, SamplingParams()))[::-1])
    kept = data.draw(st.integers(1, len(logits) - 1))
    assume(cumulative[kept - 1] < cumulative[kept] < 1)
    top_p = float(cumulative[kept - 1])
    assert (p_of(logits, SamplingParams(top_p=top_p)) > 0).sum() == kept


@given(some_logits)
def test_low_temperatures_become_greedy(logits):
    first, second = np.sort(logits)[::-1][:2]
    assume(first - second > 1e-2)
    for temperature in (1e-4, 1e-5, 1e-6, 1e-30, 1e-320, 0.0):
        p = p_of(logits, SamplingParams(temperature=temperature))
        assert p[logits.argmax()] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1), GREEDY],
    ids=str,
)
@pytest.mark.parametrize("broken", [slice(None), slice(2, 5)])
def test_logits_that_are_no_numbers_do_not_stop_a_step(params, broken):
    logits = np.zeros((3, 9), np.float32)
    logits[:, broken] = np.nan
    with np.errstate(invalid="ignore"):
        _, token = accept_chain(logits, np.array([4, 4]), None, params, np.array([0.1, 0.5, 0.9]))
    assert 0 <= token < 9


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 6.0])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("size", [3000, 20_011])
@pytest.mark.parametrize("ties", [False, True])
def test_top_p_of_large_vocabularies(spread, top_p, size, ties):
    """Few tokens or nearly all of them are kept, depending on how the logits are spread."""
    logits = np.random.default_rng(5).normal(0, spread, size).astype(np.float32)
    logits = logits.round(2) if ties else logits
    inputs = SamplingParams(top_p=top_p)
    for params in (inputs, inputs.replace(top_k=700), inputs.replace(top_k=50, min_p=0.02, temperature=0.7)):
        np.testing.assert_allclose(p_of(logits, params), warped(logits, params), rtol=1e-9, atol=1e-15)


@pytest.mark.exporter
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.6, top_k=12, top_p=0.7, min_p=0.05),
    ],
    ids=str,
)
def test_filters_equal_transformers(params):
    import torch
    from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper
    from transformers import TopKLogitsWarper as TopK
    from transformers import TopPLogitsWarper as TopP

    rows = np.random.default_rng(3).normal(0, 2, (200, 40)).astype(np.float32)
    processors = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    processors += [TopK(params.top_k)] if params.top_k else []
    processors += [TopP(params.top_p)] if params.top_p < 1 else []
    processors += [MinPLogitsWarper(params.min_p)] if params.min_p else []
    theirs = processors(torch.zeros(200, 1, dtype=torch.int64), torch.from_numpy(rows)).softmax(-1).numpy()
    for row, expected in zip(rows, theirs, strict=True):
        np.testing.assert_allclose(p_of(row, params), expected, atol=1e-5)


# --- drawing ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.integers(0, 10**6), st.lists(uniforms, min_size=1))
def test_draw_of_a_large_vocabulary(size, seed, noise):
    """Blocks of it, the last one shorter, some of them empty."""
    random = np.random.default_rng(seed)
    p = random.exponential(size=size) * (random.random(size) < random.choice([0.001, 0.1, 1]))
    p[random.integers(size)] += 1e-3
    p /= p.sum()
    for form, uniform in itertools.product(forms(p), noise):
        token = form.draw(uniform)
        assert p[token] > 0
        assert p[:token].sum() <= uniform + 1e-12
        assert p[: token + 1].sum() > uniform - 1e-12


@given(distributions, st.floats(1e-3, 1e3), uniforms)
def test_draw_does_not_need_a_sum_of_one(p, scale, uniform):
    assume(np.abs(np.cumsum(p) - uniform).min() > 1e-9)
    assert Distribution(None, p * scale).draw(uniform) == Distribution(None, p).draw(uniform)


@given(distributions)
def test_draws_stay_in_range(p):
    assert [form.draw(1.0) for form in forms(p)] == [np.flatnonzero(p)[-1]] * 2


# --- the residual -----------------------------------------------------------------------------------------------------


@given(p_and_q())
def test_residual_is_the_positive_part_of_p_minus_q(case):
    p, ids, q = case
    whole = np.zeros(len(p))
    whole[ids] = q
    assume((p - whole).max() > 1e-6)
    for form in forms(p):
        rest = everywhere(form.residual(ids, q), len(p))
        np.testing.assert_allclose(rest, np.maximum(p - whole, 0) / np.maximum(p - whole, 0).sum(), rtol=1e-6)


@given(distributions)
def test_residual_of_equal_distributions_is_p(p):
    exactly = np.asarray(p, np.float32)
    for form in forms(exactly.astype(np.float64)):
        np.testing.assert_array_equal(everywhere(form.residual(np.arange(len(p)), exactly), len(p)), exactly)


@given(distributions, st.data())
def test_each_token_has_its_probability_in_either_form(p, data):
    token = data.draw(st.integers(0, len(p) - 1))
    assert [form.of(token) for form in forms(p)] == [p[token], p[token]]


# --- acceptance -------------------------------------------------------------------------------------------------------


@given(p_and_q(), uniforms, uniforms, st.data())
def test_draft_tokens_are_accepted_with_probability_p_over_q(case, first, last, data):
    p, ids, q = case
    token = data.draw(st.sampled_from(ids[q > 0].tolist()))
    p_x, q_x = p_of(as_logits(p), SamplingParams())[token], float(q[ids == token][0])
    assume(abs(first * q_x - p_x) > 1e-9)
    accepted, _ = one_draft(p, token, ids, q, (first, last))
    assert accepted == (first < p_x / q_x)


@given(p_and_q(), uniforms, uniforms, st.data())
def test_tokens_the_target_cannot_say_are_never_accepted_nor_drawn(case, first, last, data):
    p, ids, q = case
    token = data.draw(st.sampled_from(ids[q > 0].tolist()))
    accepted, following = one_draft(p, token, ids, q, (first, last))
    assert p[token] > 0 or accepted == 0
    assert p[following] > 0


@given(p_and_q(), st.data())
def test_a_rejected_token_is_not_drawn_again(case, data):
    p, ids, q = case
    token = data.draw(st.sampled_from(ids[q > 0].tolist()))
    whole = np.zeros(len(p))
    whole[ids] = q
    assume(p[token] < whole[token] - 1e-6)
    for last in (0.0, 0.25, 0.5, 0.75, LAST_BEFORE_ONE):
        accepted, following = one_draft(p, token, ids, q, (LAST_BEFORE_ONE, last))
        assert accepted == 0
        assert following != token
        assert p[following] > whole[following] - 1e-6


@given(some_logits, sampling(), st.integers(1, 5), st.data())
def test_a_draft_equal_to_the_target_is_always_accepted(row, params, k, data):
    p = p_of(row, params)
    ids = np.flatnonzero(p)
    # Rounded down, as q is float32: rounding up by an ulp may reject with a probability of an ulp.
    q = np.nextafter(p[ids].astype(np.float32), np.float32(0))
    tokens = np.array(data.draw(st.lists(st.sampled_from(ids.tolist()), min_size=k, max_size=k)))
    noise = np.array(data.draw(st.lists(uniforms, min_size=k + 1, max_size=k + 1)))
    many = Distributions(np.stack([ids] * k), np.stack([q] * k))
    accepted, following = accept_chain(np.stack([row] * (k + 1)), tokens, many, params, noise)
    assert accepted == k
    assert p[following] > 0


@given(st.integers(0, 6), st.integers(0, 6), uniforms)
def test_acceptance_stops_at_the_first_rejection(k, wrong, last):
    size = 8
    logits = np.full((k + 1, size), -np.inf, np.float32)
    logits[np.arange(k + 1), np.arange(k + 1)] = 0.0  # the text 0, 1, 2, ... and no other
    tokens = np.arange(k)
    tokens[wrong:] = size - 1
    q = Distributions(np.full((k, 1), size - 1), np.ones((k, 1), np.float32))
    q.ids[:, 0] = tokens
    noise = np.array([0.0] * k + [last])
    expected = min(wrong, k)
    assert accept_chain(logits, tokens, q, SamplingParams(), noise) == (expected, expected)
    assert accept_chain(logits, tokens, None, GREEDY, NO_NOISE) == (expected, expected)


@given(distributions, uniforms, uniforms, st.data())
def test_tokens_chosen_without_drawing_are_accepted_with_probability_p(p, first, last, data):
    token = data.draw(st.integers(0, len(p) - 1))
    logits = np.stack([as_logits(p)] * 2)
    exact = p_of(logits[0], SamplingParams())
    assume(abs(first - exact[token]) > 1e-9)
    accepted, following = accept_chain(logits, np.array([token]), None, SamplingParams(), np.array([first, last]))
    assert accepted == (first < exact[token])
    if not accepted:
        assert following != token
        assert p[following] > 0


@given(some_logits, sampling(), uniforms)
def test_without_draft_tokens_the_next_token_is_drawn_from_p(row, params, uniform):
    nothing = np.empty(0, np.int64)
    accepted, token = accept_chain(row[None], nothing, None, params, np.array([uniform]))
    assert (accepted, token) == (0, target_distribution(row, params).draw(uniform))
    assert accept_chain(row[None], nothing, None, GREEDY, NO_NOISE) == (0, int(row.argmax()))


@given(hnp.arrays(np.float32, (5, 6), elements=st.integers(-3, 3).map(float)), st.data())
def test_greedy_acceptance_is_comparing_token_by_token(logits, data):
    best = [row.tolist().index(max(row.tolist())) for row in logits]
    tokens = [data.draw(st.one_of(st.just(token), st.integers(0, 5))) for token in best[:4]]
    expected = 0
    while expected < 4 and tokens[expected] == best[expected]:
        expected += 1
    assert accept_chain(logits, np.array(tokens), None, GREEDY, NO_NOISE) == (expected, best[expected])


@given(some_logits, sampling(), uniforms)
def test_greedy_sampling_equals_greedy_acceptance(row, params, uniform):
    for greedy in (params.replace(temperature=0.0), params.replace(top_k=1)):
        noise = np.array([uniform])
        _, token = accept_sampled(row[None], TokenTree.chain(1), np.empty(0, np.int64), None, greedy, noise)
        assert token == int(row.argmax())


# --- parameters -------------------------------------------------------------------------------------------------------


OUT_OF_RANGE: dict[str, tuple[Any, ...]] = {
    "max_tokens": (-1, 1.5, True),
    "temperature": (-0.1, math.nan, math.inf, "warm"),
    "top_p": (-0.1, 1.01),
    "top_k": (-2, 2.0),
    "min_p": (-0.1, 1.1),
    "acceptance": ("loose",),
    "posterior_threshold": (1.5,),
    "posterior_alpha": (math.nan,),
    "likelihood_threshold": (-0.1, 1.5, math.nan),
    "entropy_threshold": (-1.0, math.nan),
    "logit_bias": ({5: 101.0}, {-1: 1.0}),
    "frequency_penalty": (2.1,),
    "presence_penalty": (math.nan,),
    "repetition_penalty": (0.001,),
    "logprobs": (-1, 21, 1.5, True),
    "prompt_logprobs": (-1, 21, 1.5, True),
    "seed": (-1, 0.5),
    "stop": (("",), ("a", 3)),
}


@pytest.mark.parametrize(("field", "value"), [(name, value) for name in OUT_OF_RANGE for value in OUT_OF_RANGE[name]])
def test_parameters_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(RequestError, match=f"^{field} is ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_one_stop_text_needs_no_tuple():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
