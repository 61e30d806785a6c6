"""GGUF files: what they hold is built as it is; transformers reading the same file is the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specexport.checkpoints.checkpoint import load_checkpoint
from specexport.checkpoints.gguf.blocks import KEPT, scales_of
from specexport.checkpoints.gguf.header import read_header
from specexport.checkpoints.quantized import QuantizedTensor
from specexport.contract.reading import read_manifest
from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions
from specexport.exporter.weights import Precision
from specexport.runtime import Engine, SamplingParams
from specexport.verify.bundle import verify
from tests.checkpoints import make_checkpoint
from tests.gguf_files import WIDE, Type, make_gguf

pytestmark = pytest.mark.exporter

PROMPT = "the water of my day"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of which files are made."""
    return make_checkpoint(tmp_path_factory.mktemp("llama") / "model", "llama", **WIDE, tie_word_embeddings=True)


def _built(source: Path, output: Path, precision: Precision | None = None, **options: Any) -> Path:
    return build(
        BuildOptions(
            target=str(source), output=output, precision=precision, max_batch_size=1, max_seq_len=128, **options
        )
    )


def _require_same_text(file: Path, bundle: Path, tokens: int = 24) -> None:
    """Compares a bundle's greedy text with that of transformers reading the same file."""
    where: dict[str, Any] = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, attn_implementation="eager", **where)
    ids = tokenizer(PROMPT).input_ids
    with torch.no_grad():
        given = torch.tensor([ids])
        text = model.eval().generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=tokens, pad_token_id=2
        )
    expected = text[0, len(ids) :].tolist()
    with Engine.load(bundle, threads=1) as engine:
        assert engine.tokenizer.encode(PROMPT).ids == ids
        found = engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=tokens)).token_ids
    assert list(found) == expected[: len(found)] and len(found) >= len(expected) - 1


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_family_says_what_transformers_says_of_the_file(tmp_path: Path, family: str) -> None:
    sizes: dict[str, Any] = {"head_dim": 128} if family == "qwen3" else {}  # transformers' mapping knows no other
    checkpoint = make_checkpoint(tmp_path / "model", family, tie_word_embeddings=family != "llama", **sizes)
    file = make_gguf(tmp_path / "tiny.gguf", checkpoint, Type.F16)
    bundle = _built(file, tmp_path / "bundle", "fp32")
    _require_same_text(file, bundle)
    assert verify(bundle).passed


@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.name)
def test_integers_scales_and_offsets_are_those_of_the_file(llama: Path, tmp_path: Path, kind: Type) -> None:
    file = make_gguf(tmp_path / "tiny.gguf", llama, kind)
    tensor = read_header([file]).tensors["blk.0.ffn_up.weight"]
    restored = gguf.dequantize(tensor.data, kind).T
    scales = scales_of(tensor.data, kind)
    group = scales.group
    scale = np.repeat(scales.scale.values(), group, axis=0)
    offset = 0 if scales.offset is None else np.repeat(scales.offset.values(), group, axis=0)
    integers = np.rint((restored - offset) / np.where(scale == 0, 1, scale))
    low, high = (-128, 127) if scales.kind == "int8" else (0, 15) if scales.offset is not None else (-8, 7)
    assert integers.min() >= low and integers.max() <= high and len(np.unique(integers)) > 3
    np.testing.assert_array_equal(scale * integers.astype(np.float32) + offset, restored)


def test_blocks_are_kept_at_the_bits_of_the_file(llama: Path, tmp_path: Path) -> None:
    """Several types in a file, of which most are kept in the bits that they have; what is converted is said."""
    others = {
        "attn_v.weight": Type.Q6_K, "ffn_down.weight": Type.Q4_1, "attn_output.weight": Type.Q8_0,
        "token_embd.weight": Type.Q6_K, "blk.1.ffn_up.weight": Type.IQ2_XXS,
    }  # fmt: skip
    file = make_gguf(tmp_path / "tiny.gguf", llama, Type.Q4_K, others)
    bundle = _built(file, tmp_path / "bundle")
    precision = read_manifest(bundle).target.precision
    before = precision.quantized_before
    assert precision.weights == "stored" and before is not None and before.format.startswith("GGUF (")
    assert (before.kept, before.converted) == (15, 1) and 0 < (before.converted_rms_error or 0) < 0.02
    names = {tensor.name: tensor for tensor in load_checkpoint(str(file)).tensors.values()}
    assert isinstance(names["model.layers.1.mlp.up_proj.weight"], QuantizedTensor)
    assert verify(bundle).passed
    size = (bundle / "target" / "weights.bin").stat().st_size
    weights = sum(place.data.nbytes for place in read_header([file]).tensors.values())
    pages = 4096 * len(list(read_header([file]).tensors)) * 3
    assert size < 1.25 * weights + pages


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q5_K, Type.BF16], ids=lambda kind: kind.name)
def test_a_file_of_one_type_says_the_same(llama: Path, tmp_path: Path, kind: Type) -> None:
    file = make_gguf(tmp_path / "tiny.gguf", llama, kind)
    bundle = _built(file, tmp_path / "bundle")
    _require_same_text(file, bundle)
