"""A model's parameters from its ``config.json`` alone, for ``suggest`` and ``plan``, which run without torch.

Families with ordinary layers are listed here; tests compare each with transformers' modules. For other families, and
for sizes that a configuration leaves to its family's defaults, transformers creates the model on the meta device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specexport.contract.errors import BuildError
from specexport.exporter.checkpoints.documents import CONFIG, INDEX, SINGLE, read_object
from specexport.exporter.checkpoints.locate import locate

MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Configuration fields with the number of MTP layers."""
_MAX_SIZE = 1 << 24


class Parameter(NamedTuple):
    """A parameter of a model.

    Attributes:
        share: for a stack of experts, the share that a token uses; None for other parameters.
    """

    shape: tuple[int, ...]
    table: bool = False
    head: bool = False
    share: float | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model.

    Attributes:
        row: bytes of a token's keys and values in all layers, at 16 bits each.
        positions: the longest supported text, in tokens; None if the configuration does not say.
    """

    parameters: tuple[Parameter, ...]
    hidden: int
    intermediate: int
    vocab: int
    layers: int
    layer_types: frozenset[str]
    row: int
    positions: int | None = None

    @property
    def total(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def active(self) -> int:
        """The number of parameters that a token uses."""
        return round(
            sum((1 if parameter.share is None else parameter.share) * parameter.numel for parameter in self.parameters)
        )


class _Family(NamedTuple):
    """Differences of a family's layers from Llama's.

    Attributes:
        norms: number of norm vectors of the hidden size in a layer.
        head_norms: size of the norm vectors of queries and keys: ``head``, ``all`` heads, or empty for no norms.
        qkv_bias: whether there is a bias, or the configuration key that tells; likewise for other biases.
        true: configuration keys that are true by default.
        head_dim: default head size; None for the hidden size divided by the number of heads.
        experts: the configuration keys of the number and width of experts, for mixtures.
    """

    norms: int = 2
    norm_bias: bool = False
    head_norms: str = ""
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    true: tuple[str, ...] = ()
    gated: bool = True
    head_dim: int | None = None
    experts: tuple[str, str] | None = None


_TIED = ("tie_word_embeddings",)
_LLAMA = _Family(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias")
_ATTENTION_BIAS = _LLAMA._replace(mlp_bias=False)
_USE_BIAS = _Family(qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", true=_TIED)
_GLM = _Family(qkv_bias="attention_bias", true=("attention_bias",), head_dim=128)
FAMILIES: dict[str, _Family] = {
    "llama": _LLAMA,
    "arcee": _LLAMA._replace(gated=False),
    "ernie4_5": _USE_BIAS._replace(head_dim=128),
    "exaone4": _Family(head_norms="head"),
    "gemma": _ATTENTION_BIAS._replace(head_dim=256, true=_TIED),
    "gemma2": _ATTENTION_BIAS._replace(norms=4, head_dim=256, true=_TIED),
    "gemma3_text": _ATTENTION_BIAS._replace(norms=4, head_norms="head", head_dim=256, true=_TIED),
    "glm": _GLM,
    "glm4": _GLM._replace(norms=4),
    "granite": _LLAMA,
    "mistral": _Family(),
    "mixtral": _Family(experts=("num_local_experts", "intermediate_size")),
    "olmo2": _ATTENTION_BIAS._replace(head_norms="all"),
    "olmo3": _ATTENTION_BIAS._replace(head_norms="all"),
    "phi3": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _ATTENTION_BIAS._replace(head_norms="head", head_dim=128),
    "qwen3_moe": _ATTENTION_BIAS._replace(head_norms="head", experts=("num_experts", "moe_intermediate_size")),
    "seed_oss": _LLAMA._replace(o_bias="attention_out_bias", true=("attention_bias",), head_dim=128),
    "smollm3": _LLAMA._replace(true=_TIED),
    "starcoder2": _USE_BIAS._replace(norm_bias=True, true=(*_TIED, "use_bias"), gated=False),
}


class UnknownSizesError(Exception):
    """A configuration does not determine all sizes."""


_DRAFTS = {"eagle3": "--eagle3", "dflash": "--dflash", "medusa": "--medusa", "mlpspeculator": "--mlp-speculator"}
"""Words in the architectures of checkpoints that are no whole models, and the flags for these."""


def require_whole_model(folder: Path) -> None:
    """Refuses the checkpoint of a method's draft or heads.

    Raises:
        BuildError: it is one; names the flag for it.
    """
    config = read_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    kinds = [config.get(key) for key in ("architectures", "model_type", "speculators_model_type")]
    described = str(kinds).lower().replace("_", "")
    for kind, flag in _DRAFTS.items():
        if kind in described:
            raise BuildError(
                f"{folder / CONFIG}: describes no model of its own, but what another method drafts with; pass the "
                f"folder with {flag}"
            )


def model_sizes(source: str | Path) -> ModelSizes:
    """The sizes of a checkpoint's model, from its configuration only; for an adapter, of its base model.

    Raises:
        BuildError: the configuration cannot be read.
        ImportError: transformers is needed and not installed.
    """
    folder = locate(str(source), weights=False)
    try:
        document = json.loads((folder / CONFIG).read_bytes())
        if not isinstance(document, dict):
            raise UnknownSizesError
        return sizes_from_config(document)
    except (UnknownSizesError, OSError, ValueError, RecursionError):
        # Imported here: torch takes seconds.
        from specexport.exporter.checkpoints.config import meta_model, sizes_of

        model = meta_model(folder)
        return sizes_of(model, model.config)


def sizes_from_config(document: Mapping[str, Any]) -> ModelSizes:
    """The sizes that a ``config.json`` determines.

    Raises:
        UnknownSizesError: it does not determine all of them.
    """
    text = document.get("text_config")
    if isinstance(text, dict):  # the whole model's setting holds for its parts
        tied = document.get("tie_word_embeddings")
        document = text if tied is None else {**text, "tie_word_embeddings": tied}
    family = FAMILIES.get(str(document.get("model_type")))
    if family is None:
        raise UnknownSizesError
    sizes = _Sizes(document, family)
    kinds, positions = document.get("layer_types") or (), document.get("max_position_embeddings")
    return ModelSizes(
        parameters=tuple(_parameters(sizes, family)),
        hidden=sizes.hidden,
        intermediate=sizes.intermediate,
        vocab=sizes.vocab,
        layers=sizes.layers,
        layer_types=frozenset(map(str, kinds)),
        row=sizes.layers * sizes.key_value_heads * 2 * sizes.head_dim * 2,
        positions=positions if isinstance(positions, int) else None,
    )


def require_positions(tokens: int, positions: int, source: str) -> None:
    """Checks that a model supports a context."""
    if tokens > positions:
        raise BuildError(
            f"max_seq_len (max_model_len) is {tokens}, but {source} was made for {positions} positions; expected at "
            f"most {positions}",
            param="max_seq_len",
        )


def has_mtp(folder: Path, layers: int) -> bool:
    """Whether a checkpoint has exactly one MTP layer, by the names of its tensors."""
    try:
        counts = (json.loads((folder / CONFIG).read_bytes()).get(field) for field in MTP_COUNTS)
        if any(isinstance(count, int) and count > 1 for count in counts):
            return False
        if (folder / SINGLE).is_file():
            # Imported here, as running bundles does not need it.
            from safetensors import safe_open

            with safe_open(folder / SINGLE, framework="numpy") as file:
                names = list(file.keys())
        else:
            names = list(json.loads((folder / INDEX).read_bytes())["weight_map"])
    except Exception:  # a build reports the fault of the file
        return False
    return any(name.startswith(("mtp.", f"model.layers.{layers}.")) for name in names)


class _Sizes:
    """The sizes stated in a configuration."""

    def __init__(self, document: Mapping[str, Any], family: _Family) -> None:
        self._document, self._family = document, family
        self.hidden, self.intermediate = self.size("hidden_size"), self.size("intermediate_size")
        self.vocab, self.layers = self.size("vocab_size"), self.size("num_hidden_layers")
        self.heads, self.key_value_heads = self.size("num_attention_heads"), self.size("num_key_value_heads")
        stated = document.get("head_dim") or family.head_dim
        self.head_dim = stated or self.hidden // self.heads
        if not isinstance(self.head_dim, int) or not 0 < self.head_dim <= _MAX_SIZE:
            raise UnknownSizesError
        self.mixed = bool(document.get("mlp_only_layers")) or document.get("decoder_sparse_step", 1) != 1
        self.tied = self.has("tie_word_embeddings")

    def size(self, key: str) -> int:
        value = self._document.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_SIZE:
            raise UnknownSizesError
        return value

    def has(self, key: bool | str) -> bool:
        if isinstance(key, bool):
            return key
        value = self._document.get(key)
        return key in self._family.true if value is None else bool(value)


def _parameters(sizes: _Sizes, family: _Family) -> Iterator[Parameter]:
    hidden, intermediate = sizes.hidden, sizes.intermediate
    queries, rows = sizes.heads * sizes.head_dim, sizes.key_value_heads * sizes.head_dim
    yield Parameter((sizes.vocab, hidden), table=True, head=sizes.tied)
    if not sizes.tied:
        yield Parameter((sizes.vocab, hidden), head=True)
    norm = [Parameter((hidden,))] * (1 + family.norm_bias)
    layer = [Parameter(shape) for shape in ((queries, hidden), (rows, hidden), (rows, hidden), (hidden, queries))]
    layer += norm * family.norms
    if sizes.has(family.qkv_bias):
        layer += [Parameter((queries,)), Parameter((rows,)), Parameter((rows,))]
    if sizes.has(family.o_bias):
        layer.append(Parameter((hidden,)))
    if family.head_norms:
        layer += [
            Parameter((size,)) for size in ([sizes.head_dim] * 2 if family.head_norms == "head" else (queries, rows))
        ]
    up = 1 + family.gated
    if family.experts is not None:
        count, width = map(sizes.size, family.experts)
        if sizes.mixed:
            raise UnknownSizesError
        share = min(1.0, sizes.size("num_experts_per_tok") / count)
        layer.append(Parameter((count, hidden)))
        layer += [Parameter((count, *shape), share=share) for shape in ((up * width, hidden), (hidden, width))]
    else:
        layer += [Parameter((intermediate, hidden))] * up + [Parameter((hidden, intermediate))]
        if sizes.has(family.mlp_bias):
            layer += [Parameter((intermediate,))] * up + [Parameter((hidden,))]
    for _ in range(sizes.layers):
        yield from layer
    yield from norm
