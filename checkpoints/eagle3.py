"""EAGLE-3 drafts as ``SafeAILab/EAGLE`` and as the ``speculators`` library publish them.

A folder holds ``config.json`` and safetensors: ``fc.weight``, ``norm.weight``, ``lm_head.weight`` and a decoder layer,
``midlayer.*`` or ``layers.0.*``, with ``hidden_norm.weight`` and projections of twice the width. A draft that proposes
only some of the target's tokens has ``d2t``, of each how far its number there is above its own, and ``t2d``, which of
the target's they are. What it shares with the target may be left out: ``embed_tokens.weight`` and ``lm_head.weight``.

The first layout describes the layer in the configuration itself, the other one in ``transformer_layer_config``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from safetensors.torch import save_file
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specexport.checkpoints.checkpoint import Checkpoint
from specexport.checkpoints.config import SINGLE, stored_table
from specexport.checkpoints.locate import locate
from specexport.checkpoints.quiet import quiet
from specexport.checkpoints.stored import CONFIG, StoredTensor, read_config, stored_tensors
from specexport.contract.errors import BuildError
from specexport.contract.methods.eagle3 import MAX_STATES
from specexport.contract.model import CacheLayer
from specexport.graphs.attention import ATTENTION_NAME
from specexport.graphs.eagle3 import Eagle3Draft, Eagle3Shape
from specexport.graphs.rotary import freeze_frequencies

_CONFIGS: dict[str, Any] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
_MAX_LAYERS = 16
_FIRST, _SAME_AS = "midlayer.", "layers.0."
_D2T, _T2D, _EMBEDDING, _HEAD = "d2t", "t2d", "embed_tokens.weight", "lm_head.weight"
_UNREAD = ("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")
"""What training leaves behind, and what follows from the configuration."""

_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act",
)  # fmt: skip

_Size = Annotated[int, Meta(ge=1, le=2**24)]
_States = Annotated[list[Annotated[int, Meta(ge=0, le=4096)]], Meta(min_length=1, max_length=MAX_STATES)]


class _Layer(msgspec.Struct, kw_only=True):
    """What is read of a layer's configuration, a Llama's or a Qwen3's."""

    hidden_size: _Size
    intermediate_size: _Size
    num_attention_heads: Annotated[int, Meta(ge=1, le=4096)]
    vocab_size: _Size
    model_type: str = "llama"
    num_key_value_heads: Annotated[int, Meta(ge=1, le=4096)] | None = None
    head_dim: Annotated[int, Meta(ge=1, le=4096)] | None = None
    num_hidden_layers: Annotated[int, Meta(ge=1, le=_MAX_LAYERS)] = 1
    max_position_embeddings: _Size = 2048
    hidden_act: str = "silu"
    rms_norm_eps: Annotated[float, Meta(gt=0.0, lt=1.0)] = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: Annotated[float, Meta(gt=0.0)] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    sliding_window: _Size | None = None


class _Switches(msgspec.Struct, kw_only=True):
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    eagle_aux_hidden_state_layer_ids: _States | None = None


class _Nested(_Switches, kw_only=True):
    use_aux_hidden_state: bool = True


class _Config(_Switches, kw_only=True):
    """What is read of ``config.json`` beside the layer; other keys are left alone."""

    transformer_layer_config: _Layer | None = None
    eagle_config: _Nested | None = None
    speculators_model_type: str | None = None
    draft_vocab_size: _Size | None = None
    target_hidden_size: _Size | None = None
    norm_before_residual: bool = False
    tie_word_embeddings: bool = False


@dataclass(frozen=True)
class Eagle3Outline:
    """What a checkpoint says of itself.

    Attributes:
        path: the folder.
        layer: the layers' configuration, as transformers reads it.
        vocab: of the target it was trained for.
        draft_vocab: tokens it may propose.
        target_hidden: the target's hidden size.
        states: after how many of the target's layers it sees the residual stream; None for what is usual.
        switches: fields of :class:`~specexport.graphs.eagle3.Eagle3Shape`.
        tied: its head are rows of its embedding.
    """

    path: Path
    layer: Any
    vocab: int
    draft_vocab: int
    target_hidden: int
    states: tuple[int, ...] | None
    switches: dict[str, bool]
    tied: bool

    def seen(self, layers: int) -> tuple[int, ...]:
        """After how many layers of a target with so many it sees the residual stream.

        Raises:
            BuildError: the target has fewer.
        """
        seen = usual_states(layers) if self.states is None else self.states
        if not all(0 <= count <= layers for count in seen):
            raise BuildError(
                f"{self.path / CONFIG}: the draft sees states after {list(seen)} layers "
                f"({'as none are named' if self.states is None else 'eagle_aux_hidden_state_layer_ids'}), but the "
                f"target has {layers}; this draft was trained for another model"
            )
        return seen

    def make(self, layers: int) -> Eagle3Draft:
        """A draft of these sizes for a target of so many layers, as torch initialises it."""
        return Eagle3Draft(
            Eagle3Shape(self.layer, self.target_hidden, len(self.seen(layers)), self.draft_vocab, **self.switches)
        )


def usual_states(layers: int) -> tuple[int, ...]:
    """After how many of a target's layers a draft sees the residual stream where nothing else is said."""
    return 2, layers // 2, layers - 3


def read_eagle3(source: str) -> Eagle3Outline:
    """Reads what draft a folder or hub id holds, without reading its weights.

    Raises:
        BuildError: something is missing or malformed, or not known; names the file and the field.
    """
    folder = locate(source)
    path, what = folder / CONFIG, "an EAGLE-3 draft"
    config = read_config(path, _Config, what)
    layer = config.transformer_layer_config
    if config.speculators_model_type not in (None, "eagle3") or (layer is None) != (
        config.speculators_model_type is None
    ):
        raise BuildError(
            f"{path}: speculators_model_type is {config.speculators_model_type!r}; expected 'eagle3' with a "
            "transformer_layer_config, or neither"
        )
    layer = layer or read_config(path, _Layer, what)
    nested = config.eagle_config or _Nested()
    if not nested.use_aux_hidden_state:
        raise BuildError(f"{path}: use_aux_hidden_state is false; expected a draft that sees several layers")
    switches = {
        name: getattr(config, name) or getattr(nested, name) for name in ("norm_before_fc", "fc_norm", "norm_output")
    }
    if switches["norm_before_fc"] and switches["fc_norm"]:
        raise BuildError(f"{path}: norm_before_fc and fc_norm are both true; expected one of them at most")
    states = config.eagle_aux_hidden_state_layer_ids
    if states is None and nested.eagle_aux_hidden_state_layer_ids is not None:
        # There, a layer's number stands for what it makes (SpecForge, SGLang).
        states = [layer + 1 for layer in nested.eagle_aux_hidden_state_layer_ids]
    return Eagle3Outline(
        path=folder,
        layer=_layer_config(path, layer),
        vocab=layer.vocab_size,
        draft_vocab=config.draft_vocab_size or layer.vocab_size,
        target_hidden=config.target_hidden_size or layer.hidden_size,
        states=None if states is None else tuple(states),
        switches=switches | {"norm_before_residual": config.norm_before_residual},
        tied=config.tie_word_embeddings,
    )


def _layer_config(path: Path, layer: _Layer) -> Any:
    if layer.model_type not in _CONFIGS:
        raise BuildError(f"{path}: model_type is {layer.model_type!r}; expected one of {', '.join(_CONFIGS)}")
    given = {name: value for name, value in msgspec.structs.asdict(layer).items() if value is not None}
    windows = "sliding_attention" in (layer.layer_types or ())
    if windows and (layer.model_type != "qwen3" or layer.sliding_window is None):
        raise BuildError(f"{path}: layer_types has 'sliding_attention'; expected it with a sliding_window in a qwen3")
    given |= {"num_key_value_heads": layer.num_key_value_heads or layer.num_attention_heads}
    given |= {
        "head_dim": layer.head_dim or layer.hidden_size // layer.num_attention_heads,
        "use_sliding_window": windows,
    }
    del given["model_type"]
    try:
        with quiet():
            config = _CONFIGS[layer.model_type](**given, attn_implementation=ATTENTION_NAME)
            LlamaRotaryEmbedding(config)
            return config
    except Exception as error:  # transformers raises whatever it finds wrong
        raise BuildError(f"{path}: {error or type(error).__name__}") from error


def require_fit(outline: Eagle3Outline, *, hidden: int, vocab: int, layers: int) -> None:
    """Checks a draft against a target's hidden size, width of logits and layers, by the headers of its files.

    Raises:
        BuildError: a tensor is missing, of another shape or type or none of a draft's, or it was made for another
            target; names the file and the tensor or field.
    """
    for field, found, wanted in (
        ("target_hidden_size", outline.target_hidden, hidden),
        ("vocab_size", outline.vocab, vocab),
    ):
        if found != wanted:
            raise BuildError(
                f"{outline.path / CONFIG}: {field} is {found}, and the target's is {wanted}; this draft was trained "
                "for another model"
            )
    stored = _stored(outline)
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in outline.make(layers).state_dict().items()}
    maps = {_D2T: (outline.draft_vocab,), _T2D: (outline.vocab,)}
    for name, tensor in stored.items():
        if name not in shapes and name not in maps:
            raise BuildError(
                f"{outline.path}: tensor {tensor.name!r} is no part of an EAGLE-3 draft as {CONFIG} describes it; "
                "expected names such as 'fc.weight', 'midlayer.self_attn.q_proj.weight' or "
                "'layers.0.self_attn.q_proj.weight'"
            )
        shape = shapes.get(name) or maps[name]
        if tensor.shape != shape:
            raise BuildError(
                f"{outline.path}: tensor {tensor.name!r} is {list(tensor.shape)}, expected {list(shape)} by {CONFIG}"
            )
        if name in shapes and not tensor.floating:
            raise BuildError(
                f"{outline.path}: tensor {tensor.name!r} holds no floating-point numbers; expected weights that are "
                "not quantized"
            )
    shared = {_EMBEDDING, _HEAD} if outline.layer.hidden_size == hidden else set()
    if outline.tied:
        shared.add(_HEAD)
    needed = shapes.keys() - shared
    if outline.draft_vocab != outline.vocab:
        needed = {*needed, _D2T}
    for name in sorted(needed):
        if name not in stored:
            first = name.replace(_SAME_AS, _FIRST, 1)
            raise BuildError(
                f"{outline.path}: no tensor {name!r}"
                + (f" or {first!r}" if first != name else "")
                + f"; {CONFIG} asks "
                "for it"
            )
    _target_ids(outline, stored)


def _stored(outline: Eagle3Outline) -> dict[str, StoredTensor]:
    """The tensors by what a draft's modules call them."""
    found: dict[str, StoredTensor] = {}
    for file in sorted(outline.path.glob("*.safetensors")):
        for tensor in stored_tensors(file):
            name = tensor.name.removeprefix("model.")
            name = _SAME_AS + name.removeprefix(_FIRST) if name.startswith(_FIRST) else name
            if name.endswith(_UNREAD):
                continue
            if name in found:
                raise BuildError(
                    f"{outline.path}: tensors {found[name].name!r} and {tensor.name!r} are the same part; expected one"
                )
            found[name] = tensor
    return found


def _target_ids(outline: Eagle3Outline, stored: dict[str, StoredTensor]) -> torch.Tensor | None:
    """The target's number of each of the draft's tokens, int64 ``[draft_vocab]``; None where they are alike.

    Raises:
        BuildError: it is none of the target's, or not one that ``t2d`` says; names the tensor.
    """
    if _D2T not in stored or outline.draft_vocab == outline.vocab:
        return None
    offsets = stored[_D2T].read()
    if offsets.dtype not in (torch.int64, torch.int32):
        raise BuildError(f"{outline.path}: tensor {_D2T!r} is {offsets.dtype}; expected int64")
    ids = torch.arange(outline.draft_vocab) + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= outline.vocab or len(set(ids.tolist())) != len(ids):
        raise BuildError(
            f"{outline.path}: tensor {_D2T!r} leads to tokens that are not there, or to one twice; expected "
            f"{outline.draft_vocab} different ones below {outline.vocab}"
        )
    if _T2D in stored:
        known = stored[_T2D].read()
        if known.dtype != torch.bool or not torch.equal(known.nonzero()[:, 0], ids.sort().values):
            raise BuildError(f"{outline.path}: tensor {_T2D!r} is no mask (bool) of the tokens that {_D2T!r} leads to")
    return ids


def load_eagle3(outline: Eagle3Outline, target: Path, layers: int, positions: int) -> Eagle3Draft:
    """Reads a draft that :func:`require_fit` let pass, in fp32 and for evaluation.

    Args:
        outline: of the draft.
        target: the target's folder, for what the draft shares with it.
        layers: the target's.
        positions: the longest text; the rotary frequencies of drafts that change them for long ones are those of the
            beginning.

    Raises:
        BuildError: numbers are not finite, or the target has no tensor to share; names the tensor.
    """
    stored = _stored(outline)
    ids = _target_ids(outline, stored)
    with torch.device("meta"):
        made = outline.make(layers)
    state = {name: stored[name].finite(outline.path) for name in made.state_dict() if name in stored}
    if _EMBEDDING not in state:
        state[_EMBEDDING] = _table(target, outline, head=False)
    if _HEAD not in state:
        rows = state[_EMBEDDING] if outline.tied else _table(target, outline, head=True)
        state[_HEAD] = rows if ids is None else rows[ids]
    made.load_state_dict(state, assign=True)
    made.rotary_emb = LlamaRotaryEmbedding(outline.layer)  # computed, not stored: on meta it has no numbers
    made.target_ids = ids
    freeze_frequencies(made, positions)
    return made.eval().requires_grad_(False)


def _table(target: Path, outline: Eagle3Outline, *, head: bool) -> torch.Tensor:
    tensor = stored_table(target, head=head)
    wanted = (outline.vocab, outline.layer.hidden_size)
    if tensor.shape != wanted:
        raise BuildError(
            f"{outline.path}: has no {_HEAD if head else _EMBEDDING!r}, and the target's {tensor.name!r} is "
            f"{list(tensor.shape)}; expected {list(wanted)}"
        )
    return tensor.finite(target)


def save_eagle3(
    folder: Path, draft: Eagle3Draft, states: Sequence[int], *, tied: bool, dtype: torch.dtype = torch.float16
) -> None:
    """Writes a draft of one Llama layer as ``SafeAILab/EAGLE`` publishes them, without its embedding, the target's.

    Args:
        folder: made if it is not there.
        draft: without switches.
        states: after how many of the target's layers it sees the residual stream.
        tied: the head is the target's and left out too.
        dtype: of the stored tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    layer: Any = draft.shape.config
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: getattr(layer, name) for name in _SIZES},
        "rope_theta": layer.rope_parameters["rope_theta"],
        "draft_vocab_size": draft.shape.draft_vocab,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_aux_hidden_state_layer_ids": list(states),
    }
    if min(states) > 0:  # as SpecForge and SGLang count; vLLM reads the other one
        below = [count - 1 for count in states]
        config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": below}
    left_out = {_EMBEDDING, *({_HEAD} if tied else ())}
    state = {
        _FIRST + name.removeprefix(_SAME_AS) if name.startswith(_SAME_AS) else name: tensor.detach().to(dtype)
        for name, tensor in draft.named_parameters()
        if name not in left_out
    }
    ids = draft.target_ids
    if ids is not None:
        state[_D2T] = ids.cpu() - torch.arange(len(ids))
        state[_T2D] = torch.isin(torch.arange(layer.vocab_size), ids.cpu())
    save_file(state, folder / SINGLE, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def as_checkpoint(outline: Eagle3Outline, source: str, draft: Eagle3Draft, positions: int) -> Checkpoint:
    """A draft as a model that is written beside the target, whose longest sequence has so many ``positions``.

    ``source`` is what the user named.
    """
    config = outline.layer
    row = CacheLayer(heads=config.num_key_value_heads, key_size=config.head_dim, value_size=config.head_dim)
    return Checkpoint(
        source=source,
        path=outline.path,
        family="eagle3",
        model=draft,
        cache=(row,) * config.num_hidden_layers,
        vocab_size=outline.draft_vocab,
        input_vocab=outline.vocab,
        max_positions=positions,
        parameters=sum(parameter.numel() for parameter in draft.parameters()),
        eos_token_ids=(),
    )
