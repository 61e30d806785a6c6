"""Loading of Hugging Face causal LMs and of the facts that graphs need about them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from specexport.contract.errors import BuildError
from specexport.contract.manifest import GenerationDefaults
from specexport.contract.model import CacheLayer, StateLayer
from specexport.exporter.checkpoints.config import (
    load_causal_lm,
    quantized_in,
    read_model_config,
    require_stored,
)
from specexport.exporter.checkpoints.documents import read_object
from specexport.exporter.checkpoints.generation import read_generation
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.checkpoints.stored import StoredTensor
from specexport.exporter.checkpoints.templates import chat_templates
from specexport.graphs.attention import ATTENTION_NAME, PassThroughCache, Probe, lowering, sample_masks
from specexport.graphs.experts import EXPERTS_NAME
from specexport.graphs.recurrent import StateProbe, recurrent, take_over
from specexport.graphs.rotary import freeze_frequencies

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model")
"""Names of sentencepiece files; tiktoken uses some of them too."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model, in fp32, whose attention goes through :mod:`specexport.graphs.attention`.

    Its large matrices stay in their files (:mod:`specexport.exporter.checkpoints.streamed`).

    Attributes:
        source: the user's folder or hub id.
        path: the local folder.
        family: transformers' ``model_type``.
        model: the model, in evaluation mode.
        cache: heads and sizes of each layer with attention.
        states: the recurrent states of each layer without attention, by the layer's index.
        vocab_size: width of the logits.
        input_vocab: rows of the embedding.
        max_positions: longest sequence that the model supports with rotary frequencies independent of the length.
        parameters: number of parameters, tied ones counted once.
        eos_token_ids: tokens that end a text.
        generation: the model's defaults for requests.
        tensors: the checkpoint's tensors by name.
        quantized_in: the format of its quantized matrices; empty for none.
    """

    source: str
    path: Path
    family: str
    model: Any
    cache: tuple[CacheLayer, ...]
    vocab_size: int
    input_vocab: int
    max_positions: int
    parameters: int
    eos_token_ids: tuple[int, ...]
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    quantized_in: str = ""
    states: dict[int, StateLayer] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        """The number of decoder layers."""
        return int(self.model.config.num_hidden_layers)


def load_checkpoint(source: str) -> Checkpoint:
    """Loads the model in fp32 and probes its attention layers.

    Raises:
        BuildError: the checkpoint cannot be found or loaded, or its family cannot be traced.
    """
    path = locate(source)
    config = read_model_config(path)
    generation, eos = read_generation(path, config)
    require_stored(path, config)
    family = str(config.model_type)
    try:
        model, loaded, tensors = load_causal_lm(
            path,
            config,
            streamed=True,
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            experts_implementation=EXPERTS_NAME,
        )
        model.eval()
    except BuildError:
        raise
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise BuildError(f"{path}: model family '{family}' could not be loaded: no {error}") from error
        raise BuildError(
            f"{path}: model family '{family}' is not supported: it does not use transformers' attention interface"
        ) from error
    except Exception as error:  # model code raises exceptions of any kind
        raise BuildError(f"{path}: model family '{family}' could not be loaded: {error}") from error
    if loaded["missing_keys"]:  # transformers would initialize them at random
        raise BuildError(
            f"{path}: the weights lack {min(loaded['missing_keys'])!r}, which {path / 'config.json'} asks for; "
            "expected the configuration that they were saved with"
        )
    max_positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(max_positions, int):
        raise BuildError(f"{path / 'config.json'}: no max_position_embeddings; model family '{family}' is unsupported")
    max_positions = freeze_frequencies(model, max_positions)
    head = model.get_output_embeddings()
    if head is None:
        raise BuildError(f"{path}: model family '{family}' has no language-model head; expected a causal LM")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    take_over(model)
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
        parameters=sum(p.numel() for p in model.parameters()),
        eos_token_ids=eos,
        generation=generation,
        tensors=tensors,
        quantized_in=(quantized_in(path) or ("",))[0],
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
    """Runs two tokens to see what each layer caches: works for every family, whatever its configuration's names."""
    probe, states = Probe(), StateProbe()
    layers = int(model.config.num_hidden_layers)
    ids = torch.zeros(1, 2, dtype=torch.int64)
    try:
        with torch.no_grad(), lowering(probe), recurrent(states), sample_masks(max_positions):
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


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer in the form that the runtime needs.

    Attributes:
        tokenizer: the fast tokenizer.
        chat_templates: the Jinja templates by name.
        special_tokens: ``bos_token`` and the like, for chat templates.
        eos_token_id: the tokenizer's own token that ends a text.
        split_special_tokens: whether special tokens in a text are read as text.
    """

    tokenizer: Tokenizer
    chat_templates: dict[str, str]
    special_tokens: dict[str, str]
    eos_token_id: int | None = None
    split_special_tokens: bool = False


def load_tokenizer(path: Path) -> TokenizerFiles:
    """Loads the tokenizer of a checkpoint folder as a ``tokenizers.Tokenizer`` without truncation and padding.

    Raises:
        BuildError: there is none, or it has no fast form.
    """
    read_model_config(path)  # transformers reads the kind of tokenizer from it
    try:
        loaded = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # from missing files to malformed JSON
        broken = next((why for name in _TOKENIZER_FILES if (why := _fault(path / name)) is not None), None)
        reason = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise BuildError(
            _missing_reader(path) or broken or f"{path}: its tokenizer could not be loaded: {reason}"
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise BuildError(
            f"{path}: its tokenizer ({type(loaded).__name__}) has no fast form; expected one that a tokenizer.json can "
            "hold"
        )
    special = {name: str(token) for name, token in loaded.special_tokens_map.items() if isinstance(token, str)}
    backend.no_truncation()
    backend.no_padding()
    end = loaded.eos_token_id
    splits = bool(loaded.split_special_tokens)
    templates = chat_templates(path, loaded)
    return TokenizerFiles(backend, templates, special, end if isinstance(end, int) else None, splits)


def _fault(path: Path) -> str | None:
    """The fault of a file that should hold a JSON object; None if there is none or no file."""
    if path.is_file():
        try:
            read_object(path)
        except BuildError as error:
            return str(error)
    return None


def _missing_reader(folder: Path) -> str | None:
    """The package to install for a folder's tokenizer; transformers may name another."""
    if (folder / "tokenizer.json").is_file():
        return None
    for file in map(folder.joinpath, _SENTENCEPIECE):
        if file.is_file():
            with file.open("rb") as stream:  # tiktoken's files are lines of text
                library = "sentencepiece" if stream.read(1) == b"\n" else "tiktoken"
            if find_spec(library) is None:
                return (
                    f"{file}: read by {library}, which is not installed; install it with: pip install {library}, or "
                    "choose a checkpoint that has a tokenizer.json"
                )
    return None


TRANSFORMERS_VERSION = transformers.__version__
