"""EAGLE-3: one decoder layer that drafts from states between the target's layers (arXiv 2503.01840).

Each row of the draft belongs to a token of the text and has two inputs: the target's states at that token, fused into
one vector by ``fc``, and the embedding of the next token. It predicts the token after that. At tokens that the target
has not read yet, the draft's own output replaces the fused states.

Parameters are named as in checkpoints of the ``speculators`` library; those of ``SafeAILab/EAGLE`` call the first layer
``midlayer``.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from specexport.graphs.attention import PassThroughCache
from specexport.methods.hidden_states.graph import OwnStateModule

LAYERS: dict[str, Any] = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}
"""Layer classes by ``model_type``."""


class Eagle3Draft(OwnStateModule):
    """The draft's parameters and the computation of its rows.

    Args:
        config: the layers' configuration; ``hidden_size`` is H, ``vocab_size`` the number of input tokens.
        states: number of the target's states that it reads.
        norm_before_residual: whether the first layer's residual is the normed state.
        norm_before_fc: whether there is one norm over all of the target's states (``input_norm``).
        fc_norm: whether there is a norm for the states of each layer (EAGLE-3.1).
        norm_output: whether the next row reads the state after the last norm (EAGLE-3.1).
    """

    def __init__(
        self,
        config: Any,
        target_hidden: int,
        states: int,
        draft_vocab: int,
        *,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.norm_before_residual, self.norm_output = config, norm_before_residual, norm_output
        H, wide, eps = config.hidden_size, states * target_hidden, config.rms_norm_eps
        self.states_width, self.hidden = wide, H
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, H)
        self.input_norm = LlamaRMSNorm(wide, eps) if norm_before_fc else None
        norms = [LlamaRMSNorm(target_hidden, eps) for _ in range(states)] if fc_norm else None
        self.fc_norm = None if norms is None else torch.nn.ModuleList(norms)
        self.fc = torch.nn.Linear(wide, H, bias=False)
        self.layers = torch.nn.ModuleList(
            [LAYERS[config.model_type](config, index) for index in range(config.num_hidden_layers)]
        )
        first: Any = self.layers[0]
        first.hidden_norm = LlamaRMSNorm(H, eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(first.self_attn, name)
            wide_projection = torch.nn.Linear(2 * H, narrow.out_features, bias=narrow.bias is not None)
            setattr(first.self_attn, name, wide_projection)
        self.norm = LlamaRMSNorm(H, eps)
        self.lm_head = torch.nn.Linear(H, draft_vocab, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.register_buffer("target_ids", None, persistent=False)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(states)

    def forward(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Token ids beyond the embedding, which only the target has, are read as the last one.
        embedded = self.embed_tokens(input_ids.clamp(max=self.embed_tokens.num_embeddings - 1))
        rotary, cache = self.rotary_emb(embedded, position_ids), PassThroughCache(len(self.layers))
        first: Any = self.layers[0]
        normed = first.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        seen = torch.cat([first.input_layernorm(embedded), normed], -1)
        attended, _ = first.self_attn(
            hidden_states=seen, position_embeddings=rotary, attention_mask=None, past_key_values=cache
        )
        state = residual + attended
        state = state + first.mlp(first.post_attention_layernorm(state))
        for layer in self.layers[1:]:
            state = layer(state, position_embeddings=rotary, attention_mask=None, past_key_values=cache)
        output = self.norm(state)
        return (output if self.norm_output else state), output
