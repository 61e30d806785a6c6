"""EAGLE-3: what is read of both published layouts, what is refused, and that the graph drafts what the formulas say."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from specexport import LLM
from specexport.cli import main
from specexport.contract import tensors
from specexport.contract.errors import BuildError
from specexport.contract.methods import read_methods
from specexport.contract.reading import read_manifest
from specexport.contract.shapes import ShapePoint
from specexport.exporter.build import build
from specexport.exporter.compose import propose_graph
from specexport.exporter.engines.compiler import compile_graph, load_library
from specexport.exporter.engines.profiles import model_jobs
from specexport.exporter.engines.source import write_source
from specexport.exporter.options import BuildOptions
from specexport.methods.eagle3.checkpoint import read_eagle3
from specexport.methods.eagle3.spec import Eagle3
from specexport.methods.hidden_states.checkpoint import as_checkpoint
from specexport.methods.hidden_states.export import trace_own_state
from specexport.methods.hidden_states.propose import StatesProposer
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.backend import buffers
from specexport.runtime.backends.onnxruntime.graph import OnnxRuntimeGraph
from specexport.runtime.speculative import PLAIN, Speculative
from specexport.verify.bundle import verify
from tests.checkpoints import GROUPED, VOCAB, make_checkpoint, make_eagle3
from tests.engine_bundles import SMALL
from tests.quantized import FORMATS
from tests.ways import ways

pytestmark = pytest.mark.exporter

H, LAYERS, KEPT = GROUPED["hidden_size"], GROUPED["num_hidden_layers"], 200
LIKE: dict[str, Any] = {
    "trees": (),
    "model": "here",
    "states": (0, 1, 2),
    "hidden": H,
    "draft_hidden": H,
    "rows": 1,
    "candidates": 64,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "target", "llama")


@pytest.fixture
def draft(tmp_path: Path, target: Path) -> Path:
    return make_eagle3(tmp_path / "draft", target, draft_vocab=KEPT)


def changed(folder: Path, weights: dict[str, torch.Tensor | None] | None = None, **config: Any) -> str:
    """A draft with other tensors, where None takes one away, and another configuration."""
    state = load_file(folder / "model.safetensors") | (weights or {})
    save_file({name: item for name, item in state.items() if item is not None}, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return str(folder)


def fit(source: str) -> None:
    read_eagle3(source).require_fit(hidden=H, vocab=VOCAB, layers=LAYERS)


# --- the formulas -----------------------------------------------------------------------------------------------------


class Paper:
    """A draft by the formulas of arXiv 2503.01840, one row after another, from the names in its file."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.layer = self.config.get("transformer_layer_config", self.config)
        state = load_file(folder / "model.safetensors")
        self.weights = {name.replace("midlayer.", "").replace("layers.0.", ""): item for name, item in state.items()}
        if "embed_tokens.weight" not in self.weights:
            self.weights["embed_tokens.weight"] = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return (
            x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.layer["rms_norm_eps"]) * self.weights[f"{name}.weight"]
        )

    def fused(self, states: torch.Tensor) -> torch.Tensor:
        if self.config.get("norm_before_fc"):
            states = self._norm(states, "input_norm")
        if self.config.get("fc_norm"):
            parts = states.split(H)
            states = torch.cat([self._norm(part, f"fc_norm.{at}") for at, part in enumerate(parts)])
        return self.weights["fc.weight"] @ states

    def row(self, hidden: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The next row from fused states, or what the row before returned, and the token after it: its own state, and
        what comes after that token, ``[draft_vocab]``.
        """
        position, size = len(self.keys), self.layer["head_dim"]
        normed = self._norm(hidden, "hidden_norm")
        seen = torch.cat([self._norm(self.weights["embed_tokens.weight"][token], "input_layernorm"), normed])
        q, k, v = ((self.weights[f"self_attn.{name}_proj.weight"] @ seen).view(-1, size) for name in ("q", "k", "v"))
        if self.layer["model_type"] == "qwen3":
            q, k = self._norm(q, "self_attn.q_norm"), self._norm(k, "self_attn.k_norm")
        self.keys.append(self._rotated(k, position))
        self.values.append(v)
        q, group = self._rotated(q, position), len(q) // len(k)
        heads = []
        for head in range(len(q)):
            scores = torch.stack([q[head] @ key[head // group] for key in self.keys]) / size**0.5
            heads.append(scores.softmax(0) @ torch.stack([value[head // group] for value in self.values]))
        state = (normed if self.config.get("norm_before_residual") else hidden) + (
            self.weights["self_attn.o_proj.weight"] @ torch.cat(heads)
        )
        inner = self._norm(state, "post_attention_layernorm")
        gate, up = (self.weights[f"mlp.{name}_proj.weight"] @ inner for name in ("gate", "up"))
        state = state + self.weights["mlp.down_proj.weight"] @ (F.silu(gate) * up)
        output = self._norm(state, "norm")
        return (output if self.config.get("norm_output") else state), self.weights["lm_head.weight"] @ output

    def copy(self) -> Paper:
        """One that goes on by itself."""
        other = copy.copy(self)
        other.keys, other.values = list(self.keys), list(self.values)
        return other

    def _rotated(self, x: torch.Tensor, position: int) -> torch.Tensor:
        theta = self.layer.get("rope_parameters", {}).get("rope_theta", 10000.0)
        half = x.shape[-1] // 2
        angle = position * theta ** (-torch.arange(half) / half)
        first, second = x[:, :half], x[:, half:]
        return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], 1)


@pytest.mark.parametrize(
    ("published", "lowering", "options"),
    [
        ("SafeAILab", "native", {"draft_vocab": KEPT}),
        ("SafeAILab", "portable", {"norm_before_residual": True, "norm_before_fc": True}),
        ("speculators", "native", {"model_type": "qwen3", "fc_norm": True, "norm_output": True, "embedding": False}),
    ],
)
def test_drafts_equal_the_formulas(
    tmp_path: Path, target: Path, published: Any, lowering: Any, options: dict[str, Any]
) -> None:
    """Two slots with texts of 5 and 2 rows, whose next rows are 3 and 1, padded; then 4 tokens each."""
    folder = make_eagle3(tmp_path / "draft", target, published=published, **options)
    outline = read_eagle3(str(folder))
    outline.require_fit(hidden=H, vocab=VOCAB, layers=LAYERS)
    draft = outline.load(target, LAYERS, 512)
    cache = as_checkpoint(outline, "eagle3", "here", draft, 512).cache
    start, one_pass = trace_own_state(draft, cache, lowering)
    ir.save(propose_graph(one_pass, cache, lowering, start), tmp_path / "propose.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "propose.onnx")
    method = Eagle3(**LIKE, dynamic_tree=False)
    make = buffers(method.signatures["eagle3"])
    names = [tensor.name for tensor in session.get_outputs()]
    shape = (2, cache[0].heads, 32, cache[0].key_size)
    caches = {name.at(0): np.zeros(shape, np.float32) for name in (tensors.PAST_KEY, tensors.PAST_VALUE)}
    draw = np.random.default_rng(4)
    states = draw.normal(0, 1.5, (2, 12, 3 * H)).astype(np.float32)
    texts = draw.integers(0, VOCAB, (2, 13))

    def run(width: int, K: int, pasts: tuple[int, int], counts: tuple[int, int], local: Any = None) -> dict[str, Any]:
        inputs, _ = make(ShapePoint(2, width, 32, 0, K))
        inputs[tensors.READS_OWN][:] = local is not None
        inputs[tensors.OWN_STATE][:] = 0 if local is None else local[:, 0]
        for slot, (past, count) in enumerate(zip(pasts, counts, strict=True)):
            inputs[tensors.INPUT_IDS][slot, :count] = texts[slot, past + 1 : past + 1 + count]
            inputs[tensors.LAYER_STATES][slot, :count] = states[slot, past : past + count]
            inputs[tensors.PAST_LENGTH][slot], inputs[tensors.LAST_ROW][slot] = past, count - 1
        inputs[tensors.UNIFORM][1], inputs[tensors.TOP_K][1] = 0.7, 0  # the second slot samples
        outputs = dict(zip(names, session.run(names, inputs | caches), strict=True))
        for kind in ("key", "value"):
            rows = outputs[f"present_{kind}.0"] if lowering == "native" else outputs[f"new_{kind}.0"]
            for slot, (past, count) in enumerate(zip(pasts, counts, strict=True)):
                new = rows[slot, :, past:] if lowering == "native" else rows[slot]
                caches[f"past_{kind}.0"][slot, :, past : past + count] = new[:, :count]
        return outputs

    run(6, 1, (0, 0), (5, 2))
    result = run(4, 4, (5, 2), (3, 1))
    for slot, rows in enumerate((8, 3)):
        paper = Paper(folder, target)
        for row in range(rows):
            state, logits = paper.row(paper.fused(torch.from_numpy(states[slot, row])), int(texts[slot, row + 1]))
        for depth in range(4):
            ids, probs = result[tensors.DRAFT_IDS][depth, slot], result[tensors.DRAFT_PROBS][depth, slot]
            token, best = int(result[tensors.DRAFT_TOKENS][depth, slot]), logits.topk(64)
            candidates = (
                best.indices + paper.weights["d2t"][best.indices] if options.get("draft_vocab") else best.indices
            )
            q = best.values.softmax(0) if slot else F.one_hot(torch.tensor(0), 64).float()
            np.testing.assert_array_equal(ids[:5], candidates[:5])
            np.testing.assert_allclose(probs, q.numpy(), atol=2e-4)
            assert token == (ids[0] if slot == 0 else ids[int((probs.cumsum() - probs <= 0.7).nonzero()[0][-1])])
            state, logits = paper.row(state, token)
    # The same in a call for each token, as devices draft.
    text = run(4, 1, (5, 2), (3, 1))
    for depth, pasts in enumerate(((8, 3), (9, 4), (10, 5), (11, 6))):
        for name in (tensors.DRAFT_TOKENS, tensors.DRAFT_IDS):
            np.testing.assert_array_equal(text[name][0], result[name][depth])
        for slot, past in enumerate(pasts):
            texts[slot, past + 1] = text[tensors.DRAFT_TOKENS][0, slot]
        text = run(4, 1, pasts, (1, 1), text[tensors.NEXT_STATE])


def test_missing_draft_tensors_are_the_targets(tmp_path: Path, target: Path) -> None:
    folder = make_eagle3(tmp_path / "draft", target, draft_vocab=KEPT, embedding=False)
    source = changed(folder, {"lm_head.weight": None})
    fit(source)
    theirs = load_file(target / "model.safetensors")
    draft = read_eagle3(source).load(target, LAYERS, 512)
    assert torch.equal(draft.embed_tokens.weight, theirs["model.embed_tokens.weight"])
    ids = draft.target_ids
    assert ids is not None
    assert torch.equal(draft.lm_head.weight, theirs["lm_head.weight"][ids])
    source = changed(folder, tie_word_embeddings=True)
    tied = read_eagle3(source).load(target, LAYERS, 512)
    assert torch.equal(tied.lm_head.weight, theirs["model.embed_tokens.weight"][ids])


def test_quantized_drafts_are_read_as_quantized_targets_are(draft: Path, target: Path) -> None:
    config, quantize = FORMATS["int8"]
    stored: dict[str, torch.Tensor | None] = {}
    numbers = {}
    for name, weight in load_file(draft / "model.safetensors").items():
        if name.endswith(("_proj.weight", "fc.weight")):
            parts: dict[str, torch.Tensor] = {}
            numbers[name] = quantize(name.removesuffix(".weight"), weight, parts)
            stored |= {name: None, **parts}
    source = changed(draft, stored, quantization_config=config)
    fit(source)
    state = read_eagle3(source).load(target, LAYERS, 512).state_dict()
    assert len(numbers) == 8
    for name, expected in numbers.items():
        assert torch.equal(state[name.replace("midlayer.", "layers.0.")], expected)
    with pytest.raises(BuildError, match=r"the weights lack 'fc\.weight_scale', a part of a quantized matrix"):
        fit(changed(draft, {"fc.weight_scale": None}))


def test_the_draft_of_smollm2_fits_its_target() -> None:
    outline = read_eagle3("examples/models/smollm2-eagle3")
    outline.require_fit(hidden=576, vocab=49152, layers=30)
    assert (outline.seen(30), outline.draft_vocab, outline.layer.rope_parameters["rope_theta"]) == (
        (2, 15, 27), 8192, 100000.0
    )  # fmt: skip


def test_layers_are_named_as_their_publishers_do(tmp_path: Path, target: Path, draft: Path) -> None:
    assert read_eagle3(str(draft)).seen(LAYERS) == (0, 1, 2)
    nested = changed(
        draft, eagle_aux_hidden_state_layer_ids=None, eagle_config={"eagle_aux_hidden_state_layer_ids": [1]}
    )
    assert read_eagle3(nested).seen(LAYERS) == (2,)  # outputs of layers, there
    usual = changed(draft, eagle_config=None)
    assert read_eagle3(usual).seen(32) == (2, 16, 29)
    with pytest.raises(
        BuildError, match=r"states after \[2, 1, -1\] layers \(as none are named\), but the target has 2"
    ):
        fit(usual)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"vocab_size": 300}, "vocab_size is 300, and the target's is 320"),
        ({"target_hidden_size": 32}, "target_hidden_size is 32, and the target's is 64"),
        ({"hidden_size": 0}, r"not a configuration of an EAGLE-3 draft.*hidden_size"),
        ({"num_hidden_layers": 99}, r"not a configuration of an EAGLE-3 draft.*num_hidden_layers"),
        ({"model_type": "mamba"}, "model_type is 'mamba'; expected one of llama, qwen3"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash'; expected 'eagle3' with a"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm are both true"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, r"\[0, 1, 3\] layers .*, but the target has 2"),
        ({"rope_scaling": {"rope_type": "none"}}, "config.json: "),
        ({"layer_types": ["sliding_attention"], "sliding_window": 8}, "layer_types has 'sliding_attention'"),
        ({"fc_norm": True}, "no tensor 'fc_norm.0.weight'; config.json asks for it"),
    ],
)
def test_configurations_that_do_not_fit_are_refused_by_field(draft: Path, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(BuildError, match=reason) as caught:
        fit(changed(draft, **change))
    assert str(draft) in str(caught.value)


Q = "midlayer.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({Q: None}, "no tensor 'layers.0.self_attn.q_proj.weight' or 'midlayer.self_attn.q_proj.weight'"),
        ({Q: torch.zeros(32, 64)}, r"q_proj.weight' is \[32, 64\], expected \[32, 128\] by config.json"),
        ({Q: torch.zeros(32, 128, dtype=torch.int8)}, "q_proj.weight' holds no floating-point numbers"),
        ({Q: torch.full((32, 128), torch.nan)}, "q_proj.weight' holds numbers that are not finite"),
        ({"layers.0.self_attn.q_proj.weight": torch.zeros(32, 128)}, "and '.*' are the same part; expected one"),
        ({"midlayer.self_attn.qq_proj.weight": torch.zeros(2)}, "'midlayer.self_attn.qq_proj.weight' is no part of"),
        ({"d2t": None}, "no tensor 'd2t'"),
        ({"d2t": torch.zeros(KEPT)}, "tensor 'd2t' is torch.float32; expected int64"),
        ({"d2t": torch.full((KEPT,), VOCAB)}, "tensor 'd2t' leads to tokens that are not there"),
        ({"d2t": -torch.arange(KEPT)}, "tensor 'd2t' leads to tokens that are not there, or to one twice"),
        ({"t2d": torch.ones(VOCAB, dtype=torch.bool)}, "tensor 't2d' is no mask"),
        ({"t2d": torch.ones(9, dtype=torch.bool)}, r"tensor 't2d' is \[9\], expected \[320\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    target: Path, draft: Path, change: dict[str, Any], reason: str
) -> None:
    source = changed(draft, change)
    with pytest.raises(BuildError, match=reason):
        fit(source)
        read_eagle3(source).load(target, LAYERS, 512)


# --- bundles ----------------------------------------------------------------------------------------------------------


def test_greedy_text_is_plain_decoding_s_in_every_tree(bundle: Callable[[str], Path]) -> None:
    """With drafts that are often right: prompts of all lengths, begun anew, alike, and after other methods."""
    draw, reached = np.random.default_rng(1), 0
    with Engine.load(bundle("dice-eagle3"), threads=1) as engine:
        params = GREEDY.replace(max_tokens=20)
        for length in (1, 2, 3, 7, 30):
            prompt = draw.integers(3, 12, length).tolist()
            plain = engine.generate(prompt, params, PLAIN).token_ids
            for speculation in ("eagle3", Speculative(method="eagle3", num_speculative_tokens=3), "ngram", "eagle3"):
                done = engine.generate(prompt, params, speculation)
                assert done.token_ids == plain
                reached = max(reached, *(depth + 1 for depth, n in enumerate(done.stats.accepted_at) if n), 0)
    assert reached >= 2


def test_a_run_makes_the_rows_that_are_missing_alone(
    bundle: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU a run is as wide as the text has grown, not as wide as the deepest tree may make it grow."""
    lengths: list[int] = []
    widths: list[int] = []
    propose, run = StatesProposer.propose, OnnxRuntimeGraph.run

    def noted_propose(self: StatesProposer, views: Any) -> Any:
        lengths.append(len(views[0].tokens))
        return propose(self, views)

    def noted_run(self: OnnxRuntimeGraph, tokens: int, *args: Any, drafts: int = 0, **named: Any) -> Any:
        widths.extend([tokens] * (drafts > 0))
        return run(self, tokens, *args, drafts=drafts, **named)

    with Engine.load(bundle("dice-eagle3"), threads=1, calibrate=False) as engine:
        monkeypatch.setattr(StatesProposer, "propose", noted_propose)
        monkeypatch.setattr(OnnxRuntimeGraph, "run", noted_run)
        engine.generate([5, 7, 9], GREEDY, "eagle3")
    assert len(widths) == len(lengths) > 2
    assert widths[1:] == np.diff(lengths).tolist()


def test_a_shared_beginning_is_drafted_from(bundle: Callable[[str], Path]) -> None:
    """The draft's rows of a text that begins alike are taken over; what it never saw the target reads again."""
    draw = np.random.default_rng(2)
    text = draw.integers(3, 12, 30).tolist()
    with Engine.load(bundle("dice-eagle3"), threads=1, prefix_cache=False) as engine:
        alone = engine.generate([*text, 5], GREEDY.replace(max_tokens=8), "eagle3")
    with Engine.load(bundle("dice-eagle3"), threads=1) as engine:
        params = GREEDY.replace(max_tokens=8)
        engine.generate([*text, 4], params, PLAIN)
        after_plain = engine.generate([*text, 5], params, "eagle3")
        again = engine.generate([*text, 5], params, "eagle3")
        longer = engine.generate([*text, 5, *alone.token_ids, 7], params, "eagle3")
    assert [item.stats.cached_tokens for item in (after_plain, again)] == [0, 29]  # all but the token before the root
    assert 31 < longer.stats.cached_tokens < 31 + 8
    for item in (after_plain, again):
        assert (item.token_ids, item.stats.accepted) == (alone.token_ids, alone.stats.accepted)


def test_several_requests_at_once(bundle: Callable[[str], Path]) -> None:
    draw = np.random.default_rng(3)
    texts = [draw.integers(3, 12, length).tolist() for length in (1, 4, 9, 2, 17, 30)]
    methods = ["eagle3", None, "eagle3", "eagle3", "ngram", "eagle3"]
    params = GREEDY.replace(max_tokens=20)
    with Engine.load(bundle("dice-eagle3-batch"), threads=1) as engine:
        alone = [engine.generate(text, params, PLAIN).token_ids for text in texts]
        hows = [PLAIN if method is None else method for method in methods]
        streams = [engine.stream(text, params, speculation) for text, speculation in zip(texts, hows, strict=True)]
        together = [tuple(token for chunk in stream for token in chunk.token_ids) for stream in streams]
        assert sum(stream.stats.drafted for stream in streams) > 0
    assert together == alone


def test_build_inspect_verify_and_bench(
    tmp_path: Path, target: Path, draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In int8, from the command line; another draft is found out."""
    out = tmp_path / "bundle"
    words = ["build", "--target", str(target), "--eagle3", str(draft), "-o", str(out), "--precision", "int8"]
    assert main([*words, "--block-size", "16", "--max-seq-len", "128", "--max-batch-size", "2"]) == 0
    manifest = read_manifest(out)
    (method,) = manifest.methods
    assert isinstance(method, Eagle3)
    assert (method.states, method.hidden, method.rows, method.candidates) == ((0, 1, 2), H, 9, 64)
    assert {tensors.LAYER_STATES.at(count) for count in (0, 1, 2)} <= {*manifest.target_signature.outputs}
    assert main(["inspect", str(out)]) == 0
    assert "eagle3, states after 0, 1, 2 of the target's layers" in capsys.readouterr().out
    report = verify(out, prompts=("the words", "one by one"), max_tokens=6)
    assert report.passed
    assert any("draft's graph proposes the original draft's own token" in check.sentence for check in report.checks)
    with LLM(model=str(out)) as llm:
        assert llm.generate([5, 9, 17], GREEDY)[0].outputs[0].token_ids
    other = changed(copytree(draft, tmp_path / "other"), {"lm_head.weight": torch.randn(KEPT, H)})
    assert not verify(out, sources={"eagle3.model": other}, max_tokens=4).passed
    with pytest.raises(BuildError, match="only the most probable token of each depth can have children"):
        build(
            BuildOptions(
                target=str(target),
                methods=read_methods({"method": "eagle3", "model": method.model, "trees": [[[0], [1], [1, 0]]]}),
                output=tmp_path / "never",
            )
        )


def test_its_graphs_become_engines(tmp_path: Path) -> None:
    """Those of the target, which says its states, and of the draft, which makes a token a call."""
    target = make_checkpoint(tmp_path / "target", "qwen3", **SMALL)
    draft = make_eagle3(tmp_path / "draft", target, states=(0, 1), draft_vocab=KEPT, size=64, fc_norm=True)
    out = tmp_path / "bundle"
    build(BuildOptions(str(target), out, methods=ways(eagle3=draft), max_seq_len=192, max_batch_size=2))
    manifest, library = read_manifest(out), load_library("tensorrt-rtx")
    for role, widths in (("target", {1, 2, 3, 5, 7, 9, 64}), ("eagle3", {1, 9, 64})):
        model = manifest.models[role]
        (job,) = model_jobs(model, manifest, manifest.batch_sizes, plain=True)
        assert {profile.tokens for profile in job.profiles} == widths
        master = out / model.graph.master
        source, engine = master.with_name("source.onnx"), out / f"{role}.engine"
        write_source(master, source, "fp16", job.drafts, job.fixed, compiled=True)
        report = compile_graph(source, engine, job.sizes, library, ((8, 9),))
        assert (report.profiles, report.size) == (len(job.profiles), engine.stat().st_size)
