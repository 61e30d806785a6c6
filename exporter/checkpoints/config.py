"""A checkpoint's configurations and tensor shapes, checked before anything is made of them.

transformers believes a configuration: a layer that the weights lack is drawn at random, and one of a billion is made.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specexport.contract.errors import BuildError
from specexport.exporter.checkpoints.adapters import merged
from specexport.exporter.checkpoints.gguf.folder import header_of
from specexport.exporter.checkpoints.gguf.tensors import format_of, tensors_of
from specexport.exporter.checkpoints.locate import ADAPTER, locate, unreadable
from specexport.exporter.checkpoints.locate import INDEX as INDEX
from specexport.exporter.checkpoints.locate import SINGLE as SINGLE
from specexport.exporter.checkpoints.outline import ModelOutline, Parameter
from specexport.exporter.checkpoints.quantized import Kind, dequantized, quantization
from specexport.exporter.checkpoints.quiet import quiet
from specexport.exporter.checkpoints.stored import CONFIG, StoredTensor, require_sane, stored_tensors
from specexport.exporter.checkpoints.streamed import StandIns

GENERATION = "generation_config.json"
_MAX_BYTES = 16 << 20
_MAX_INDEX = 64 << 20
_TEXT_PART = "text_config"
_TEXT_PREFIXES = {"model.language_model.": "model.", "language_model.": "", "lm_head.": "lm_head.", "mtp.": "mtp."}
"""Where models that read more than text keep their language model, and what a checkpoint of that alone says instead."""


def meta_model(source: str | Path) -> Any:
    """A checkpoint's model without its weights, which only its configuration is read for; an adapter's is its base.

    Raises:
        BuildError: the configuration cannot be read.
    """
    folder = locate(str(source), weights=False)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(read_model_config(folder))
    except (ValueError, KeyError) as error:
        raise BuildError(f"{source}: its configuration cannot be read: {error}") from error


def outlined(model: Any, config: Any) -> ModelOutline:
    """What a model is made of whose layers are configured like transformers' own."""
    sizes, shares = text_sizes(config), _expert_shares(model, config)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    head = model.lm_head.weight if hasattr(model, "lm_head") else model.get_output_embeddings().weight
    parameters = (
        Parameter(tuple(one.shape), id(one) in tables, one is head, shares.get(id(one))) for one in model.parameters()
    )
    both = 2 * sizes.head_dim
    if (latent := getattr(config, "qk_nope_head_dim", None)) is not None:
        both = latent + config.qk_rope_head_dim + config.v_head_dim
    return ModelOutline(
        parameters=tuple(parameters),
        hidden=config.hidden_size,
        intermediate=sizes.intermediate_size,
        vocab=config.vocab_size,
        layers=config.num_hidden_layers,
        layer_types=frozenset(getattr(config, "layer_types", None) or ()),
        row=int(config.num_hidden_layers * sizes.key_value_heads * both * 2),
    )


def _expert_shares(model: Any, config: Any) -> dict[int, float]:
    """The share of a mixture's weights that a token uses, top-k of all experts: by the id of their parameter."""
    stacks = [module for module in model.modules() if hasattr(module, "is_transposed") and hasattr(module, "has_gate")]
    used = config.num_experts_per_tok if stacks else 0
    return {id(p): min(1.0, used / len(p)) for module in stacks for p in module.parameters()}


def read_model_config(folder: Path) -> Any:
    """The configuration of a checkpoint's folder, as transformers reads it; code beside it is never run.

    Of a model that reads pictures or sound as well it is that of the language model, whose tensors
    :func:`checkpoint_tensors` yields.

    Raises:
        BuildError: it is no JSON object, of a family that transformers does not know, or a number in it is absurd;
            names the file and the field.
    """
    path = folder / CONFIG
    document = _document(path, _MAX_BYTES)
    require_sane(path, document)
    try:
        with quiet():
            return _language_model(AutoConfig.from_pretrained(folder, trust_remote_code=False), document)
    except Exception as error:  # transformers raises whatever the family's code raises
        raise BuildError(f"{path}: {error or type(error).__name__}") from error


def _language_model(config: Any, document: dict[str, Any]) -> Any:
    """The configuration of the language model: the whole one, or the part of a model that reads more than text.

    Args:
        config: as transformers reads it.
        document: the file, which tells what was stated from what is a default.
    """
    if not isinstance(document.get(_TEXT_PART), dict):
        return config
    text = config.get_text_config()
    if text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"{_TEXT_PART} is of the family '{text.model_type}', of which transformers has no causal LM")
    for name in ("dtype", "eos_token_id", "tie_word_embeddings"):
        if {name, f"torch_{name}"} & document.keys():  # what the whole model says holds for its parts
            setattr(text, name, getattr(config, name))
    return text


class TextSizes(NamedTuple):
    """Sizes of a language model that its family's configuration may leave out, or call by its own name."""

    key_value_heads: int
    head_dim: int
    intermediate_size: int


def text_sizes(config: Any) -> TextSizes:
    """The configuration's values, or the usual ones; transformers' ``attribute_map`` knows other names."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    return TextSizes(
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or hidden // heads,
        getattr(config, "intermediate_size", None) or 4 * hidden,
    )


def layers_in(folder: Path) -> int:
    """How many decoder layers a checkpoint's configuration says it has."""
    return int(read_model_config(folder).num_hidden_layers)


def require_stored(folder: Path, config: Any) -> None:
    """Compares the sizes that a configuration gives with the tensors of the checkpoint, by the headers of its files.

    Raises:
        BuildError: a file is missing, malformed or outside the folder, or the model would have layers, tensors or
            shapes that the weights do not have; names the file, and the field or the tensor.
    """
    stored = {tensor.name: tensor for tensor in checkpoint_tensors(folder)}
    path = folder / CONFIG
    layers = getattr(config, "num_hidden_layers", None)
    numbered = [int(match[1]) for name in stored if (match := re.search(r"\.(\d+)\.", f".{name}"))]
    there = 1 + max(numbered, default=-1)
    if isinstance(layers, int) and layers > there:
        raise BuildError(f"{path}: num_hidden_layers is {layers}, but the weights have {there} layers")
    try:
        with quiet(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
    except Exception as error:  # as above
        why = str(error or type(error).__name__)[:300]  # some list all families there are
        raise BuildError(f"{path}: model family '{config.model_type}' could not be loaded: {why}") from error
    for name, parameter in model.state_dict().items():
        found = stored.get(name) or stored.get(name.removeprefix(f"{model.base_model_prefix}."))
        if found is not None and found.shape != tuple(parameter.shape):
            raise BuildError(
                f"{path}: its sizes make tensor {name!r} {list(parameter.shape)}, but the weights hold "
                f"{list(found.shape)}; expected the configuration that the weights were saved with"
            )
    described = sum(parameter.numel() for parameter in model.parameters())
    held = sum(torch.Size(tensor.shape).numel() for tensor in stored.values())
    if described > 2 * held:
        raise BuildError(f"{path}: describes {described:,} parameters, but the weights hold {held:,}")


def stored_table(folder: Path, *, head: bool) -> StoredTensor:
    """The matrix that a checkpoint looks its tokens up in, or, with ``head``, the one that its logits are made with.

    Raises:
        BuildError: the weights hold none.
    """
    model = _outline(folder)
    table = (model.get_output_embeddings() if head else model.get_input_embeddings()).weight
    names = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is table]
    names += [name.removeprefix(f"{model.base_model_prefix}.") for name in names]
    found = next((tensor for tensor in checkpoint_tensors(folder) if tensor.name in names), None)
    if found is None:
        raise BuildError(f"{folder}: the weights lack {names[0]!r}; expected the files that save_pretrained writes")
    return found


def quantized_in(folder: Path) -> tuple[str, Kind | Literal["stored"]] | None:
    """The format that a checkpoint's matrices are quantized in, and the precision that holds them as they are.

    Raises:
        BuildError: nothing here reads the format.
    """
    if (header := header_of(folder)) is not None:
        return format_of(header), "stored"
    path = folder / CONFIG
    return quantization(path, _document(path, _MAX_BYTES))


def load_causal_lm(
    folder: Path, config: Any, *, streamed: bool = False, **how: Any
) -> tuple[Any, dict[str, Any], dict[str, StoredTensor]]:
    """A model as transformers loads it, from safetensors; quantized matrices become floating-point ones.

    Args:
        folder: the checkpoint.
        config: its configuration.
        streamed: leaves large matrices in their files; the model then runs within
            :func:`~specexport.exporter.checkpoints.streamed.read_weights`.
        how: more arguments of ``from_pretrained``.

    Returns:
        The model, what transformers says about loading it, and the checkpoint's tensors by name.

    Raises:
        BuildError: the files are wrong; transformers raises whatever else there is.
    """
    if quantized_in(folder) is not None and hasattr(config, "quantization_config"):
        config = copy.deepcopy(config)
        del config.quantization_config  # else transformers would ask for the library that made it
    with quiet():
        with torch.device("meta"):
            outline = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
        stand_ins = StandIns(outline)
        stored: dict[str, StoredTensor] = {}
        held: dict[str, torch.Tensor] = {}
        for tensor in checkpoint_tensors(folder):
            stored[tensor.name] = tensor
            held[tensor.name] = stand_ins.held(tensor) if streamed else tensor.read()
        model, loaded = type(outline).from_pretrained(
            None, state_dict=held, config=config, output_loading_info=True, **how
        )
        stand_ins.find(model, stored)
        return model, loaded, stored


def checkpoint_tensors(folder: Path) -> Iterator[StoredTensor]:
    """The tensors of the files that transformers reads, quantized matrices as those they stand for.

    Of a model that reads pictures or sound as well only those of the language model, under the names that they have in
    a checkpoint of that alone.
    """
    if (header := header_of(folder)) is not None:
        return tensors_of(header, _outline(folder))
    path = folder / CONFIG
    document = _document(path, _MAX_BYTES)
    tensors = dequantized(path, document, _files(folder))
    text_alone = not isinstance(document.get(_TEXT_PART), dict)
    if (folder / ADAPTER).is_file():
        if not text_alone or quantization(path, document) is not None:
            raise BuildError(
                f"{folder / ADAPTER}: an adapter of a model that is quantized or reads more than text; merge it with "
                "peft (merge_and_unload) into the model as it was trained, and build from what save_pretrained writes"
            )
        return merged(folder, _outline, tensors)
    if text_alone:
        return tensors
    return (replace(one, name=name) for one in tensors if (name := _name_in_text(one.name)) is not None)


def _outline(folder: Path) -> Any:
    """A checkpoint's model on torch's meta device."""
    with quiet(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(read_model_config(folder), trust_remote_code=False)


def _name_in_text(name: str) -> str | None:
    """The name of a language model's tensor in a checkpoint of that alone; None for what is no part of it."""
    for prefix, own in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
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
    placed = _document(path, _MAX_INDEX).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise BuildError(f"{path}: weight_map is no object of file names by tensors; fetch the checkpoint again")
    for file in sorted(set(placed.values())):
        if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise BuildError(f"{path}: weight_map: {file!r} is no safetensors file of the folder; refusing to read it")
        if not (folder / file).is_file():
            raise BuildError(f"{folder / file}: missing, and {INDEX} names it; fetch the checkpoint again")
        yield from stored_tensors(folder / file)


def read_document(path: Path) -> dict[str, Any]:
    """A small JSON file's object.

    Raises:
        BuildError: it is too large, no JSON or no object.
    """
    return _document(path, _MAX_BYTES)


def _document(path: Path, most: int) -> dict[str, Any]:
    size = path.stat().st_size
    if size > most:
        raise BuildError(f"{path}: {size} bytes; expected at most {most}")
    try:
        found = json.loads(path.read_bytes())  # not msgspec: Python, which wrote it, writes Infinity too
    except (ValueError, RecursionError) as error:
        raise BuildError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BuildError(f"{path}: holds {type(found).__name__}; expected an object")
    return found
