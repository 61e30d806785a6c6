"""MTP: the layers that checkpoints hold behind the last one are read, refused by name, and draft what they say."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from specexport.contract import tensors
from specexport.contract.errors import BuildError
from specexport.contract.methods import read_methods
from specexport.exporter.build import build
from specexport.exporter.compose import propose_graph
from specexport.exporter.options import BuildOptions
from specexport.exporter.passes.experts import lower_experts
from specexport.methods.hidden_states.export import trace_own_state
from specexport.methods.mtp import MTP, MTPOptions
from specexport.methods.mtp.export import read_mtp
from tests.checkpoints import GROUPED, VOCAB, changed, make_checkpoint, make_mtp
from tests.fixtures import Bundles
from tests.hidden_states import TwoSlots, require_drafted
from tests.test_mixtures import MIXTURES

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
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
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
        whole = {name.replace(FIRST[family], "model.layers.1."): tensor for name, tensor in self.stored.items()}
        document = json.loads((folder / "config.json").read_text())
        kinds = {name: value * 2 for name, value in document.items() if name.endswith("layer_types") and value}
        changed(longer, dict.fromkeys(self.stored) | whole, num_hidden_layers=2, **kinds)
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
def test_drafts_equal_the_formulas(tmp_path, checkpoint_of, family, lowering):
    """Two slots with texts of 5 and 2 rows, whose next rows are 3 and 1, padded; then 4 tokens each."""
    folder = checkpoint_of(family)
    outline = read_mtp(str(folder))
    outline.require_fit(hidden=H, vocab=VOCAB, layers=LAYERS)
    draft = outline.load(outline.path, LAYERS, 512)
    cache = draft.cache()
    start, one_pass = trace_own_state(draft, cache, lowering)
    graph = propose_graph(one_pass, cache, lowering, start)
    lower_experts(graph, branches=lowering == "native")
    method = MTP(trees=(), states=(1,), hidden=H, draft_hidden=H, rows=1, candidates=64, dynamic_tree=False)
    draw = np.random.default_rng(4)
    states = draw.normal(0, 1.5, (2, 12, H)).astype(np.float32)
    texts = draw.integers(0, VOCAB, (2, 13))

    def write_tokens(inputs: dict[str, Any], slot: int, past: int, count: int) -> None:
        inputs[tensors.INPUT_IDS][slot, :count] = texts[slot, past + 1 : past + 1 + count]

    slots = TwoSlots(graph, tmp_path, method, states, write_tokens)
    slots.run(6, 1, (0, 0), (5, 2))
    drafted = slots.run(4, 4, (5, 2), (3, 1))
    layer = Layer(folder, family, tmp_path)
    for slot, rows in enumerate((8, 3)):
        hidden = layer.norm(torch.from_numpy(states[slot, :rows]), "model.norm")
        tokens = texts[slot, 1 : rows + 1].tolist()
        for depth in range(4):
            state, logits = layer.rows(hidden, tokens)
            token = require_drafted(drafted, depth, slot, logits)
            hidden, tokens = torch.cat([hidden, state[None]]), [*tokens, token]


# --- what is refused --------------------------------------------------------------------------------------------------

B = "model.layers.1."


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("glm4_moe", {f"{B}eh_proj.weight": None}, "no tensor 'fc.weight' or 'model.layers.1.eh_proj.weight'"),
        ("glm4_moe", {f"{B}enorm.weight": torch.zeros(9)}, r"enorm.weight' is \[9\], expected \[64\] in "),
        ("glm4_moe", {f"{B}mlp.experts.3.up_proj.weight": None}, "experts.3.up_proj.weight'; expected it in the MTP"),
        ("glm4_moe", {f"{B}mlp.experts.3.up_proj.weight": torch.zeros(31, H)}, r"3.up_proj.weight' is \[31, 64\]"),
        ("glm4_moe", {f"{B}mlp.experts.8.up_proj.weight": torch.zeros(32, H)}, "is not part of the MTP layer"),
        ("deepseek_v3", {f"{B}self_attn.kv_b_proj.weight": None}, "no tensor 'layers.0.self_attn.kv_b_proj.weight'"),
        ("qwen3_next", {"mtp.pre_fc_norm_hidden.weight": None}, "'mtp.pre_fc_norm_hidden.weight'; expected it in"),
        ("qwen3_next", {"mtp.layers.1.mlp.gate.weight": torch.zeros(8, H)}, "is not part of the MTP layer"),
        ("qwen3_next", {"mtp.fc.weight": torch.zeros(H, H)}, r"'mtp.fc.weight' is \[64, 64\], expected \[64, 128\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, checkpoint_of, family, change, reason):
    source = changed(copytree(checkpoint_of(family), tmp_path / "changed"), change)
    with pytest.raises(BuildError, match=reason) as caught:
        outline = read_mtp(source)
        outline.require_fit(hidden=H, vocab=VOCAB, layers=LAYERS)
        outline.load(outline.path, LAYERS, 512)
    assert source in str(caught.value)


def test_it_is_suggested_for_targets_that_have_one(checkpoint_of, cli):
    target = checkpoint_of("glm4_moe")
    shown = cli("suggest", "--target", target).words
    assert f"specexport build --target {target} --mtp -o bundle/" in shown
    assert "in its own checkpoint" in shown


def test_targets_without_a_layer_or_with_several_are_refused(tmp_path, checkpoint_of):
    plain = make_checkpoint(tmp_path / "plain", "llama")
    with pytest.raises(BuildError, match=r"no MTP layer: no tensor begins with 'mtp.' or 'model.layers.2.'"):
        build(BuildOptions(str(plain), tmp_path / "never", methods="mtp"))
    several = changed(copytree(checkpoint_of("glm4_moe"), tmp_path / "several"), num_nextn_predict_layers=3)
    with pytest.raises(BuildError, match="num_nextn_predict_layers is 3; expected 1"):
        read_mtp(several)


@pytest.mark.parametrize("name", ["mtp", "deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp"])
def test_the_names_of_vllm(name):
    (method,) = read_methods({"method": name, "num_speculative_tokens": 2})
    assert method == MTPOptions(num_speculative_tokens=2)


def test_a_layer_without_tables_of_its_own_takes_the_target_s(tmp_path, checkpoint_of):
    left_out = {f"{B}embed_tokens.weight": None, f"{B}shared_head.head.weight": None}
    outline = read_mtp(changed(copytree(checkpoint_of("deepseek_v3"), tmp_path / "bare"), left_out))
    outline.require_fit(hidden=H, vocab=VOCAB, layers=LAYERS)
    theirs, draft = load_file(outline.path / "model.safetensors"), outline.load(outline.path, LAYERS, 512)
    assert torch.equal(draft.embed_tokens.weight, theirs["model.embed_tokens.weight"])
    assert torch.equal(draft.lm_head.weight, theirs["lm_head.weight"])
