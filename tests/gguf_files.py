"""GGUF files of tiny checkpoints, written with the gguf library's writer as llama.cpp's converter writes them."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import load_file

ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3",
    "starcoder2": "starcoder2", "nemotron": "nemotron",
}  # fmt: skip
_WINDOWED = ("gemma2", "gemma3", "phi3")
_ONE_MORE = ("gemma2", "gemma3", "nemotron")
"""Architectures whose files hold norms with 1 added."""
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
"""Sizes that blocks of 256 divide."""
Type = GGMLQuantizationType
_HALVES: dict[GGMLQuantizationType, dict[int, float]] = {
    Type.Q2_K: {80: 0.01, 82: 0.02}, Type.Q3_K: {108: 0.002}, Type.Q4_K: {0: 0.0003, 2: 0.0015},
    Type.Q5_K: {0: 0.00015, 2: 0.0015}, Type.Q6_K: {208: 0.00005}, Type.IQ4_NL: {0: 0.001}, Type.IQ4_XS: {0: 0.0001},
    Type.IQ2_XXS: {0: 0.01},
}  # fmt: skip
"""Where a block has its fp16 numbers, and how large these are: the library cannot quantize to these types."""


def make_gguf(
    path: Path,
    checkpoint: Path,
    kind: GGMLQuantizationType = Type.F32,
    others: dict[str, GGMLQuantizationType] | None = None,
    metadata: dict[str, Any] | None = None,
    parts: int = 1,
    tensors: dict[str, npt.NDArray[np.float32]] | None = None,
) -> Path:
    """Writes a checkpoint's model and tokenizer into a GGUF file.

    Args:
        path: the file; of several parts the name before ``-00001-of-0000N``.
        checkpoint: as ``make_checkpoint`` makes it.
        kind: of the matrices. Blocks that the library cannot quantize to are drawn at random.
        others: of matrices whose names in the file end so.
        metadata: more of it, or other values; None for what is to be left out.
        parts: files that it is split into.
        tensors: more of them.

    Returns:
        The file, or the first.
    """
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    architecture = ARCHITECTURES[config["model_type"]]
    layers, prefix = config["num_hidden_layers"], architecture
    rope = config.get("rope_parameters") or {}
    fields: dict[str, Any] = {
        "general.architecture": architecture,
        "general.name": "tiny",
        f"{prefix}.context_length": config["max_position_embeddings"],
        f"{prefix}.embedding_length": config["hidden_size"],
        f"{prefix}.block_count": layers,
        f"{prefix}.feed_forward_length": config["intermediate_size"],
        f"{prefix}.attention.head_count": config["num_attention_heads"],
        f"{prefix}.attention.head_count_kv": config["num_key_value_heads"],
        f"{prefix}.attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps", 1e-5)),
        f"{prefix}.attention.key_length": config.get("head_dim"),
        f"{prefix}.attention.sliding_window": config.get("sliding_window") if architecture in _WINDOWED else None,
        f"{prefix}.rope.dimension_count": config.get("head_dim") if architecture == "llama" else None,
        f"{prefix}.rope.freq_base": float(rope.get("rope_theta") or rope["full_attention"]["rope_theta"]),
        f"{prefix}.vocab_size": config["vocab_size"],
        **_tokenizer(checkpoint),
    } | (metadata or {})
    path.parent.mkdir(parents=True, exist_ok=True)
    names = gguf.get_tensor_name_map({name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture], layers)
    random = np.random.default_rng(0)
    held: dict[str, tuple[npt.NDArray[Any], GGMLQuantizationType]] = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        stem, _, last = name.rpartition(".")
        target = f"{names.get_name(stem)}.{last}"
        array = tensor.float().numpy()
        if architecture == "llama" and target.rpartition(".")[0].endswith(("attn_q", "attn_k")):
            heads = config["num_attention_heads" if "attn_q" in target else "num_key_value_heads"]
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        if architecture in _ONE_MORE and target.endswith("norm.weight"):
            array = array + 1
        wanted = next((other_kind for end, other_kind in (others or {}).items() if target.endswith(end)), kind)
        held[target] = _blocks(array, wanted, random) if array.ndim > 1 else (array, Type.F32)
    held |= {name: (array, Type.F32) for name, array in (tensors or {}).items()}
    placed = list(held.items())
    files = [path] if parts == 1 else [
        path.with_name(f"{path.stem}-{number + 1:05}-of-{parts:05}.gguf") for number in range(parts)
    ]  # fmt: skip
    for number, file in enumerate(files):
        writer = gguf.GGUFWriter(file, architecture)
        for key, value in (fields if number == 0 else {}).items():
            if key != "general.architecture" and value is not None:
                _add(writer, key, value)
        if parts > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", parts)
            writer.add_int32("split.tensors.count", len(held))
        for name, (array, stored) in placed[number * len(placed) // parts : (number + 1) * len(placed) // parts]:
            writer.add_tensor(name, array, raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return files[0]


def _blocks(
    array: npt.NDArray[np.float32], kind: GGMLQuantizationType, random: np.random.Generator
) -> tuple[npt.NDArray[Any], GGMLQuantizationType]:
    if kind not in _HALVES:
        return gguf.quantize(array, kind), kind
    block, size = GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (array.size // block, size), dtype=np.uint8)
    for at, largest in _HALVES[kind].items():
        halves = random.uniform(largest / 4, largest, len(data)).astype(np.float16)
        data[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return data.reshape(len(array), -1), kind


def _tokenizer(checkpoint: Path) -> dict[str, Any]:
    document = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = sorted(document["model"]["vocab"], key=document["model"]["vocab"].get)
    special = {added_token["content"] for added_token in document["added_tokens"] if added_token["special"]}
    merges = [
        added_token if isinstance(added_token, str) else " ".join(added_token)
        for added_token in document["model"]["merges"]
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in vocabulary],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
