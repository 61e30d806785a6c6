"""EAGLE-3: both published layouts, what is refused, that graph and training follow the formulas."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specexport.contract import tensors
from specexport.contract.errors import BuildError, SpecExportError
from specexport.exporter.checkpoints.stored import save_head_tensors
from specexport.exporter.compose import propose_graph
from specexport.graphs.attention import lowering
from specexport.graphs.layers import recorded_states
from specexport.methods.eagle3 import Eagle3, Eagle3Training
from specexport.methods.eagle3.export import read_eagle3, save_eagle3
from specexport.methods.eagle3.train import (
    _TrainingTimeTest,
    draft_losses,
    initial_draft,
    new_draft,
    train_eagle3,
    train_over_equal_channels,
)
from specexport.methods.hidden_states import StatesProposer
from specexport.methods.hidden_states.export import trace_own_state
from specexport.runtime import Engine
from specexport.runtime.backends.onnxruntime.graph import OnnxRuntimeGraph
from specexport.training.predictions import measure_accuracy, weighted_loss
from specexport.training.run import load_model
from tests.checkpoints import GROUPED, VOCAB, changed, make_eagle3
from tests.hidden_states import GREEDY, Formulas, TwoSlots, require_drafted
from tests.quantized import FORMATS
from tests.training import CPU, LANGUAGE, silent, train_on_language, training_options, windows_of

pytestmark = pytest.mark.exporter

H, LAYERS, KEPT = GROUPED["hidden_size"], GROUPED["num_hidden_layers"], 200
LIKE = {"trees": (), "model": "here", "states": (0, 1, 2), "hidden": H, "draft_hidden": H, "rows": 1, "candidates": 64}


@pytest.fixture
def draft(tmp_path: Path, target: Path) -> Path:
    return make_eagle3(tmp_path / "draft", target, draft_vocab=KEPT)


def fit(source: str) -> None:
    read_eagle3(source).require_fit(hidden=H, vocab=VOCAB, layers=LAYERS)


# --- the formulas -----------------------------------------------------------------------------------------------------


class Paper(Formulas):
    """A draft by the formulas of arXiv 2503.01840, one row after another, from the names in its file."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.layer = self.config.get("transformer_layer_config", self.config)
        self.epsilon = self.layer["rms_norm_eps"]
        self.theta = self.layer.get("rope_parameters", {}).get("rope_theta", 10000.0)
        self.share = self.config.get("partial_rotary_factor", 1.0)
        state = load_file(folder / "model.safetensors")
        self.weights = {name.replace("midlayer.", "").replace("layers.0.", ""): value for name, value in state.items()}
        if "embed_tokens.weight" not in self.weights:
            self.weights["embed_tokens.weight"] = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def fused(self, states: torch.Tensor) -> torch.Tensor:
        if self.config.get("norm_before_fc"):
            states = self.norm(states, "input_norm")
        if self.config.get("fc_norm"):
            parts = states.split(H)
            states = torch.cat([self.norm(part, f"fc_norm.{at}") for at, part in enumerate(parts)])
        return self.weights["fc.weight"] @ states

    def row(self, hidden: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The next row from fused states, or what the row before returned, and the token after it: its own state, and
        what comes after that token, ``[draft_vocab]``.
        """
        position, size = len(self.keys), self.layer["head_dim"]
        normed = self.norm(hidden, "hidden_norm")
        seen = torch.cat([self.norm(self.weights["embed_tokens.weight"][token], "input_layernorm"), normed])
        q, k, v = ((self.weights[f"self_attn.{name}_proj.weight"] @ seen).view(-1, size) for name in ("q", "k", "v"))
        if self.layer["model_type"] == "qwen3":
            q, k = self.norm(q, "self_attn.q_norm"), self.norm(k, "self_attn.k_norm")
        self.keys.append(self.rotated(k, position))
        self.values.append(v)
        q, group = self.rotated(q, position), len(q) // len(k)
        heads = []
        for head in range(len(q)):
            scores = torch.stack([q[head] @ key[head // group] for key in self.keys]) / size**0.5
            heads.append(scores.softmax(0) @ torch.stack([value[head // group] for value in self.values]))
        state = (normed if self.config.get("norm_before_residual") else hidden) + (
            self.weights["self_attn.o_proj.weight"] @ torch.cat(heads)
        )
        inner = self.norm(state, "post_attention_layernorm")
        gate, up = (self.weights[f"mlp.{name}_proj.weight"] @ inner for name in ("gate", "up"))
        state = state + self.weights["mlp.down_proj.weight"] @ (F.silu(gate) * up)
        output = self.norm(state, "norm")
        return (output if self.config.get("norm_output") else state), self.weights["lm_head.weight"] @ output

    def copy(self) -> Paper:
        """One that goes on by itself."""
        other = copy.copy(self)
        other.keys, other.values = list(self.keys), list(self.values)
        return other


@pytest.mark.parametrize(
    ("published", "lowering", "options"),
    [
        ("SafeAILab", "native", {"draft_vocab": KEPT}),
        ("SafeAILab", "portable", {"norm_before_residual": True, "norm_before_fc": True}),
        ("SafeAILab", "native", {"partial_rotary_factor": 0.5}),
        ("speculators", "native", {"model_type": "qwen3", "fc_norm": True, "norm_output": True, "embedding": False}),
    ],
)
def test_drafts_equal_the_formulas(tmp_path, target, published, lowering, options):
    """Two slots with texts of 5 and 2 rows, whose next rows are 3 and 1, padded; then 4 tokens each."""
    folder = make_eagle3(tmp_path / "draft", target, published=published, **options)
    outline = read_eagle3(str(folder))
    outline.require_fit(hidden=H, vocab=VOCAB, layers=LAYERS)
    draft = outline.load(target, LAYERS, 512)
    cache = draft.cache()
    start, one_pass = trace_own_state(draft, cache, lowering)
    method = Eagle3(**LIKE, dynamic_tree=False)
    draw = np.random.default_rng(4)
    states = draw.normal(0, 1.5, (2, 12, 3 * H)).astype(np.float32)
    texts = draw.integers(0, VOCAB, (2, 13))

    def write_tokens(inputs: dict[str, Any], slot: int, past: int, count: int) -> None:
        inputs[tensors.INPUT_IDS][slot, :count] = texts[slot, past + 1 : past + 1 + count]

    graph = propose_graph(one_pass, cache, lowering, start)
    slots = TwoSlots(graph, tmp_path, method, states, write_tokens)
    slots.run(6, 1, (0, 0), (5, 2))
    drafted = slots.run(4, 4, (5, 2), (3, 1))
    for slot, rows in enumerate((8, 3)):
        paper = Paper(folder, target)
        offsets = paper.weights.get("d2t")
        target_ids = None if offsets is None else torch.arange(KEPT) + offsets
        for row in range(rows):
            state, logits = paper.row(paper.fused(torch.from_numpy(states[slot, row])), int(texts[slot, row + 1]))
        for depth in range(4):
            state, logits = paper.row(state, require_drafted(drafted, depth, slot, logits, target_ids))
    # The same in a call for each token, as devices draft.
    outputs = slots.run(4, 1, (5, 2), (3, 1))
    for depth, pasts in enumerate(((8, 3), (9, 4), (10, 5), (11, 6))):
        for name in (tensors.DRAFT_TOKENS, tensors.DRAFT_IDS):
            np.testing.assert_array_equal(outputs[name][0], drafted[name][depth])
        for slot, past in enumerate(pasts):
            texts[slot, past + 1] = outputs[tensors.DRAFT_TOKENS][0, slot]
        local = {tensors.READS_OWN: True, tensors.OWN_STATE: outputs[tensors.NEXT_STATE][:, 0]}
        outputs = slots.run(4, 1, pasts, (1, 1), **local)


def test_missing_draft_tensors_are_the_targets(tmp_path, target):
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


def test_quantized_drafts_are_read_as_quantized_targets_are(draft, target):
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


def test_the_draft_of_smollm2_fits_its_target():
    outline = read_eagle3("examples/models/smollm2-eagle3")
    outline.require_fit(hidden=576, vocab=49152, layers=30)
    assert (outline.seen(30), outline.draft_vocab, outline.layer.rope_parameters["rope_theta"]) == (
        (2, 15, 27), 8192, 100000.0
    )  # fmt: skip


def test_layers_are_named_as_their_publishers_do(tmp_path, target, draft):
    assert read_eagle3(str(draft)).seen(LAYERS) == (0, 1, 2)
    nested = changed(
        draft, eagle_aux_hidden_state_layer_ids=None, eagle_config={"eagle_aux_hidden_state_layer_ids": [1]}
    )
    assert read_eagle3(nested).seen(LAYERS) == (2,)  # outputs of layers, there
    usual = changed(draft, eagle_config={"eagle_aux_hidden_state_layer_ids": [], "return_hidden_post_norm": True})
    assert read_eagle3(usual).switches["norm_output"]
    assert read_eagle3(usual).seen(32) == (2, 16, 29)
    with pytest.raises(
        BuildError, match=r"states after \[2, 1, -1\] layers \(as none are named\), but the target has 2"
    ):
        fit(usual)


def test_configurations_that_name_the_targets_family_or_positions(draft):
    """SpecForge's of Phi-4, QwQ and Qwen2.5-VL."""
    mrope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    fit(changed(draft, architectures=["LlamaForCausalLMEagle3"], model_type="phi3", rope_scaling=mrope))
    assert read_eagle3(str(draft)).layer.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"vocab_size": 300}, "vocab_size is 300, and the target's is 320"),
        ({"target_hidden_size": 32}, "target_hidden_size is 32, and the target's is 64"),
        ({"hidden_size": 0}, r"not a configuration of an EAGLE-3 draft.*hidden_size"),
        ({"hidden_act": "magic"}, r"hidden_act is 'magic', which transformers does not know"),
        ({"num_hidden_layers": 99}, r"not a configuration of an EAGLE-3 draft.*num_hidden_layers"),
        ({"model_type": "mamba"}, "model_type is 'mamba'; expected one of llama, qwen3"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash'; expected 'eagle3' with a"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm are both true"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, r"\[0, 1, 3\] layers .*, but the target has 2"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 1]}, r"\[1, 1, 1\] layers .*; expected each number once"),
        ({"rope_scaling": {"rope_type": "none"}}, "config.json: "),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor rotates 3 of 8 channels"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 8}, "layer_types has 'sliding_attention'"),
        ({"fc_norm": True}, "no tensor 'fc_norm.0.weight'; expected it in an EAGLE-3 draft as config.json"),
    ],
)
def test_configurations_that_do_not_fit_are_refused_by_field(draft, change, reason):
    with pytest.raises(BuildError, match=reason) as caught:
        fit(changed(draft, **change))
    assert str(draft) in str(caught.value)


Q = "midlayer.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({Q: None}, "no tensor 'layers.0.self_attn.q_proj.weight' or 'midlayer.self_attn.q_proj.weight'"),
        ({Q: torch.zeros(32, 64)}, r"q_proj.weight' is \[32, 64\], expected \[32, 128\] in "),
        ({Q: torch.zeros(32, 128, dtype=torch.int8)}, "q_proj.weight' holds no floating-point numbers"),
        ({Q: torch.full((32, 128), torch.nan)}, "q_proj.weight' holds numbers that are not finite"),
        ({"layers.0.self_attn.q_proj.weight": torch.zeros(32, 128)}, "and '.*' are the same part; expected one"),
        ({"midlayer.self_attn.qq_proj.weight": torch.zeros(2)}, "'midlayer.self_attn.qq_proj.weight' is not part of"),
        ({"d2t": None}, "no tensor 'd2t'"),
        ({"d2t": torch.zeros(KEPT)}, "tensor 'd2t' is torch.float32; expected int64"),
        ({"d2t": torch.full((KEPT,), VOCAB)}, "tensor 'd2t' maps to tokens that do not exist"),
        ({"d2t": -torch.arange(KEPT)}, "tensor 'd2t' maps to tokens that do not exist, or several to one"),
        ({"t2d": torch.ones(VOCAB, dtype=torch.bool)}, "tensor 't2d' is not a boolean mask"),
        ({"t2d": torch.ones(9, dtype=torch.bool)}, r"tensor 't2d' is \[9\], expected \[320\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(target, draft, change, reason):
    source = changed(draft, change)
    with pytest.raises(BuildError, match=reason):
        fit(source)
        read_eagle3(source).load(target, LAYERS, 512)


# --- bundles ----------------------------------------------------------------------------------------------------------


def test_a_run_makes_the_rows_that_are_missing_alone(bundle, spy):
    """On the CPU a run is as wide as the text has grown, not as wide as the deepest tree may make it grow."""
    with Engine.load(bundle("dice-eagle3"), threads=1, calibrate=False) as engine:
        lengths = spy(StatesProposer, "propose", lambda _, views: len(views[0].tokens))
        shapes = spy(OnnxRuntimeGraph, "run", lambda _, shape: shape)
        engine.generate([5, 7, 9], GREEDY, "eagle3")
    widths = [shape.tokens for shape in shapes if shape.drafts]
    assert len(widths) == len(lengths) > 2
    assert widths[1:] == np.diff(lengths).tolist()


# --- training ---------------------------------------------------------------------------------------------------------


STATES = (0, 1, 2)
HIDDEN, LAYERS = GROUPED["hidden_size"], GROUPED["num_hidden_layers"]


@pytest.fixture
def options(target: Path, tmp_path: Path) -> Callable[..., Eagle3Training]:
    return partial(training_options, "eagle3", target, tmp_path)


@pytest.mark.slow
def test_the_loss_is_that_of_drafting_from_every_token_by_the_formulas(target, options, tmp_path):
    """Draft after draft, token after token, against all of them at once: logits, and the loss made of them."""
    steps, kept, decay = 3, 200, 0.8
    settings = options(draft_vocab_size=kept, intermediate_size=48)
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    windows = windows_of(ids)
    torch.manual_seed(0)
    loaded = load_model(str(target), CPU, frozen=True)
    draft = new_draft(settings, loaded, STATES, windows)
    save_eagle3(tmp_path / "draft", draft, STATES, tied=False)
    texts: list[torch.Tensor] = []
    hook = draft.lm_head.register_forward_hook(lambda _module, _args, output: texts.append(output))
    loss, _ = weighted_loss(draft_losses(draft, loaded.model, STATES, windows.rows(torch.arange(2)), steps), decay)
    hook.remove()

    plain = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager").eval()
    with torch.no_grad(), recorded_states(plain, STATES) as noted:
        logits = plain(ids, use_cache=False).logits
    states = torch.cat([noted[count] for count in STATES], -1)
    expected = torch.zeros(())
    known = draft.target_ids
    for step in range(steps):
        drafted, losses = iter(texts[step]), []
        for row in range(2):
            for begin in range(ids.shape[1] - 2 - step):
                paper = Paper(tmp_path / "draft", target)
                for at in range(begin + 1):
                    state, expected_own = paper.row(paper.fused(states[row, at]), int(ids[row, at + 1]))
                for ahead in range(1, step + 1):
                    state, expected_own = paper.row(state, int(ids[row, begin + 1 + ahead]))
                torch.testing.assert_close(next(drafted), expected_own, rtol=1e-4, atol=1e-4)
                wanted = logits[row, begin + 1 + step]
                learnt = bool((known == wanted.argmax()).any())
                losses.append(
                    -(wanted[known].softmax(-1) * expected_own.log_softmax(-1)).sum() if learnt else torch.zeros(())
                )
        expected = expected + decay**step * torch.stack(losses).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_draft_learns_to_go_on_from_its_own_states(target, options, tmp_path):
    loaded = load_model(str(target), CPU, frozen=True)
    windows = windows_of(LANGUAGE)
    torch.manual_seed(0)
    draft = new_draft(options(), loaded, STATES, windows)
    trained = train_on_language(
        draft, loaded.model, lambda batch, _: draft_losses(draft, loaded.model, STATES, batch, 3), 60,
        tmp_path / "draft.pt", [draft.lm_head],
    )  # fmt: skip
    accuracy = measure_accuracy(lambda batch: draft_losses(draft, loaded.model, STATES, batch, 3), 3, windows, CPU)
    assert all(row[0] > 0.9 for row in accuracy.ranks), accuracy.ranks
    assert accuracy.paths[0, 0, 0] > 0.8
    assert len(trained.history[-1]["top-1"]) == 3


@pytest.mark.slow
def test_new_drafts_learn_from_all_channels_of_the_states_alike(options, target):
    sizes = torch.tensor([0.5, 1.0, 1000.0]).repeat_interleave(HIDDEN)
    states = torch.randn(1, 64, 3 * HIDDEN, generator=torch.Generator().manual_seed(0)) * sizes
    loaded = load_model(str(target), CPU, frozen=True)
    fresh, other = (new_draft(options(), loaded, STATES, windows_of(LANGUAGE)) for _ in range(2))
    fused = other.fuse(states)
    train_over_equal_channels(other, sizes, new=False)
    torch.testing.assert_close(other.fuse(states), fused, rtol=1e-4, atol=1e-3)
    train_over_equal_channels(fresh, sizes, new=True)
    fresh.fuse(states).square().sum().backward()
    (trained,) = fresh.fc.parameters()
    of_each = [part.norm() for part in trained.grad.chunk(3, -1)]
    assert max(of_each) < 1.5 * min(of_each)


@pytest.mark.slow
def test_drafts_propose_the_most_frequent_tokens(options, target):
    ids = torch.full((4, 8), 7)
    ids[:, :4] = torch.tensor([300, 9, 9, 300])
    windows = windows_of(ids)
    windows.learn[:, 0] = False
    loaded = load_model(str(target), CPU, frozen=True)
    draft = new_draft(options(draft_vocab_size=64), loaded, STATES, windows)
    # Those that are never learnt follow by their numbers.
    assert draft.target_ids.tolist() == [*range(63), 300]
    assert torch.equal(draft.lm_head.weight, loaded.model.get_output_embeddings().weight[draft.target_ids])


@pytest.mark.slow
@pytest.mark.parametrize("kept", [None, 200])
def test_narrower_mlps_keep_the_strongest_units(options, target, tmp_path, kept):
    """Those that write nothing can go, and it says the same."""
    folder = make_eagle3(tmp_path / "draft", target, draft_vocab=kept)
    state = load_file(folder / "model.safetensors")
    state["midlayer.mlp.down_proj.weight"][:, ::3] = 0.0
    save_file(state, folder / "model.safetensors")
    loaded = load_model(str(target), CPU, frozen=True)
    settings = options(draft=str(folder), states=None, intermediate_size=32)
    whole, states = initial_draft(msgspec.structs.replace(settings, intermediate_size=None), loaded)
    narrow, _ = initial_draft(settings, loaded)
    assert states == STATES
    for draft in (whole, narrow):
        kept_as_they_are = [name for name, weight in draft.named_parameters() if not weight.requires_grad]
        assert kept_as_they_are == ["embed_tokens.weight"]
    assert narrow.layers[0].mlp.down_proj.weight.shape == (HIDDEN, 32)
    draw = torch.Generator().manual_seed(3)
    ids, hidden = torch.randint(0, VOCAB, (1, 6), generator=draw), torch.randn(1, 6, HIDDEN, generator=draw)
    texts = []
    for draft in (whole, narrow):
        with torch.no_grad(), lowering(_TrainingTimeTest()):
            texts.append(draft.lm_head(draft(ids, hidden, torch.arange(6)[None])[1]))
    torch.testing.assert_close(texts[1], texts[0])
    record = train_eagle3(settings, silent)
    written = read_eagle3(str(settings.output))
    assert (written.layer.intermediate_size, written.draft_vocab) == (32, kept or VOCAB)
    assert record["options"]["draft"] == str(folder)


@pytest.mark.slow
def test_unsupported_drafts_cannot_be_continued(options, target, tmp_path):
    folder = make_eagle3(tmp_path / "draft", target, published="speculators", model_type="qwen3", fc_norm=True)
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "has fc_norm, layers of a qwen3; expected one plain llama layer"),
        ({"states": STATES}, "--draft was given together with --states"),
        ({"draft_vocab_size": 100}, "--draft was given together with --draft-vocab-size"),
    )
    for more, expected in refused:
        with pytest.raises(SpecExportError, match=expected):
            train_eagle3(options(**{"draft": str(folder), "states": None} | more), silent)
    plain = make_eagle3(tmp_path / "plain", target)
    with pytest.raises(SpecExportError, match="--intermediate-size is 64; expected 16 to 48, that of --draft"):
        train_eagle3(options(draft=str(plain), states=None, intermediate_size=64), silent)


@pytest.mark.slow
def test_those_who_may_read_the_configuration_may_read_the_weights(tmp_path):
    save_head_tensors(tmp_path, {}, {"weight": torch.ones(1)})
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1
