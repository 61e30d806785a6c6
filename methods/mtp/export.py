"""Exports the multi-token prediction (MTP) layer of a target's checkpoint, which transformers ignores.

A decoder layer of the target's kind drafts (DeepSeek-V3, arXiv 2412.19437, section 2.2). Its input is ``eh_proj
[RMSNorm(embedding of the next token); RMSNorm(h)]``, where h is the input of the target's head: the last state after
the last norm. For further tokens, the layer's own output after its last norm replaces h. Embedding and head are the
target's.

In a target with L layers, its tensors have one of two sets of names: ``model.layers.{L}.*`` with ``eh_proj``,
``enorm``, ``hnorm`` and ``shared_head`` (DeepSeek-V3, GLM-4.5), or ``mtp.*`` with ``fc``, ``pre_fc_norm_embedding``,
``pre_fc_norm_hidden``, ``norm`` and ``layers.0.*`` (Qwen3-Next, Qwen3.5).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specexport.contract.errors import BuildError
from specexport.exporter.checkpoints.config import checkpoint_tensors, read_model_config
from specexport.exporter.checkpoints.documents import CONFIG
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.checkpoints.quiet import quiet
from specexport.exporter.checkpoints.sizes import MTP_COUNTS
from specexport.exporter.checkpoints.stored import StoredTensor
from specexport.graphs.attention import ATTENTION_NAME, PassThroughCache
from specexport.graphs.experts import EXPERTS_NAME
from specexport.methods.hidden_states.checkpoint import DraftOutline
from specexport.methods.hidden_states.export import OwnStateExporter
from specexport.methods.hidden_states.graph import OwnStateModule
from specexport.methods.mtp import MTP

_QWEN = {"mtp.pre_fc_norm_embedding.": "enorm.", "mtp.pre_fc_norm_hidden.": "hnorm.", "mtp.": ""}
_DEEPSEEK = {
    "embed_tokens.": "embed_tokens.",
    "shared_head.head.": "lm_head.",
    "shared_head.norm.": "norm.",
    "enorm.": "enorm.",
    "hnorm.": "hnorm.",
    "eh_proj.": "fc.",
    "": "layers.0.",
}
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The stored matrices of an expert, ``[out,in]``, which transformers fuses into one tensor."""


class MTPDraft(OwnStateModule):
    """The layer and its norms.

    Args:
        model: transformers' decoder of the target, whose ``embed_tokens``, ``norm`` and kind of last layer are used.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        vocab, H = map(int, model.embed_tokens.weight.shape)
        self.states_width = self.hidden = H
        self.embed_tokens = model.embed_tokens
        self.target_norm, self.enorm, self.hnorm, self.norm = (copy.deepcopy(model.norm) for _ in range(4))
        self.fc = torch.nn.Linear(2 * H, H, bias=False)
        self.layers = torch.nn.ModuleList([model.layers[-1]])
        module: Any
        for module in self.layers.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = 0  # the index of its cache
        self.lm_head = torch.nn.Linear(H, vocab, bias=False)
        self.rotary_emb = model.rotary_emb
        self.register_buffer("target_ids", None, persistent=False)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return self.target_norm(states)

    def forward(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.embed_tokens(input_ids.clamp(max=self.embed_tokens.num_embeddings - 1))
        state = self.fc(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        rotary = self.rotary_emb(state, position_ids)
        outputs = self.layers[0](
            state,
            position_embeddings=rotary,
            attention_mask=None,
            position_ids=position_ids,
            past_key_values=PassThroughCache(1),
        )
        output = self.norm(outputs[0] if isinstance(outputs, tuple) else outputs)
        return output, output


@dataclass(frozen=True)
class MTPOutline(DraftOutline):
    """The configuration of a target's MTP layer.

    Attributes:
        names: maps prefixes of stored names to those in the draft; the first match applies.
    """

    names: dict[str, str]

    what = f"the MTP layer that {CONFIG} describes"

    @staticmethod
    def default_states(draft_layers: int, layers: int) -> tuple[int, ...]:
        return (layers,)

    def make(self, layers: int) -> MTPDraft:
        with quiet(), torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(self.layer), trust_remote_code=False)
            return MTPDraft(model.base_model)

    @property
    def prefixes(self) -> Mapping[str, str]:
        return {start: to for start, to in self.names.items() if to}

    def stored(self) -> dict[str, StoredTensor]:
        stored = {}
        for tensor in checkpoint_tensors(self.path):
            start = next((start for start in self.names if tensor.name.startswith(start)), None)
            if start is not None:
                stored[self.names[start] + tensor.name.removeprefix(start)] = tensor
        return stored

    def parts(
        self, name: str, shape: tuple[int, ...], stored: Mapping[str, StoredTensor]
    ) -> dict[str, tuple[int, ...]]:
        start, _, last = name.rpartition(".")
        if name in stored or last not in _FUSED or len(shape) != 3:
            return {name: shape}
        experts, rows, columns = shape
        size = rows // len(_FUSED[last]), columns
        return {f"{start}.{expert}.{kind}.weight": size for expert in range(experts) for kind in _FUSED[last]}


def read_mtp(source: str) -> MTPOutline:
    """Reads the configuration of a target's MTP layer, without its weights."""
    folder = locate(source)
    config = copy.deepcopy(read_model_config(folder))
    layers = int(config.num_hidden_layers)
    for field in MTP_COUNTS:
        count = getattr(config, field, None)
        if isinstance(count, int) and count > 1:
            raise BuildError(f"{folder / CONFIG}: {field} is {count}; expected 1, as one layer drafts every token")
    names = [tensor.name for tensor in checkpoint_tensors(folder)]
    layer_prefix = f"model.layers.{layers}."
    if any(name.startswith("mtp.") for name in names):
        prefixes = dict(_QWEN)
    elif any(name.startswith(layer_prefix) for name in names):
        prefixes = {layer_prefix + start: stands_for for start, stands_for in _DEEPSEEK.items()}
    else:
        raise BuildError(
            f"{folder}: no MTP layer: no tensor begins with 'mtp.' or {layer_prefix!r}; expected a checkpoint that is "
            "published with one (DeepSeek-V3, GLM-4.5, Qwen3-Next), as transformers does not save it"
        )
    for name, kinds in config.to_dict().items():
        if name.endswith("layer_types") and isinstance(kinds, list):
            setattr(config, name, [*kinds, "full_attention" if name == "layer_types" else kinds[-1]])
    config.num_hidden_layers = layers + 1
    config._attn_implementation = ATTENTION_NAME
    config._experts_implementation = EXPERTS_NAME
    return MTPOutline(
        path=folder,
        layer=config,
        vocab=config.vocab_size,
        draft_vocab=config.vocab_size,
        target_hidden=config.hidden_size,
        states=None,
        tied=False,
        names=prefixes | {"model.norm.": "target_norm."},
    )


EXPORTER = OwnStateExporter(MTP, read_mtp)
