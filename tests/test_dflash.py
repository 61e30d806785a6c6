"""DFlash: what is read of both published layouts, what is refused, and that the graph drafts what the formulas say."""

from __future__ import annotations

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
from safetensors.torch import load_file

from specexport import LLM
from specexport.cli import main
from specexport.contract import signature, tensors
from specexport.contract.errors import BuildError
from specexport.contract.methods import read_methods
from specexport.contract.reading import read_manifest
from specexport.contract.shapes import ShapePoint
from specexport.exporter.build import build
from specexport.exporter.engines.compiler import compile_graph, load_library
from specexport.exporter.engines.profiles import model_jobs
from specexport.exporter.engines.source import write_source
from specexport.exporter.options import BuildOptions
from specexport.methods.dflash.checkpoint import read_dflash, usual_states
from specexport.methods.dflash.export import trace_dflash
from specexport.methods.dflash.spec import DFlash
from specexport.methods.hidden_states.checkpoint import as_checkpoint
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.backend import buffers
from specexport.runtime.speculative import PLAIN, Speculative
from specexport.verify.bundle import verify
from tests.checkpoints import GROUPED, VOCAB, make_checkpoint, make_dflash
from tests.engine_bundles import SMALL
from tests.test_eagle3 import changed
from tests.ways import ways

pytestmark = pytest.mark.exporter

H, LAYERS, KEPT, BLOCK = GROUPED["hidden_size"], GROUPED["num_hidden_layers"], 200, 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "target", "llama")


@pytest.fixture
def draft(tmp_path: Path, target: Path) -> Path:
    return make_dflash(tmp_path / "draft", target)


@pytest.fixture
def small_vocabulary(tmp_path: Path, target: Path) -> Path:
    return make_dflash(tmp_path / "small", target, published="speculators", draft_vocab=KEPT)


def fit(source: str) -> None:
    read_dflash(source).require_fit(hidden=H, vocab=VOCAB, layers=LAYERS)


# --- the formulas -----------------------------------------------------------------------------------------------------


class Paper:
    """A draft by the formulas of arXiv 2602.06036, a row and a head at a time, from the names in its file."""

    def __init__(self, folder: Path, target: Path, theta: float = 5000.0) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.layer = self.config.get("transformer_layer_config", self.config)
        self.more = {**self.config, **self.config.get("dflash_config", {})}
        self.theta = theta
        theirs = load_file(target / "model.safetensors")
        self.weights = {
            "embed_tokens.weight": theirs["model.embed_tokens.weight"],
            "lm_head.weight": theirs["lm_head.weight"],
        }
        self.weights |= load_file(folder / "model.safetensors")

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return (
            x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.layer["rms_norm_eps"]) * self.weights[f"{name}.weight"]
        )

    def _rotated(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half = x.shape[-1] // 2
        angle = position * self.theta ** (-torch.arange(half) / half)
        first, second = x[:, :half], x[:, half:]
        return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], 1)

    def logits(self, states: torch.Tensor, root: int, K: int) -> torch.Tensor:
        """What comes after a root and each of K - 1 tokens behind it, ``[K,draft_vocab]``, of the states ``[N,n*H]`` at
        the N tokens before it.
        """
        size, count = self.layer["head_dim"], len(states)
        context = [self._norm(self.weights["fc.weight"] @ state, "hidden_norm") for state in states]
        scale = self.more.get("input_embedding_scale", 1.0)
        rows = [
            self.weights["embed_tokens.weight"][state] * scale for state in (root, *[self.more["mask_token_id"]] * K)
        ]
        for at, kind in enumerate(self.layer["layer_types"]):
            sliding, name = kind == "sliding_attention", f"layers.{at}"
            causal = self.config.get("is_causal", sliding and not self.config.get("sliding_window_non_causal"))
            window = self.layer["sliding_window"] if sliding else 10**9
            normed = [self._norm(row, f"{name}.input_layernorm") for row in rows]
            keys, values, results = [], [], []
            for position, row in enumerate([*context, *normed]):
                k, v = ((self.weights[f"{name}.self_attn.{state}_proj.weight"] @ row).view(-1, size) for state in "kv")
                keys.append(self._rotated(self._norm(k, f"{name}.self_attn.k_norm"), position))
                values.append(v)
            for place, row in enumerate(normed):
                mine = count + place
                q = (self.weights[f"{name}.self_attn.q_proj.weight"] @ row).view(-1, size)
                q, heads = self._rotated(self._norm(q, f"{name}.self_attn.q_norm"), mine), []
                seen = [state for state in range(len(keys)) if mine - state < window and not (causal and state > mine)]
                for head in range(len(q)):
                    shared = head // (len(q) // len(keys[0]))
                    scores = torch.stack([q[head] @ keys[state][shared] for state in seen]) / size**0.5
                    heads.append(scores.softmax(0) @ torch.stack([values[state][shared] for state in seen]))
                results.append(rows[place] + self.weights[f"{name}.self_attn.o_proj.weight"] @ torch.cat(heads))
            inner = [self._norm(row, f"{name}.post_attention_layernorm") for row in results]
            gates, ups = (
                [self.weights[f"{name}.mlp.{state}_proj.weight"] @ row for row in inner] for state in ("gate", "up")
            )
            down = self.weights[f"{name}.mlp.down_proj.weight"]
            rows = [row + down @ (F.silu(gate) * up) for row, gate, up in zip(results, gates, ups, strict=True)]
        text = torch.stack([self.weights["lm_head.weight"] @ self._norm(row, "norm") for row in rows[1:]])
        text = text * self.more.get("output_multiplier", 1.0)
        cap = self.more.get("final_logit_softcapping")
        return cap * torch.tanh(text / cap) if cap else text


@pytest.mark.parametrize(
    ("lowering", "options"),
    [
        ("native", {}),
        ("portable", {"windows": (True, False)}),
        ("native", {"published": "speculators", "draft_vocab": KEPT, "layers": 1, "states": (0, 1, 2)}),
        (
            "native",
            {
                "published": "speculators",
                "windows": (False, True),
                "sliding_window_non_causal": True,
                "draft_vocab": KEPT,
            },
        ),
        ("portable", {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}),
    ],
)
def test_drafts_equal_the_formulas(tmp_path: Path, target: Path, lowering: Any, options: dict[str, Any]) -> None:
    """Two slots with texts of 9 and 2 rows, whose next rows are 3 and 1, padded; then blocks of 6 and 4 tokens."""
    folder = make_dflash(tmp_path / "draft", target, **options)
    outline = read_dflash(str(folder))
    outline.require_fit(hidden=H, vocab=VOCAB, layers=LAYERS)
    draft = outline.load(target, LAYERS, 512)
    cache = as_checkpoint(outline, "dflash", "here", draft, 512).cache
    ir.save(trace_dflash(draft, cache, lowering), tmp_path / "propose.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "propose.onnx")
    method = DFlash(
        trees=(),
        model="here",
        states=outline.seen(LAYERS),
        hidden=H,
        rows=1,
        candidates=64,
        block_size=BLOCK,
        dynamic_tree=False,
    )
    make, wide = buffers(method.signatures["dflash"]), draft.fc.in_features
    names = [tensor.name for tensor in session.get_outputs()]
    shape = (2, cache[0].heads, 32, cache[0].key_size)
    caches = {name: np.zeros(shape, np.float32) for name in signature.caches(cache)}
    draw = np.random.default_rng(4)
    states = draw.normal(0, 1.5, (2, 12, wide)).astype(np.float32)
    roots = draw.integers(0, VOCAB, 2)

    def run(width: int, Ks: tuple[int, int], pasts: tuple[int, int], counts: tuple[int, int]) -> dict[str, Any]:
        inputs, _ = make(ShapePoint(2, width, 32, 0, max(Ks)))
        for slot, (past, count) in enumerate(zip(pasts, counts, strict=True)):
            inputs[tensors.INPUT_IDS][slot] = roots[slot]
            inputs[tensors.LAYER_STATES][slot, :count] = states[slot, past : past + count]
            inputs[tensors.LAYER_STATES][slot, count:] = 9.0  # padding
            inputs[tensors.PAST_LENGTH][slot], inputs[tensors.LAST_ROW][slot] = past, count - 1
            inputs[tensors.BLOCK_ROWS][slot] = 1 + Ks[slot]
        inputs[tensors.UNIFORM][1], inputs[tensors.TOP_K][1] = 0.7, 0  # the second slot samples
        outputs = dict(zip(names, session.run(names, inputs | caches), strict=True))
        for name, rows in caches.items():
            new = outputs[name.replace("past", "present" if lowering == "native" else "new")]
            for slot, (past, count) in enumerate(zip(pasts, counts, strict=True)):
                from_row = past if lowering == "native" else 0
                rows[slot, :, past : past + count] = new[slot, :, from_row : from_row + count]
        return outputs

    run(10, (1, 1), (0, 0), (9, 2))
    Ks = (5, 3)
    result = run(4, Ks, (9, 2), (3, 1))
    paper = Paper(folder, target)
    for slot, rows in enumerate((12, 3)):
        logits = paper.logits(torch.from_numpy(states[slot, :rows]), int(roots[slot]), Ks[slot])
        for depth in range(Ks[slot]):
            ids, probs = result[tensors.DRAFT_IDS][depth, slot], result[tensors.DRAFT_PROBS][depth, slot]
            token, best = int(result[tensors.DRAFT_TOKENS][depth, slot]), logits[depth].topk(64)
            candidates = (
                best.indices + paper.weights["d2t"][best.indices] if options.get("draft_vocab") else best.indices
            )
            q = best.values.softmax(0) if slot else F.one_hot(torch.tensor(0), 64).float()
            np.testing.assert_array_equal(ids[:5], candidates[:5])
            np.testing.assert_allclose(probs, q.numpy(), atol=2e-4)
            assert token == (ids[0] if slot == 0 else ids[int((probs.cumsum() - probs <= 0.7).nonzero()[0][-1])])


def test_missing_draft_tensors_are_the_targets(target: Path, draft: Path, small_vocabulary: Path) -> None:
    theirs = load_file(target / "model.safetensors")
    whole = read_dflash(str(draft)).load(target, LAYERS, 512)
    assert torch.equal(whole.embed_tokens.weight, theirs["model.embed_tokens.weight"])
    assert torch.equal(whole.lm_head.weight, theirs["lm_head.weight"])
    source = changed(small_vocabulary, {"lm_head.weight": None})
    fit(source)
    part = read_dflash(source).load(target, LAYERS, 512)
    assert part.target_ids is not None
    assert torch.equal(part.lm_head.weight, theirs["lm_head.weight"][part.target_ids])


def test_layers_are_named_as_their_publishers_do(draft: Path, small_vocabulary: Path) -> None:
    assert read_dflash(str(draft)).seen(LAYERS) == (1, 2)  # target_layer_ids 0, 1: outputs of layers
    assert read_dflash(str(small_vocabulary)).seen(LAYERS) == (1, 2)  # aux_hidden_state_layer_ids 1, 2
    neighbour = changed(draft, dflash_config=None, mask_token_id=7, target_layer_ids=[1])
    assert (read_dflash(neighbour).seen(LAYERS), read_dflash(neighbour).mask_token) == ((2,), 7)
    # z-lab's for Qwen3-8B's 36 layers: five draft layers see 1, 9, 17, 25 and 33.
    assert usual_states(5, 36) == (2, 10, 18, 26, 34)
    assert usual_states(1, 36) == (19,)
    usual = changed(draft, target_layer_ids=None)
    with pytest.raises(BuildError, match=r"states after \[2, 0\] layers|but the target has 1"):
        read_dflash(usual).seen(1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"vocab_size": 400}, "vocab_size is 400, and the target's is 320"),
        ({"target_hidden_size": 32}, "target_hidden_size is 32, and the target's is 64"),
        ({"hidden_size": 0}, r"not a configuration of a DFlash draft.*hidden_size"),
        ({"num_hidden_layers": 99}, r"not a configuration of a DFlash draft.*num_hidden_layers"),
        ({"block_size": 1}, r"not a configuration of a DFlash draft.*block_size"),
        ({"model_type": "mamba"}, "model_type is 'mamba'; expected one of qwen3"),
        ({"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3'; expected 'dflash' with a"),
        ({"dflash_config": {"target_layer_ids": [0]}}, "mask_token_id is None; expected a token below vocab_size, 320"),
        ({"dflash_config": {"mask_token_id": 320}}, "mask_token_id is 320; expected a token below vocab_size, 320"),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 2]}},
            r"\[1, 3\] layers .*, but the target has 2",
        ),
        ({"dflash_config": {"mask_token_id": 1, "use_swa": True}}, "dflash_config.use_swa is True; expected False"),
        ({"projector_type": "domino"}, "projector_type is 'domino'; expected 'dflash'"),
        ({"sample_from_anchor": True}, "sample_from_anchor is True; expected False"),
        ({"rope_scaling": {"rope_type": "none"}}, "config.json: "),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}, "sliding_window is 4; expected at least"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types has 'sliding_attention'; expected it with"),
        ({"layer_types": ["full_attention"]}, "config.json: "),
        (
            {"num_hidden_layers": 3, "layer_types": None},
            "no tensor 'layers.2.input_layernorm.weight'; config.json asks",
        ),
    ],
)
def test_configurations_that_do_not_fit_are_refused_by_field(draft: Path, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(BuildError, match=reason) as caught:
        fit(changed(draft, **change))
    assert str(draft) in str(caught.value)


Q = "layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({Q: None}, f"no tensor '{Q}'; config.json asks for it"),
        ({"hidden_norm.weight": None}, "no tensor 'hidden_norm.weight'"),
        ({Q: torch.zeros(32, 128)}, r"q_proj.weight' is \[32, 128\], expected \[32, 64\] by config.json"),
        ({Q: torch.zeros(32, 64, dtype=torch.int8)}, "q_proj.weight' holds no floating-point numbers"),
        ({Q: torch.full((32, 64), torch.nan)}, "q_proj.weight' holds numbers that are not finite"),
        ({f"model.{Q}": torch.zeros(32, 64)}, "and '.*' are the same part; expected one"),
        ({"candidate_selector.hidden_projection.weight": torch.zeros(2)}, "hidden_projection.weight' is no part of a"),
        ({"d2t": None}, "no tensor 'd2t'"),
        ({"d2t": torch.full((KEPT,), VOCAB)}, "tensor 'd2t' leads to tokens that are not there"),
        ({"t2d": torch.ones(VOCAB, dtype=torch.bool)}, "tensor 't2d' is no mask"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    target: Path, small_vocabulary: Path, change: dict[str, Any], reason: str
) -> None:
    source = changed(small_vocabulary, change)
    with pytest.raises(BuildError, match=reason):
        fit(source)
        read_dflash(source).load(target, LAYERS, 512)


# --- bundles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dice-dflash", "dice-dflash-portable"])
def test_greedy_text_is_plain_decoding_s_in_every_tree(bundle: Callable[[str], Path], name: str) -> None:
    """With drafts that are often right: prompts of all lengths, begun anew, alike, and after other methods."""
    draw, reached = np.random.default_rng(1), 0
    with Engine.load(bundle(name), threads=1) as engine:
        params = GREEDY.replace(max_tokens=20)
        for length in (1, 2, 3, 7, 40):
            prompt = draw.integers(3, 12, length).tolist()
            plain = engine.generate(prompt, params, PLAIN).token_ids
            for speculation in ("dflash", Speculative(method="dflash", num_speculative_tokens=5), "ngram", "dflash"):
                done = engine.generate(prompt, params, speculation)
                assert done.token_ids == plain
                reached = max(reached, *(depth + 1 for depth, n in enumerate(done.stats.accepted_at) if n), 0)
    assert reached >= 2


def test_a_shared_beginning_is_drafted_from(bundle: Callable[[str], Path]) -> None:
    """The draft's rows of a text that begins alike are taken over; what it never saw the target reads again."""
    text = np.random.default_rng(2).integers(3, 12, 30).tolist()
    with Engine.load(bundle("dice-dflash"), threads=1, prefix_cache=False) as engine:
        alone = engine.generate([*text, 5], GREEDY.replace(max_tokens=8), "dflash")
    with Engine.load(bundle("dice-dflash"), threads=1) as engine:
        params = GREEDY.replace(max_tokens=8)
        engine.generate([*text, 4], params, PLAIN)
        after_plain = engine.generate([*text, 5], params, "dflash")
        again = engine.generate([*text, 5], params, "dflash")
    assert [item.stats.cached_tokens for item in (after_plain, again)] == [0, 29]  # all but the token before the root
    for item in (after_plain, again):
        assert (item.token_ids, item.stats.accepted) == (alone.token_ids, alone.stats.accepted)


def test_several_requests_at_once(bundle: Callable[[str], Path]) -> None:
    """What is drafted of one does not depend on the others, though their trees are of different depths."""
    draw = np.random.default_rng(3)
    texts = [draw.integers(3, 12, length).tolist() for length in (1, 4, 9, 2, 17, 30)]
    short = Speculative(method="dflash", num_speculative_tokens=5)
    hows: list[Any] = ["dflash", PLAIN, short, "dflash", "ngram", "dflash"]
    params = GREEDY.replace(max_tokens=20)
    sampled = SamplingParams(temperature=0.9, seed=7, max_tokens=20, ignore_eos=True)
    with Engine.load(bundle("dice-dflash-batch"), threads=1) as engine:
        alone = [engine.generate(text, params, PLAIN).token_ids for text in texts]
        drawn = engine.generate(texts[2], sampled, short)
        streams = [engine.stream(text, params, speculation) for text, speculation in zip(texts, hows, strict=True)]
        streams.append(engine.stream(texts[2], sampled, short))
        *together, again = [tuple(token for chunk in stream for token in chunk.token_ids) for stream in streams]
        assert sum(stream.stats.drafted for stream in streams) > 0
    assert together == alone
    assert again == drawn.token_ids


def test_build_inspect_and_verify(
    tmp_path: Path, target: Path, small_vocabulary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In int8, from the command line; another draft is found out."""
    out = tmp_path / "bundle"
    words = ["build", "--target", str(target), "--dflash", str(small_vocabulary), "-o", str(out), "--precision", "int8"]
    assert main([*words, "--block-size", "16", "--max-seq-len", "128", "--max-batch-size", "2"]) == 0
    manifest = read_manifest(out)
    (method,) = manifest.methods
    assert isinstance(method, DFlash)
    assert (method.states, method.hidden, method.rows, method.candidates) == ((1, 2), H, 8, 64)
    assert [len(tree) - 1 for tree in method.token_trees()] == [4, 7]
    assert main(["inspect", str(out)]) == 0
    assert "dflash, states after 1, 2 of the target's layers" in capsys.readouterr().out
    report = verify(out, prompts=("the words", "one by one"), max_tokens=6)
    assert report.passed
    assert any("draft's graph proposes the original draft's own token" in check.sentence for check in report.checks)
    with LLM(model=str(out)) as llm:
        assert llm.generate([5, 9, 17], GREEDY)[0].outputs[0].token_ids
    other = changed(copytree(small_vocabulary, tmp_path / "other"), {"lm_head.weight": torch.randn(KEPT, H)})
    assert not verify(out, sources={"dflash.model": other}, max_tokens=4).passed
    with pytest.raises(BuildError, match="depth 8, with a block of 8 tokens"):
        build(
            BuildOptions(
                target=str(target),
                methods=read_methods({"method": "dflash", "model": method.model, "num_speculative_tokens": 8}),
                output=tmp_path / "never",
            )
        )


def test_its_graphs_become_engines(tmp_path: Path) -> None:
    """Those of the target, which says its states, and of the draft, a profile for each number of draft tokens."""
    target = make_checkpoint(tmp_path / "target", "qwen3", **SMALL)
    draft = make_dflash(tmp_path / "draft", target, states=(1,), size=64, windows=(True, False))
    out = tmp_path / "bundle"
    build(BuildOptions(str(target), out, methods=ways(dflash=draft), max_seq_len=192, max_batch_size=2))
    manifest, library = read_manifest(out), load_library("tensorrt-rtx")
    model = manifest.models["dflash"]
    (job,) = model_jobs(model, manifest, manifest.batch_sizes, plain=True)
    assert {(profile.tokens, profile.drafts) for profile in job.profiles} == {(8, 1), (8, 2), (8, 4), (8, 7), (64, 1)}
    master = out / model.graph.master
    source, engine = master.with_name("source.onnx"), out / "dflash.engine"
    write_source(master, source, "fp16", job.drafts, job.fixed, compiled=True)
    report = compile_graph(source, engine, job.sizes, library, ((8, 9),))
    assert (report.profiles, report.size) == (len(job.profiles), engine.stat().st_size)
