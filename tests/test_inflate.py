"""Enlarging a checkpoint keeps what it computes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.inflate import (
    DRAFT_WIDTH_PER_LAYER,
    Shape,
    choose_shape,
    compare,
    inflate,
    inflate_speculator,
    inflate_states_draft,
    main,
    real_layers,
)
from specexport.contract.methods import method_type, part
from specexport.exporter.checkpoints.checkpoint import reference_states
from specexport.graphs.layers import recorded_states
from specexport.methods.hidden_states.checkpoint import load_draft
from specexport.methods.mlp_speculator.export import read_speculator
from tests.checkpoints import make_dflash, make_eagle3, make_speculator

pytestmark = pytest.mark.exporter

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1, 8, 2, 8]]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny random Llama checkpoint whose heads are together wider than its residual stream."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=request.param,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(2.0)
    model.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def test_inflated_model_computes_the_same(source, tmp_path):
    out = tmp_path / "out"
    shape = inflate(source, out, params=5e5)
    agreement = compare(source, out, PROMPTS)
    assert agreement.positions == sum(len(prompt) for prompt in PROMPTS)
    assert agreement.exact
    assert agreement.largest_difference < 1e-4

    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert Shape.of(config) == shape
    assert abs(shape.params - 5e5) < 0.2 * 5e5
    with safe_open(out / "model.safetensors", framework="pt") as tensors:
        written = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    assert written == shape.tensors()


def test_new_weights_are_dense_and_seeded(source, tmp_path):
    shape = Shape.of(json.loads((source / "config.json").read_text(encoding="utf-8")))
    large = Shape(64, 8, 4, 16, 5, 96, shape.vocab, shape.tied)
    weights = []
    for out, seed in ((tmp_path / "a", 1), (tmp_path / "b", 1), (tmp_path / "c", 2)):
        assert inflate(source, out, shape=large, seed=seed) == large
        weights.append((out / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]
    with safe_open(tmp_path / "a" / "model.safetensors", framework="pt") as tensors:
        for name, size in large.tensors().items():
            if len(size) == 2:
                assert (tensors.get_tensor(name) != 0).float().mean() > 0.99, name


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_inflated_speculator_says_the_same(source, tmp_path, tied):
    """Of the same texts: the enlarged target's states go with it."""
    make_speculator(tmp_path / "small", source, 3, inner=32, tied=tied, scale_input=tied)
    large = tmp_path / "large"
    inflate(source, large, shape=Shape(96, 8, 4, 16, 3, 96, 64, bool(Shape.of(_config(source)).tied)))
    inflate_speculator(tmp_path / "small", tmp_path / "grown", source, large)
    texts = []
    for model, speculator in ((source, "small"), (large, "grown")):
        loaded = LlamaForCausalLM.from_pretrained(model).eval()
        _, hidden = reference_states(loaded, np.array(PROMPTS[0]))
        stages = read_speculator(str(tmp_path / speculator)).load()
        texts.append(stages.logits(hidden[-1], torch.tensor([5, 9, 2])))
    torch.testing.assert_close(texts[1], texts[0], atol=2e-3, rtol=1e-3)
    assert stages.logits(torch.randn(96), torch.tensor([1])).shape == (1, 64)


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_an_inflated_states_draft_says_the_same(source, tmp_path, method):
    """Of the same text: it sees the layers of the enlarged target that do what those of the small one did."""
    exporter: Any = part(method_type(method), "export").EXPORTER
    make = make_eagle3 if method == "eagle3" else make_dflash
    make(tmp_path / "small", source, states=(1, 2), size=8)
    large, text, drafted = tmp_path / "large", PROMPTS[0], [5, 9, 2]
    inflate(source, large, shape=Shape(96, 16, 8, 16, 5, 96, 64, bool(Shape.of(_config(source)).tied)))
    inflate_states_draft(tmp_path / "small", tmp_path / "grown", source, large)
    texts = []
    for model, draft in ((source, "small"), (large, "grown")):
        loaded, outline = LlamaForCausalLM.from_pretrained(model).eval(), exporter.read(str(tmp_path / draft))
        layers = loaded.config.num_hidden_layers
        outline.require_fit(hidden=loaded.config.hidden_size, vocab=64, layers=layers)
        seen = outline.seen(layers)
        result = load_draft(outline, model, 64, family=method, source=draft)
        with torch.no_grad(), recorded_states(loaded, seen) as noted:
            loaded(torch.tensor([text[:-1]]))
        states = torch.cat([noted[count] for count in seen], -1)
        with torch.no_grad():
            texts.append(torch.stack(list(exporter.reference_logits(result, text, states, drafted))))
    torch.testing.assert_close(texts[1], texts[0], atol=2e-3, rtol=1e-3)


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def test_real_layers_are_spread_evenly():
    assert real_layers(2, 8) == {2: 0, 6: 1}
    assert real_layers(3, 3) == {0: 0, 1: 1, 2: 2}
    assert sorted(real_layers(7, 24).values()) == list(range(7))


def test_chosen_shapes_have_the_size_asked_for():
    target = choose_shape(Shape(256, 4, 2, 64, 7, 672, 4096, True), 290e6)
    draft = choose_shape(Shape(96, 2, 1, 64, 3, 288, 4096, True), 25e6, DRAFT_WIDTH_PER_LAYER)
    assert (target.hidden, target.heads, target.kv_heads, target.ffn, target.layers) == (1024, 16, 8, 2880, 24)
    assert (draft.hidden, draft.layers) == (768, 3)
    assert target.params == pytest.approx(290e6, rel=0.02)
    assert draft.params == pytest.approx(25e6, rel=0.05)


def test_refusals(source, tmp_path, capsys):
    with pytest.raises(ValueError, match="more parameters"):
        inflate(source, tmp_path / "out", params=1e3)
    shape = Shape.of(json.loads((source / "config.json").read_text(encoding="utf-8")))
    with pytest.raises(ValueError, match="smaller hidden"):
        inflate(source, tmp_path / "out", shape=Shape(16, 4, 2, 16, 2, 40, shape.vocab, shape.tied))
    assert main(["--source", str(tmp_path / "nothing"), "--out", str(tmp_path / "out")]) == 1
    assert "no config.json" in capsys.readouterr().err
