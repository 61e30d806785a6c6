"""``LLM``: what vLLM's users type, and what they get back."""

import contextlib
import copy
import fcntl
import os
import pickle
import pty
import struct
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

import specexport
from specexport import LLM, SamplingParams
from specexport.contract.errors import BackendError, BuildError, RequestError
from specexport.contract.methods import known, read_method, read_methods
from specexport.contract.tree import TokenTree
from tests.fixtures import Bundles
from tests.threads import python

NAME = "llama-near"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPTS = ["one two three", "the of and", "what"]


@pytest.fixture(scope="module")
def llm(bundle: Bundles) -> LLM:
    return LLM(bundle=bundle(NAME), threads=1, calibrate=False)


@pytest.mark.parametrize("columns", [80, 0])
def test_a_terminal_sees_how_far_it_is(llm, monkeypatch, columns):
    """One that does not tell its size too, as those of containers do."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", columns and 24, columns, 0, 0))
    with os.fdopen(follower, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        terminal.write("quiet\n")
        llm.generate(PROMPTS, GREEDY)
    content = b""
    with os.fdopen(leader, "rb", buffering=0) as reader, contextlib.suppress(OSError):  # which ends it, on Linux
        while part := reader.read(1 << 16):
            content += part
    text = content.decode()
    assert text.startswith("quiet")
    assert "generating" in text
    assert "3/3" in text


def test_the_package_has_what_callers_name():
    assert [name for name in specexport.__all__ if not hasattr(specexport, name)] == []
    assert set(specexport.__all__) <= set(dir(specexport))
    errors = [value for name in specexport.__all__ if isinstance(value := getattr(specexport, name), type)]
    assert {error for error in errors if issubclass(error, Exception)} >= {BackendError, BuildError, RequestError}


def test_errors_and_outputs_pass_between_processes_and_engines_say_that_they_do_not(llm):
    refused = pickle.loads(pickle.dumps(specexport.QueueFullError("the queue is full", retry_after=3)))
    assert (str(refused), refused.retry_after) == ("the queue is full", 3)
    (output,) = llm.generate(PROMPTS[0], GREEDY.replace(logprobs=1), use_tqdm=False)
    assert pickle.loads(pickle.dumps(output)) == output
    for attempt in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="an engine cannot be pickled or copied; open the bundle in every process"):
            attempt(llm)
    for attempt in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="a stream cannot be pickled or copied"):
            attempt(llm._frontend.engine.stream("a", GREEDY))


FORKED = """
import os, sys, warnings
from specexport import LLM, SamplingParams
warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 and later: onnxruntime has threads
options = {"threads": 2, "calibrate": False}
llm = LLM(sys.argv[1], **options)
def text():
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
    return output.outputs[0].token_ids
expected = text()
if os.fork() == 0:
    llm = LLM(sys.argv[1], **options)  # instead of the parent's, which is freed
    assert text() == expected
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""


def test_a_forked_process_opens_its_own(bundle):
    """Freeing the parent's waits for threads that a child does not have."""
    python(FORKED, bundle(NAME))


def test_outputs_are_the_engines_in_order(llm, engine):
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for index, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        expected = engine(NAME).generate(prompt, GREEDY)
        (completion,) = output.outputs
        assert (output.request_id, output.prompt, output.finished) == (str(index), prompt, True)
        assert output.prompt_token_ids == tuple(engine(NAME).encode(prompt))
        assert (completion.index, completion.text, completion.token_ids) == (0, expected.text, expected.token_ids)
        assert (completion.finish_reason, completion.logprobs, completion.cumulative_logprob) == ("length", None, None)
        assert completion.metrics.output_tokens == 16
        assert completion.metrics.accepted > 0


def test_each_prompt_may_have_its_own_parameters(llm, capsys):
    outputs = llm.generate(PROMPTS, [GREEDY.replace(max_tokens=count) for count in (1, 2, 3)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    assert capsys.readouterr().out == ""
    with pytest.raises(RequestError, match="2 sampling_params for 3 prompts"):
        llm.generate(PROMPTS, [GREEDY, GREEDY])


def test_n_outputs_differ_and_a_seed_reproduces_them(llm):
    params = SamplingParams(n=3, seed=7, max_tokens=12, ignore_eos=True)
    first, again = (llm.generate("one two", params, use_tqdm=False)[0] for _ in range(2))
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert len({output.token_ids for output in first.outputs}) == 3
    assert [output.token_ids for output in first.outputs] == [output.token_ids for output in again.outputs]


def test_logprobs_are_by_token_with_their_text(llm):
    (output,) = llm.generate("one two", SamplingParams(seed=1, max_tokens=5, logprobs=2), use_tqdm=False)
    (completion,) = output.outputs
    assert completion.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True))
    )
    for entry, token in zip(completion.logprobs, completion.token_ids, strict=True):
        assert {1, 2} <= {value.rank for value in entry.values()}
        assert token in entry
        assert all(isinstance(value.decoded_token, str) for value in entry.values())


def test_an_engine_seed_reproduces_requests_by_their_order(bundle):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    texts = []
    for seed in (1, 1, 2):
        with LLM(bundle=bundle(NAME), seed=seed, threads=1, calibrate=False) as llm:
            texts.append([out.outputs[0].token_ids for out in llm.generate(["one"] * 3, params, use_tqdm=False)])
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) == 3


def test_max_model_len_bounds_prompt_and_output(bundle):
    with LLM(bundle=bundle(NAME), max_model_len=20, threads=1, calibrate=False) as llm:
        for params in (GREEDY, GREEDY.replace(max_tokens=None), GREEDY.replace(max_tokens=100, min_tokens=50)):
            (output,) = llm.generate([5] * 15, params, use_tqdm=False)
            assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (5, "length")
        too_long = r"prompt 1: the prompt has 20 tokens, but the context holds 20"
        with pytest.raises(specexport.ContextLengthError, match=too_long):
            llm.generate([[5], [5] * 20], GREEDY, use_tqdm=False)
    for wrong, expected in ((1, "a whole number >= 2"), (513, "at most 512, for which this bundle was built")):
        with pytest.raises(BuildError, match=f"max_model_len is {wrong}; expected {expected}"):
            LLM(bundle=bundle(NAME), max_model_len=wrong, threads=1, calibrate=False)


def test_nothing_runs_if_one_request_is_refused(llm):
    with pytest.raises(RequestError, match="prompt 1: the prompt holds token 9999"):
        llm.generate([[5], [9999]], GREEDY, use_tqdm=False)


def test_a_bundle_may_be_named_as_the_model(bundle):
    config = {"method": "draft_model", "num_speculative_tokens": 2}
    with LLM(str(bundle(NAME)), speculative_config=config, calibrate=False) as llm:
        (output,) = llm.generate("one two", GREEDY, use_tqdm=False)
        assert output.outputs[0].metrics.drafted <= 2 * output.outputs[0].metrics.steps_with_draft


def test_prompts_have_log_probabilities(bundle):
    with LLM(bundle=bundle(NAME), threads=1, calibrate=False) as llm:
        scored, plain = llm.generate(
            [[5, 6, 7, 8], [5, 6]], [GREEDY.replace(prompt_logprobs=1, max_tokens=0), GREEDY], use_tqdm=False
        )
    assert plain.prompt_logprobs is None
    first, *others = scored.prompt_logprobs
    assert first is None
    assert [token in (other or {}) for token, other in zip([6, 7, 8], others, strict=True)] == [True] * 3
    assert all(1 <= len(other or {}) <= 2 for other in others)
    assert scored.outputs[0].token_ids == ()


def test_the_backend_is_the_engines(bundle):
    with LLM(bundle=bundle(NAME), threads=1, calibrate=False, backend="onnxruntime") as llm:
        assert llm._frontend.engine.backend.device.startswith("onnxruntime, ")
    with pytest.raises(BackendError, match="backend is 'abacus'; expected one of onnxruntime") as caught:
        LLM(bundle=bundle(NAME), backend="abacus")
    assert caught.value.param == "backend"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give one of them"),
        ({"model": "a", "bundle": "b"}, "give one of them"),
        ({"bundle": "{}", "tensor_parallel_size": 2}, "tensor_parallel_size is 2, but .* was built for 1"),
        ({"bundle": "{}", "gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
        ({"bundle": "{}", "seed": -1}, "seed is -1"),
        ({"bundle": "{}", "precision": "int8"}, "precision was given with a bundle"),
        ({"bundle": "{}", "presicion": "int8"}, "presicion is not an option; expected some of model, "),
        ({"model": "m", "presicion": "int8"}, "presicion is not an option; expected some of model, "),
        ({"model": "m", "methods": ()}, "methods is not an option"),
        ({"model": "m", "draft_precision": "int8"}, "draft_precision was given without a draft"),
        ({"model": "m", "draft_precision": None}, "m: no such folder"),
        ({"model": "m", "precision": "int9"}, "precision is 'int9'; expected one of fp32, fp16"),
        ({"model": "m", "threads": 0}, "threads is 0; expected a whole number >= 1"),
        ({"bundle": "{}", "speculative_config": {"method": "medusa"}}, "method is 'medusa'; the bundle has draft"),
        ({"bundle": "{}", "speculative_config": "medusa"}, "method is 'medusa'; the bundle has draft_model"),
        ({"bundle": "{}", "speculative_config": {"model": "x"}}, "model was given with a bundle"),
        (
            {"bundle": "{}", "speculative_config": {"method": "medusa", "model": "h", "trees": "mc_sim_7b_63"}},
            "model was given with a bundle, which is built already; name method and num_speculative_tokens alone",
        ),
        ({"bundle": "{}", "speculative_config": "medusa:heads/"}, "its options belong to the build"),
        ({"bundle": "{}", "speculative_config": {"method": "magic"}}, "method is 'magic'; expected one of dflash"),
        ({"bundle": "{}", "speculative_config": {"method": "suffix", "store_tokens": -1}}, "store_tokens"),
        (
            {"bundle": "{}", "speculative_config": {"method": "suffix", "num_speculative_tokens": 30}},
            "suffix: the bundle verifies chains of at most 8 draft tokens",
        ),
        (
            {"bundle": "{}", "speculative_config": {"method": "draft_model", "num_speculative_tokens": "x"}},
            "speculative_config: num_speculative_tokens is 'x'; expected a whole number >= 0",
        ),
        (
            {"bundle": "{}", "speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}},
            "num_speculative_tokens is 3; the bundle was built for 1, 2, 4, 7",
        ),
        ({"model": 3}, "model is 3; expected a text or a path"),
        ({"bundle": b"x"}, "bundle is b'x'; expected a text or a path"),
    ],
)
def test_wrong_options_are_named(bundle, options, words):
    fields = {key: str(bundle(NAME)) if value == "{}" else value for key, value in options.items()}
    with pytest.raises(BuildError, match=words):
        LLM(**fields)


# --- speculative_config -----------------------------------------------------------------------------------------------


def test_configurations_of_vllm_select_methods():
    assert read_methods({"model": "[ngram]"}) == read_methods("ngram")
    for options in ({"model": "d"}, {"method": "eagle3", "model": "e", "num_speculative_tokens": 3}):
        assert read_methods({**options, "draft_tensor_parallel_size": 1}) == read_methods(options)


def test_a_config_may_name_several_methods_the_default_first():
    ngram, suffix, draft = (
        read_method(config) for config in ({"method": "ngram"}, {"method": "suffix"}, {"model": "d"})
    )
    assert read_methods([{"method": "ngram"}, "suffix", {"model": "d"}]) == (ngram, suffix, draft)
    assert read_methods('[{"method": "ngram"}, {"model": "d"}]') == (ngram, draft)


@pytest.mark.parametrize(("least", "most", "sizes"), [(None, None, (2, 4)), (None, 1, (1, 1)), (3, 6, (3, 6))])
def test_ngram_sizes_have_fitting_defaults(least, most, sizes):
    fields = {key: value for key, value in (("prompt_lookup_min", least), ("prompt_lookup_max", most)) if value}
    (ngram,) = read_methods({"method": "ngram", **fields})
    assert ngram.lookup_sizes == sizes


def test_trees_are_presets_files_or_trees(tmp_path):
    tree = TokenTree.from_choices([[0], [1], [0, 0]])
    file = tmp_path / "tree.json"
    file.write_text("[[0], [1], [0, 0]]")
    for inputs in (file, str(file), [file], [tree], [tree.choices]):
        (read,) = read_methods({"method": "medusa", "model": "h", "trees": inputs})
        assert read.trees == (tree.choices,)
    (preset,) = read_methods({"method": "medusa", "model": "h", "trees": "mc_sim_7b_63"})
    assert preset.trees == (TokenTree.load("mc_sim_7b_63").choices,)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"method": "ngram", "top": 1}, "top is unknown; the keys of 'ngram' are num_speculative_tokens"),
        ({"method": "magic"}, f"method is 'magic'; expected one of {', '.join(known())}"),
        ("magic", "method is 'magic'; expected one of"),
        ({}, "method is missing"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": "5"}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 40}, "num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_max": 0}, "prompt_lookup_max"),
        ({"method": "ngram", "prompt_lookup_max": 33}, "prompt_lookup_max"),
        ({"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 4}, "prompt_lookup_min is 4; expected 1 to"),
        ({"method": "medusa"}, "model is missing; the keys of 'medusa' are"),
        ({"method": "medusa", "model": "h", "trees": "nowhere.json"}, "nowhere.json"),
        ({"method": "medusa", "model": "h", "trees": [Path("nowhere.json")]}, "nowhere.json"),
        ({"method": "medusa", "model": "h", "trees": 5}, "trees is 5; expected names of presets, files or trees"),
        ({"method": "medusa", "model": "h", "heads": 3}, "heads is unknown; the keys of 'medusa' are"),
        ({"method": "medusa_draft", "model": "d"}, "medusa is missing"),
        ({"method": "suffix", "model": "d"}, "model is unknown; the keys of 'suffix' are"),
        ({"model": "d", "prompt_lookup_max": 4}, "prompt_lookup_max is unknown; the keys of 'draft_model' are"),
        ({"method": "lookahead", "window": 5, "ngram": 4}, "window, ngram and guesses belong together"),
        ({"method": "lookahead", "preset": "huge"}, "preset is 'huge'; expected W,N,G or one of gpu, cpu, small"),
        ({"method": "lookahead", "num_speculative_tokens": 4}, "its steps follow from window, ngram and guesses"),
        ({"method": "self_draft"}, "layers is missing"),
        ({"method": "self_draft", "layers": 2, "model": "d"}, "model is unknown; the keys of 'self_draft' are"),
        ({"method": "universal_draft"}, "model is missing"),
        ({"model": "d", "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size is 2; expected 1"),
        ("{", "speculative_config: not JSON"),
        (5, "5 is not an object with the key method"),
        ([5], r"\[5\] is not an object with the key method, or a list of them"),
    ],
)
def test_a_wrong_config_is_named(arguments, words):
    with pytest.raises(BuildError, match=words):
        read_methods(arguments)


def test_a_bundles_text_methods_take_their_options_in_the_config(bundle):
    fields = [{"method": "suffix", "store_tokens": 400}, {"method": "ngram", "prompt_lookup_max": 3}]
    with LLM(bundle=bundle(NAME), speculative_config=fields, threads=1, calibrate=False) as first:
        methods = first._frontend.engine.methods
        assert methods["suffix"].store_tokens == 400
        assert methods["ngram"].prompt_lookup_max == 3
        stats = [first.generate([[9, 8, 7, 6, 5]], GREEDY, use_tqdm=False)[0].outputs[0].metrics for _ in range(2)]
        # The second time the store has the whole output; the draft model, the bundle's default, would always draft.
        assert stats[1].steps < stats[0].steps
        assert stats[0].drafted < stats[1].drafted


@pytest.mark.parametrize("config", [None, "hypothesis", {"method": "hypothesis", "num_speculative_tokens": [8, 2]}])
def test_requests_may_always_have_a_hypothesis(bundle, config):
    with LLM(bundle=bundle(NAME), speculative_config=config, threads=1, calibrate=False) as first:
        prompts = [[9, 8, 7, 6, 5], [5, 6, 7]]
        before = [output.outputs[0].token_ids for output in first.generate(prompts, GREEDY, use_tqdm=False)]
        expected = [{"hypothesis": tokens} for tokens in before]
        after = [output.outputs[0] for output in first.generate(prompts, GREEDY, use_tqdm=False, speculative=expected)]
        assert [item.token_ids for item in after] == before
        assert all(item.metrics.accepted == item.metrics.drafted >= 12 for item in after)
        if config is not None and config != "hypothesis":
            assert [len(tree) for tree in first._frontend.engine.methods["hypothesis"].token_trees()] == [9, 3]
        with pytest.raises(RequestError, match="1 speculative for 2 prompts"):
            first.generate(prompts, GREEDY, use_tqdm=False, speculative=[{}])
        with pytest.raises(RequestError, match=r"prompt 0: speculative: .magic. was given without a method"):
            first.generate(prompts, GREEDY, use_tqdm=False, speculative={"magic": 1})


@pytest.mark.exporter
def test_medusa_draft_and_hypothesis_are_built_by_their_configs(tmp_path, monkeypatch):
    from tests.checkpoints import VOCAB, make_checkpoint, make_heads
    from tests.make_bundles import DICE

    monkeypatch.setenv("SPECEXPORT_CACHE", str(tmp_path / "cache"))
    model = str(make_checkpoint(tmp_path / "model", "llama", **{**DICE, "vocab_size": VOCAB}))
    heads = str(make_heads(tmp_path / "heads", Path(model), 2, tied=True))
    config = [
        {"method": "medusa_draft", "model": model, "medusa": heads, "num_speculative_tokens": 3},
        {"method": "hypothesis", "num_speculative_tokens": [6, 3]},
    ]
    options: dict[str, Any] = {"max_model_len": 48, "threads": 1, "max_batch_size": 1, "calibrate": False}
    with LLM(model, speculative_config=config, **options) as first:
        methods = first._frontend.engine.methods
        assert list(methods)[:2] == ["medusa_draft", "hypothesis"]
        assert [len(tree) for tree in methods["medusa_draft"].token_trees()] == [4]
        assert [len(tree) for tree in methods["hypothesis"].token_trees()] == [7, 4]
        (drafted,) = first.generate([[5, 6, 5]], GREEDY, use_tqdm=False)
        (plain,) = first.generate([[5, 6, 5]], GREEDY, use_tqdm=False, speculative={"num_speculative_tokens": 0})
        assert drafted.outputs[0].metrics.drafted > 0 == plain.outputs[0].metrics.drafted
        assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_program_may_have_no_console(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert len(llm.generate(PROMPTS, GREEDY)) == len(PROMPTS)


def test_a_thread_may_outlive_the_main_one(bundle):
    """No further thread can be started then; ``test_engine.py`` ends a process while a daemon thread decodes."""
    code = (
        "import sys, threading, time; from specexport import LLM, SamplingParams\n"
        "llm = LLM(bundle=sys.argv[1], calibrate=False, threads=1)\n"
        "def generate():\n"
        "    time.sleep(0.3)\n"
        "    print(len(llm.generate([[5, 6]] * 2, SamplingParams(max_tokens=9, ignore_eos=True), use_tqdm=False)))\n"
        "threading.Thread(target=generate).start()\n"
    )
    assert python(code, bundle("llama-near")) == "2\n"
