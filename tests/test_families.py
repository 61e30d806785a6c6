"""Every supported model family computes in its graphs what transformers does; every other one is refused by name."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.pytorch_utils import Conv1D

from specexport.contract import tensors
from specexport.contract.errors import BuildError
from specexport.contract.signature import caches
from specexport.contract.tree import TokenTree
from specexport.exporter import compose, trace
from specexport.exporter.checkpoints import parity as check
from specexport.exporter.checkpoints.checkpoint import Checkpoint, load_checkpoint
from specexport.exporter.checkpoints.tokenizer import load_tokenizer
from specexport.exporter.engines.source import write_source
from specexport.exporter.options import Storage
from specexport.exporter.passes import onnxruntime_cuda
from specexport.graphs.propose import MAX_CANDIDATES, DraftPass, draw_candidate
from specexport.graphs.step import StepModule
from specexport.runtime import SamplingParams
from specexport.runtime.backends.onnxruntime.kernels import kernels
from specexport.runtime.backends.onnxruntime.session import open_session
from tests.checkpoints import FAMILIES, GROUPED, LAYERS_DIFFER, MAX_POSITIONS, VOCAB, WINDOW, make_checkpoint
from tests.reference import draw_candidates
from tests.test_weights import stored_graph

pytestmark = pytest.mark.exporter

Array = npt.NDArray[Any]

TOLERANCE = 1e-4
TREE = TokenTree((-1, 0, 0, 1, 1, 2, 5))
CHAIN_STEPS = 4
NOISE = 0.37


@dataclass
class Family:
    """One family's checkpoint, its model as transformers runs it, and its graphs on disk."""

    name: str
    checkpoint: Checkpoint
    eager: Any
    folder: Path

    def logits(self, tokens: Sequence[int]) -> Array:
        """What transformers says after each token of a text: ``[N,V]``."""
        with torch.no_grad():
            logits: Array = self.eager(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
        return logits

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        text = list(tokens)
        for _ in range(count):
            text.append(int(self.logits(text)[-1].argmax()))
        return text[len(tokens) :]


class Graph:
    """A graph in onnxruntime with a cache for some slots, on its own kernels alone or on ours too."""

    def __init__(self, path: Path, checkpoint: Checkpoint, batch: int, rows: int, ours: bool = False) -> None:
        if ours:
            self.session = open_session(path, 2, "native", "fp32")
        else:
            options = ort.SessionOptions()
            options.intra_op_num_threads = 1
            options.log_severity_level = 3
            self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.batch = batch
        sizes = [(c.heads, size) for c in checkpoint.cache for size in (c.key_size, c.value_size)]
        names = caches(checkpoint.cache)
        # What was never written must never be read: it would show at once.
        self.caches = {
            name: np.full((batch, heads, rows, size), 1e6, np.float32)
            for name, (heads, size) in zip(names, sizes, strict=True)
        }

    def run(self, **inputs: Array) -> dict[str, Array]:
        """Runs the graph and keeps the caches it returns."""
        names = [output.name for output in self.session.get_outputs()]
        outputs = dict(zip(names, self.session.run(names, {**inputs, **self.caches}), strict=True))
        self.caches = {name: outputs.pop(name.replace("past", "present")) for name in self.caches}
        return outputs

    def step(self, tokens: Array, past: Sequence[int], tree: TokenTree, rows: Array | None = None) -> Array:
        """Logits of ``rows [B,R]`` (all, if None) of a step over ``tokens [B,T]``."""
        every = np.arange(len(tree))[None].repeat(self.batch, 0)
        return self.run(
            input_ids=tokens,
            position_ids=np.array(past, np.int64)[:, None] + tree.depths[None],
            tree_mask=tree.mask[None].repeat(self.batch, 0),
            past_length=np.array(past, np.int64),
            logits_rows=every if rows is None else rows,
        )[tensors.LOGITS]

    def propose(
        self,
        tokens: Array,
        past: Sequence[int],
        last_row: Sequence[int],
        count: int,
        *,
        temperature: float = 1.0,
        top_k: int = 1,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> dict[str, Array]:
        read = {value.name for value in self.session.get_inputs()}
        passes = {name: np.array(count) for name in (tensors.NUM_DRAFT_TOKENS,) if name in read}
        return self.run(
            **passes,
            input_ids=tokens,
            past_length=np.array(past, np.int64),
            last_row=np.array(last_row, np.int64),
            uniform=np.full((self.batch, count), NOISE, np.float32),
            temperature=np.full(self.batch, temperature, np.float32),
            top_k=np.full(self.batch, top_k, np.int64),
            top_p=np.full(self.batch, top_p, np.float32),
            min_p=np.full(self.batch, min_p, np.float32),
        )


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for one another cost more than they bring at these sizes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    # Tracing takes most of the time: one layer of each type, and two alike for one family.
    layers = 2 if request.param in ("llama", *LAYERS_DIFFER) else 1
    folder = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, num_hidden_layers=layers)
    eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    yield Family(request.param, load_checkpoint(str(folder)), eager, folder)


@pytest.fixture(scope="module")
def step_graph(family: Family) -> Path:
    path = family.folder / "step.onnx"
    ir.save(trace.trace_step(StepModule(family.checkpoint.model), family.checkpoint.cache), path)
    return path


@pytest.fixture(scope="module")
def propose_graph(family: Family) -> Path:
    path, loaded = family.folder / "propose.onnx", family.checkpoint
    one_pass = DraftPass(loaded.model, loaded.vocab_size, loaded.input_vocab, loaded.max_positions)
    ir.save(compose.propose_graph(trace.trace_draft_pass(one_pass, loaded.cache), loaded.cache), path)
    return path


def random_text(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCAB, length)]


def padded(parts: Sequence[Sequence[int]], width: int) -> Array:
    return np.array([[*part, *[7] * (width - len(part))] for part in parts], np.int64)


def differences(
    family: Family, path: Path, prompts: Sequence[int], chunk: int, rows: int, ours: bool = True
) -> dict[str, float]:
    """The largest difference of a logit from transformers' in prefill, chain steps and a tree, slots in parallel."""
    texts = [random_text(length + CHAIN_STEPS + len(TREE), seed) for seed, length in enumerate(prompts)]
    expected = [family.logits(text) for text in texts]
    graph = Graph(path, family.checkpoint, len(texts), rows, ours)
    past = [0] * len(texts)
    worst = {"prefill": 0.0, "chain": 0.0, "tree": 0.0}

    def note(part: str, ours: Array, theirs: Array) -> None:
        worst[part] = max(worst[part], float(np.abs(ours - theirs).max(initial=0.0)))

    while any(done < length for done, length in zip(past, prompts, strict=True)):
        # The shorter text's slot runs along on padding.
        parts = [text[done : min(done + chunk, n)] for text, done, n in zip(texts, past, prompts, strict=True)]
        logits = graph.step(padded(parts, chunk), past, TokenTree.chain(chunk))
        for slot, part in enumerate(parts):
            note("prefill", logits[slot, : len(part)], expected[slot][past[slot] : past[slot] + len(part)])
            past[slot] += len(part)
    for _ in range(CHAIN_STEPS):
        logits = graph.step(
            np.array([[text[done]] for text, done in zip(texts, past, strict=True)]), past, TREE.chain(1)
        )
        for slot, done in enumerate(past):
            note("chain", logits[slot], expected[slot][done : done + 1])
        past = [done + 1 for done in past]
    nodes = np.array([text[done:] for text, done in zip(texts, past, strict=True)])
    logits = graph.step(nodes, past, TREE)
    for slot, done in enumerate(past):
        for node in range(len(TREE)):
            path_tokens = nodes[slot, TREE.mask[node]]
            note("tree", logits[slot, node], family.logits([*texts[slot][:done], *path_tokens])[-1])
    # Only the root is accepted: a chain step overwrites what the tree wrote, and what it does not reach stays unseen.
    logits = graph.step(
        nodes[:, 1:3], [done + 1 for done in past], TokenTree.chain(2), np.ones((len(texts), 1), np.int64)
    )
    for slot, done in enumerate(past):
        note("chain", logits[slot], family.logits(texts[slot][: done + 3])[-1:])
    return worst


@pytest.mark.parametrize(
    ("prompts", "chunk", "rows", "ours"),
    [
        ((2 * WINDOW + 5, WINDOW + 3), 8, 40, True),
        ((2 * WINDOW + 5, WINDOW + 3), 8, 40, False),
        ((WINDOW + 13,), 16, 56, True),
    ],
    ids=["two slots", "two slots on onnxruntime's kernels", "one slot"],
)
def test_step_graph_equals_transformers(family, step_graph, prompts, chunk, rows, ours):
    worst = differences(family, step_graph, prompts, chunk, rows, ours)
    assert max(worst.values()) < TOLERANCE, worst


def test_the_fused_operators_of_gpus_equal_transformers(family, step_graph, monkeypatch):
    """They run on the CPU too, but in fp32."""
    monkeypatch.setattr(onnxruntime_cuda, "_HALF", (ir.DataType.FLOAT,))
    fused = step_graph.with_name("step.fused.onnx")
    write_source(step_graph, fused, "fp32", 0, {"B": 1, "S": 56}, compiled=False)
    worst = differences(family, fused, (WINDOW + 13,), 16, 56, ours=False)
    assert max(worst.values()) < TOLERANCE, worst
    nodes = Counter(node.op_type for node in ir.load(fused).graph)
    masters = Counter(node.op_type for node in ir.load(step_graph).graph)
    assert nodes["GroupQueryAttention"] == masters["Attention"]
    assert nodes["TensorScatter"] == masters["TensorScatter"] - 2 * masters["Attention"]


@pytest.mark.skipif(not kernels().devices, reason="the kernels are not compiled: onnxruntime's rows are not exact")
def test_a_row_is_the_same_whatever_runs_beside_it(family, step_graph):
    """In chunks and one by one, alone and beside another slot, as a branch of a tree and as a chain."""
    text, branches = random_text(2 * WINDOW + 5, 1), random_text(len(TREE), 2)
    wide = Graph(step_graph, family.checkpoint, 1, 56, ours=True)
    rows: list[Array] = []
    for start in range(0, len(text), 7):
        part = text[start : start + 7]
        rows += list(wide.step(padded([part], 7), [start], TokenTree.chain(7))[0, : len(part)])
    nodes = wide.step(np.array([branches]), [len(text)], TREE)[0]
    narrow = Graph(step_graph, family.checkpoint, 2, 56, ours=True)
    other = random_text(3 * len(text), 3)

    def alone(token: int, past: int) -> Array:
        logits = narrow.step(np.array([[other[past]], [token]]), [past // 2, past], TokenTree.chain(1))
        row: Array = logits[1, 0]
        return row

    for past, token in enumerate(text):
        assert np.array_equal(alone(token, past), rows[past]), past
    for leaf in (4, 6):  # a branch off the tree's first path, and its longest
        path = np.flatnonzero(TREE.mask[leaf])
        for depth, node in enumerate(path):
            assert np.array_equal(alone(branches[node], len(text) + depth), nodes[node]), (leaf, node)


def test_the_portable_lowering_equals_transformers(family):
    check.require_parity(family.checkpoint, "portable")


def test_the_models_embeddings_equal_tokens(family):
    check.require_parity(family.checkpoint, embeds=True)


def test_step_graph_is_plain_onnx_with_fused_norms(family, step_graph):
    model = ir.load(step_graph)
    assert model.opset_imports == {"": 24}
    nodes = Counter(node.op_type for node in model.graph.all_nodes())
    assert {node.domain for node in model.graph.all_nodes()} == {""}
    assert all(value.uses() for value in model.graph.inputs)
    kinds = Counter(type(module).__name__ for module in family.eager.modules())
    rms_norms = sum(count for name, count in kinds.items() if name.endswith("RMSNorm"))
    assert nodes["RMSNormalization"] == rms_norms
    assert nodes["LayerNormalization"] == kinds["LayerNorm"]
    assert rms_norms + kinds["LayerNorm"] > 0
    assert nodes["Reciprocal"] == nodes["Sqrt"] == nodes["ReduceMean"] == 0
    rotary = [node for node in model.graph if node.op_type == "RotaryEmbedding"]
    rotated_layers = {"opt": 0, "gpt2": 0, "smollm3": 1}.get(family.name, len(family.checkpoint.cache))
    assert len(rotary) == 2 * rotated_layers
    assert nodes["Gemm"] == 0
    assert columns(_weight_shape(node) for node in model.graph) == columns(map(_shape, linear_layers(family.eager)))
    capped = family.name == "gemma2"
    assert nodes["Attention"] == (0 if capped else len(family.checkpoint.cache))


def test_weights_have_the_names_of_the_model(family, step_graph, propose_graph):
    """And are what it holds under them, transposed where they are multiplied."""
    stored = {name: parameter.detach().numpy() for name, parameter in family.eager.named_parameters()}
    for path in (step_graph, propose_graph):
        graph = ir.load(path).graph
        loops = [node.attributes["body"].as_graph() for node in graph if node.op_type == "Loop"]
        stored_names: set[str] = set()
        for value in (value for part in (graph, *loops) for value in part.initializers.values()):
            assert value.name is not None and value.const_value is not None
            array, names = value.const_value.numpy(), joined(value.name)
            if set(names) <= stored.keys():
                stored_names |= set(names)
                as_stored = stored[names[0]]
                if array.shape != as_stored.shape or not np.array_equal(array, as_stored):
                    as_stored = np.concatenate([stored[name].T for name in names], axis=-1)
                np.testing.assert_array_equal(array, as_stored, err_msg=value.name)
            elif value.name.endswith(".folded"):
                assert value.name.removesuffix(".folded") in stored
            else:
                assert array.dtype != np.float32 or array.nbytes < 256, value.name  # a norm of 64 has that
        assert {name for name, array in stored.items() if array.ndim == 2} <= stored_names
    assert any(".folded" in name for name in ir.load(step_graph).graph.initializers) == family.name.startswith("gemma")


def joined(name: str) -> list[str]:
    """The matrices in one: ``a.{b,c}.d`` is ``a.b.d`` and ``a.c.d``."""
    match = re.fullmatch(r"(.*)\{(.*)\}(.*)", name)
    return [f"{match[1]}{part}{match[3]}" for part in match[2].split(",")] if match else [name]


def linear_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear | Conv1D)]


def _shape(layer: Any) -> tuple[int, int]:
    rows, cols = layer.weight.shape if isinstance(layer, Conv1D) else layer.weight.shape[::-1]
    return rows, cols


def columns(shapes: Iterable[tuple[int, ...] | None]) -> Counter[int]:
    """How many columns there are of each length: the same however matrices with one input are joined."""
    counted: Counter[int] = Counter()
    for shape in shapes:
        if shape is not None:
            counted[shape[0]] += shape[1]
    return counted


def _weight_shape(node: ir.Node) -> tuple[int, ...] | None:
    """``[K,N]`` if ``node`` multiplies by a weight: one stored that way, or the transposed embedding."""
    if node.op_type != "MatMul":
        return None
    weight = node.inputs[1]
    assert weight is not None
    transpose = weight.producer()
    tied = transpose is not None and transpose.op_type == "Transpose"
    stored = transpose.inputs[0] if transpose is not None and tied else weight
    if stored is None or not stored.is_initializer():
        return None
    shape = stored.const_value.numpy().shape
    return shape[::-1] if tied else shape


def test_every_linear_layer_is_quantized(family, step_graph, tmp_path):
    model = ir.load(step_graph)
    matrices = sum(_weight_shape(node) is not None for node in model.graph)
    weights = stored_graph(model, tmp_path / "step.onnx", Storage("int8", 32))
    report = weights.report
    multiplied = [name for name in report.quantized if ".matmul" in name or ".tied" in name]
    assert len(multiplied) == matrices > 0, report
    assert not report.not_quantized
    text = random_text(12, 0)
    graph = Graph(tmp_path / "step.onnx", family.checkpoint, 1, 16)
    ours = graph.step(np.array([text]), [0], TokenTree.chain(12))[0]
    theirs = family.logits(text)
    assert 1e-5 < np.abs(ours - theirs).mean() / np.abs(theirs).mean() < 0.1


def test_propose_graph_equals_transformers(family, propose_graph):
    K, chunk, rows = 4, 24, 64
    prompts = [random_text(2 * WINDOW + 5, 10), random_text(WINDOW + 3, 11)]
    graph = Graph(propose_graph, family.checkpoint, 2, rows)
    # Prefill of all but the last token; a pass over a padded chunk still says what follows its last real token.
    drafts = graph.propose(padded([p[:-1] for p in prompts], chunk), [0, 0], [len(p) - 2 for p in prompts], 1)
    for slot, prompt in enumerate(prompts):
        assert drafts[tensors.DRAFT_TOKENS][0, slot] == family.greedy(prompt[:-1], 1)[0]

    texts = [list(prompt) for prompt in prompts]
    # All drafts are accepted and a token follows; two are accepted and another token follows; none is.
    for round_, accepted in enumerate((K, 2, 0, 1)):
        past = [len(text) - 2 for text in texts]
        drafts = graph.propose(np.array([text[-2:] for text in texts]), past, [1, 1], K)
        for slot, text in enumerate(texts):
            drafted = drafts[tensors.DRAFT_TOKENS][:, slot].tolist()
            assert drafted == family.greedy(text, K), (round_, slot)
            assert drafts[tensors.DRAFT_IDS][:, slot, 0].tolist() == drafted
            assert drafts[tensors.DRAFT_PROBS][:, slot, 0].tolist() == [1.0] * K
            text += [*drafted[:accepted], random_text(1, 20 + 2 * round_ + slot)[0]]
        if round_ == 0:
            recomputed = Graph(propose_graph, family.checkpoint, 2, rows)
            written = [prompt + drafts[tensors.DRAFT_TOKENS][:, slot].tolist() for slot, prompt in enumerate(prompts)]
            recomputed.propose(padded(written, 32), [0, 0], [0, 0], 1)
            for name, cache in graph.caches.items():
                for slot, prompt in enumerate(prompts):
                    result = len(prompt) + K - 1
                    ours, theirs = cache[slot, :, :result], recomputed.caches[name][slot, :, :result]
                    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4, err_msg=name)

    sampling: dict[str, Any] = {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.02}
    drafts = graph.propose(np.array([t[-2:] for t in texts]), [len(t) - 2 for t in texts], [1, 1], 2, **sampling)
    for slot, text in enumerate(texts):
        for index in range(2):
            token, ids, probs = expected_draft(family.logits(text)[-1], NOISE, **sampling)
            kept = probs > 0
            assert drafts[tensors.DRAFT_IDS][index, slot][kept].tolist() == ids[kept].tolist()
            np.testing.assert_allclose(drafts[tensors.DRAFT_PROBS][index, slot], probs, atol=1e-4)
            assert drafts[tensors.DRAFT_TOKENS][index, slot] == token
            text.append(token)


@pytest.mark.parametrize(
    ("slots", "compiled"), [(1, False), (2, False), (2, True)], ids=["fused", "onnxruntime-cuda", "TensorRT"]
)
def test_a_gpus_pass_of_the_draft_equals_the_loops(family, propose_graph, slots, compiled, monkeypatch):
    """In ONNX Runtime its attention is over the cache alone; with one slot it is fused, for a CPU in fp32."""
    monkeypatch.setattr(onnxruntime_cuda, "_HALF", (ir.DataType.FLOAT,))
    fused, rows = propose_graph.with_name(f"propose.{slots}.{compiled}.onnx"), 64
    write_source(propose_graph, fused, "fp32", 1, {"S": rows, **({"B": 1} if slots == 1 else {})}, compiled=compiled)
    loop, single = (Graph(path, family.checkpoint, slots, rows) for path in (propose_graph, fused))
    sampling = {"temperature": 0.9, "top_k": 0, "top_p": 0.95, "min_p": 0.01}
    texts = [random_text(rows, seed) for seed in range(slots)]
    past = np.array([0, 3][:slots])
    for tokens, padding in ((9, 0), (11, [4, 0]), (2, 0), (2, 1), (2, [0, 1]), (5, 0), (1, 0), (16, 2)):
        new = np.array([text[at : at + tokens] for text, at in zip(texts, past, strict=True)])
        last = tokens - 1 - np.broadcast_to(padding, 2)[:slots]
        expected = loop.propose(new, list(past), list(last), 1, **sampling)
        outputs = single.propose(new, list(past), list(last), 1, **sampling)
        for name in expected:
            np.testing.assert_allclose(outputs[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
        past = past + last + 1
        for name, cache in loop.caches.items():
            for slot, valid in enumerate(past):
                ours, theirs = single.caches[name][slot, :, :valid], cache[slot, :, :valid]
                np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=name)
    layers, graph = len(family.checkpoint.cache), ir.load(fused).graph
    assert not {node.op_type for node in graph} & {"Loop", "ConstantOfShape"}  # no rows of passes before
    nodes = [node for node in graph if node.op_type in ("Attention", "GroupQueryAttention")]
    assert len(nodes) == (0 if family.name == "gemma2" or compiled else layers)  # Gemma's scores are bounded
    if slots == 1:
        full = [node for node in nodes if node.attributes.get_int("causal", 0)]
        assert len(full) == {"mistral": 0, "gemma2": 0, "gemma3": 1}.get(family.name, layers)
        assert [node for node in nodes if node.inputs[10:] and node.inputs[10]] == [n for n in nodes if n not in full]


def test_propose_graph_is_plain_onnx(family, propose_graph):
    model = ir.load(propose_graph)
    assert model.opset_imports == {"": 24}
    nodes = Counter(node.op_type for node in model.graph.all_nodes())
    assert {node.domain for node in model.graph.all_nodes()} == {""}
    assert nodes["Loop"] == 1
    assert all(value.uses() for value in model.graph.inputs)
    assert nodes["Gemm"] == nodes["Reciprocal"] == nodes["ReduceMean"] == 0
    (body,) = (node.attributes["body"].as_graph() for node in model.graph if node.op_type == "Loop")
    assert columns(_weight_shape(node) for node in body) == columns(map(_shape, linear_layers(family.eager)))


def expected_draft(logits: Array, noise: float, **settings: Any) -> tuple[int, Array, Array]:
    """The draft's token, candidates and their probabilities, as NumPy computes them."""
    params = SamplingParams(**settings)
    token, ids, probs = draw_candidates(logits[None], np.array([noise], np.float32), params, MAX_CANDIDATES)
    return int(token[0]), ids[0], probs[0]


@pytest.mark.parametrize("vocab", [3, MAX_CANDIDATES - 1, MAX_CANDIDATES, 500])
def test_candidates_are_drawn_from_the_declared_distribution(vocab):
    draw = np.random.default_rng(vocab)
    n = 400
    logits = (draw.standard_normal((n, vocab)) * draw.choice([0.1, 1, 5, 30], (n, 1))).astype(np.float32)
    noise = draw.choice([0.0, 0.999999, -1], n).astype(np.float32)
    noise = np.where(noise < 0, draw.random(n), noise).astype(np.float32)
    temperature = draw.choice([0.01, 0.5, 1.0, 1.7], n).astype(np.float32)
    top_k = draw.choice([0, 1, 2, 40, MAX_CANDIDATES, 1000], n)
    top_p = draw.choice([1e-6, 0.3, 0.9, 1.0], n).astype(np.float32)
    min_p = draw.choice([0.0, 0.05, 0.7, 1.0], n).astype(np.float32)
    inputs = (logits, noise, temperature, top_k, top_p, min_p)
    token, ids, probs = (out.numpy() for out in draw_candidate(*(torch.from_numpy(array) for array in inputs)))

    assert ids.shape == probs.shape == (n, min(vocab, MAX_CANDIDATES))
    assert probs.dtype == np.float32
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-5)
    for row in range(n):
        settings = {"temperature": temperature[row], "top_k": top_k[row], "top_p": top_p[row], "min_p": min_p[row]}
        _, expected_ids, expected = expected_draft(logits[row], noise[row], **settings)
        np.testing.assert_array_equal(ids[row], expected_ids)
        np.testing.assert_allclose(probs[row], expected, atol=2e-5, err_msg=str(settings))
        (index,) = np.flatnonzero(ids[row] == token[row])
        until = expected.cumsum()
        # The noise falls where the token's share of the distribution lies, up to rounding.
        assert until[index] - expected[index] - 1e-5 <= noise[row] <= until[index] + 1e-5
        assert probs[row, index] > 0


def test_rounding_of_noise_keeps_tokens_in_range():
    first = torch.ones(1)
    token, ids, probs = draw_candidate(
        torch.zeros(1, 40), first * (1 - 2**-24), first, torch.tensor([3]), first, torch.zeros(1)
    )
    assert int((probs > 0).sum()) == 3
    assert int(token) in ids[0, :3].tolist()


PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "no attention": ("mamba", {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}),
    "ALiBi": ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "ALiBi, another": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}),
    "attention of its own": ("falcon", {**GROUPED, "alibi": True}),
    "two softmaxes": ("diffllama", GROUPED),
    # These say in their mask only how far back a token sees, and farther than a short text can show.
    "window in the mask": (
        "phimoe",
        {**GROUPED, "num_local_experts": 4, "sliding_window": 64, "rope_parameters": PLAIN_ROPE},
    ),
    "window in the mask of some layers": (
        "qwen2_moe",
        {**GROUPED, "num_experts": 4, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
    ),
    "chunks": (
        "llama4_text",
        {**GROUPED, "num_local_experts": 2, "intermediate_size_mlp": 96, "attention_chunk_size": 64},
    ),
    "bidirectional": ("gemma3_text", {**GROUPED, "head_dim": 16, "use_bidirectional_attention": True}),
}


@pytest.mark.parametrize("why", REFUSED)
def test_other_families_are_refused_by_name(why, tmp_path):
    name, config = REFUSED[why]
    make_checkpoint(tmp_path, name, **config)
    with pytest.raises(BuildError, match=rf"model family '{name}'"):
        check.require_parity(load_checkpoint(str(tmp_path)))


def test_an_encoder_decoder_is_refused_by_name(tmp_path):
    T5ForConditionalGeneration(
        T5Config(d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16, vocab_size=VOCAB)
    ).save_pretrained(tmp_path)
    with pytest.raises(BuildError, match="model family 't5'"):
        load_checkpoint(str(tmp_path))


def test_keys_shared_between_layers_are_cached_by_each(tmp_path):
    """Gemma 3n's last layers attend to the keys of earlier ones; a cache of its own for each is the same."""
    make_checkpoint(
        tmp_path,
        "gemma3n_text",
        **{**GROUPED, "num_hidden_layers": 4},
        head_dim=16,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=WINDOW,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
        altup_num_inputs=2,
    )
    loaded = load_checkpoint(str(tmp_path))
    check.require_parity(loaded)
    # And they are of tokens also beside the embeddings, which embeddings in their place do not say.
    with pytest.raises(BuildError, match="'gemma3n_text' does not read its own embeddings as it reads tokens"):
        check.require_parity(loaded, embeds=True)


def test_values_may_be_narrower_than_keys(tmp_path):
    """Latent attention as MiniCPM 3 and the DeepSeek models have it."""
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    sizes = {**GROUPED, "num_hidden_layers": 1, "num_key_value_heads": 4}
    make_checkpoint(tmp_path, "minicpm3", **sizes, **latent)
    loaded = load_checkpoint(str(tmp_path))
    assert [(layer.key_size, layer.value_size) for layer in loaded.cache] == [(24, 16)]
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32).eval()
    ir.save(trace.trace_step(StepModule(loaded.model), loaded.cache), tmp_path / "step.onnx")
    worst = differences(Family("minicpm3", loaded, eager, tmp_path), tmp_path / "step.onnx", (13, 7), 8, 32)
    assert max(worst.values()) < TOLERANCE, worst


LENGTH_DEPENDENT: dict[str, tuple[str, dict[str, Any], int]] = {
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4}}, MAX_POSITIONS),
    "longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [2.0 + 0.3 * i for i in range(8)],
            },
            "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": 48,
        },
        48,
    ),
}


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_rotary_frequencies_that_change_with_length_hold_up_to_the_declared_one(kind, tmp_path):
    name, config, positions = LENGTH_DEPENDENT[kind]
    make_checkpoint(tmp_path, name, num_hidden_layers=1, **config)
    loaded = load_checkpoint(str(tmp_path))
    assert loaded.max_positions == positions
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32).eval()
    ir.save(trace.trace_step(StepModule(loaded.model), loaded.cache), tmp_path / "step.onnx")
    family = Family(name, loaded, eager, tmp_path)
    worst = differences(family, tmp_path / "step.onnx", (48 - CHAIN_STEPS - len(TREE),), 16, 64)
    assert max(worst.values()) < TOLERANCE, worst
    if kind == "longrope":
        text = random_text(64, 0)
        assert not math.isclose(family.logits(text)[47, 0], family.logits(text[:48])[47, 0], abs_tol=1e-3)
        # As the first Phi-3 models spell it.
        document = json.loads((tmp_path / "config.json").read_text())
        scaling = document.pop("rope_parameters")
        for name in ("rope_type", "original_max_position_embeddings"):
            del scaling[name]
        (tmp_path / "config.json").write_text(json.dumps(document | {"rope_scaling": scaling | {"type": "su"}}))
        assert load_tokenizer(tmp_path).tokenizer.get_vocab_size() > 0
        early = load_checkpoint(str(tmp_path))
        assert early.max_positions == positions
        torch.testing.assert_close(early.model.model.rotary_emb.inv_freq, loaded.model.model.rotary_emb.inv_freq)
