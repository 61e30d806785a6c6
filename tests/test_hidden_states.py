"""Drafts that see the target's hidden states, EAGLE-3's, DFlash's and MTP layers: texts, bundles, engines."""

from functools import partial
from shutil import copytree
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from transformers import AutoModelForCausalLM

from specexport import LLM
from specexport.contract import tensors
from specexport.contract.errors import BuildError
from specexport.contract.methods import method_name, read_methods
from specexport.contract.reading import read_manifest
from specexport.exporter import trace
from specexport.exporter.build import build
from specexport.exporter.checkpoints.checkpoint import load_checkpoint
from specexport.exporter.engines.compiler import compile_graph, load_library
from specexport.exporter.engines.source import model_jobs, write_source
from specexport.exporter.options import BuildOptions
from specexport.graphs.layers import recorded_states
from specexport.graphs.step import StepModule
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.speculative import PLAIN, Speculative
from specexport.verify.bundle import verify
from tests.checkpoints import GROUPED, VOCAB, changed, make_checkpoint, make_dflash, make_eagle3, make_mtp
from tests.engine_bundles import SMALL
from tests.hidden_states import GREEDY
from tests.streams import started, tokens_of
from tests.test_mtp import PUBLISHED

pytestmark = pytest.mark.exporter

H, KEPT = GROUPED["hidden_size"], 200
SMALL_TREES = {"eagle3": 3, "dflash": 5, "mtp": 3}
"""Draft tokens of the smaller tree of each method's bundle of twelve tokens."""


@pytest.mark.parametrize("name", ["dice-eagle3", "dice-dflash", "dice-dflash-portable", "dice-mtp"])
def test_greedy_text_is_plain_decoding_s_in_every_tree(bundle, name):
    """With drafts that are often right: prompts of all lengths, begun anew, alike, and after other methods."""
    method, draw, reached = name.split("-")[1], np.random.default_rng(1), 0
    small = Speculative(method=method, num_speculative_tokens=SMALL_TREES[method])
    params = GREEDY.replace(max_tokens=20)
    with Engine.load(bundle(name), threads=1) as engine:
        for length in (1, 2, 3, 7, 40):
            prompt = draw.integers(3, 12, length).tolist()
            plain = engine.generate(prompt, params, PLAIN).token_ids
            for speculation in (method, small, "ngram", method):
                text = engine.generate(prompt, params, speculation)
                assert text.token_ids == plain
                reached = max(reached, *(depth + 1 for depth, n in enumerate(text.stats.accepted_at) if n), 0)
    assert reached >= 2


@pytest.mark.parametrize("method", SMALL_TREES)
def test_a_shared_beginning_is_drafted_from(bundle, method):
    """The draft's rows of a text that begins alike are taken over; what it never saw the target reads again."""
    prompt, params = np.random.default_rng(2).integers(3, 12, 30).tolist(), GREEDY.replace(max_tokens=8)
    with Engine.load(bundle(f"dice-{method}"), threads=1, prefix_cache=False) as engine:
        alone = engine.generate([*prompt, 5], params, method)
    with Engine.load(bundle(f"dice-{method}"), threads=1) as engine:
        engine.generate([*prompt, 4], params, PLAIN)
        after_plain = engine.generate([*prompt, 5], params, method)
        again = engine.generate([*prompt, 5], params, method)
        longer = engine.generate([*prompt, 5, *alone.token_ids, 7], params, method)
    assert [text.stats.cached_tokens for text in (after_plain, again)] == [0, 29]  # all but the token before the root
    assert 31 < longer.stats.cached_tokens < 31 + 8
    for text in (after_plain, again):
        assert (text.token_ids, text.stats.accepted) == (alone.token_ids, alone.stats.accepted)


@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize("method", SMALL_TREES)
def test_several_requests_at_once(bundle, method):
    """What is drafted of one does not depend on the others, though their trees are of different depths."""
    draw = np.random.default_rng(3)
    prompts = [draw.integers(3, 12, length).tolist() for length in (1, 4, 9, 2, 17, 30)]
    small = Speculative(method=method, num_speculative_tokens=SMALL_TREES[method])
    params = GREEDY.replace(max_tokens=20)
    sampled = SamplingParams(temperature=0.9, seed=7, max_tokens=20, ignore_eos=True)
    with Engine.load(bundle(f"dice-{method}-batch"), threads=1) as engine:
        plain = [engine.generate(prompt, params, PLAIN).token_ids for prompt in prompts]
        drawn = engine.generate(prompts[2], sampled, small)
        requests: list[Any] = [method, PLAIN, small, method, "ngram", method]
        asks = [*((prompt, params, how) for prompt, how in zip(prompts, requests, strict=True))]
        streams = started(engine.stream(*ask) for ask in (*asks, (prompts[2], sampled, small)))
        *together, again = [tokens_of(stream) for stream in streams]
        assert sum(stream.stats.drafted for stream in streams) > 0
    assert together == plain
    assert again == drawn.token_ids


@pytest.mark.parametrize(
    ("method", "states", "rows", "changes"),
    [
        ("eagle3", (0, 1, 2), 9, {"lm_head.weight": torch.ones(KEPT, H)}),
        ("dflash", (1, 2), 8, {"lm_head.weight": torch.ones(KEPT, H)}),
        ("mtp", (1,), 9, {"mtp.fc.weight": torch.ones(H, 2 * H)}),
    ],
)
def test_build_inspect_and_verify(tmp_path, target, cli, method, states, rows, changes):
    """In int8, from the command line; another draft is found out."""
    draft, out = tmp_path / "draft", tmp_path / "bundle"
    if method == "mtp":
        target = make_mtp(draft, "qwen3_next", **PUBLISHED["qwen3_next"])
        words = ["--mtp", "--draft-precision", "fp32"]
    else:
        make = {"eagle3": make_eagle3, "dflash": partial(make_dflash, published="speculators")}[method]
        words = [f"--{method}", str(make(draft, target, draft_vocab=KEPT))]
    words += ["--target", str(target), "-o", str(out), "--precision", "int8", "--block-size", "16"]
    cli("build", *words, "--max-seq-len", "128", "--max-batch-size", "2")
    manifest = read_manifest(out)
    (recorded,) = manifest.methods
    assert method_name(recorded) == method
    assert (recorded.states, recorded.hidden, recorded.rows, recorded.candidates) == (states, H, rows, 64)
    assert {tensors.LAYER_STATES.at(count) for count in states} <= {*manifest.target_signature.outputs}
    weights = [model.precision.weights for model in manifest.models.values()]
    assert weights == ["int8", "fp32" if method == "mtp" else "int8"]
    seen = ", ".join(map(str, states))
    assert f"{method}, states after {seen} of the target's layers" in cli("inspect", out).out
    report = verify(out, prompts=("the words", "one by one"), max_tokens=6)
    assert report.passed
    assert any("its graph proposes the original's own token" in check.sentence for check in report.checks)
    with LLM(model=str(out), calibrate=False) as llm:
        assert llm.generate([5, 9, 17], GREEDY)[0].outputs[0].token_ids
        # A text that fills the context, and that the target reads again as the draft has not seen it.
        plain, drafted = (llm.generate([5] * 120, GREEDY, speculative=how)[0].outputs[0] for how in (PLAIN, method))
        assert (drafted.token_ids, drafted.metrics.cached_tokens) == (plain.token_ids, 0)
    other = changed(copytree(draft, tmp_path / "other"), {n: torch.randn_like(each) for n, each in changes.items()})
    originals: dict[str, Any] = {"target": other} if method == "mtp" else {"sources": {f"{method}.model": other}}
    assert not verify(out, **originals, max_tokens=4).passed


@pytest.mark.parametrize(
    ("method", "make", "shared"),
    [
        ("eagle3", partial(make_eagle3, draft_vocab=KEPT, embedding=False), {"embed_tokens"}),
        ("dflash", make_dflash, {"embed_tokens", "lm_head"}),
    ],
)
def test_what_the_target_has_too_is_stored_once(tmp_path, target, method, make, shared):
    draft, out = make(tmp_path / "draft", target), tmp_path / "bundle"
    methods = read_methods({"method": method, "model": str(draft)})
    build(BuildOptions(str(target), out, methods=methods, precision="int8", max_seq_len=128))
    graph = ir.load(out / f"{method}.onnx").graph
    constants = [value.const_value for each in (graph, *graph.subgraphs()) for value in each.initializers.values()]
    stored = [tensor for tensor in constants if isinstance(tensor, ir.ExternalTensor)]
    elsewhere = [tensor for tensor in stored if tensor.location == "target.bin"]
    assert {str(tensor.name).split(".")[0] for tensor in elsewhere} == shared
    assert read_manifest(out).models[method].shared_bytes == sum(tensor.nbytes for tensor in elsewhere)
    checks = verify(out, max_tokens=6).checks
    assert [check.result for check in checks if check.name in ("graphs", method)] == ["passed", "passed"]


@pytest.mark.parametrize(
    ("method", "precision", "lowering"),
    [
        ("dflash", "int8", "native"),
        ("dflash", "int4", "native"),
        ("mtp", "int8", "native"),
        ("mtp", "fp16", "portable"),
    ],
)
def test_a_tied_head_is_stored_once(tmp_path, method, precision, lowering):
    """The target's embedding is its head and the draft's, within a loop's body too; at int4 the draft has its own."""
    target, out = tmp_path / "target", tmp_path / "bundle"
    if method == "mtp":
        make_mtp(target, "qwen3_next", **PUBLISHED["qwen3_next"], tie_word_embeddings=True)
        methods: Any = "mtp"
    else:
        methods = f"dflash:{make_dflash(tmp_path / 'draft', make_checkpoint(target, 'qwen3'))}"
    options: dict[str, Any] = {"precision": precision, "draft_precision": precision, "lowering": lowering}
    build(BuildOptions(str(target), out, methods, max_seq_len=128, **options))
    graph = ir.load(out / f"{method}.onnx").graph
    constants = [value.const_value for each in (graph, *graph.subgraphs()) for value in each.initializers.values()]
    tables = [each for each in constants if each.size > VOCAB and each.name.startswith(("embed_tokens", "lm_head"))]
    draft_tables = {("dflash.bin", "lm_head")} if precision == "int4" else set()
    assert {(each.location, each.name.partition(".")[0]) for each in tables} == {
        ("target.bin", "embed_tokens"),
        *draft_tables,
    }
    shared = {each.offset: each.nbytes for each in constants if getattr(each, "location", None) == "target.bin"}
    assert read_manifest(out).models[method].shared_bytes == sum(shared.values())
    with Engine.load(out, threads=1) as engine:
        for prompt in ([5], [9, 17, 40, 3]):
            assert engine.generate(prompt, GREEDY, method).token_ids == engine.generate(prompt, GREEDY, PLAIN).token_ids
    checks = verify(out, max_tokens=4).checks
    assert [check.result for check in checks if check.name in ("graphs", method)] == ["passed", "passed"]


@pytest.mark.parametrize(
    ("method", "make", "more", "reason"),
    [
        ("eagle3", make_eagle3, {"trees": [[[0], [1], [1, 0]]]}, "only the most probable token of each depth can have"),
        ("dflash", make_dflash, {"num_speculative_tokens": 8}, "depth 8, with a block of 8 tokens"),
    ],
)
def test_trees_that_cannot_be_filled_are_refused(tmp_path, target, method, make, more, reason):
    methods = read_methods({"method": method, "model": str(make(tmp_path / "draft", target)), **more})
    with pytest.raises(BuildError, match=reason):
        build(BuildOptions(str(target), tmp_path / "never", methods=methods))


@pytest.mark.parametrize(
    ("method", "widths"),
    [
        # The draft makes a token a call; or its profiles are those of each number of draft tokens.
        ("eagle3", {(1, 1), (9, 1), (64, 1)}),
        ("dflash", {(8, 1), (8, 2), (8, 4), (8, 7), (64, 1)}),
        pytest.param("mtp", {(1, 1), (9, 1), (64, 1)}, marks=pytest.mark.slow),
    ],
)
def test_its_graphs_become_engines(tmp_path, method, widths):
    """Those of the target, which says its states, and of the draft."""
    target, draft, out = tmp_path / "target", tmp_path / "draft", tmp_path / "bundle"
    options: dict[str, Any] = {}
    if method == "mtp":
        make_mtp(target, "glm4_moe", **{**PUBLISHED["glm4_moe"], **SMALL})
        options = {"methods": "mtp", "backend": "tensorrt-rtx"}
    else:
        make_checkpoint(target, "qwen3", **SMALL)
    if method == "eagle3":
        make_eagle3(draft, target, states=(0, 1), draft_vocab=KEPT, size=64, fc_norm=True)
        options = {"methods": f"eagle3:{draft}"}
    elif method == "dflash":
        make_dflash(draft, target, states=(1,), size=64, windows=(True, False))
        options = {"methods": f"dflash:{draft}"}
    build(BuildOptions(str(target), out, max_seq_len=192, max_batch_size=2, **options))
    manifest, library = read_manifest(out), load_library("tensorrt-rtx")
    for role in (method,) if method == "dflash" else ("target", method):
        model = manifest.models[role]
        (job,) = model_jobs(model, manifest, manifest.batch_sizes, plain=True)
        if role == "target":
            leaves = set() if "backend" in options else {4, 6, 8}  # trees of bundles for CPUs alone
            assert {profile.tokens for profile in job.profiles} == {1, 2, 3, 5, 7, 9, 64} | leaves
        else:
            assert {(profile.tokens, profile.drafts) for profile in job.profiles} == widths
        master = out / model.graph.master
        source, engine = master.with_name("source.onnx"), out / f"{role}.engine"
        write_source(master, source, "fp16", job.drafts, job.fixed, compiled=True)
        report = compile_graph(source, engine, job.sizes, library, ((8, 9),))
        assert (report.profiles, report.size) == (len(job.profiles), engine.stat().st_size)


# --- the target's outputs ---------------------------------------------------------------------------------------------


TOKENS, ROWS = [5, 9, 2, 31, 7], 16


@pytest.mark.parametrize(("family", "lowering"), [("llama", "native"), ("gpt2", "native"), ("gemma2", "portable")])
def test_steps_output_layer_states(tmp_path, family, lowering):
    loaded = load_checkpoint(str(make_checkpoint(tmp_path / family, family)))
    names = [tensors.LAYER_STATES.at(count) for count in (0, 1, 2)]
    module = StepModule(loaded.model, outputs=[tensors.LOGITS, *names], lowering=lowering)
    ir.save(trace.trace_step(module, loaded.cache), tmp_path / "step.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "step.onnx")
    assert [tensor.name for tensor in session.get_outputs()][:4] == [tensors.LOGITS, *names]
    fields = {
        tensors.INPUT_IDS: np.array([TOKENS]),
        tensors.POSITION_IDS: np.arange(len(TOKENS))[None],
        tensors.TREE_MASK: np.tri(len(TOKENS), dtype=bool)[None],
        tensors.PAST_LENGTH: np.array([0]),
        tensors.LOGITS_ROWS: np.array([[len(TOKENS) - 1]]),
    }
    for layer, shape in enumerate(loaded.cache):
        for name, size in ((tensors.PAST_KEY, shape.key_size), (tensors.PAST_VALUE, shape.value_size)):
            fields[name.at(layer)] = np.zeros((1, shape.heads, ROWS, size), np.float32)
    outputs = session.run(names, fields)

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / family, attn_implementation="eager").eval()
    with torch.no_grad(), recorded_states(plain, [2]) as last:
        states = plain(torch.tensor([TOKENS]), output_hidden_states=True, use_cache=False).hidden_states
    for output, expected in zip(outputs, (states[0], states[1], last[2]), strict=True):
        np.testing.assert_allclose(output, expected.numpy(), rtol=1e-4, atol=1e-4)
    assert not np.allclose(last[2].numpy(), states[2].numpy())  # that is after the final norm


def test_layers_that_are_not_there_are_refused(tmp_path):
    loaded = load_checkpoint(str(make_checkpoint(tmp_path / "llama", "llama")))
    wrong = pytest.raises(ValueError, match="it has 2 layers; expected the states after 0 to 2 of them")
    with wrong, recorded_states(loaded.model, [1, 3]):
        pass
