"""What a model is made of by its configuration alone is what transformers makes of it."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specexport.exporter.checkpoints import config as configurations
from specexport.exporter.checkpoints.config import sizes_of
from specexport.exporter.checkpoints.sizes import FAMILIES, ModelSizes, model_sizes, sizes_from_config
from tests.checkpoints import GROUPED, make_checkpoint

pytestmark = pytest.mark.exporter

MIXED = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
BIASES = ("attention_bias", "attention_out_bias", "mlp_bias", "use_bias")
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"head_dim": 24},
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": False, **dict.fromkeys(BIASES, True)},
    dict.fromkeys(BIASES, False),
)


def made_by_transformers(document: dict[str, Any]) -> ModelSizes:
    stated = {key: value for key, value in document.items() if key != "model_type"}
    config = AutoConfig.for_model(document["model_type"], **stated)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return sizes_of(model, config)


def sums(model: ModelSizes) -> dict[str, Any]:
    """All but how products are joined in one matrix: what is stored and read does not depend on it."""
    known = dataclasses.asdict(model) | {"parameters": None, "total": model.total, "active": model.active}
    rows = sum(parameter.shape[0] for parameter in model.parameters if len(parameter.shape) == 2)
    used = Counter(
        parameter for parameter in model.parameters if parameter.table or parameter.head or parameter.share is not None
    )
    return known | {"rows": rows, "used": used, "layer_types": None}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_those_of_transformers(family: str) -> None:
    base = {"model_type": family, **GROUPED, "vocab_size": 320, "pad_token_id": 0}
    if FAMILIES[family].experts is not None:
        base |= MIXED
    for change in CHANGES:
        document = base | change
        assert sums(sizes_from_config(document)) == sums(made_by_transformers(document)), change


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": None},  # of which a family has its own default
        {"mlp_only_layers": [0]},
        {"vocab_size": "many"},
    ],
)
def test_incomplete_configurations_use_transformers(
    tmp_path: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    request: list[Path] = []
    monkeypatch.setattr(configurations, "meta_model", lambda folder: request.append(folder) or torch.nn.Linear(1, 1))
    monkeypatch.setattr(configurations, "sizes_of", lambda *_: "transformers'")
    document = {"model_type": "qwen3_moe", **GROUPED, **MIXED, "vocab_size": 320, **change}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in document.items() if v is not None}))
    monkeypatch.setattr(torch.nn.Linear, "config", None, raising=False)
    assert model_sizes(tmp_path) == "transformers'" and request == [tmp_path]


def test_of_a_model_that_reads_more_than_text_the_language_model_counts(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gemma3")
    whole = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert sizes_from_config({"model_type": "gemma3", "text_config": whole}) == sizes_from_config(whole)
