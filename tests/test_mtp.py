"""MTP: the layers that checkpoints hold behind the last one are read, refused by name, and draft what they say."""

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
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

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
from specexport.exporter.passes.experts import lower_experts
from specexport.methods.hidden_states.checkpoint import as_checkpoint
from specexport.methods.hidden_states.export import trace_own_state
from specexport.methods.mtp.checkpoint import read_mtp
from specexport.methods.mtp.spec import MTP, MTPOptions
from specexport.runtime import Engine
from specexport.runtime.backend import buffers
from specexport.runtime.speculative import PLAIN, Speculative
from specexport.verify.bundle import verify
from tests.checkpoints import GROUPED, VOCAB, make_checkpoint, make_mtp
from tests.engine_bundles import SMALL
from tests.test_eagle3 import GREEDY, changed
from tests.test_mixtures import MIXTURES
from tests.ways import ways

pytestmark = pytest.mark.exporter

H, LAYERS = GROUPED["hidden_size"], GROUPED["num_hidden_layers"]
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": MIXTURES["deepseek_v3"],
    "glm4_moe": MIXTURES["glm4_moe"],
    "qwen3_next": {
        **MIXTURES["qwen3_moe"],
        "published": "qwen",
        "shared_expert_intermediate_size": 32,
        "layer_types": ["full_attention"],
    },
}
"""Families whose checkpoints hold an MTP layer, with one layer before it."""
FIRST = {"deepseek_v3": "model.layers.1.", "glm4_moe": "model.layers.1.", "qwen3_next": "mtp.layers.0."}
NORMS = {
    **dict.fromkeys(
        ("deepseek_v3", "glm4_moe"), tuple(f"model.layers.1.{name}" for name in ("enorm", "hnorm", "shared_head.norm"))
    ),
    "qwen3_next": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
}


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("published")

    def checkpoint(family: str) -> Path:
        folder = root / family
        return folder if folder.exists() else make_mtp(folder, family, **PUBLISHED[family])

    return checkpoint


class Layer:
    """A layer by the formulas of arXiv 2412.19437, 2.2, around the one that transformers makes where the configuration
    says that the target has one more: its own reading of the tensors and its own attention, without a cache.
    """

    def __init__(self, folder: Path, family: str, work: Path) -> None:
        self.stored = load_file(folder / "model.safetensors")
        longer = copytree(folder, work / "longer")
        whole = {name.replace(FIRST[family], "model.layers.1."): item for name, item in self.stored.items()}
        save_file(whole, longer / "model.safetensors", metadata={"format": "pt"})
        path = longer / "config.json"
        document = json.loads(path.read_text())
        kinds = {name: value * 2 for name, value in document.items() if name.endswith("layer_types") and value}
        path.write_text(json.dumps(document | {"num_hidden_layers": 2} | kinds))
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            longer, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
        ).eval()
        self.epsilon = AutoConfig.from_pretrained(folder).rms_norm_eps
        self.names, self.added = NORMS[family], 1.0 if family == "qwen3_next" else 0.0  # Qwen's norms are 1 + weight
        fc = "mtp.fc.weight" if family == "qwen3_next" else "model.layers.1.eh_proj.weight"
        self.fc = self.stored[fc]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        rms = torch.sqrt((x * x).mean(-1, keepdim=True) + self.epsilon)
        return x / rms * (self.added + self.stored[f"{name}.weight"])

    @torch.no_grad()
    def rows(self, hidden: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of rows from ``hidden [N,H]`` and the tokens after each: the last one's state, and its logits."""
        enorm, hnorm, norm = self.names
        embedded = self.stored["model.embed_tokens.weight"][tokens]
        x = (torch.cat([self.norm(embedded, enorm), self.norm(hidden, hnorm)], -1) @ self.fc.T)[None]
        at = torch.arange(len(tokens))
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        base = self.model.model
        state = base.layers[1](
            x, attention_mask=mask, position_ids=at[None], position_embeddings=base.rotary_emb(x, at[None])
        )
        output = self.norm(state[0, -1], norm)
        return output, self.stored["lm_head.weight"] @ output


@pytest.mark.parametrize(
    ("family", "lowering"),
    [("deepseek_v3", "native"), ("glm4_moe", "native"), ("glm4_moe", "portable"), ("qwen3_next", "native")],
)
def test_drafts_equal_the_formulas(
    tmp_path: Path, checkpoint_of: Callable[[str], Path], family: str, lowering: Any
) -> None:
    """Two slots with texts of 5 and 2 rows, whose next rows are 3 and 1, padded; then 4 tokens each."""
    folder = checkpoint_of(family)
    outline = read_mtp(str(folder))
    outline.require_fit(hidden=H, vocab=VOCAB, layers=LAYERS)
    draft = outline.load(outline.path, LAYERS, 512)
    cache = as_checkpoint(outline, "mtp", "here", draft, 512).cache
    start, one_pass = trace_own_state(draft, cache, lowering)
    graph = propose_graph(one_pass, cache, lowering, start)
    lower_experts(graph, branches=lowering == "native")
    ir.save(graph, tmp_path / "propose.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "propose.onnx")
    method = MTP(trees=(), states=(1,), hidden=H, draft_hidden=H, rows=1, candidates=64, dynamic_tree=False)
    make = buffers(method.signatures["mtp"])
    names = [tensor.name for tensor in session.get_outputs()]
    (row,) = cache
    caches = {
        "past_key.0": np.zeros((2, row.heads, 32, row.key_size), np.float32),
        "past_value.0": np.zeros((2, row.heads, 32, row.value_size), np.float32),
    }
    draw = np.random.default_rng(4)
    states = draw.normal(0, 1.5, (2, 12, H)).astype(np.float32)
    texts = draw.integers(0, VOCAB, (2, 13))

    def run(width: int, K: int, pasts: tuple[int, int], counts: tuple[int, int]) -> dict[str, Any]:
        inputs, _ = make(ShapePoint(2, width, 32, 0, K))
        for slot, (past, count) in enumerate(zip(pasts, counts, strict=True)):
            inputs[tensors.INPUT_IDS][slot, :count] = texts[slot, past + 1 : past + 1 + count]
            inputs[tensors.LAYER_STATES][slot, :count] = states[slot, past : past + count]
            inputs[tensors.PAST_LENGTH][slot], inputs[tensors.LAST_ROW][slot] = past, count - 1
        inputs[tensors.UNIFORM][1], inputs[tensors.TOP_K][1] = 0.7, 0  # the second slot samples
        checkpoint_of = dict(zip(names, session.run(names, inputs | caches), strict=True))
        for kind in ("key", "value"):
            rows = checkpoint_of[f"present_{kind}.0"] if lowering == "native" else checkpoint_of[f"new_{kind}.0"]
            for slot, (past, count) in enumerate(zip(pasts, counts, strict=True)):
                new = rows[slot, :, past:] if lowering == "native" else rows[slot]
                caches[f"past_{kind}.0"][slot, :, past : past + count] = new[:, :count]
        return checkpoint_of

    run(6, 1, (0, 0), (5, 2))
    drafted = run(4, 4, (5, 2), (3, 1))
    layer = Layer(folder, family, tmp_path)
    for slot, rows in enumerate((8, 3)):
        hidden = layer.norm(torch.from_numpy(states[slot, :rows]), "model.norm")
        tokens = texts[slot, 1 : rows + 1].tolist()
        for depth in range(4):
            state, logits = layer.rows(hidden, tokens)
            ids, probs = drafted[tensors.DRAFT_IDS][depth, slot], drafted[tensors.DRAFT_PROBS][depth, slot]
            token, best = int(drafted[tensors.DRAFT_TOKENS][depth, slot]), logits.topk(64)
            q = best.values.softmax(0) if slot else F.one_hot(torch.tensor(0), 64).float()
            np.testing.assert_array_equal(ids[:5], best.indices[:5])
            np.testing.assert_allclose(probs, q.numpy(), atol=2e-4)
            assert token == (ids[0] if slot == 0 else ids[int((probs.cumsum() - probs <= 0.7).nonzero()[0][-1])])
            hidden, tokens = torch.cat([hidden, state[None]]), [*tokens, token]


# --- what is refused --------------------------------------------------------------------------------------------------

B = "model.layers.1."


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("glm4_moe", {f"{B}eh_proj.weight": None}, "no tensor 'fc.weight' or 'model.layers.1.eh_proj.weight'"),
        ("glm4_moe", {f"{B}enorm.weight": torch.zeros(9)}, r"enorm.weight' is \[9\], expected \[64\] by config.json"),
        (
            "glm4_moe",
            {f"{B}hnorm.weight": torch.zeros(H, dtype=torch.int8)},
            "hnorm.weight' holds no floating-point numbers",
        ),
        ("glm4_moe", {f"{B}shared_head.norm.weight": torch.full((H,), torch.nan)}, "are not finite"),
        ("glm4_moe", {f"{B}mlp.experts.3.up_proj.weight": None}, "experts.3.up_proj.weight'; config.json asks for it"),
        (
            "glm4_moe",
            {f"{B}mlp.experts.3.up_proj.weight": torch.zeros(31, H)},
            r"experts.3.up_proj.weight' is \[31, 64\], expected \[32, 64\]",
        ),
        ("glm4_moe", {f"{B}mlp.experts.8.up_proj.weight": torch.zeros(32, H)}, "is no part of the MTP layer"),
        ("deepseek_v3", {f"{B}self_attn.kv_b_proj.weight": None}, "no tensor 'layers.0.self_attn.kv_b_proj.weight'"),
        ("qwen3_next", {"mtp.pre_fc_norm_hidden.weight": None}, "'mtp.pre_fc_norm_hidden.weight'; config.json asks"),
        ("qwen3_next", {"mtp.layers.1.mlp.gate.weight": torch.zeros(8, H)}, "is no part of the MTP layer"),
        ("qwen3_next", {"mtp.fc.weight": torch.zeros(H, H)}, r"'mtp.fc.weight' is \[64, 64\], expected \[64, 128\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, checkpoint_of: Callable[[str], Path], family: str, change: dict[str, Any], reason: str
) -> None:
    source = changed(copytree(checkpoint_of(family), tmp_path / "changed"), change)
    with pytest.raises(BuildError, match=reason) as caught:
        outline = read_mtp(source)
        outline.require_fit(hidden=H, vocab=VOCAB, layers=LAYERS)
        outline.load(outline.path, LAYERS, 512)
    assert source in str(caught.value)


def test_it_is_suggested_for_targets_that_have_one(checkpoint_of: Callable[[str], Path], capsys: Any) -> None:
    target = checkpoint_of("glm4_moe")
    assert main(["suggest", "--target", str(target)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"specexport build --target {target} --mtp -o bundle/" in shown
    assert "in its own checkpoint" in shown


def test_targets_without_a_layer_or_with_several_are_refused(
    tmp_path: Path, checkpoint_of: Callable[[str], Path]
) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama")
    with pytest.raises(BuildError, match=r"no MTP layer: no tensor begins with 'mtp.' or 'model.layers.2.'"):
        build(BuildOptions(str(plain), tmp_path / "never", methods=ways(mtp=True)))
    several = changed(copytree(checkpoint_of("glm4_moe"), tmp_path / "several"), num_nextn_predict_layers=3)
    with pytest.raises(BuildError, match="num_nextn_predict_layers is 3; expected 1"):
        read_mtp(several)


@pytest.mark.parametrize("name", ["mtp", "deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp"])
def test_the_names_of_vllm(name: str) -> None:
    (method,) = read_methods({"method": name, "num_speculative_tokens": 2})
    assert method == MTPOptions(num_speculative_tokens=2)


def test_a_layer_without_tables_of_its_own_takes_the_target_s(
    tmp_path: Path, checkpoint_of: Callable[[str], Path]
) -> None:
    left_out = {f"{B}embed_tokens.weight": None, f"{B}shared_head.head.weight": None}
    outline = read_mtp(changed(copytree(checkpoint_of("deepseek_v3"), tmp_path / "bare"), left_out))
    outline.require_fit(hidden=H, vocab=VOCAB, layers=LAYERS)
    theirs, draft = load_file(outline.path / "model.safetensors"), outline.load(outline.path, LAYERS, 512)
    assert torch.equal(draft.embed_tokens.weight, theirs["model.embed_tokens.weight"])
    assert torch.equal(draft.lm_head.weight, theirs["lm_head.weight"])


# --- bundles ----------------------------------------------------------------------------------------------------------


def test_greedy_text_is_plain_decoding_s_in_every_tree(bundle: Callable[[str], Path]) -> None:
    draw, reached = np.random.default_rng(1), 0
    with Engine.load(bundle("dice-mtp"), threads=1) as engine:
        params = GREEDY.replace(max_tokens=20)
        for length in (1, 2, 3, 7, 30):
            prompt = draw.integers(3, 12, length).tolist()
            plain = engine.generate(prompt, params, PLAIN).token_ids
            for speculation in ("mtp", Speculative(method="mtp", num_speculative_tokens=3), "ngram", "mtp"):
                done = engine.generate(prompt, params, speculation)
                assert done.token_ids == plain
                reached = max(reached, *(depth + 1 for depth, n in enumerate(done.stats.accepted_at) if n), 0)
    assert reached >= 2


def test_a_shared_beginning_is_drafted_from(bundle: Callable[[str], Path]) -> None:
    text = np.random.default_rng(2).integers(3, 12, 30).tolist()
    params = GREEDY.replace(max_tokens=8)
    with Engine.load(bundle("dice-mtp"), threads=1, prefix_cache=False) as engine:
        alone = engine.generate([*text, 5], params, "mtp")
    with Engine.load(bundle("dice-mtp"), threads=1) as engine:
        engine.generate([*text, 4], params, PLAIN)
        after_plain = engine.generate([*text, 5], params, "mtp")
        again = engine.generate([*text, 5], params, "mtp")
    assert [item.stats.cached_tokens for item in (after_plain, again)] == [0, 29]
    for item in (after_plain, again):
        assert (item.token_ids, item.stats.accepted) == (alone.token_ids, alone.stats.accepted)


def test_several_requests_at_once(bundle: Callable[[str], Path]) -> None:
    draw = np.random.default_rng(3)
    texts = [draw.integers(3, 12, length).tolist() for length in (1, 4, 9, 2, 17, 30)]
    params = GREEDY.replace(max_tokens=20)
    with Engine.load(bundle("dice-mtp-batch"), threads=1) as engine:
        alone = [engine.generate(text, params, PLAIN).token_ids for text in texts]
        hows = ["mtp", PLAIN, "mtp", "mtp", "ngram", "mtp"]
        streams = [engine.stream(text, params, speculation) for text, speculation in zip(texts, hows, strict=True)]
        together = [tuple(token for chunk in stream for token in chunk.token_ids) for stream in streams]
        assert sum(stream.stats.drafted for stream in streams) > 0
    assert together == alone


def test_build_inspect_and_verify(
    tmp_path: Path, checkpoint_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """In int8, from the command line; another layer is found out."""
    out, target = tmp_path / "bundle", checkpoint_of("qwen3_next")
    words = [
        "build",
        "--target",
        str(target),
        "--mtp",
        "-o",
        str(out),
        "--precision",
        "int8",
        "--draft-precision",
        "fp32",
    ]
    assert main([*words, "--block-size", "16", "--max-seq-len", "128", "--max-batch-size", "2"]) == 0
    (method,) = read_manifest(out).methods
    assert isinstance(method, MTP)
    assert (method.states, method.hidden, method.draft_hidden, method.rows, method.candidates) == ((1,), H, H, 9, 64)
    assert [model.precision.weights for model in read_manifest(out).models.values()] == ["int8", "fp32"]
    assert main(["inspect", str(out)]) == 0
    assert "mtp, states after 1 of the target's layers" in capsys.readouterr().out
    report = verify(out, prompts=("the words", "one by one"), max_tokens=6)
    assert report.passed
    assert any("draft's graph proposes the original draft's own token" in check.sentence for check in report.checks)
    with LLM(model=str(out)) as llm:
        assert llm.generate([5, 9, 17], GREEDY)[0].outputs[0].token_ids
    other = changed(copytree(target, tmp_path / "other"), {"mtp.fc.weight": torch.randn(H, 2 * H)})
    assert not verify(out, target=other, max_tokens=4).passed


@pytest.mark.slow
def test_its_graph_becomes_an_engine(tmp_path: Path) -> None:
    config = {**PUBLISHED["glm4_moe"], **SMALL}
    target, out = make_mtp(tmp_path / "target", "glm4_moe", **config), tmp_path / "bundle"
    build(
        BuildOptions(
            str(target), out, methods=ways(mtp=True), max_seq_len=192, max_batch_size=2, backend="tensorrt-rtx"
        )
    )
    manifest, library = read_manifest(out), load_library("tensorrt-rtx")
    for role, widths in (("target", {1, 2, 3, 5, 7, 9, 64}), ("mtp", {1, 9, 64})):
        model = manifest.models[role]
        (job,) = model_jobs(model, manifest, manifest.batch_sizes, plain=True)
        assert {profile.tokens for profile in job.profiles} == widths
        master = out / model.graph.master
        source, engine = master.with_name("source.onnx"), out / f"{role}.engine"
        write_source(master, source, "fp16", job.drafts, job.fixed, compiled=True)
        report = compile_graph(source, engine, job.sizes, library, ((8, 9),))
        assert (report.profiles, report.size) == (len(job.profiles), engine.stat().st_size)
