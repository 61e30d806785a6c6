"""EAGLE-3 checkpoints in the layouts of ``SafeAILab/EAGLE`` and of the ``speculators`` library.

A folder holds ``config.json`` and safetensors: ``fc.weight``, ``norm.weight``, ``lm_head.weight`` and a decoder layer,
``midlayer.*`` or ``layers.0.*``, with ``hidden_norm.weight`` and projections of twice the width.

The former describes the layer at the top level of the configuration, the latter in ``transformer_layer_config``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
from safetensors.torch import save_file

from specexport.contract.errors import BuildError
from specexport.exporter.checkpoints.documents import CONFIG, SINGLE, read_config
from specexport.exporter.checkpoints.locate import locate
from specexport.methods.eagle3.graph import Eagle3Draft, Eagle3Shape
from specexport.methods.hidden_states.checkpoint import (
    D2T,
    EMBEDDING,
    HEAD,
    T2D,
    Layer,
    OwnFilesOutline,
    Size,
    States,
    layer_config,
)

_FIRST, _SAME_AS = "midlayer.", "layers.0."

_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act",
)  # fmt: skip


class _Switches(msgspec.Struct, kw_only=True):
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    eagle_aux_hidden_state_layer_ids: States | None = None


class _Nested(_Switches, kw_only=True):
    use_aux_hidden_state: bool = True


class _Config(_Switches, kw_only=True):
    """The fields read from ``config.json``, except those of the layer; other keys are ignored."""

    transformer_layer_config: Layer | None = None
    eagle_config: _Nested | None = None
    speculators_model_type: str | None = None
    draft_vocab_size: Size | None = None
    target_hidden_size: Size | None = None
    norm_before_residual: bool = False
    tie_word_embeddings: bool = False


@dataclass(frozen=True)
class Eagle3Outline(OwnFilesOutline):
    """An EAGLE-3 checkpoint's configuration.

    Attributes:
        switches: fields of :class:`~specexport.methods.eagle3.graph.Eagle3Shape`.
    """

    switches: dict[str, bool]

    what: ClassVar[str] = (
        f"an EAGLE-3 draft as {CONFIG} describes it; expected names such as 'fc.weight', "
        "'midlayer.self_attn.q_proj.weight' or 'layers.0.self_attn.q_proj.weight'"
    )
    keys: ClassVar[str] = "eagle_aux_hidden_state_layer_ids"
    same: ClassVar[Mapping[str, str]] = {_FIRST: _SAME_AS}

    def usual_states(self, layers: int) -> tuple[int, ...]:
        return usual_states(layers)

    def make(self, layers: int) -> Eagle3Draft:
        with torch.device("meta"):
            return Eagle3Draft(
                Eagle3Shape(self.layer, self.target_hidden, len(self.seen(layers)), self.draft_vocab, **self.switches)
            )


def usual_states(layers: int) -> tuple[int, ...]:
    """The layer counts after which a draft reads the target's residual stream by default."""
    return 2, layers // 2, layers - 3


def read_eagle3(source: str) -> Eagle3Outline:
    """Reads a draft's configuration from a folder or hub id, without its weights.

    Raises:
        BuildError: a field is missing, malformed or unsupported; names the file and the field.
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
    layer = layer or read_config(path, Layer, what)
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
        # Here ids number the layers that output the states (SpecForge, SGLang).
        states = [layer + 1 for layer in nested.eagle_aux_hidden_state_layer_ids]
    return Eagle3Outline(
        path=folder,
        layer=layer_config(path, layer),
        vocab=layer.vocab_size,
        draft_vocab=config.draft_vocab_size or layer.vocab_size,
        target_hidden=config.target_hidden_size or layer.hidden_size,
        states=None if states is None else tuple(states),
        switches=switches | {"norm_before_residual": config.norm_before_residual},
        tied=config.tie_word_embeddings,
    )


def save_eagle3(
    folder: Path, draft: Eagle3Draft, states: Sequence[int], *, tied: bool, dtype: torch.dtype = torch.float16
) -> None:
    """Writes a draft of one Llama layer in EAGLE's layout, without the embedding, which is the target's.

    Args:
        folder: created if missing.
        draft: with all switches off.
        states: the layer counts after which it reads the target's residual stream.
        tied: leave out the head too, as it is the target's.
        dtype: dtype of the stored tensors.
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
    if min(states) > 0:  # SpecForge and SGLang count this way; vLLM reads the top-level field
        below = [count - 1 for count in states]
        config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": below}
    left_out = {EMBEDDING, *({HEAD} if tied else ())}
    state = {
        _FIRST + name.removeprefix(_SAME_AS) if name.startswith(_SAME_AS) else name: tensor.detach().to(dtype)
        for name, tensor in draft.named_parameters()
        if name not in left_out
    }
    ids = draft.target_ids
    if ids is not None:
        state[D2T] = ids.cpu() - torch.arange(len(ids))
        state[T2D] = torch.isin(torch.arange(layer.vocab_size), ids.cpu())
    save_file(state, folder / SINGLE, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
