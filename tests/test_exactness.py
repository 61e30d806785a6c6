"""Greedy text is plain decoding's bit for bit: with every method, tree, batch and chunk, alone and beside others.

Log-probabilities come from the logits that decided, so two texts whose log-probabilities are all equal were computed
alike to the last bit: a far sharper test than that of the tokens. It holds on any processor, as a row of the kernels
depends on that row alone.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.contract import tensors
from specexport.contract.errors import BackendError
from specexport.contract.tree import TokenTree
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.backend import RunShape
from specexport.runtime.backends.onnxruntime import kernels
from specexport.runtime.backends.onnxruntime.graph import OnnxRuntimeGraph
from specexport.runtime.backends.onnxruntime.session import open_session
from specexport.runtime.bundle import Bundle
from specexport.runtime.speculative import PLAIN, Speculative
from tests.streams import started

SPINE = TokenTree((-1, 0, 0, 1, 1, 3))
TREE = TokenTree((-1, 0, 1, 2, 0, 4, 0, 6, 7, 1, 9))
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0)
TOKENS = 16
SHIPPED = ["llama-near-batch", "qwen3-medusa", "qwen3-mlp", "qwen3-lookahead", "gemma2-self"]
BUILT = ["int8", "int4 in blocks of 128", "bf16", "int8 gemma2"]
MORE = ("lfm2_moe", "qwen3_next", "bamba", "mixtral", "deepseek_v3")
"""Mixtures of experts and hybrids, whose groups of operators lie between experts and convolutions of onnxruntime's."""
needs_kernels = pytest.mark.skipif(not kernels.LIBRARY.is_file(), reason="the kernels are not compiled")

Said = list[tuple[int, float]]


@pytest.fixture(scope="module", params=BUILT)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that is the target, so that long paths are accepted, and heads, both with trees."""
    from specexport.exporter.build import build
    from specexport.exporter.options import BuildOptions
    from tests.checkpoints import make_checkpoint, make_heads

    folder = tmp_path_factory.mktemp("built")
    precision, _, block = request.param.removesuffix(" gemma2").partition(" in blocks of ")
    family = "gemma2" if request.param.endswith("gemma2") else "llama"
    model = make_checkpoint(folder / family, family, hidden_size=256, intermediate_size=512)
    heads = make_heads(folder / "heads", model, 3, tied=True)
    methods = (
        {"model": str(model), "num_speculative_tokens": 4, "trees": [SPINE]},
        {"method": "medusa", "model": str(heads), "trees": [TREE]},
    )
    options: dict[str, Any] = {"block_size": int(block)} if block else {}
    return build(BuildOptions(str(model), folder / "bundle", methods, precision=precision, max_batch_size=4, **options))


def _prompts(vocab: int) -> list[list[int]]:
    """Texts that repeat, so that there is something to look up; one is longer than a chunk."""
    random = np.random.default_rng(7)
    return [random.integers(3, vocab, size).tolist() * 2 for size in (4, 38)]


def _ways(engine: Engine) -> Iterator[Speculative]:
    """Every method with every tree."""
    for name, method in engine.methods.items():
        for tree in () if method.takes_hypothesis else method.token_trees():
            yield Speculative(method=name, num_speculative_tokens=None if name == "lookahead" else len(tree) - 1)


def _said(engine: Engine, prompts: Sequence[list[int]], way: Speculative | str, tokens: int = TOKENS) -> list[Said]:
    """Tokens and log-probabilities of texts that are decoded side by side."""
    streams = started(engine.stream(prompt, GREEDY.replace(max_tokens=tokens), way) for prompt in prompts)
    return [[(entry.token, entry.logprob) for chunk in stream for entry in chunk.logprobs] for stream in streams]


def _differing(folder: Path) -> list[str]:
    """Ways whose texts differ from plain decoding's in a token or in one bit of a log-probability."""
    with Engine.load(folder, threads=2, check_hashes=False, prefix_cache=False) as engine:
        assert engine.inexact == ""
        prompts = _prompts(engine.manifest.target.vocab_size)
        plain = [_said(engine, [prompt], PLAIN)[0] for prompt in prompts]
        engine._scheduler._program._chunk = 16
        differing = [] if _said(engine, prompts[-1:], PLAIN) == plain[-1:] else ["a prompt in smaller chunks"]
    with Engine.load(folder, threads=1, check_hashes=False) as engine:
        for way in (PLAIN, *_ways(engine)):
            if [_said(engine, [prompt], way)[0] for prompt in prompts] != plain:
                differing.append(f"{way}")
            # What the prefix cache has of this text came from other ways.
            start = [*prompts[-1], *(token for token, _ in plain[-1][:6])]
            if _said(engine, [start], way, TOKENS - 6) != [plain[-1][6:]]:
                differing.append(f"{way} after a text that was decoded")
            if engine.slots >= len(prompts) and _said(engine, prompts, way) != plain:
                differing.append(f"{way} in a batch")
    return differing


@needs_kernels
@pytest.mark.parametrize("name", SHIPPED)
def test_texts_are_plain_decodings_bit_for_bit(bundle, name):
    assert _differing(bundle(name)) == []


@needs_kernels
@pytest.mark.exporter
def test_texts_of_every_precision_are_plain_decodings_bit_for_bit(built):
    assert _differing(built) == []


@needs_kernels
@pytest.mark.exporter
@pytest.mark.parametrize("family", MORE)
def test_texts_of_mixtures_and_hybrids_are_plain_decodings_bit_for_bit(tmp_path, family):
    from specexport.exporter.build import build
    from specexport.exporter.options import BuildOptions
    from tests.checkpoints import HYBRIDS, make_checkpoint
    from tests.test_mixtures import MIXTURES

    model = make_checkpoint(tmp_path / family, family, **(HYBRIDS | MIXTURES)[family])
    method = f"draft_model:{model},num_speculative_tokens=4"
    options = {"precision": "int8", "max_seq_len": 128, "max_batch_size": 2}
    assert _differing(build(BuildOptions(str(model), tmp_path / "bundle", method, **options))) == []


@needs_kernels
def test_paths_off_the_first_branch_are_committed_as_they_are(bundle):
    with Engine.load(bundle("qwen3-medusa"), threads=1) as engine:
        prompts = _prompts(engine.manifest.target.vocab_size)
        streams = [engine.stream(prompt, GREEDY.replace(max_tokens=4 * TOKENS)) for prompt in prompts]
        paths = [chunk.verified.path for stream in streams for chunk in stream if chunk.verified is not None]
        assert any(list(path) != list(range(1, len(path) + 1)) for path in paths)


def test_possible_differences_are_reported(bundle, monkeypatch):
    with Engine.load(bundle("gpt2-tree-portable"), threads=1) as engine:
        assert engine.inexact
    monkeypatch.setenv(kernels.SWITCH, "0")
    with Engine.load(bundle("llama-near-batch"), threads=1) as engine:
        assert engine.inexact == kernels.kernels().described
        prompt = _prompts(engine.manifest.target.vocab_size)[0]
        tokens = [[token for token, _ in _said(engine, [prompt], way)[0]] for way in (PLAIN, *list(_ways(engine))[:2])]
        assert tokens == tokens[:1] * len(tokens)


@needs_kernels
@pytest.mark.exporter  # onnx comes with it
def test_operators_that_round_and_are_not_claimed_are_counted(tmp_path):
    import onnx

    text = """<ir_version: 10, opset_import: ["" : 23]> agraph (float[N] x) => (float[N] y)
        <float[1] one = {1.0}> { a = Add(x, one) b = Acosh(a) c = Acosh(b) y = Mul(c, c) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    session = open_session(tmp_path / "model.onnx", 1, "native", "fp32")
    assert kernels.not_claimed(session) == {"Acosh": 2}


def test_prompt_remainders_use_narrow_chunks(bundle, spy):
    with Engine.load(bundle("llama-near-batch"), threads=1) as engine:
        ran = spy(OnnxRuntimeGraph, "run", lambda _, shape: (shape.tokens, shape.rows))
        engine.generate(list(range(5, 15)), GREEDY.replace(max_tokens=3), PLAIN)
        assert engine.manifest.prefill_chunk > 16
    assert ran == [(16, 1), (1, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize("name", ["llama-near-batch", "qwen3-lookahead"])
def test_a_text_may_end_where_the_largest_cache_does(name, bundle):
    """A text that repeats, so that methods that look text up draft to its end."""
    with Engine.load(bundle(name), threads=1) as engine:
        prompt = [20 + at % 5 for at in range(engine.manifest.max_seq_len - 22)]
        plain = engine.generate(prompt, GREEDY, PLAIN).token_ids
        for way in _ways(engine):
            done = engine.generate(prompt, GREEDY, way)
            assert (done.finish_reason, done.token_ids, len(plain)) == ("length", plain, 22)


def test_logits_that_are_not_finite_end_only_their_request(bundle, monkeypatch):
    with Engine.load(bundle("llama-near-batch"), threads=1) as engine:
        real = OnnxRuntimeGraph.run

        def run(self: Any, shape: RunShape) -> Any:
            outputs = real(self, shape)
            if self is engine._target and shape.rows == shape.tokens and 0 in shape.slots and self.filled(0) > 12:
                outputs[tensors.LOGITS][0 - shape.slots.start] = np.nan
            return outputs

        params = GREEDY.replace(max_tokens=8, logprobs=None)
        bad, good = engine.stream(list(range(3, 13)), params), engine.stream([7, 8, 9], params)
        bad.start()
        good.start()
        monkeypatch.setattr(OnnxRuntimeGraph, "run", run)
        with pytest.raises(BackendError, match=r"logits after \d+ tokens are not finite.*'specexport verify BUNDLE'"):
            list(bad)
        assert sum(len(chunk.token_ids) for chunk in good) == 8


@pytest.mark.exporter
@needs_kernels
def test_builds_report_rounding_errors(built):
    precision = Bundle.open(built).manifest.target.precision
    # Logits of random weights: their spread makes small errors large divergences.
    limits = {"int8": (0.005, 0.15, 0.2), "int4": (0.05, 0.9, 1.5)}.get(precision.weights)
    if limits is None:
        assert precision.quality is None
        return
    quality = precision.quality
    assert quality is not None and quality.tokens > 100
    assert limits[0] < quality.logits_rms_error < limits[1]
    assert quality.same_choice > 0.1 and 0 < quality.kl < limits[2]
    assert abs(np.log(quality.perplexity / quality.reference_perplexity)) < 0.1
