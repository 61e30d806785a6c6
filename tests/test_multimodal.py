"""Checkpoints of models that read pictures as well: their language model is found, built, and says the same alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from specexport.contract.errors import BuildError
from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions
from specexport.runtime import EmbedsPrompt, Engine, SamplingParams
from specexport.runtime.speculative import PLAIN
from tests.checkpoints import BOS, EOS, GROUPED, HYBRIDS, PAD, VOCAB, WINDOW, tokenizer

pytestmark = pytest.mark.exporter

TEXT = {**GROUPED, "head_dim": 16, "vocab_size": VOCAB, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
RECURRENT = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
PICTURES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PATCHES = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
IMAGE = 9
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**PICTURES, "model_type": "pixtral", "head_dim": 16},
        "tie_word_embeddings": False,
    },
    "gemma3": {
        "text_config": {**TEXT, **WINDOWS, "model_type": "gemma3_text"},
        "vision_config": {**PICTURES, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": {
            **TEXT,
            **WINDOWS,
            "model_type": "gemma4_text",
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 0,
        },
        "vision_config": None,
        "audio_config": None,
    },
    "qwen3_5": {
        "text_config": {**TEXT, **HYBRIDS["qwen3_5_text"], **RECURRENT, "model_type": "qwen3_5_text"},
        "vision_config": {**PATCHES, "patch_size": 14},
    },
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**PICTURES, "model_type": "clip_vision_model"},
        "image_token_index": IMAGE,
    },
}


def make(folder: Path, family: str, **more: Any) -> Any:
    """Writes a random model as ``save_pretrained`` does, and returns it."""
    config = CONFIG_MAPPING[family](**{**FAMILIES[family], **more})
    torch.manual_seed(0)
    model: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(0.25 * noise if parameter.ndim > 1 else parameter + 0.2 * noise)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model.eval()


def greedy(model: Any, count: int, **prompt: torch.Tensor) -> list[int]:
    inputs = next(value for name, value in prompt.items() if name in ("input_ids", "inputs_embeds"))
    with torch.no_grad():
        completion = model.generate(
            **prompt,
            attention_mask=torch.ones(inputs.shape[:2], dtype=torch.int64),
            generation_config=GenerationConfig(max_new_tokens=count, min_new_tokens=count, pad_token_id=PAD),
        )
    return [int(token) for token in completion[0, -count:]]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_language_model_equals_the_whole_model(family, tmp_path):
    whole = make(tmp_path / "model", family)
    build(BuildOptions(str(tmp_path / "model"), tmp_path / "bundle", max_seq_len=64))
    prompt = [3, 77, 150, 31, 200, 12]
    expected = greedy(whole, 24, input_ids=torch.tensor([prompt]))
    with Engine.load(tmp_path / "bundle", threads=1) as engine:
        for way in (PLAIN, {"method": "ngram"}):
            params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
            assert list(engine.generate(prompt, params, way).token_ids) == expected
        text = whole.get_decoder() if hasattr(whole, "get_decoder") else whole.language_model
        head = whole.lm_head.weight
        tied = head.data_ptr() == text.get_input_embeddings().weight.data_ptr()
        counted = sum(parameter.numel() for parameter in text.parameters()) + (0 if tied else head.numel())
        assert engine.manifest.target.parameters == counted, "no pictures' weights"


def test_pictures_come_as_embeddings(tmp_path):
    whole = make(tmp_path / "model", "llava")
    build(BuildOptions(str(tmp_path / "model"), tmp_path / "bundle", max_seq_len=64, inputs_embeds=True))
    prompt = [3, 77, *[IMAGE] * 4, 150, 31]
    picture = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(3))
    expected = greedy(whole, 16, input_ids=torch.tensor([prompt]), pixel_values=picture)
    assert expected != greedy(whole, 16, input_ids=torch.tensor([prompt]), pixel_values=-picture)
    with torch.no_grad():
        seen = whole.get_image_features(pixel_values=picture).pooler_output[0]
    with Engine.load(tmp_path / "bundle", threads=1) as engine:
        inputs = EmbedsPrompt([prompt[:2], np.asarray(seen), prompt[6:]])
        for way in (PLAIN, {"method": "ngram"}):
            params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
            assert list(engine.generate(inputs, params, way).token_ids) == expected


def test_a_language_model_that_transformers_cannot_run_alone_is_refused_by_name(tmp_path):
    make(tmp_path / "model", "llava")
    config = tmp_path / "model" / "config.json"
    document = json.loads(config.read_text())
    document |= {"model_type": "qwen3_vl", "text_config": {**TEXT, "model_type": "qwen3_vl_text"}}
    document["vision_config"] = PATCHES
    config.write_text(json.dumps(document))
    with pytest.raises(BuildError, match=r"config.json: text_config is of the family 'qwen3_vl_text', for which trans"):
        build(BuildOptions(str(tmp_path / "model"), tmp_path / "bundle"))
    assert not (tmp_path / "bundle").exists()
