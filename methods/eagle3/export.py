"""Reads, writes and exports EAGLE-3 checkpoints in the layouts of ``SafeAILab/EAGLE`` and the ``speculators`` library.

A folder holds ``config.json`` and safetensors: ``fc.weight``, ``norm.weight``, ``lm_head.weight`` and a decoder layer,
``midlayer.*`` or ``layers.0.*``, with ``hidden_norm.weight`` and projections of twice the width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specexport.contract.errors import BuildError
from specexport.exporter.checkpoints.documents import CONFIG, read_config
from specexport.exporter.checkpoints.stored import save_head_tensors
from specexport.methods.eagle3 import Eagle3
from specexport.methods.eagle3.graph import Eagle3Draft
from specexport.methods.hidden_states.checkpoint import (
    D2T,
    EMBEDDING,
    HEAD,
    T2D,
    DraftOutline,
    States,
    layer_config,
    read_draft,
)
from specexport.methods.hidden_states.export import OwnStateExporter

_FIRST, _SAME_AS = "midlayer.", "layers.0."
_LAYERS = {"LlamaForCausalLMEagle3": "llama", "Eagle3LlamaForCausalLM": "llama"}
"""The kind of the layer of published architectures."""

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
    return_hidden_post_norm: bool = False


class _Config(_Switches, kw_only=True):
    """The fields of ``config.json`` that are specific to EAGLE-3; other keys are ignored."""

    eagle_config: _Nested | None = None
    norm_before_residual: bool = False
    tie_word_embeddings: bool = False


@dataclass(frozen=True)
class Eagle3Outline(DraftOutline):
    """An EAGLE-3 checkpoint's configuration.

    Attributes:
        switches: keyword arguments of :class:`~specexport.methods.eagle3.graph.Eagle3Draft`.
    """

    switches: dict[str, bool]

    what = (
        f"an EAGLE-3 draft as {CONFIG} describes it, with names such as 'fc.weight', "
        "'midlayer.self_attn.q_proj.weight' or 'layers.0.self_attn.q_proj.weight'"
    )
    keys = "eagle_aux_hidden_state_layer_ids"

    @property
    def prefixes(self) -> Mapping[str, str]:
        return {_FIRST: _SAME_AS}

    @staticmethod
    def default_states(draft_layers: int, layers: int) -> tuple[int, ...]:
        return 2, layers // 2, layers - 3

    def make(self, layers: int) -> Eagle3Draft:
        with torch.device("meta"):
            return Eagle3Draft(
                self.layer, self.target_hidden, len(self.seen(layers)), self.draft_vocab, **self.switches
            )

    @property
    def rotated(self) -> int:
        """Number of channels of each head that positions rotate, the first ones."""
        return int(self.layer.head_dim * self.layer.rope_parameters.get("partial_rotary_factor", 1.0))

    def load(self, target: Path, layers: int, positions: int) -> Eagle3Draft:
        draft: Eagle3Draft = super().load(target, layers, positions)
        if self.rotated < self.layer.head_dim:
            _rotate_first(draft, self.layer, self.rotated)
        return draft


def _rotate_first(draft: Eagle3Draft, layer: Any, rotated: int) -> None:
    """Lets positions rotate the first channels of each head only.

    Llama's layer rotates all channels, in pairs of one from each half. So the channels to rotate become the beginnings
    of the halves, and the angle of the others is 0. Scores do not depend on the order of channels.
    """
    size, half = layer.head_dim, rotated // 2
    first, second = torch.arange(half), torch.arange(half, rotated)
    others = torch.arange(rotated, size).chunk(2)
    order = torch.cat([first, others[0], second, others[1]])
    for name, parameter in draft.named_parameters():
        if any(part in name for part in (".q_proj.", ".k_proj.", ".q_norm.", ".k_norm.")):
            heads = parameter.view(-1, size, *parameter.shape[1:])
            parameter.copy_(heads[:, order].reshape(parameter.shape))
    turning = LlamaRotaryEmbedding(type(layer)(**layer.to_dict() | {"head_dim": rotated})).inv_freq
    draft.rotary_emb.inv_freq = torch.nn.functional.pad(turning, (0, size // 2 - half))


def read_eagle3(source: str) -> Eagle3Outline:
    """Reads a draft's configuration from a folder or hub id, without its weights."""
    layer, _, fields = read_draft(source, "eagle3", "an EAGLE-3 draft", _LAYERS)
    path = fields["path"] / CONFIG
    config = read_config(path, _Config, "an EAGLE-3 draft")
    nested = config.eagle_config or _Nested()
    if not nested.use_aux_hidden_state:
        raise BuildError(f"{path}: use_aux_hidden_state is false; expected a draft that sees several layers")
    switches = {
        name: getattr(config, name) or getattr(nested, name) for name in ("norm_before_fc", "fc_norm", "norm_output")
    }
    switches["norm_output"] |= nested.return_hidden_post_norm  # TensorRT-LLM's name
    if switches["norm_before_fc"] and switches["fc_norm"]:
        raise BuildError(f"{path}: norm_before_fc and fc_norm are both true; expected one of them at most")
    # In eagle_config, ids number the layers that output the states (SpecForge, SGLang). NVIDIA's empty lists mean none.
    states = config.eagle_aux_hidden_state_layer_ids or [
        layer + 1 for layer in nested.eagle_aux_hidden_state_layer_ids or ()
    ]
    built = layer_config(path, layer)
    outline = Eagle3Outline(
        **fields,
        layer=built,
        states=tuple(states) or None,
        switches=switches | {"norm_before_residual": config.norm_before_residual},
        tied=config.tie_word_embeddings,
    )
    partial = outline.rotated < built.head_dim
    if partial and (outline.rotated % 2 or built.rope_parameters["rope_type"] != "default"):
        raise BuildError(
            f"{path}: partial_rotary_factor rotates {outline.rotated} of {built.head_dim} channels with rope_type "
            f"{built.rope_parameters['rope_type']!r}; expected an even number with 'default'"
        )
    return outline


def save_eagle3(folder: Path, draft: Eagle3Draft, states: Sequence[int], *, tied: bool) -> None:
    """Writes a draft of one Llama layer, with all switches off, in EAGLE's layout, without the target's embedding.

    ``states`` are the numbers of layers after which it reads the target's residual stream; ``tied`` leaves out the head
    too, as it is the target's.
    """
    layer = draft.config
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: getattr(layer, name) for name in _SIZES},
        "rope_theta": layer.rope_parameters["rope_theta"],
        "draft_vocab_size": draft.lm_head.out_features,
        "tie_word_embeddings": False,
        "torch_dtype": str(draft.fc.weight.dtype).removeprefix("torch."),
        "eagle_aux_hidden_state_layer_ids": list(states),
    }
    if min(states) > 0:  # SpecForge and SGLang count this way; vLLM reads the top-level field
        below = [count - 1 for count in states]
        config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": below}
    omitted = {EMBEDDING, *({HEAD} if tied else ())}
    state = {
        _FIRST + name.removeprefix(_SAME_AS) if name.startswith(_SAME_AS) else name: tensor.detach()
        for name, tensor in draft.named_parameters()
        if name not in omitted
    }
    ids = draft.target_ids
    if ids is not None:
        state[D2T] = ids.cpu() - torch.arange(len(ids))
        state[T2D] = torch.isin(torch.arange(layer.vocab_size), ids.cpu())
    save_head_tensors(folder, config, state)


EXPORTER = OwnStateExporter(Eagle3, read_eagle3)
