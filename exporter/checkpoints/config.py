"""Reads configurations of checkpoints, and checks them against the stored tensors before a model is created.

transformers trusts a configuration: it would initialize missing layers at random, or allocate any number of them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specexport.contract.errors import BuildError
from specexport.exporter.checkpoints.adapters import merge_adapter
from specexport.exporter.checkpoints.documents import (
    ADAPTER,
    CONFIG,
    INDEX,
    SINGLE,
    read_index,
    read_object,
    require_sane,
)
from specexport.exporter.checkpoints.gguf.folder import header_of
from specexport.exporter.checkpoints.gguf.tensors import format_of, tensors_of
from specexport.exporter.checkpoints.locate import unreadable
from specexport.exporter.checkpoints.quantized import dequantize_tensors, quantization
from specexport.exporter.checkpoints.quiet import failing_as, quiet
from specexport.exporter.checkpoints.sizes import ModelSizes, Parameter
from specexport.exporter.checkpoints.stored import Kind, StandIns, StoredTensor, stored_tensors

_TEXT_PART = "text_config"
_TEXT_PREFIXES = {"model.language_model.": "model.", "language_model.": "", "lm_head.": "lm_head.", "mtp.": "mtp."}
"""Prefixes of the language model's tensors in multimodal and text-only checkpoints."""


def meta_model(folder: Path) -> Any:
    """A checkpoint's model on torch's meta device, from its configuration only; for an adapter, its base model."""
    return _create_meta_model(folder, read_model_config(folder))


def _create_meta_model(folder: Path, config: Any) -> Any:

    def describe(error: Exception) -> str:
        header = header_of(folder)
        path = folder / CONFIG if header is None else header.path
        reason = " ".join(str(error or type(error).__name__).split())[:300]  # some list all families
        return f"{path}: model family '{config.model_type}' could not be loaded: {reason}"

    with failing_as(describe), quiet(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)


def sizes_of(model: Any, config: Any) -> ModelSizes:
    """The sizes of a transformers model."""
    sizes, shares = text_sizes(config), _expert_shares(model, config)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    head = model.lm_head.weight if hasattr(model, "lm_head") else model.get_output_embeddings().weight
    parameters = (
        Parameter(tuple(tensor.shape), id(tensor) in tables, tensor is head, shares.get(id(tensor)))
        for tensor in model.parameters()
    )
    key_value_size = 2 * sizes.head_dim
    if (latent := getattr(config, "qk_nope_head_dim", None)) is not None:
        key_value_size = latent + config.qk_rope_head_dim + config.v_head_dim
    return ModelSizes(
        parameters=tuple(parameters),
        hidden=config.hidden_size,
        intermediate=sizes.intermediate_size,
        vocab=config.vocab_size,
        layers=config.num_hidden_layers,
        layer_types=frozenset(getattr(config, "layer_types", None) or ()),
        row=int(config.num_hidden_layers * sizes.key_value_heads * key_value_size * 2),
        positions=getattr(config, "max_position_embeddings", None),
    )


def _expert_shares(model: Any, config: Any) -> dict[int, float]:
    """The share of a mixture's weights that a token uses (top-k over experts), by the parameter's id."""
    stacks = [module for module in model.modules() if hasattr(module, "is_transposed") and hasattr(module, "has_gate")]
    used = config.num_experts_per_tok if stacks else 0
    return {id(p): min(1.0, used / len(p)) for module in stacks for p in module.parameters()}


def read_model_config(folder: Path) -> Any:
    """Reads transformers' configuration of a checkpoint folder; code in the folder is never run.

    For a multimodal model it is the language model's, like the tensors of :func:`checkpoint_tensors`.
    """
    return read_configs(folder)[1]


def read_configs(folder: Path) -> tuple[Any, Any]:
    """The whole configuration of a checkpoint folder, and its language model's."""
    path = folder / CONFIG
    document = read_object(path)
    require_sane(path, document)

    def describe(error: Exception) -> str:
        kind = document.get("model_type")
        if isinstance(kind, str) and kind not in CONFIG_MAPPING and "auto_map" not in document:
            return (
                f"{path}: model_type is {kind!r}, which transformers {transformers.__version__} does not know; "
                "expected a causal LM of a family that it has"
            )
        return f"{path}: {error or type(error).__name__}"

    with failing_as(describe), quiet():
        config = _read_config(folder, document)
        return config, _language_model(config, document)


def _read_config(folder: Path, document: dict[str, Any]) -> Any:
    scaling = document.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("type") == "su":
        # Longrope's first name. transformers knows it, but renames it too late to fill in longrope's fields.
        renamed = document | {"rope_scaling": scaling | {"type": "longrope"}}
        return CONFIG_MAPPING[document["model_type"]].from_dict(renamed)
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _language_model(config: Any, document: dict[str, Any]) -> Any:
    """The language model's configuration: ``config`` itself, or its text part in a multimodal model.

    ``document`` is the file's content, which distinguishes stated values from defaults.
    """
    if not isinstance(document.get(_TEXT_PART), dict):
        return config
    text = config.get_text_config()
    if text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"{_TEXT_PART} is of the family '{text.model_type}', for which transformers has no causal LM")
    for name in ("dtype", "eos_token_id", "tie_word_embeddings"):
        if {name, f"torch_{name}"} & document.keys():  # the whole model's setting holds for its parts
            setattr(text, name, getattr(config, name))
    return text


class TextSizes(NamedTuple):
    """Sizes of a language model that a family's configuration may leave out or rename."""

    key_value_heads: int
    head_dim: int
    intermediate_size: int


def text_sizes(config: Any) -> TextSizes:
    """The sizes in a configuration, or the usual defaults; transformers' ``attribute_map`` resolves other names."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    return TextSizes(
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or hidden // heads,
        getattr(config, "intermediate_size", None) or 4 * hidden,
    )


def require_stored(folder: Path, config: Any) -> None:
    """Compares a configuration's sizes with the tensors of the checkpoint, by the headers of its files."""
    stored = {tensor.name: tensor for tensor in checkpoint_tensors(folder)}
    path = folder / CONFIG
    layers = getattr(config, "num_hidden_layers", None)
    numbered = [int(match[1]) for name in stored if (match := re.search(r"\.(\d+)\.", f".{name}"))]
    stored_layers = 1 + max(numbered, default=-1)
    if isinstance(layers, int) and layers > stored_layers:
        raise BuildError(f"{path}: num_hidden_layers is {layers}, but the weights have {stored_layers} layers")
    model = _create_meta_model(folder, config)
    for name, parameter in model.state_dict().items():
        stored_tensor = stored.get(name) or stored.get(name.removeprefix(f"{model.base_model_prefix}."))
        if stored_tensor is not None and stored_tensor.shape != tuple(parameter.shape):
            raise BuildError(
                f"{path}: its sizes make tensor {name!r} {list(parameter.shape)}, but the weights hold "
                f"{list(stored_tensor.shape)}; expected the configuration that the weights were saved with"
            )
    described_numel = sum(parameter.numel() for parameter in model.parameters())
    stored_numel = sum(torch.Size(tensor.shape).numel() for tensor in stored.values())
    if described_numel > 2 * stored_numel:
        raise BuildError(f"{path}: describes {described_numel:,} parameters, but the weights hold {stored_numel:,}")


def stored_table(folder: Path, *, head: bool) -> StoredTensor:
    """The embedding matrix of a checkpoint, or, with ``head``, that of its language-model head."""
    model = meta_model(folder)
    table = (model.get_output_embeddings() if head else model.get_input_embeddings()).weight
    names = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is table]
    if head:  # the last of those that are tied, as its own may differ from the embedding
        names.reverse()
    names += [name.removeprefix(f"{model.base_model_prefix}.") for name in names]
    stored = {tensor.name: tensor for tensor in checkpoint_tensors(folder)}
    matching = next((stored[name] for name in names if name in stored), None)
    if matching is None:
        raise BuildError(f"{folder}: the weights lack {names[0]!r}; expected the files that save_pretrained writes")
    return matching


def quantized_in(folder: Path) -> tuple[str, Kind | Literal["stored"]] | None:
    """The format of a checkpoint's quantized matrices, and the precision that stores them unchanged."""
    if (header := header_of(folder)) is not None:
        return format_of(header), "stored"
    path = folder / CONFIG
    return quantization(path, read_object(path))


def precision_of_matrices(folder: Path) -> Literal["fp32", "fp16", "bf16"]:
    """The precision that stores the matrices of an unquantized checkpoint unchanged: their type, if all have the same.

    What its configuration says does not count, as it may be the type that the model was trained in.
    """
    types = {tensor.dtype for tensor in checkpoint_tensors(folder) if len(tensor.shape) > 1 and tensor.floating}
    return "bf16" if types == {"BF16"} else "fp16" if types == {"F16"} else "fp32"


def load_causal_lm(
    folder: Path, config: Any, *, streamed: bool = False, **options: Any
) -> tuple[Any, dict[str, Any], dict[str, StoredTensor]]:
    """Loads a model with transformers, from safetensors; quantized matrices are dequantized.

    Args:
        streamed: leave large matrices in their files; the model then runs within
            :func:`~specexport.exporter.checkpoints.stored.read_weights`.

    Returns:
        The model, transformers' report of loading it, and the checkpoint's tensors by name.

    Raises:
        BuildError: the files are invalid; transformers may raise other exceptions.
    """
    if quantized_in(folder) is not None and hasattr(config, "quantization_config"):
        config = copy.deepcopy(config)
        del config.quantization_config  # otherwise transformers would ask for the quantizer's library
    meta = _create_meta_model(folder, config)
    with quiet():
        stand_ins = StandIns(meta)
        stored: dict[str, StoredTensor] = {}
        state: dict[str, torch.Tensor] = {}
        for tensor in checkpoint_tensors(folder):
            stored[tensor.name] = tensor
            state[tensor.name] = stand_ins.tensor_to_load(tensor) if streamed else tensor.read()
        for name in _copies(meta, stored) if streamed else ():
            del state[name]
        model, loaded = type(meta).from_pretrained(
            None, state_dict=state, config=config, output_loading_info=True, **options
        )
        stand_ins.mark(model, stored)
        return model, loaded, stored


def _copies(meta: Any, stored: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Stored tensors that repeat one that they are tied to. transformers ties these, but cannot compare stand-ins."""
    for names in meta.all_tied_weights_keys.items():
        places = [
            next((place for place in (name, name.removeprefix(f"{meta.base_model_prefix}.")) if place in stored), None)
            for name in names
        ]
        if None not in places:
            copy, original = (stored[str(place)] for place in places)
            described = [(tensor.shape, tensor.dtype) for tensor in (copy, original)]
            if described[0] == described[1] and torch.equal(copy.read(), original.read()):
                yield copy.name


def checkpoint_tensors(folder: Path) -> Iterator[StoredTensor]:
    """The tensors of the files that transformers reads; quantized matrices are dequantized when they are read.

    For a multimodal model, only those of the language model, named as in a text-only checkpoint.
    """
    if (header := header_of(folder)) is not None:
        return tensors_of(header, meta_model(folder))
    path = folder / CONFIG
    document = read_object(path)
    tensors = dequantize_tensors(path, document, _files(folder))
    text_alone = not isinstance(document.get(_TEXT_PART), dict)
    if (folder / ADAPTER).is_file():
        if not text_alone or quantization(path, document) is not None:
            raise BuildError(
                f"{folder / ADAPTER}: an adapter of a model that is quantized or reads more than text; merge it with "
                "peft (merge_and_unload) into the model as it was trained, and build from what save_pretrained writes"
            )
        return merge_adapter(folder, meta_model, tensors)
    if text_alone:
        return tensors
    return (replace(tensor, name=name) for tensor in tensors if (name := _name_in_text(tensor.name)) is not None)


def _name_in_text(name: str) -> str | None:
    """A tensor's name in a text-only checkpoint; None if the language model lacks it."""
    for prefix, text_prefix in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return text_prefix + name.removeprefix(prefix)
    return None


def _files(folder: Path) -> Iterator[StoredTensor]:
    if (folder / SINGLE).is_file():
        yield from stored_tensors(folder / SINGLE)
        return
    path = folder / INDEX
    if not path.is_file() and (pickled := sorted(file.name for file in folder.glob("*.bin"))):
        raise BuildError(f"{folder}: {unreadable(', '.join(pickled))}")
    if not path.is_file():
        raise BuildError(f"{folder}: neither {SINGLE} nor {INDEX}; expected the files that save_pretrained writes")
    placed = read_index(path)
    for file in sorted(set(placed.values())):
        if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise BuildError(f"{path}: weight_map: {file!r} is not a safetensors file in the folder; refusing it")
        if not (folder / file).is_file():
            raise BuildError(f"{folder / file}: missing, and {INDEX} names it; fetch the checkpoint again")
        # A file may also have older copies of tensors that the index places in another.
        yield from (tensor for tensor in stored_tensors(folder / file) if placed.get(tensor.name, file) == file)
