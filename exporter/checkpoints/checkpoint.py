"""Loads Hugging Face causal LMs, for tracing or as references to compare with."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specexport.contract.errors import BuildError, BundleError
from specexport.contract.manifest import GenerationDefaults
from specexport.contract.model import CacheLayer, Model, StateLayer
from specexport.exporter.checkpoints.config import load_causal_lm, quantized_in, read_model_config, require_stored
from specexport.exporter.checkpoints.generation import read_generation
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.checkpoints.quiet import failing_as
from specexport.exporter.checkpoints.stored import StoredTensor
from specexport.graphs.attention import ATTENTION_NAME, PassThroughCache, Probe, lowering, sample_masks
from specexport.graphs.experts import EXPERTS_NAME
from specexport.graphs.layers import hidden_and_logits, keep_first_layers
from specexport.graphs.recurrent import StateProbe, patch_recurrence
from specexport.graphs.rotary import freeze_frequencies, take_one_position_row

Array = npt.NDArray[Any]
_IN_LAYER = re.compile(r"\.\d+\.")
_SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "scales")
"""Names of the scales of quantized matrices."""


@dataclass(frozen=True)
class Checkpoint:
    """A model loaded in fp32 whose attention runs through :mod:`specexport.graphs.attention`.

    Large matrices stay in their files (:mod:`specexport.exporter.checkpoints.stored`).

    Attributes:
        source: the user's folder or hub id.
        family: transformers' ``model_type``.
        cache: heads and sizes of each layer with attention.
        states: the recurrent states of each layer without attention, by the layer's index.
        vocab_size: width of the logits.
        input_vocab: rows of the embedding.
        max_positions: the longest sequence over which the model's rotary frequencies stay the same.
        generation: the model's defaults for requests.
        quantized_in: the format of its quantized matrices; empty if there are none.
    """

    source: str
    path: Path
    family: str
    model: Any
    cache: tuple[CacheLayer, ...]
    vocab_size: int
    input_vocab: int
    max_positions: int
    eos_token_ids: tuple[int, ...] = ()
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    quantized_in: str = ""
    states: dict[int, StateLayer] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """The number of parameters, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def layers(self) -> int:
        return int(self.model.config.num_hidden_layers)


def load_checkpoint(source: str) -> Checkpoint:
    """Loads the model in fp32 and probes its attention layers."""
    path = locate(source)
    config = read_model_config(path)
    generation, eos = read_generation(path, config)
    require_stored(path, config)
    family = str(config.model_type)

    def describe(error: Exception) -> str:
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
            reason = "is not supported: it does not use transformers' attention interface"
        else:
            reason = f"could not be loaded: {'no ' if isinstance(error, KeyError) else ''}{error}"
        return f"{path}: model family '{family}' {reason}"

    with failing_as(describe):
        model, loaded, tensors = load_causal_lm(
            path,
            config,
            streamed=True,
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            experts_implementation=EXPERTS_NAME,
        )
        model.eval()
    _require_configured(path, model, loaded, tensors)
    max_positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(max_positions, int):
        raise BuildError(f"{path / 'config.json'}: no max_position_embeddings; model family '{family}' is unsupported")
    max_positions = freeze_frequencies(model, max_positions)
    take_one_position_row(model)
    head = model.get_output_embeddings()
    if head is None:
        raise BuildError(f"{path}: model family '{family}' has no language-model head; expected a causal LM")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    patch_recurrence(model)
    cache, states = _probe(model, family, max_positions)
    return Checkpoint(
        source=source,
        path=path,
        family=family,
        model=model,
        cache=cache,
        states=states,
        vocab_size=int(head.weight.shape[0]),
        input_vocab=int(model.get_input_embeddings().weight.shape[0]),
        max_positions=max_positions,
        eos_token_ids=eos,
        generation=generation,
        tensors=tensors,
        quantized_in=(quantized_in(path) or ("",))[0],
    )


def _require_configured(
    path: Path, model: Any, loaded: Mapping[str, Iterable[str]], tensors: Mapping[str, StoredTensor]
) -> None:
    """Refuses weights that differ from the configuration; ``loaded`` is transformers' report of loading them."""
    if loaded["missing_keys"]:  # transformers would initialize them at random
        raise BuildError(
            f"{path}: the weights lack {min(loaded['missing_keys'])!r}, which {path / 'config.json'} asks for; "
            "expected the configuration that they were saved with"
        )
    modules = dict(model.named_modules())
    for name in loaded["unexpected_keys"]:
        module, _, part = name.rpartition(".")
        parent, numbered = module.rpartition(".")[0], _IN_LAYER.search(module)
        # Quantizers store biases of zeros, too.
        in_module = module in modules and ((part == "bias" and bool(tensors[name].read().any())) or part in _SCALES)
        # Such as a norm of queries. Layers after the model's last one are those of drafts.
        in_layer = part == "weight" and numbered and module not in modules and parent in modules
        if in_module or in_layer:
            raise BuildError(
                f"{path}: the weights have {name!r}, which {path / 'config.json'} leaves out; expected the "
                "configuration that they were saved with, such as model_type, attention_bias or quantization_config"
            )


@contextlib.contextmanager
def plain_transformers(model: Any) -> Iterator[None]:
    """Context in which a loaded model uses transformers' own attention and experts."""
    model.set_attn_implementation("eager")
    mixture = model.config._experts_implementation == EXPERTS_NAME
    if mixture:
        model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
        if mixture:
            model.set_experts_implementation(EXPERTS_NAME)


def _probe(model: Any, family: str, max_positions: int) -> tuple[tuple[CacheLayer, ...], dict[int, StateLayer]]:
    """Runs two tokens to find the cached sizes of each layer, which families' configurations name differently."""
    states = StateProbe()
    probe = Probe(states)
    layers = int(model.config.num_hidden_layers)
    ids = torch.zeros(1, 2, dtype=torch.int64)
    try:
        with torch.no_grad(), lowering(probe), sample_masks(max_positions):
            model(ids, position_ids=torch.arange(2)[None], past_key_values=PassThroughCache(layers), use_cache=True)
    except BuildError as error:
        raise BuildError(f"model family '{family}': {error}") from error
    except Exception as error:
        raise BuildError(
            f"model family '{family}' cannot be traced: it does not run through transformers' attention and cache "
            f"interfaces ({type(error).__name__}: {error})"
        ) from error
    if not probe.seen or (not states.seen and sorted(probe.seen) != list(range(layers))):
        raise BuildError(
            f"model family '{family}' cannot be traced: {layers} layers, but attention ran in layers "
            f"{sorted(probe.seen)}; expected one attention with its own cache in every layer, or in some, with "
            "convolutions in others"
        )
    order = {layer: index for index, layer in enumerate(sorted(probe.seen))}
    for module in model.modules() if states.seen else ():
        module.cache_index = order.get(getattr(module, "layer_idx", -1))
    return tuple(probe.seen[layer] for layer in order), dict(sorted(states.seen.items()))


def load_reference(path: Path, described: Model, layers: int | None = None) -> Any:
    """Loads a checkpoint, or its first ``layers``, in fp32 with plain transformers.

    Args:
        described: the manifest's entry of the model, which the checkpoint must match.

    Raises:
        BundleError: it does not match.
    """
    config = read_model_config(path)
    model, *_ = load_causal_lm(path, config, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    if layers is not None:
        keep_first_layers(model, layers)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    width = int(model.get_output_embeddings().weight.shape[0])
    if (parameters, width) != (described.parameters, described.vocab_size):
        raise BundleError(
            f"{path} is another model: {parameters:,} parameters and {width:,} logits, where the bundle was built from "
            f"{described.parameters:,} and {described.vocab_size:,}; pass the checkpoint the bundle was built from"
        )
    return model


def reference_logits(model: Any, text: Array) -> Array:
    """A model's logits after each token of a text, float32 ``[N,V]``."""
    with torch.no_grad():
        return model(torch.from_numpy(text)[None], use_cache=False).logits[0].float().numpy()


def reference_states(model: Any, text: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """A model's logits after each token of a text, ``[N,V]``, and the inputs of its head, ``[N,H]``."""
    ids = torch.from_numpy(text)[None]
    with torch.no_grad():
        hidden, logits = hidden_and_logits(model, ids, torch.ones_like(ids, dtype=torch.bool))
    return logits.float(), hidden[0].float()


def reference_embeds(model: Any, text: Array) -> Array:
    """The embeddings of a text's tokens, float32 ``[N,H]``, which the model accepts instead of tokens."""
    with torch.no_grad():
        return model.get_input_embeddings()(torch.from_numpy(text)).float().numpy()


def clamp_tokens(tokens: list[int], model: Any) -> Array:
    """Tokens as graphs read them: ids beyond the embedding become the last id."""
    return np.minimum(np.array(tokens), model.get_input_embeddings().weight.shape[0] - 1)
