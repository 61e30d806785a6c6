"""Makes a checkpoint folder of a GGUF file, with the file's settings in transformers' own files.

transformers maps GGUF metadata to a configuration and a tokenizer; its mapping determines the supported families.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Sequence
from transformers import AutoTokenizer, PreTrainedConfig

from specexport.contract.errors import BuildError
from specexport.exporter.checkpoints.documents import CONFIG, require_sane
from specexport.exporter.checkpoints.gguf.header import Header, as_library_reader, read_header
from specexport.exporter.checkpoints.quiet import failing_as, quiet

_ORIGINAL = "build from the model that the file was converted from"
_LAYER = re.compile(r"blk\.(\d{1,5})\.")
_ENDS = ("eos", "eot", "eom")
_TURN_ENDS = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|endoftext|>", "<|end_of_text|>",
    "<EOT>", "_<EOT>", "<|return|>", "<|call|>", "<|END_OF_TURN_TOKEN|>", "[EOT]", "[EOS]", "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
})  # fmt: skip
"""Tokens that always end a turn, as in llama.cpp, whatever the file says."""
_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"
}  # fmt: skip
_LIKE_GPT2 = ("", "default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "mellum", "exaone4", "trillion")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Values of ``tokenizer.ggml.pre`` that split text like GPT-2's tokenizer; the second group also separates digits."""
_LIKE_QWEN2 = ("", "default", "qwen2", "deepseek-r1-qwen", "megrez")
"""Values of it that split text as transformers does for Qwen's architectures, whatever the file says."""
_WHOLE_WORDS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
)  # fmt: skip
"""Values of it whose tokenizers take a word that is a token whole, even if no merges lead to it."""
_UNMAPPED = {
    "phi3": {"attention.sliding_window": "sliding_window"},
    "starcoder2": {"rope.freq_base": "rope_theta"},
    "stablelm": {"rope.freq_base": "rope_theta"},
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"
    },
    "gemma3": {"rope.freq_base_swa": "rope_local_base_freq"},
}  # fmt: skip
"""Settings that transformers' mapping ignores, by family, with their names in a configuration."""
_PARTLY_ROTARY = ("nemotron", "phi3", "stablelm")
"""Families whose rotary embeddings may cover a part of each head."""
_LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the 27B models, whose attention has a scale that files do not state."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Rotary settings of all of Meta's Llama 3 models; a file holds only the resulting factors."""


def header_of(folder: Path) -> Header | None:
    """The header of the GGUF file or files in a folder; None for a safetensors checkpoint."""
    files = sorted(folder.glob("*.gguf"))
    if not files or any(folder.glob("*.safetensors")):
        return None
    files = [file.readlink() if file.is_symlink() else file for file in files]  # the user's names for the files
    states = [file.stat() for file in files]
    return _header(tuple((file, state.st_size, state.st_mtime_ns) for file, state in zip(files, states, strict=True)))


@functools.lru_cache(maxsize=4)
def _header(files: tuple[tuple[Path, int, int], ...]) -> Header:
    return read_header([file for file, *_ in files])


def describe(folder: Path) -> None:
    """Writes the configuration and the tokenizer beside a folder's GGUF file, unless they exist."""
    header = header_of(folder)
    if header is None or (folder / CONFIG).is_file():
        return
    with quiet(), mock.patch.object(gguf, "GGUFReader", as_library_reader(header)):
        with failing_as(lambda error: f"{header.path}: general.architecture {header.architecture!r}: {_reason(error)}"):
            document, _ = PreTrainedConfig.get_config_dict(folder, gguf_file=header.path.name)
        document.pop("_model_name_or_path", None)
        require_sane(header.path, document)
        _require_sizes(header, document)
        document.update(_rope_scaling(header, document))
        _add_attention(header, document)
        with failing_as(lambda error: f"{header.path}: its tokenizer could not be read: {_reason(error)}"):
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=header.path.name, trust_remote_code=False)
    _set_split(header, tokenizer.backend_tokenizer)
    _set_prefix(header, tokenizer.backend_tokenizer)
    tokenizer.backend_tokenizer.add_special_tokens(sorted(_TURN_ENDS.intersection(tokenizer.get_vocab())))
    tokenizer.save_pretrained(folder)
    _write_templates(header, folder)
    # The families' own classes would ignore the file's tokenizer.
    _change(folder / "tokenizer_config.json", lambda settings: {"tokenizer_class": "PreTrainedTokenizerFast"})
    # transformers adds GPT-2's <|endoftext|> where the file has none, as a token that the model lacks.
    count = len(header.get("tokenizer.ggml.tokens", list, []))
    _change(
        folder / "tokenizer.json",
        lambda stated: {"added_tokens": [token for token in stated["added_tokens"] if token["id"] < count]},
    )
    (folder / "generation_config.json").write_text(json.dumps(_generation(header)), encoding="utf-8")
    (folder / CONFIG).write_text(json.dumps(document), encoding="utf-8")  # last: it marks the folder as complete


def _change(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Sets keys of a JSON file's object."""
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(document | change(document)), encoding="utf-8")


def _add_attention(header: Header, config: dict[str, Any]) -> None:
    """Adds settings of attention that transformers does not map for all families."""
    family, prefix = header.architecture, f"{header.architecture}."
    head_dim = header.get(f"{prefix}attention.key_length", int)
    if head_dim is not None:
        config.setdefault("head_dim", head_dim)
    for key, name in _UNMAPPED.get(family, {}).items():
        if value := header.get(prefix + key, (int, float)):  # 0 is none
            config[name] = value
    if family not in (*_PARTLY_ROTARY, *_LARGE_GEMMA):
        return
    width = header.get(f"{prefix}embedding_length", int, 0) // (header.get(f"{prefix}attention.head_count", int) or 1)
    rotary = header.get(f"{prefix}rope.dimension_count", int, 0)
    if family in _PARTLY_ROTARY and 0 < rotary < (head_dim or width):
        config["partial_rotary_factor"] = rotary / (head_dim or width)
    if _LARGE_GEMMA.get(family) == config["num_hidden_layers"]:
        config["query_pre_attn_scalar"] = width


def _require_sizes(header: Header, config: dict[str, Any]) -> None:
    """Refuses attention without heads, and more layers than the file has, which transformers would allocate."""
    numbered = [int(match[1]) for name in header.tensors if (match := _LAYER.match(name))]
    layers, stored = config.get("num_hidden_layers"), 1 + max(numbered, default=-1)
    if not isinstance(layers, int) or not 1 <= layers <= stored:
        key = f"{header.architecture}.block_count"
        raise BuildError(f"{header.path}: {key} is {str(layers)[:20]}; expected 1 to {stored}, the layers in it")
    for name, key in (("num_attention_heads", "head_count"), ("num_key_value_heads", "head_count_kv")):
        heads = config.get(name)
        if isinstance(heads, int) and heads < 1:
            raise BuildError(f"{header.path}: {header.architecture}.attention.{key} is {heads}; expected at least 1")


def _set_split(header: Header, tokenizer: Tokenizer) -> None:
    """Sets the tokenizer to split texts as the file states; transformers splits all unknown kinds like GPT-2."""
    kind = header.get("tokenizer.ggml.pre", str, "default")
    if kind in _WHOLE_WORDS and isinstance(tokenizer.model, BPE):
        tokenizer.model.ignore_merges = True
    qwen = header.architecture.startswith("qwen")
    if kind in _LIKE_QWEN2 if qwen else not isinstance(tokenizer.pre_tokenizer, ByteLevel) or kind in _LIKE_GPT2:
        return
    if qwen or kind not in _SINGLE_DIGITS:
        raise BuildError(
            f"{header.path}: tokenizer.ggml.pre is {kind[:40]!r}, a way to split text that transformers does not know; "
            f"{_ORIGINAL}"
        )
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])


def _set_prefix(header: Header, tokenizer: Tokenizer) -> None:
    """Puts a space before texts, or none, as the file states.

    transformers always puts one, but not before a text that begins with one, nor after a special token.
    """
    if not isinstance(tokenizer.pre_tokenizer, Metaspace):
        return
    if header.get("tokenizer.ggml.add_space_prefix", bool, True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = None
        return
    tokenizer.pre_tokenizer.prepend_scheme = "never"
    # Without the removal of a first space.
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _write_templates(header: Header, folder: Path) -> None:
    """Writes the templates that have names; transformers reads the default one."""
    for name in header.get("tokenizer.chat_templates", list, []):
        template = header.get(f"tokenizer.chat_template.{name}", str)
        if template is not None and re.fullmatch(r"\w{1,64}", str(name)):
            path = folder / "additional_chat_templates" / f"{name}.jinja"
            path.parent.mkdir(exist_ok=True)
            path.write_text(template, encoding="utf-8")


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return "".join(letter if letter.isprintable() else "?" for letter in text) or type(error).__name__


def _generation(header: Header) -> dict[str, Any]:
    """The content of ``generation_config.json``: tokens that end a text, and the file's sampling settings."""
    declared = [header.get(f"tokenizer.ggml.{name}_token_id", int) for name in _ENDS]
    tokens = header.get("tokenizer.ggml.tokens", list, [])
    turn_ends = [number for number, token in enumerate(tokens) if token in _TURN_ENDS]
    ends = list(dict.fromkeys([*(end for end in declared if end is not None), *turn_ends]))
    settings: dict[str, Any] = {"eos_token_id": ends} if ends else {}
    for name, key in _SAMPLING.items():
        value = header.get(f"general.sampling.{name}", (int, float))
        if value is not None:
            settings |= {"do_sample": True, key: value}
    return settings


def _rope_scaling(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    """The scaling of rotary frequencies, which transformers' mapping mostly ignores."""
    if config.get("rope_scaling") or config.get("rope_parameters", {}).get("rope_type", "default") != "default":
        return {}
    prefix = f"{header.architecture}.rope"
    theta = header.get(f"{prefix}.freq_base", float, 10000.0)
    # Older files have one key, the factor.
    factor = header.get(f"{prefix}.scaling.factor", float, header.get(f"{prefix}.scale_linear", float, 1.0)) or 1.0
    kind = header.get(f"{prefix}.scaling.type", str, "none" if factor == 1.0 else "linear")
    if "rope_freqs.weight" in header.tensors:
        factors = _factors(header, "rope_freqs.weight")
        scaling = {"rope_type": "llama3", "factor": float(factors.max(initial=1.0)), **_LLAMA3}
        expected = _llama3_factors(theta, len(factors), scaling)
        if not np.allclose(factors, expected, rtol=1e-3):
            raise BuildError(
                f"{header.path}: tensor 'rope_freqs.weight' holds other factors than Llama 3's scaling by "
                f"{scaling['factor']:g}; {_ORIGINAL}"
            )
        return {"rope_scaling": scaling}
    original = header.get(f"{prefix}.scaling.original_context_length", int)
    if "rope_factors_short.weight" in header.tensors and "rope_factors_long.weight" in header.tensors:
        kind = "longrope"
    if kind == "longrope" and original:
        scaling = {
            f"{name}_factor": _factors(header, f"rope_factors_{name}.weight").tolist() for name in ("short", "long")
        }
        length = {"original_max_position_embeddings": original}  # in both places, as in Phi-3's own configuration
        return {"rope_scaling": {"rope_type": kind, **scaling, **length}, **length}
    if kind in ("none", ""):
        return {}
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn" and original:
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        return {"rope_scaling": {**scaling, **_yarn(header, f"{prefix}.scaling", factor)}}
    raise BuildError(
        f"{header.path}: {prefix}.scaling.type is {kind[:40]!r}; expected none, linear, or yarn or longrope with "
        f"an original context length; {_ORIGINAL}"
    )


def _yarn(header: Header, prefix: str, factor: float) -> dict[str, float]:
    """YaRN's settings in a file, beside the factor."""
    ramp = {name: header.get(f"{prefix}.yarn_{name}", float) for name in ("beta_fast", "beta_slow")}
    settings = {name: value for name, value in ramp.items() if value is not None}
    # llama.cpp multiplies attention's own factor by it.
    attention = header.get(f"{prefix}.yarn_attn_factor", float, header.get(f"{prefix}.attn_factor", float, 1.0))
    if not (factor > 0 and math.isfinite(factor)):
        raise BuildError(f"{header.path}: {prefix}.factor is {factor:g}; expected a number above 0; {_ORIGINAL}")
    if attention != 1.0:
        settings["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
    for name, usual in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        value = header.get(f"{prefix}.{name}", float, usual)
        if value != usual:
            raise BuildError(f"{header.path}: {prefix}.{name} is {value:g}; expected {usual:g}; {_ORIGINAL}")
    return settings


def _factors(header: Header, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The divisors of rotary frequencies that a tensor holds."""
    if name not in header.tensors:
        raise BuildError(f"{header.path}: tensor {name!r} is missing; {_ORIGINAL}")
    place = header.tensors[name]
    return gguf.dequantize(place.data, place.kind).astype(np.float64).reshape(-1)


def _llama3_factors(theta: float, count: int, scaling: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The divisor of each rotary frequency."""
    waves = 2 * math.pi * theta ** (np.arange(count) / count)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = ((scaling["original_max_position_embeddings"] / waves - low) / (high - low)).clip(0, 1)
    divisor = (1 - smooth) / scaling["factor"] + smooth
    return 1 / divisor
