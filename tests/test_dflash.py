"""DFlash: both published layouts, what is refused, that graph and training follow the formulas."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specexport.contract import tensors
from specexport.contract.errors import BuildError
from specexport.graphs.layers import recorded_states
from specexport.methods.dflash import DFlash, DFlashTraining
from specexport.methods.dflash.export import DFlashOutline, read_dflash, save_dflash, trace_dflash
from specexport.methods.dflash.train import draft_losses, new_draft, random_anchors
from specexport.training.data import Windows
from specexport.training.predictions import Losses, measure_accuracy, weighted_loss
from specexport.training.run import load_model
from tests.checkpoints import GROUPED, VOCAB, changed, make_dflash
from tests.hidden_states import Formulas, TwoSlots, require_drafted
from tests.training import CPU, LANGUAGE, saying, train_on_language, training_options, windows_of

pytestmark = pytest.mark.exporter

H, LAYERS, KEPT, BLOCK = GROUPED["hidden_size"], GROUPED["num_hidden_layers"], 200, 8


@pytest.fixture
def draft(tmp_path: Path, target: Path) -> Path:
    return make_dflash(tmp_path / "draft", target)


@pytest.fixture
def small_vocabulary(tmp_path: Path, target: Path) -> Path:
    return make_dflash(tmp_path / "small", target, published="speculators", draft_vocab=KEPT)


def fit(source: str) -> None:
    read_dflash(source).require_fit(hidden=H, vocab=VOCAB, layers=LAYERS)


# --- the formulas -----------------------------------------------------------------------------------------------------


class Paper(Formulas):
    """A draft by the formulas of arXiv 2602.06036, a row and a head at a time, from the names in its file."""

    def __init__(self, folder: Path, target: Path, theta: float = 5000.0) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.layer = self.config.get("transformer_layer_config", self.config)
        self.more = {**self.config, **self.config.get("dflash_config", {})}
        self.theta, self.epsilon = theta, self.layer["rms_norm_eps"]
        theirs = load_file(target / "model.safetensors")
        self.weights = {
            "embed_tokens.weight": theirs["model.embed_tokens.weight"],
            "lm_head.weight": theirs["lm_head.weight"],
        }
        self.weights |= load_file(folder / "model.safetensors")

    def logits(self, states: torch.Tensor, root: int, K: int) -> torch.Tensor:
        """What comes after a root and each of K - 1 tokens behind it, ``[K,draft_vocab]``, of the states ``[N,n*H]`` at
        the N tokens before it.
        """
        size, count = self.layer["head_dim"], len(states)
        context = [self.norm(self.weights["fc.weight"] @ state, "hidden_norm") for state in states]
        scale = self.more.get("input_embedding_scale", 1.0)
        rows = [
            self.weights["embed_tokens.weight"][state] * scale for state in (root, *[self.more["mask_token_id"]] * K)
        ]
        for at, kind in enumerate(self.layer["layer_types"]):
            sliding, name = kind == "sliding_attention", f"layers.{at}"
            causal = self.config.get("is_causal", sliding and not self.config.get("sliding_window_non_causal"))
            window = self.layer["sliding_window"] if sliding else 10**9
            normed = [self.norm(row, f"{name}.input_layernorm") for row in rows]
            keys, values, results = [], [], []
            for position, row in enumerate([*context, *normed]):
                k, v = ((self.weights[f"{name}.self_attn.{state}_proj.weight"] @ row).view(-1, size) for state in "kv")
                keys.append(self.rotated(self.norm(k, f"{name}.self_attn.k_norm"), position))
                values.append(v)
            for place, row in enumerate(normed):
                mine = count + place
                q = (self.weights[f"{name}.self_attn.q_proj.weight"] @ row).view(-1, size)
                q, heads = self.rotated(self.norm(q, f"{name}.self_attn.q_norm"), mine), []
                seen = [state for state in range(len(keys)) if mine - state < window and not (causal and state > mine)]
                for head in range(len(q)):
                    shared = head // (len(q) // len(keys[0]))
                    scores = torch.stack([q[head] @ keys[state][shared] for state in seen]) / size**0.5
                    heads.append(scores.softmax(0) @ torch.stack([values[state][shared] for state in seen]))
                results.append(rows[place] + self.weights[f"{name}.self_attn.o_proj.weight"] @ torch.cat(heads))
            inner = [self.norm(row, f"{name}.post_attention_layernorm") for row in results]
            gates, ups = (
                [self.weights[f"{name}.mlp.{state}_proj.weight"] @ row for row in inner] for state in ("gate", "up")
            )
            down = self.weights[f"{name}.mlp.down_proj.weight"]
            rows = [row + down @ (F.silu(gate) * up) for row, gate, up in zip(results, gates, ups, strict=True)]
        text = torch.stack([self.weights["lm_head.weight"] @ self.norm(row, "norm") for row in rows[1:]])
        text = text * self.more.get("output_multiplier", 1.0)
        cap = self.more.get("final_logit_softcapping")
        return cap * torch.tanh(text / cap) if cap else text


PUBLISHED = {"published": "speculators", "draft_vocab": KEPT}


@pytest.mark.parametrize(
    ("lowering", "options"),
    [
        ("native", {}),
        ("portable", {"windows": (True, False)}),
        ("native", {**PUBLISHED, "layers": 1, "states": (0, 1, 2)}),
        ("native", {**PUBLISHED, "windows": (False, True), "sliding_window_non_causal": True}),
        ("portable", {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}),
    ],
)
def test_drafts_equal_the_formulas(tmp_path, target, lowering, options):
    """Two slots with texts of 9 and 2 rows, whose next rows are 3 and 1, padded; then blocks of 6 and 4 tokens."""
    folder = make_dflash(tmp_path / "draft", target, **options)
    outline = read_dflash(str(folder))
    outline.require_fit(hidden=H, vocab=VOCAB, layers=LAYERS)
    draft = outline.load(target, LAYERS, 512)
    cache = draft.cache()
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
    draw = np.random.default_rng(4)
    states = draw.normal(0, 1.5, (2, 12, draft.fc.in_features)).astype(np.float32)
    roots = draw.integers(0, VOCAB, 2)

    def write_root(inputs: dict[str, Any], slot: int, past: int, count: int) -> None:
        inputs[tensors.INPUT_IDS][slot] = roots[slot]

    slots = TwoSlots(trace_dflash(draft, cache, lowering), tmp_path, method, states, write_root)
    Ks = (5, 3)
    slots.run(10, 1, (0, 0), (9, 2), **{tensors.BLOCK_ROWS: 2})
    outputs = slots.run(4, max(Ks), (9, 2), (3, 1), **{tensors.BLOCK_ROWS: [1 + K for K in Ks]})
    paper = Paper(folder, target)
    offsets = paper.weights.get("d2t")
    target_ids = None if offsets is None else torch.arange(KEPT) + offsets
    for slot, rows in enumerate((12, 3)):
        logits = paper.logits(torch.from_numpy(states[slot, :rows]), int(roots[slot]), Ks[slot])
        for depth in range(Ks[slot]):
            require_drafted(outputs, depth, slot, logits[depth], target_ids)


def test_missing_draft_tensors_are_the_targets(target, draft, small_vocabulary):
    theirs = load_file(target / "model.safetensors")
    whole = read_dflash(str(draft)).load(target, LAYERS, 512)
    assert torch.equal(whole.embed_tokens.weight, theirs["model.embed_tokens.weight"])
    assert torch.equal(whole.lm_head.weight, theirs["lm_head.weight"])
    source = changed(small_vocabulary, {"lm_head.weight": None})
    fit(source)
    part = read_dflash(source).load(target, LAYERS, 512)
    assert part.target_ids is not None
    assert torch.equal(part.lm_head.weight, theirs["lm_head.weight"][part.target_ids])


def test_layers_are_named_as_their_publishers_do(draft, small_vocabulary):
    assert read_dflash(str(draft)).seen(LAYERS) == (1, 2)  # target_layer_ids 0, 1: outputs of layers
    assert read_dflash(str(small_vocabulary)).seen(LAYERS) == (1, 2)  # aux_hidden_state_layer_ids 1, 2
    neighbour = changed(draft, dflash_config=None, mask_token_id=7, target_layer_ids=[1], model_type="qwen3_vl_text")
    assert (read_dflash(neighbour).seen(LAYERS), read_dflash(neighbour).mask_token) == ((2,), 7)
    # z-lab's for Qwen3-8B's 36 layers: five draft layers see 1, 9, 17, 25 and 33.
    assert DFlashOutline.default_states(5, 36) == (2, 10, 18, 26, 34)
    assert DFlashOutline.default_states(1, 36) == (19,)


def test_layers_with_windows_are_causal_where_their_publishers_say(tmp_path, target):
    folder = make_dflash(tmp_path / "draft", target, published="speculators", windows=(False, True))
    assert read_dflash(str(folder)).causal == (False, True)  # sliding_window_non_causal is false
    assert read_dflash(changed(folder, sliding_window_non_causal=None)).causal == (False, False)
    folder = make_dflash(tmp_path / "other", target, windows=(False, True))
    assert read_dflash(str(folder)).causal == (False, True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_size": 1}, r"not a configuration of a DFlash draft.*block_size"),
        ({"model_type": "mamba", "architectures": None}, "model_type is 'mamba'; expected one of qwen3"),
        ({"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3'; expected 'dflash' with a"),
        ({"dflash_config": {"target_layer_ids": [0]}}, "mask_token_id is None; expected a token below vocab_size, 320"),
        ({"dflash_config": {"mask_token_id": 320}}, "mask_token_id is 320; expected a token below vocab_size, 320"),
        ({"dflash_config": {"mask_token_id": 1}}, "no target_layer_ids; expected the layers that the draft"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 2]}}, r"\[1, 3\] layers .* the target has 2"),
        ({"dflash_config": {"mask_token_id": 1, "use_swa": True}}, "dflash_config.use_swa is True; expected False"),
        ({"projector_type": "domino"}, "projector_type is 'domino'; expected 'dflash'"),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type is 'domino'; expected 'dflash'"),
        ({"dflash_config": {"shift_label": True}}, "shift_label is True; expected False"),
        ({"sample_from_anchor": True}, "sample_from_anchor is True; expected False"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}, "sliding_window is 4; expected at least"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types has 'sliding_attention'; expected it with"),
        ({"layer_types": ["full_attention"]}, "config.json: "),
        ({"num_hidden_layers": 3, "layer_types": None}, "no tensor 'layers.2.input_layernorm.weight'; expected it in"),
    ],
)
def test_configurations_that_do_not_fit_are_refused_by_field(draft, change, reason):
    """What all drafts' configurations have in common is tested of EAGLE-3's, and so are tensors, below."""
    with pytest.raises(BuildError, match=reason) as caught:
        fit(changed(draft, **change))
    assert str(draft) in str(caught.value)


Q = "layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({Q: None}, f"no tensor '{Q}'; expected it in a DFlash draft as config.json"),
        ({"hidden_norm.weight": None}, "no tensor 'hidden_norm.weight'"),
        ({Q: torch.zeros(32, 128)}, r"q_proj.weight' is \[32, 128\], expected \[32, 64\] in "),
        ({f"model.{Q}": torch.zeros(32, 64)}, "and '.*' are the same part; expected one"),
        ({"candidate_selector.hidden_projection.weight": torch.zeros(2)}, "hidden_projection.weight' is not part of a"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(target, small_vocabulary, change, reason):
    source = changed(small_vocabulary, change)
    with pytest.raises(BuildError, match=reason):
        fit(source)
        read_dflash(source).load(target, LAYERS, 512)


# --- training ---------------------------------------------------------------------------------------------------------


STATES, BLOCK = (1, 2), 4


@pytest.fixture
def options(target: Path, tmp_path: Path) -> Callable[..., DFlashTraining]:
    return partial(training_options, "dflash", target, tmp_path)


@pytest.mark.slow
def test_the_loss_is_that_of_blocks_by_the_formulas(target, options, tmp_path):
    """Block after block against all of them at once, some of which reach past the text: logits, and their loss."""
    decay, length = 0.7, 9
    ids = torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))
    windows = windows_of(ids)
    torch.manual_seed(0)
    loaded = load_model(str(target), CPU, frozen=True)
    draft = new_draft(options(intermediate_size=48), loaded, STATES)
    save_dflash(tmp_path / "draft", draft, STATES, 2)
    anchors = torch.tensor([[0, 3, 6], [1, 5, 7]])
    texts: list[torch.Tensor] = []
    hook = draft.lm_head.register_forward_hook(lambda _module, _args, output: texts.append(output))
    loss, _ = weighted_loss(draft_losses(draft, loaded.model, STATES, windows.rows(torch.arange(2)), anchors), decay)
    hook.remove()

    plain = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager").eval()
    with torch.no_grad(), recorded_states(plain, STATES) as noted:
        logits = plain(ids, use_cache=False).logits
    states = torch.cat([noted[count] for count in STATES], -1)
    paper = Paper(tmp_path / "draft", target, theta=10000.0)
    losses: list[list[torch.Tensor]] = [[] for _ in range(BLOCK - 1)]
    drafted = [iter(text) for text in texts]
    for row in range(2):
        for anchor in anchors[row].tolist():
            expected_own = paper.logits(states[row, : anchor + 1], int(ids[row, anchor + 1]), BLOCK - 1)
            for ahead in range(min(BLOCK - 1, length - 2 - anchor)):
                torch.testing.assert_close(next(drafted[ahead]), expected_own[ahead], rtol=1e-4, atol=1e-4)
                wanted = logits[row, anchor + 1 + ahead].softmax(-1)
                losses[ahead].append(-(wanted * expected_own[ahead].log_softmax(-1)).sum())
    expected = torch.stack([decay**at * torch.stack(part).mean() for at, part in enumerate(losses)]).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_draft_learns_blocks(target, options, tmp_path):
    loaded = load_model(str(target), CPU, frozen=True)
    torch.manual_seed(0)
    draft = new_draft(options(), loaded, STATES)

    def losses_of(batch: Windows, number: int) -> Losses:
        return draft_losses(draft, loaded.model, STATES, batch, random_anchors(batch, 8, 0, number))

    trained = train_on_language(draft, loaded.model, losses_of, 100, tmp_path / "draft.pt")
    windows = windows_of(LANGUAGE[:8])
    with saying(loaded.model) as say:
        say(windows.rows(torch.arange(8)))
        accuracy = measure_accuracy(partial(draft_losses, draft, loaded.model, STATES), BLOCK - 1, windows, CPU)
    assert all(row[0] > 0.9 for row in accuracy.ranks), accuracy.ranks
    assert accuracy.paths[0, 0, 0] > 0.8
    assert len(trained.history[-1]["top-1"]) == BLOCK - 1


@pytest.mark.slow
def test_anchors_are_drawn_where_something_is_learnt():
    windows = windows_of(torch.arange(40).view(2, 20))
    windows.learn[:, :10] = False
    batch = windows.rows(torch.arange(2))
    first, second = (random_anchors(batch, 5, 3, number) for number in (0, 1))
    assert first.tolist() != second.tolist()
    assert torch.equal(first, random_anchors(batch, 5, 3, 0))
    # Behind the anchor comes the root, and behind that a token that is learnt.
    assert all(8 <= at < 18 for at in (*first.flatten().tolist(), *second.flatten().tolist()))
    assert all(len(set(row)) == 5 for row in first.tolist())
