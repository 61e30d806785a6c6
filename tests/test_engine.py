"""How the engine behaves around the texts it makes: limits, ends, seeds, streams, threads."""

import gc
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specexport.contract.errors import ClosedError
from specexport.runtime import Chunk, Completion, Engine, RequestError, SamplingParams, Stats, Stream
from specexport.runtime.backend import BackendOptions, open_backend
from specexport.runtime.backends.onnxruntime import backend
from specexport.runtime.bundle import Bundle
from specexport.runtime.speculative import PLAIN
from tests.fixtures import Bundles, Engines
from tests.manifests import put
from tests.streams import tokens_of
from tests.threads import JOIN, in_thread, python

NAME = "llama-near"
PROMPT = (17, 180, 33, 250, 64, 99, 201)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=24, ignore_eos=True)


@pytest.fixture
def llama(engine: Engines) -> Engine:
    return engine(NAME)


@pytest.fixture
def fresh_engine(bundle: Bundles) -> Engine:
    """An engine that no other test waits for, should this one never free it."""
    return Engine.load(bundle(NAME), threads=1)


@pytest.fixture
def changed(bundle: Bundles, tmp_path: Path) -> Callable[..., Engine]:
    """Loads a copy of the bundle whose manifest says other things of its tokenizer."""

    def load(**tokenizer: Any) -> Engine:
        folder = shutil.copytree(bundle(NAME), tmp_path / "bundle")
        for field, value in tokenizer.items():
            put(folder, f"tokenizer.{field}", value)
        return Engine.load(folder, threads=1)

    return load


# --- seeds ------------------------------------------------------------------------------------------------------------


def test_a_seed_makes_the_text_reproducible(llama, bundle):
    with Engine.load(bundle(NAME), threads=1) as other:
        pairs = [(llama, 1), (llama, 2), (llama, 1), (other, 2)]
        texts = [loaded.generate(PROMPT, SAMPLED.replace(seed=seed)).token_ids for loaded, seed in pairs]
    assert texts[0] == texts[2] != texts[1] == texts[3]


def test_without_a_seed_texts_differ(llama):
    assert len({llama.generate(PROMPT, SAMPLED).token_ids for _ in range(4)}) > 1


def test_a_request_leaves_no_trace_in_the_next(llama):
    first = llama.generate(PROMPT, SAMPLED.replace(seed=3)).token_ids
    llama.generate([300] * 150, SAMPLED.replace(seed=4, max_tokens=60))
    llama.generate(PROMPT[:3], SAMPLED.replace(seed=4, max_tokens=60))
    assert llama.generate(PROMPT, SAMPLED.replace(seed=3)).token_ids == first


def test_defaults_are_the_models_own(llama):
    assert llama.params() == SamplingParams(temperature=0.0, posterior_threshold=0.09, posterior_alpha=0.3)
    assert llama.generate(PROMPT).token_ids[:24] == llama.generate(PROMPT, GREEDY.replace(ignore_eos=False)).token_ids


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_a_prompt_may_be_text_or_its_tokens(llama):
    text = "what is the first word of all"
    tokens = llama.tokenizer.encode(text).ids
    assert llama.encode(text) == tokens
    from_text, from_tokens = llama.generate(text, GREEDY), llama.generate(tokens, GREEDY)
    assert from_text.token_ids == from_tokens.token_ids
    assert from_text.stats.prompt_tokens == len(tokens)


def test_an_empty_prompt_is_the_start_token(llama):
    start = llama.tokenizer.token_to_id("<s>")
    assert llama.encode("") == llama.encode([]) == [start]
    assert llama.generate("", GREEDY).token_ids == llama.generate([start], GREEDY).token_ids


def test_an_empty_prompt_without_a_start_token_is_the_end_token(changed):
    loaded = changed(special_tokens={}, eos_token_ids=[7, 1])
    assert loaded.encode("") == [7]


def test_an_empty_prompt_is_refused_where_nothing_could_stand_for_it(changed):
    loaded = changed(special_tokens={}, eos_token_ids=[])
    with pytest.raises(RequestError, match="prompt is empty"):
        loaded.generate("", GREEDY)
    assert len(loaded.generate("a", GREEDY).token_ids) == 24


def test_text_whose_tokens_the_model_does_not_have_is_refused(engine):
    """Some tokenizers know more tokens than their model."""
    small = engine("dice-near")
    with pytest.raises(RequestError, match="0 to 11"):
        small.generate("people", GREEDY)
    assert len(small.generate([3, 4], GREEDY).token_ids) == 24


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 66, 128, 129, 130])
@pytest.mark.parametrize("name", [NAME, "gemma2-equal"])
def test_prompts_of_every_length_at_the_borders_of_prefill_chunks(engine, name, length):
    """The text after a prompt is the same, however much of it is prompt and however much was generated."""
    prompt = [3 + (37 * i) % 300 for i in range(length)]
    whole = engine(name).generate(prompt, GREEDY).token_ids
    assert engine(name).generate(prompt, GREEDY, PLAIN).token_ids == whole
    assert engine(name).generate([*prompt, *whole[:10]], GREEDY.replace(max_tokens=14)).token_ids == whole[10:]


# --- the context ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [512, 513, 700])
def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers(llama, length):
    with pytest.raises(RequestError, match=rf"{length} tokens.*512"):
        llama.generate([5] * length, GREEDY)


@pytest.mark.parametrize("name", [NAME, "qwen3-bad", "gemma2-equal", "gpt2-near"])
@pytest.mark.parametrize("speculation", [True, False])
def test_a_text_ends_with_the_context(engine, oracle, name, speculation):
    for case in oracle(name)["greedy"][-2:]:
        params = GREEDY.replace(max_tokens=1000, ignore_eos=False)
        done = engine(name).generate(case["prompt"], params, None if speculation else PLAIN)
        assert (done.token_ids, done.finish_reason) == (tuple(case["tokens"]), "length")
        assert len(case["prompt"]) + len(done.token_ids) == 512


@pytest.mark.parametrize("name", [NAME, "gemma2-equal"])
def test_the_caches_grow_without_changing_the_text(bundle, oracle, name):
    """In a new engine, whose caches have their first size; the cases cross each border while generating."""
    for case in oracle(name)["greedy"][-4:-1]:
        with Engine.load(bundle(name), threads=1) as fresh:
            done = fresh.generate(case["prompt"], GREEDY.replace(max_tokens=len(case["tokens"]), ignore_eos=False))
            assert done.token_ids == tuple(case["tokens"])


# --- how texts end ----------------------------------------------------------------------------------------------------


def test_max_tokens_is_exact(llama):
    whole = llama.generate(PROMPT, GREEDY).token_ids
    for count in range(len(whole)):
        done = llama.generate(PROMPT, GREEDY.replace(max_tokens=count))
        assert (done.token_ids, done.finish_reason) == (whole[:count], "length")
        assert done.stats.output_tokens == count


def test_no_tokens_are_no_work(llama):
    done = llama.generate([5] * llama.manifest.max_seq_len, GREEDY.replace(max_tokens=0))
    assert done == Completion("", (), "length", done.stats)
    assert done.stats.steps == done.stats.drafted == 0


def test_any_of_the_end_tokens_ends_the_text(llama, changed):
    whole = llama.generate(PROMPT, GREEDY)
    later, sooner = whole.token_ids[15], whole.token_ids[9]
    at = min(whole.token_ids.index(later), whole.token_ids.index(sooner))
    assert 0 < at < 15
    other = changed(eos_token_ids=[later, sooner])
    for speculation in (True, False):
        done = other.generate(PROMPT, GREEDY.replace(ignore_eos=False), None if speculation else PLAIN)
        assert (done.token_ids, done.finish_reason) == (whole.token_ids[: at + 1], "stop")
        assert done.text == llama.tokenizer.decode(whole.token_ids[:at])
    assert other.generate(PROMPT, GREEDY).token_ids == whole.token_ids


def test_the_end_token_wins_over_the_length(llama, changed):
    first = llama.generate(PROMPT, GREEDY).token_ids[0]
    done = changed(eos_token_ids=[first]).generate(PROMPT, GREEDY.replace(ignore_eos=False, max_tokens=1))
    assert (done.token_ids, done.text, done.finish_reason) == ((first,), "", "stop")


def test_a_stop_text_ends_the_text_before_it(llama):
    whole = llama.generate(PROMPT, GREEDY)
    pieces = [llama.tokenizer.decode([token]) for token in whole.token_ids]
    for at in range(3, 18):
        # From the middle of one token into the next.
        stop = "".join(pieces[at : at + 2])[len(pieces[at]) // 2 :][: len(pieces[at])] or pieces[at]
        if "\ufffd" in stop:
            continue
        done = llama.generate(PROMPT, GREEDY.replace(stop=(stop, "never said")))
        assert done.finish_reason == "stop"
        assert done.text == whole.text[: whole.text.index(stop)]
        assert done.token_ids == whole.token_ids[: len(done.token_ids)]
        assert stop in llama.tokenizer.decode(done.token_ids)
        assert stop not in llama.tokenizer.decode(done.token_ids[:-1])


def test_absent_stop_texts_change_nothing(llama):
    whole = llama.generate(PROMPT, GREEDY)
    end = llama.generate(PROMPT, GREEDY.replace(stop=(whole.text[-3:] + "!", "\x00\x01")))
    assert (end.text, end.token_ids, end.finish_reason) == (whole.text, whole.token_ids, "length")


@pytest.mark.parametrize("seed", range(10))
def test_the_text_decodes_the_tokens(llama, seed):
    """Random weights say a lot of stray bytes."""
    done = llama.generate(PROMPT, SAMPLED.replace(seed=seed, temperature=1.5, max_tokens=60))
    assert done.text == llama.tokenizer.decode(done.token_ids)


# --- acceptance -------------------------------------------------------------------------------------------------------


def test_typical_acceptance_accepts_more_and_greedy_stays_exact(llama):
    loose = SAMPLED.replace(acceptance="typical", posterior_threshold=0.0, top_p=1.0)
    strict = SAMPLED.replace(acceptance="typical", posterior_threshold=1.0, posterior_alpha=1.0, top_p=1.0)
    everything, little = (
        sum(llama.generate(PROMPT, params.replace(seed=seed)).stats.accepted for seed in range(6))
        for params in (loose, strict)
    )
    drafted = sum(llama.generate(PROMPT, loose.replace(seed=seed)).stats.drafted for seed in range(6))
    assert everything == drafted  # any token p gives a chance to is likely enough
    assert little < 0.9 * everything
    greedy = GREEDY.replace(acceptance="typical", posterior_threshold=0.0)
    assert llama.generate(PROMPT, greedy).token_ids == llama.generate(PROMPT, GREEDY).token_ids


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_is_the_completion_in_pieces(fresh_engine):
    params = SAMPLED.replace(seed=8)
    whole = fresh_engine.generate(PROMPT, params)
    stream = fresh_engine.stream(PROMPT, params)
    chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tokens_of(chunks) == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert stream.tokens == [*PROMPT, *whole.token_ids]
    assert list(stream) == []


def test_a_stream_starts_when_it_is_read(fresh_engine):
    waiting = fresh_engine.stream(PROMPT, GREEDY)
    assert fresh_engine.generate(PROMPT, GREEDY).token_ids == tokens_of(waiting)


def test_a_second_request_in_a_thread_with_an_unfinished_stream_finishes_that_first(fresh_engine):
    """Where there is one slot: what the first one made meanwhile can still be read."""

    def nested() -> tuple[int, ...]:
        with fresh_engine.stream(PROMPT, GREEDY) as stream:
            first = next(stream)
            assert len(fresh_engine.generate(PROMPT[:3], GREEDY).token_ids) == 24
            assert stream.stats.output_tokens == 24
            return first.token_ids + tokens_of(stream)

    assert in_thread(nested) == fresh_engine.generate(PROMPT, GREEDY).token_ids


@pytest.mark.parametrize("how", ["dropped", "closed", "an error"])
def test_a_stream_that_is_left_frees_the_engine(fresh_engine, how):
    def leave() -> None:
        stream = fresh_engine.stream(PROMPT, GREEDY)
        if how == "an error":
            with pytest.raises(ZeroDivisionError), stream:
                for _ in stream:
                    raise ZeroDivisionError
            return
        next(stream)
        if how == "closed":
            stream.close()
            stream.close()
            assert list(stream) == []

    leave()
    gc.collect()
    assert len(in_thread(lambda: fresh_engine.generate(PROMPT, GREEDY)).token_ids) == 24


def test_a_cancelled_stream_ends_before_its_next_step(fresh_engine):
    stream = fresh_engine.stream(PROMPT, GREEDY.replace(max_tokens=400))
    started, cancelled = threading.Event(), threading.Event()

    def read() -> list[Chunk]:
        chunks = [next(stream)]
        started.set()
        assert cancelled.wait(JOIN)
        return [*chunks, *stream]

    def cancel() -> None:
        assert started.wait(JOIN)
        stream.cancel()
        cancelled.set()

    canceller = threading.Thread(target=cancel, daemon=True)
    canceller.start()
    chunks = in_thread(read)
    assert [chunk.finish_reason for chunk in chunks] == [None, "cancelled"]
    assert chunks[1].token_ids == ()
    assert len(fresh_engine.generate(PROMPT, GREEDY).token_ids) == 24


def test_a_stream_cancelled_before_it_starts_is_empty(fresh_engine):
    stream = fresh_engine.stream(PROMPT, GREEDY)
    stream.cancel()
    assert list(stream) == [Chunk("", (), "cancelled")]
    assert stream.stats.steps == 0


def test_a_stream_closed_by_another_thread_ends_and_frees_the_engine(fresh_engine):
    """At any time: while the other thread is in a step, between steps, or after the end."""
    for _ in range(20):
        stream = fresh_engine.stream(PROMPT, GREEDY.replace(max_tokens=60))
        reader = threading.Thread(target=lambda stream=stream: list(stream), daemon=True)
        reader.start()
        stream.close()
        reader.join(JOIN)
        assert not reader.is_alive()
        assert len(in_thread(lambda: fresh_engine.generate(PROMPT, GREEDY.replace(max_tokens=2))).token_ids) == 2


def test_a_stream_closed_while_it_waits_for_its_turn_never_runs(fresh_engine):
    with fresh_engine.stream(PROMPT, GREEDY) as running:
        next(running)
        waiting = fresh_engine.stream(PROMPT, GREEDY)
        waiting.start()
        waiting.close()
        assert list(waiting) == []
        assert waiting.stats.output_tokens == 0
        list(running)
    assert waiting.stats.steps == 0
    assert len(in_thread(lambda: fresh_engine.generate(PROMPT, GREEDY)).token_ids) == 24


# --- threads and closing ----------------------------------------------------------------------------------------------


def test_threads_beyond_the_cores_are_not_started(bundle, monkeypatch):
    monkeypatch.setattr(backend, "available_cores", lambda: 1)
    opened, options = Bundle.open(bundle(NAME)), BackendOptions("onnxruntime", threads=1000)
    with pytest.warns(UserWarning, match=r"^threads is 1000, and this process may use 1 core: it takes 1 thread, as"):
        assert ", 1 thread," in open_backend(opened, options).device


def test_a_closed_engine_refuses_requests(bundle):
    with Engine.load(bundle(NAME), threads=1) as loaded:
        prepared = loaded.stream(PROMPT, GREEDY)
        assert len(loaded.generate(PROMPT, GREEDY).token_ids) == 24
    asks = (lambda: loaded.generate(PROMPT, GREEDY), lambda: loaded.stream(PROMPT, GREEDY), lambda: next(prepared))
    for refused in asks:
        with pytest.raises(ClosedError, match="closed"):
            refused()
    loaded.close()


def test_an_error_of_a_signals_handler_stays_what_it_is(bundle, monkeypatch):
    """Handlers run when onnxruntime returns, so that their errors seem to be its own."""

    def raising(*_: Any) -> None:
        raise TimeoutError("too slow")

    with Engine.load(bundle(NAME), threads=1) as engine:
        with monkeypatch.context() as patched:
            patched.setattr("onnxruntime.InferenceSession.run_with_iobinding", raising)
            with pytest.raises(TimeoutError, match="too slow"):
                engine.generate(PROMPT, GREEDY)
        assert len(engine.generate(PROMPT, GREEDY).token_ids) == 24


def test_closing_ends_this_threads_own_stream(bundle):
    def leave_early() -> Stream:
        with Engine.load(bundle(NAME), threads=1) as loaded:
            stream = loaded.stream(PROMPT, GREEDY)
            next(stream)
        return stream

    assert list(in_thread(leave_early)) == []


def refuses_requests(engine: Engine) -> bool:
    try:
        engine.stream(PROMPT, GREEDY)
    except ClosedError:
        return True
    return False


def test_closing_waits_for_another_threads_request(bundle):
    loaded = Engine.load(bundle(NAME), threads=1)
    stream = loaded.stream(PROMPT, GREEDY)
    tokens = list(next(stream).token_ids)
    closer = threading.Thread(target=loaded.close, daemon=True)
    closer.start()
    while not refuses_requests(loaded):
        time.sleep(0.001)
    for chunk in stream:
        tokens += chunk.token_ids
    closer.join(JOIN)
    assert not closer.is_alive()
    assert len(tokens) == 24


# --- speculation ------------------------------------------------------------------------------------------------------


def test_a_draft_equal_to_the_target_is_always_accepted(engine):
    """Through prefill chunks and cache sizes: after one wrong row in its cache it would soon say something else."""
    for prompt in ([9], list(PROMPT), [3 + i % 300 for i in range(200)]):
        done = engine("gemma2-equal").generate(prompt, GREEDY.replace(max_tokens=300))
        assert done.stats.acceptance_rate == 1.0
        assert len(done.token_ids) == 300


def test_k_is_chosen_per_request(llama):
    whole = llama.generate(PROMPT, GREEDY)
    for k in (1, 2, 4, 7):
        done = llama.generate(PROMPT, GREEDY, {"num_speculative_tokens": k})
        assert done.token_ids == whole.token_ids
        assert len(done.stats.acceptance_by_position) == k
        assert done.stats.drafted == k * done.stats.steps_with_draft
    with pytest.raises(RequestError, match=r"num_speculative_tokens is 3.* 1, 2, 4, 7"):
        llama.generate(PROMPT, GREEDY, {"num_speculative_tokens": 3})
    for key, fault in (("num_spec_tokens", "is unknown"), ("model", "is set when the bundle is built")):
        with pytest.raises(RequestError, match=f"{key!r} of method 'draft_model' {fault}.*num_speculative_tokens"):
            llama.generate(PROMPT, GREEDY, {"method": "draft_model", key: 3})


@pytest.mark.parametrize("params", [GREEDY, SAMPLED.replace(seed=1), SAMPLED.replace(seed=2, max_tokens=77)], ids=str)
@pytest.mark.parametrize("name", [NAME, "qwen3-bad", "gemma2-equal"])
def test_stats_add_up(engine, name, params):
    done = engine(name).generate(PROMPT, params)
    stats = done.stats
    assert stats.prompt_tokens == len(PROMPT)
    assert stats.output_tokens == len(done.token_ids) == params.max_tokens
    assert 0 <= stats.accepted <= stats.drafted
    assert stats.accepted == sum(stats.accepted_at)
    assert stats.accepted_at == sorted(stats.accepted_at, reverse=True)
    assert stats.steps_with_draft <= stats.steps
    # Each step gives its accepted tokens and one more; the last one may give more than there is room for.
    assert stats.output_tokens <= stats.accepted + stats.steps < stats.output_tokens + 8
    assert stats.acceptance_length == pytest.approx(stats.output_tokens / stats.steps)
    assert stats.acceptance_rate == pytest.approx(stats.accepted / stats.drafted)
    assert stats.decode_seconds == pytest.approx(stats.propose + stats.verify + stats.accept + stats.host)
    assert stats.tokens_per_second == pytest.approx(stats.output_tokens / stats.decode_seconds)
    assert stats.as_dict()["acceptance_length"] == stats.acceptance_length
    assert stats.total >= stats.first_token >= stats.prefill > 0


def test_plain_decoding_drafts_nothing(llama):
    stats = llama.generate(PROMPT, GREEDY, PLAIN).stats
    assert (stats.drafted, stats.accepted, stats.steps, stats.acceptance_length) == (0, 0, 24, 1.0)
    assert stats.acceptance_rate == 0.0
    assert stats.acceptance_by_position == []


def test_stats_of_nothing_are_zero():
    stats = Stats()
    assert (stats.acceptance_length, stats.acceptance_rate, stats.tokens_per_second) == (0.0, 0.0, 0.0)


def test_a_process_may_end_while_a_daemon_thread_decodes(bundle):
    """Python ends such a thread in onnxruntime's code, which would abort the process."""
    code = (
        "import sys, threading, time; from specexport.runtime import Engine, SamplingParams\n"
        "engine = Engine.load(sys.argv[1], calibrate=False, threads=1)\n"
        "params = SamplingParams(max_tokens=400, ignore_eos=True)\n"
        "def decode():\n    while True: engine.generate([5, 6], params)\n"
        "for _ in range(2): threading.Thread(target=decode, daemon=True).start()\n"
        "time.sleep(0.2)\n"
    )
    assert python(code, bundle("llama-near")) == ""
