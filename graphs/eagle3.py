"""EAGLE-3: one decoder layer that goes on from states between the target's layers (arXiv 2503.01840).

A row of the draft belongs to a token of the text and sees two things: the target's states at that token, fused into one
vector by ``fc``, and the embedding of the token after it. It says what comes after that one. Where the target has not
been yet, the draft's own output takes the place of the fused states.

Parameters are named as in checkpoints of the ``speculators`` library; those of ``SafeAILab/EAGLE`` call the first layer
``midlayer``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from specexport.graphs.attention import PassThroughCache, TwoPartLowering, lowering
from specexport.graphs.propose import draw_candidate
from specexport.graphs.step import flat, pairs

LAYERS: dict[str, Any] = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}
"""What a draft's layers are, by ``model_type``."""


@dataclass(frozen=True)
class Eagle3Shape:
    """What a draft is made of.

    Attributes:
        config: of its layers; ``hidden_size`` is H, ``vocab_size`` the number of tokens it reads.
        target_hidden: the target's hidden size.
        states: how many of the target's layers it sees.
        draft_vocab: tokens it may propose.
        norm_before_residual: the residual of the first layer is the normed state.
        norm_before_fc: one norm over all of the target's states (``input_norm``).
        fc_norm: a norm for those of each layer (EAGLE-3.1).
        norm_output: the next row sees the state after the last norm (EAGLE-3.1).
    """

    config: PretrainedConfig
    target_hidden: int
    states: int
    draft_vocab: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class Eagle3Draft(torch.nn.Module):
    """The draft's parameters, and what a row of it computes.

    Attributes:
        target_ids: int64 ``[draft_vocab]``, the target's number of each token it may propose; None where alike.
    """

    target_ids: torch.Tensor | None

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.shape = shape
        config: Any = shape.config
        H, wide, eps = config.hidden_size, shape.states * shape.target_hidden, config.rms_norm_eps
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, H)
        self.input_norm = LlamaRMSNorm(wide, eps) if shape.norm_before_fc else None
        self.fc_norm = (
            torch.nn.ModuleList([LlamaRMSNorm(shape.target_hidden, eps) for _ in range(shape.states)])
            if shape.fc_norm
            else None
        )
        self.fc = torch.nn.Linear(wide, H, bias=False)
        self.layers = torch.nn.ModuleList(
            [LAYERS[config.model_type](config, index) for index in range(config.num_hidden_layers)]
        )
        first: Any = self.layers[0]
        first.hidden_norm = LlamaRMSNorm(H, eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(first.self_attn, name)
            made = torch.nn.Linear(2 * H, narrow.out_features, bias=narrow.bias is not None)
            setattr(first.self_attn, name, made)
        self.norm = LlamaRMSNorm(H, eps)
        self.lm_head = torch.nn.Linear(H, shape.draft_vocab, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.register_buffer("target_ids", None, persistent=False)

    def fused(self, states: torch.Tensor) -> torch.Tensor:
        """What a row sees of the target, ``[B,T,H]``, of the states of all layers side by side."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        fused: torch.Tensor = self.fc(states)
        return fused

    def forward(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs rows under the lowering in force.

        Args:
            input_ids: int64 ``[B,T]``, of each row the token after its own.
            hidden: ``[B,T,H]``, :meth:`fused` states, or what this returned for the row before.
            position_ids: int64 ``[B,T]``.

        Returns:
            What the next rows may see in the place of fused states, and what ``lm_head`` reads, ``[B,T,H]`` each.
        """
        # A token that only the target's logits know is read as the last one.
        embedded = self.embed_tokens(input_ids.clamp(max=self.embed_tokens.num_embeddings - 1))
        rotary, cache = self.rotary_emb(embedded, position_ids), PassThroughCache(len(self.layers))
        first: Any = self.layers[0]
        normed = first.hidden_norm(hidden)
        residual = normed if self.shape.norm_before_residual else hidden
        seen = torch.cat([first.input_layernorm(embedded), normed], -1)
        attended, _ = first.self_attn(
            hidden_states=seen, position_embeddings=rotary, attention_mask=None, past_key_values=cache
        )
        state = residual + attended
        state = state + first.mlp(first.post_attention_layernorm(state))
        for layer in self.layers[1:]:
            state = layer(state, position_embeddings=rotary, attention_mask=None, past_key_values=cache)
        output = self.norm(state)
        return (output if self.shape.norm_output else state), output


class Eagle3Start(torch.nn.Module):
    """What the first pass is given: fused states, and that no row was made before."""

    def __init__(self, draft: Eagle3Draft) -> None:
        super().__init__()
        self.model = draft

    def forward(
        self, layer_states: torch.Tensor, own_state: torch.Tensor, reads_own: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States ``[B,T,n*H]``, or where bool ``[B]`` says so the draft's own ``[B,H]``, to ``[B,T,H]``; and ``[B,0]``.

        See :class:`Eagle3Pass`. Where it reads its own, the first row is the only one that is no padding.
        """
        hidden = torch.where(reads_own[:, None, None], own_state[:, None], self.model.fused(layer_states))
        return hidden, layer_states[:, :0, 0]


class Eagle3Pass(torch.nn.Module):
    """One pass of the draft, as :class:`~specexport.graphs.propose.DraftPass`, with a state carried from pass to pass.

    Its rows may be padded: each slot has as many as the target's last step accepted tokens for it.
    """

    def __init__(self, draft: Eagle3Draft) -> None:
        super().__init__()
        self.model = draft

    def forward(
        self,
        input_ids: torch.Tensor,
        last_row: torch.Tensor,
        uniform: torch.Tensor,
        past_length: torch.Tensor,
        hidden: torch.Tensor,
        real: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        past: list[torch.Tensor],
        rows: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Runs rows that follow the cache and the R rows not in it yet.

        Args:
            input_ids: int64 ``[B,T]``, see :class:`Eagle3Draft`.
            last_row: int64 ``[B]``, the last of the T that is no padding.
            uniform: float32 ``[B]``.
            past_length: int64 ``[B]``, valid rows of the cache.
            hidden: float32 ``[B,T,H]``.
            real: float32 ``[B,R]``, 1 for rows made before, 0 for padding.
            temperature: ``[B]`` as all that follow; see :func:`~specexport.graphs.propose.draw_candidate`.
            top_k: likewise.
            top_p: likewise.
            min_p: likewise.
            past: caches.
            rows: the R rows, ``[B,Hkv,R,D]``.

        Returns:
            ``(token [B], ids [B,M], probs [B,M], hidden [B,1,H], real [B,R+T], rows...)``, tokens as the target
            numbers them.
        """
        tokens = input_ids.shape[1]
        real = torch.cat([real, (torch.arange(tokens) <= last_row[:, None]).float()], 1)
        fresh = torch.arange(real.shape[1])
        seen = (fresh[None, None, :] <= fresh[-tokens:][None, :, None]) & (real > 0.5)[:, None, :]
        # Padding takes no position.
        positions = past_length[:, None] + real.cumsum(1).long() - 1
        two_part = TwoPartLowering(pairs(past), past_length, seen, positions, pairs(rows))
        with lowering(two_part):
            state, output = self.model(input_ids, hidden, positions[:, -tokens:])
        row = last_row[:, None, None].expand(-1, 1, state.shape[-1])
        logits = self.model.lm_head(output.gather(1, row)[:, 0]).float()
        token, ids, probs = draw_candidate(logits, uniform, temperature, top_k, top_p, min_p)
        if self.model.target_ids is not None:
            token, ids = self.model.target_ids[token], self.model.target_ids[ids]
        return (token, ids, probs, state.gather(1, row), real, *flat(two_part.returned))
