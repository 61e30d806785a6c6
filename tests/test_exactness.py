"""Greedy text is plain decoding's bit for bit: with every method, tree and width, alone and beside others.

Log-probabilities come from the logits that decided, so two texts whose log-probabilities are all equal were computed
alike to the last bit: a far sharper test than that of the tokens. It holds on any processor, as nothing of it is known
before the graph was run here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.contract import tensors
from specexport.contract.errors import BackendError, RequestError
from specexport.contract.tree import TokenTree
from specexport.runtime import Completion, Engine, SamplingParams
from specexport.runtime import ort as runtime_ort
from specexport.runtime.buffers import buffers
from specexport.runtime.bundle import Bundle
from specexport.runtime.graph import Graph
from specexport.runtime.machine import Remembered
from specexport.runtime.opening import open_graph
from specexport.runtime.ort import OnnxRuntimeGraph
from specexport.runtime.ort_backend import OnnxRuntimeBackend
from specexport.runtime.speculative import PLAIN, Speculative
from specexport.runtime.widths import Agreement, BuiltWidths, ExactWidths
from tests import masked_cpu
from tests.ways import ways

TREE = TokenTree((-1, 0, 1, 2, 0, 4, 0, 6, 7, 1, 9))
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
QUANTIZED = ["int8", "int4", "int4 in blocks of 128"]
SHIPPED = ["gpt2-tree", "llama-near-batch", "qwen3-medusa", "qwen3-mlp", "qwen3-lookahead"]


@pytest.fixture(autouse=True)
def nothing_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECEXPORT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module", params=QUANTIZED)
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that is the target, so that long paths are accepted, and heads, both with trees."""
    from specexport.exporter.build import build
    from specexport.exporter.options import BuildOptions
    from tests.checkpoints import GROUPED, make_checkpoint, make_heads

    folder = tmp_path_factory.mktemp("quantized")
    precision, _, block = request.param.removesuffix(" mixture").partition(" in blocks of ")
    family, sizes = "llama", {"hidden_size": 256, "intermediate_size": 512}
    if request.param.endswith("mixture"):
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
        family, sizes = "mixtral", {**GROUPED, **experts, "hidden_size": 128, "intermediate_size": 256}
    model = make_checkpoint(folder / family, family, **sizes)
    heads = make_heads(folder / "heads", model, 3, tied=True)
    methods = (*ways(draft=model, sizes=(4,)), *ways(medusa=heads, trees=(TREE,)))
    options: dict[str, Any] = {"block_size": int(block)} if block else {}
    return build(BuildOptions(str(model), folder / "bundle", methods, precision=precision, **options))


def _prompts(vocab: int) -> list[list[int]]:
    """Texts that repeat, so that there is something to look up."""
    random = np.random.default_rng(7)
    return [random.integers(3, vocab, size).tolist() * 2 for size in (4, 11, 26)]


def _ways(engine: Engine) -> list[Speculative]:
    """Every method with every tree."""
    return [
        Speculative(method=name, num_speculative_tokens=None if name == "lookahead" else len(tree) - 1)
        for name, method in engine.methods.items()
        if not method.takes_hypothesis
        for tree in method.token_trees()
    ]


def _said(made: Completion) -> list[tuple[int, float]]:
    return [(entry.token, entry.logprob) for entry in made.logprobs]


def _differing(folder: Path, **options: Any) -> int:
    """Texts that differ from plain decoding's in a token or in one bit of a log-probability."""
    differing = 0
    with Engine.load(folder, threads=2, check_hashes=False, prefix_cache=False, **options) as engine:
        prompts = _prompts(engine.manifest.target.vocab_size)
        plain = [_said(engine.generate(prompt, GREEDY, PLAIN)) for prompt in prompts]
        for way in _ways(engine):
            differing += sum(
                _said(engine.generate(p, GREEDY, way)) != said for p, said in zip(prompts, plain, strict=True)
            )
        if engine.slots >= len(prompts):
            for way in (PLAIN, *_ways(engine)):
                streams = [engine.stream(prompt, GREEDY, way) for prompt in prompts]
                for stream in streams:
                    stream.start()
                made = [[(e.token, e.logprob) for chunk in stream for e in chunk.logprobs] for stream in streams]
                differing += sum(said != known for said, known in zip(made, plain, strict=True))
    return differing


@pytest.mark.parametrize("name", SHIPPED)
def test_texts_are_plain_decodings_bit_for_bit(bundle: Callable[[str], Path], name: str) -> None:
    assert _differing(bundle(name)) == 0


@pytest.mark.exporter
@pytest.mark.parametrize("quantized", [*QUANTIZED, "fp32 mixture", "int4 mixture"], indirect=True)
def test_quantized_texts_are_plain_decodings_bit_for_bit(quantized: Path) -> None:
    assert _differing(quantized) == 0


@pytest.mark.exporter
def test_the_build_says_what_rounding_did(quantized: Path) -> None:
    precision = Bundle.open(quantized).manifest.target.precision
    assert precision.logits_rms_error is not None
    assert precision.same_choice is not None
    low, high = (0.005, 0.15) if precision.weights == "int8" else (0.05, 0.9)
    assert low < precision.logits_rms_error < high
    assert precision.same_choice > 0.1


@pytest.mark.exporter
def test_kernels_that_part_one_row_from_several_change_nothing(
    quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks multiplied in floating point: every processor has one kernel for a row and another for several."""
    real = runtime_ort.open_session

    def in_floats(*arguments: Any) -> Any:
        import onnxruntime

        class Options(onnxruntime.SessionOptions):  # type: ignore[misc]
            def add_session_config_entry(self, name: str, value: str) -> None:
                super().add_session_config_entry(name, "1" if name.endswith("accuracy_level") else value)

        with monkeypatch.context() as patch:
            patch.setattr(onnxruntime, "SessionOptions", Options)
            return real(*arguments)

    monkeypatch.setattr(runtime_ort, "open_session", in_floats)
    assert _differing(quantized) == 0
    # The test can fail: taken as narrow as they come, steps part.
    assert _differing(quantized, exactness="fast") > 0


@pytest.mark.slow
@pytest.mark.exporter
@pytest.mark.skipif(bool(masked_cpu.missing()), reason=masked_cpu.missing())
@pytest.mark.parametrize("quantized", ["int4"], indirect=True)
def test_on_a_processor_without_avx512(quantized: Path, tmp_path: Path) -> None:
    """Its int4 kernel for a single row rounds otherwise than that for several."""
    asked = (
        "import sys; from pathlib import Path; from tests import test_exactness as t; folder = Path(sys.argv[1]); "
        "print(t._differing(folder), t.Engine.load(folder, threads=2).widths.choose(range(1), 1))"
    )
    said = subprocess.run(
        [sys.executable, "-c", asked, quantized], env=masked_cpu.environment(tmp_path), capture_output=True, text=True
    )
    assert said.stdout.split() == ["0", "2"], said.stderr


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["gpt2-tree", "llama-near-batch"])
def test_rows_agree_at_the_widths_that_are_chosen(bundle: Callable[[str], Path], name: str, threads: int) -> None:
    opened = Bundle.open(bundle(name))
    backend = OnnxRuntimeBackend(opened, threads)
    signature = opened.manifest.target_signature
    target = backend.open(opened.manifest.target, backend.default_slots, buffers(signature))
    widths = backend.widths(target)
    text = np.random.default_rng(0).integers(3, opened.manifest.target.vocab_size, 60)
    alone = open_graph(opened, opened.manifest.target, 1, buffers(signature), threads)
    whole = _logits(alone, text, 16, 16)
    assert target.filled(0) == 0
    for needed in range(1, 10):
        width = widths.choose(range(1), needed)
        assert width >= needed
        np.testing.assert_array_equal(_logits(alone, text, needed, width), whole)


def _logits(graph: Graph, text: np.ndarray, step: int, width: int) -> np.ndarray:
    """Logits after every token of a text, some tokens a step of some width."""
    found = []
    graph.copy(0, 0, 0)
    for past in range(0, len(text), step):
        part = text[past : past + step]
        graph.reserve(past + width)
        given = graph.inputs(width, width)
        given[tensors.INPUT_IDS][0] = np.resize(part, width)
        given[tensors.POSITION_IDS][0] = past + np.arange(width)
        given[tensors.PAST_LENGTH][0] = past
        found.append(graph.run(width, width)[tensors.LOGITS][0, : len(part)].copy())
        graph.commit(0, past, range(len(part)))
    return np.concatenate(found)


# --- what is found out, and remembered --------------------------------------------------------------------------------


class Kernels:
    """A graph whose rows say in which kernel they were computed; of the rest as much as widths ask for."""

    def __init__(
        self,
        kernel: Callable[[int, int, int], int],
        sizes: Sequence[int] = (1, 4),
        chunk: int = 0,
        step: int = 0,
        narrow: int = 0,
    ) -> None:
        self.sizes = tuple(sizes)
        self.runs = 0
        self._kernel = kernel
        self._chunk, self._step, self._narrow = chunk, step, narrow
        self._filled = [0] * self.sizes[-1]
        self._read_in_chunks = self._read_in_steps = 0

    def widths(self, slots: int) -> tuple[int, ...]:
        return (1, 3, 5, 9)

    def chunk(self, most: int, tokens: int) -> int:
        return min(most, -(-tokens // 16) * 16)

    def filled(self, slot: int) -> int:
        return self._filled[slot]

    def reserve(self, rows: int) -> None:
        if rows > 256:
            raise BackendError("no cache so large")

    def copy(self, source: int, to: int, rows: int) -> None:
        self._filled[to] = rows
        self._read_in_chunks = self._read_in_steps = 0

    def commit(self, slot: int, past: int, nodes: Sequence[int]) -> None:
        self._filled[slot] = past + len(nodes)
        self._read_in_steps = self._step * (past >= 24)

    def inputs(self, tokens: int, rows: int = 0, drafts: int = 0, slots: range = range(1)) -> dict[str, np.ndarray]:
        B = len(slots)
        return {
            tensors.INPUT_IDS: np.zeros((B, tokens), np.int64),
            tensors.POSITION_IDS: np.zeros((B, tokens), np.int64),
            tensors.TREE_MASK: np.zeros((B, tokens, tokens), np.bool_),
            tensors.PAST_LENGTH: np.array([self._filled[slot] for slot in slots]),
        }

    def protect_rows(self, *_: object, **__: object) -> None: ...

    def run(self, tokens: int, rows: int = 0, drafts: int = 0, slots: range = range(1)) -> dict[str, np.ndarray]:
        self.runs += 1
        if rows == 1 and tokens > 9:
            self._read_in_chunks = self._narrow if tokens == 16 else self._chunk
        logits = np.zeros((len(slots), rows, 2), np.float32)
        for row in range(rows):
            logits[:, row] = self._kernel(len(slots), tokens, row) + self._read_in_chunks + self._read_in_steps
        return {tensors.LOGITS: logits}


@pytest.fixture
def manifest(bundle: Callable[[str], Path]) -> Any:
    return Bundle.open(bundle("llama-near-batch"), check_hashes=False).manifest


def _widths(graph: Kernels, manifest: Any, about: str = "kernels") -> ExactWidths:
    return ExactWidths(graph, manifest, Remembered("widths", (about,), Agreement))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (lambda batch, tokens, row: 0, {1: 1, 3: 3, 5: 5, 9: 9, 4: 4, 7: 8}),
        # One row has a kernel of its own.
        (lambda batch, tokens, row: int(batch * tokens == 1), {1: 2, 3: 3, 5: 5, 9: 9}),
        # Rows go in pairs, and the last of an odd number by itself.
        (lambda batch, tokens, row: int(row == tokens - 1 and tokens % 2), {1: 2, 3: 4, 5: 6, 9: 12, 2: 2}),
        # Another kernel for few rows.
        (lambda batch, tokens, row: int(tokens < 6), {1: 6, 3: 6, 5: 6, 9: 9}),
    ],
)
def test_the_narrowest_width_whose_rows_agree_is_taken(
    manifest: Any, kernel: Callable[[int, int, int], int], expected: dict[int, int]
) -> None:
    graph = Kernels(kernel)
    widths = _widths(graph, manifest)
    graph.copy(0, 0, 30)
    assert {needed: widths.choose(range(1), needed) for needed in expected} == expected
    assert widths.chunks and not widths.parted


def test_batches_are_compared_when_they_hold_something(manifest: Any) -> None:
    graph = Kernels(lambda batch, tokens, row: int(batch == 4 and tokens < 3))
    widths = _widths(graph, manifest)
    assert widths.choose(range(4), 1) == 1 and 4 not in widths.agreement.widths  # empty slots show nothing
    graph.copy(2, 2, 30)
    assert widths.choose(range(4), 1) == 3
    assert widths.agreement.widths[4] == {1: 3}
    graph.copy(2, 2, 245)  # at the context's end there is no room to compare
    assert widths.choose(range(4), 5) == 5 and widths.agreement.widths[4] == {1: 3}


def test_rows_that_agree_nowhere_are_counted(manifest: Any) -> None:
    widths = _widths(Kernels(lambda batch, tokens, row: tokens), manifest)
    assert widths.choose(range(1), 5) == 5
    assert widths.exact and widths.parted == 4  # every width of the bundle


def test_what_cannot_be_exact_says_so(bundle: Callable[[str], Path], manifest: Any) -> None:
    widths = _widths(Kernels(lambda batch, tokens, row: int(tokens == 1), step=1), manifest)
    assert not widths.exact and widths.choose(range(1), 1) == 1
    # Lowered portably a step's rows lie behind the whole cache, and those of the cache at their place.
    with Engine.load(bundle("gpt2-tree-portable"), threads=1) as engine:
        assert not engine.widths.exact
    with pytest.raises(BackendError, match="exactness is 'exact', which this bundle cannot be here: lowered portable"):
        Engine.load(bundle("gpt2-tree-portable"), threads=1, exactness="exact")


def test_what_was_found_is_remembered_and_a_damaged_file_is_not_believed(manifest: Any, tmp_path: Path) -> None:
    def kernel(batch: int, tokens: int, row: int) -> int:
        return int(tokens == 1)

    first, second, third, other = (Kernels(kernel) for _ in range(4))
    assert _widths(first, manifest).choose(range(1), 1) == 2
    assert _widths(second, manifest).choose(range(1), 1) == 2
    assert first.runs > 0 and second.runs == 0
    (known,) = (tmp_path / "cache" / "widths").iterdir()
    assert json.loads(known.read_text())["widths"]["1"]["1"] == 2
    _widths(other, manifest, "another bundle")
    assert other.runs > 0
    known.write_text('{"steps": true, "chunks": true, "widths": {"1": {"1": "x"}}}')
    assert _widths(third, manifest).choose(range(1), 1) == 2
    assert third.runs > 0


def test_output_is_not_taken_over_where_chunks_part_from_steps(
    bundle: Callable[[str], Path], manifest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _widths(Kernels(lambda *_: 0, chunk=1), manifest).chunks is False
    assert _widths(Kernels(lambda *_: 0, narrow=1), manifest).chunks is False
    params = GREEDY.replace(max_tokens=20)
    for chunks, expected in ((True, 47), (False, 29)):
        monkeypatch.setattr(ExactWidths, "chunks", chunks)
        with Engine.load(bundle("llama-near-batch"), threads=1) as engine:
            prompt = list(range(5, 35))
            said = engine.generate(prompt, params)
            again = engine.generate([*prompt, *said.token_ids, 9], params)
            assert again.stats.cached_tokens in (expected, expected + 1, expected + 2)


def test_what_is_left_of_a_prompt_is_read_no_wider_than_it_is(
    bundle: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = list[int]()
    run = OnnxRuntimeGraph.run

    def noted(graph: OnnxRuntimeGraph, tokens: int, rows: int = 0, *rest: Any, **named: Any) -> Any:
        ran.append(tokens)
        return run(graph, tokens, rows, *rest, **named)

    said = []
    for exactness, chunks, expected in (("fast", True, 16), ("exact", True, 16), ("exact", False, None)):
        monkeypatch.setattr(ExactWidths, "chunks", chunks)
        with Engine.load(bundle("llama-near-batch"), threads=1, exactness=exactness) as engine:
            monkeypatch.setattr(OnnxRuntimeGraph, "run", noted)
            ran.clear()
            said.append(_said(engine.generate(list(range(5, 15)), GREEDY.replace(max_tokens=20), PLAIN)))
            assert engine.manifest.prefill_chunk > 16
            assert ran[0] == (expected or engine.manifest.prefill_chunk)
            monkeypatch.setattr(OnnxRuntimeGraph, "run", run)
    assert said[1] == said[2]


def test_a_step_that_would_reach_beyond_the_largest_cache_is_no_wider_than_the_bundles(
    bundle: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.load(bundle("llama-near-batch"), threads=1) as engine:
        limit = engine.manifest.max_seq_len
        prompt = np.random.default_rng(3).integers(3, engine.manifest.target.vocab_size, limit - 6).tolist()
        expected = engine.generate(prompt, GREEDY)
        assert (expected.finish_reason, len(expected.token_ids)) == ("length", 6)
        monkeypatch.setattr(ExactWidths, "choose", lambda *_: 160)
        assert _said(engine.generate(prompt, GREEDY)) == _said(expected)


# --- what is asked for ------------------------------------------------------------------------------------------------


def test_fast_takes_the_widths_of_the_bundle(bundle: Callable[[str], Path]) -> None:
    with Engine.load(bundle("gpt2-tree"), threads=1, exactness="fast") as engine:
        assert isinstance(engine.widths, BuiltWidths)
        assert engine.widths.choose(range(1), 1) == 1
    with pytest.raises(RequestError, match="exactness is 'near'; expected 'exact' or 'fast'"):
        Engine.load(bundle("gpt2-tree"), exactness="near")  # type: ignore[arg-type]


def test_logits_that_are_no_numbers_end_the_request_and_no_other(
    bundle: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.load(bundle("llama-near-batch"), threads=1) as engine:
        real = runtime_ort.OnnxRuntimeGraph.run

        def run(self: Any, tokens: int, rows: int = 0, drafts: int = 0, slots: range = range(1)) -> Any:
            made = real(self, tokens, rows, drafts, slots)
            if self is engine._target and rows == tokens and 0 in slots and self.filled(0) > 12:
                made[tensors.LOGITS][0 - slots.start] = np.nan
            return made

        params = GREEDY.replace(max_tokens=8, logprobs=None)
        bad, good = engine.stream(list(range(3, 13)), params), engine.stream([7, 8, 9], params)
        bad.start()
        good.start()
        monkeypatch.setattr(runtime_ort.OnnxRuntimeGraph, "run", run)
        with pytest.raises(BackendError, match=r"logits after \d+ tokens are not finite.*'specexport verify BUNDLE'"):
            list(bad)
        assert sum(len(chunk.token_ids) for chunk in good) == 8
