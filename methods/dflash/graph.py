"""DFlash: a few decoder layers draft a whole block of tokens in one pass (arXiv 2602.06036; z-lab/dflash).

The draft has a row in its cache of each token of the text: in every layer a key and a value of the target's states at
that token, which ``fc`` and ``hidden_norm`` fuse into one vector. A block is the text's last token, the *root*, and one
mask for each token to be drafted. Its rows see all the context and one another; row i says what comes i tokens after
the root, whatever the others say. They are dropped after each pass.

Parameters are named as in ``z-lab``'s checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from specexport.contract.model import LoweredAs
from specexport.graphs.attention import AttentionCall, KeyValues, TwoPartLowering, attend, lowering
from specexport.graphs.ops import tensor_scatter
from specexport.graphs.propose import draw_candidate
from specexport.graphs.step import flat, pairs

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of positions, ``[B,N,D]``."""


@dataclass(frozen=True)
class DFlashShape:
    """What a draft is made of.

    Attributes:
        config: of its layers, a Qwen3's; ``hidden_size`` is H, ``vocab_size`` the number of tokens it reads.
        target_hidden: the target's hidden size.
        states: how many of the target's layers it sees.
        draft_vocab: tokens it may propose.
        block_size: tokens of the longest block, its root among them.
        mask_token: what stands for a token to be drafted.
        causal: of each layer, whether a row of a block sees only those before it and itself.
        embedding_scale: what embeddings are multiplied by.
        logit_scale: what logits are multiplied by.
        logit_softcap: their bound then, by tanh; None for no bound.
    """

    config: PretrainedConfig
    target_hidden: int
    states: int
    draft_vocab: int
    block_size: int
    mask_token: int
    causal: tuple[bool, ...]
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None


class DFlashDraft(torch.nn.Module):
    """The draft's parameters, and what they compute.

    Attributes:
        target_ids: int64 ``[draft_vocab]``, the target's number of each token it may propose; None where alike.
    """

    target_ids: torch.Tensor | None

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__()
        self.shape = shape
        config: Any = shape.config
        H, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, H)
        self.fc = torch.nn.Linear(shape.states * shape.target_hidden, H, bias=False)
        self.hidden_norm = qwen3.Qwen3RMSNorm(H, eps)
        self.layers = torch.nn.ModuleList(
            [qwen3.Qwen3DecoderLayer(config, index) for index in range(config.num_hidden_layers)]
        )
        self.norm = qwen3.Qwen3RMSNorm(H, eps)
        self.lm_head = torch.nn.Linear(H, shape.draft_vocab, bias=False)
        self.rotary_emb = qwen3.Qwen3RotaryEmbedding(config)
        self.register_buffer("target_ids", None, persistent=False)

    def context(self, states: torch.Tensor) -> torch.Tensor:
        """The context ``[B,T,H]`` of the target's states, those of all layers side by side."""
        context: torch.Tensor = self.hidden_norm(self.fc(states))
        return context

    def block(self, roots: torch.Tensor, rows: int) -> torch.Tensor:
        """Blocks of so many rows, int64 ``[N,rows]``, behind the roots ``[N]``."""
        masks = torch.full((roots.shape[0], rows - 1), self.shape.mask_token, device=roots.device)
        # A token that only the target's logits know is read as the last one.
        return torch.cat([roots.clamp(max=self.embed_tokens.num_embeddings - 1)[:, None], masks], 1)

    def forward(
        self, block: torch.Tensor, context: torch.Tensor, block_positions: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Runs the rows of blocks under the lowering in force.

        Args:
            block: int64 ``[B,R]``, see :meth:`block`.
            context: ``[B,T,H]``, see :meth:`context`; rows that are not in the cache yet.
            block_positions: int64 ``[B,R]``.
            positions: int64 ``[B,T+R]``, those of the context before them.

        Returns:
            What :meth:`logits` reads, ``[B,R,H]``.
        """
        hidden = self.embed_tokens(block) * self.shape.embedding_scale
        own, every = self.rotary_emb(hidden, block_positions), self.rotary_emb(hidden, positions)
        layer: Any
        for layer in self.layers:
            hidden = hidden + _attended(layer.self_attn, layer.input_layernorm(hidden), context, own, every)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        output: torch.Tensor = self.norm(hidden)
        return output

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., draft_vocab]`` of rows, in float32."""
        logits: torch.Tensor = self.lm_head(output).float()
        if self.shape.logit_scale != 1.0:
            logits = logits * self.shape.logit_scale
        cap = self.shape.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def _attended(attention: Any, hidden: torch.Tensor, context: torch.Tensor, own: Rotary, every: Rotary) -> torch.Tensor:
    """Attention of a block's rows over the context and themselves; keys and values are made by one product each."""
    batch, rows, _ = hidden.shape
    heads = (batch, -1, attention.head_dim)
    both = torch.cat([context, hidden], 1)
    query = attention.q_norm(attention.q_proj(hidden).view(batch, rows, *heads[1:])).transpose(1, 2)
    key = attention.k_norm(attention.k_proj(both).view(batch, both.shape[1], *heads[1:])).transpose(1, 2)
    value = attention.v_proj(both).view(batch, both.shape[1], *heads[1:]).transpose(1, 2)
    # By its module's name, as tracing puts another function in its place. Of both results one is needed.
    query, _ = qwen3.apply_rotary_pos_emb(query, query, *own)
    key, _ = qwen3.apply_rotary_pos_emb(key, key, *every)
    window = attention.sliding_window
    attended, _ = attend(attention, query, key, value, None, scaling=attention.scaling, sliding_window=window)
    output: torch.Tensor = attention.o_proj(attended.flatten(2))
    return output


class EachLayer:
    """A lowering made of one for each layer."""

    def __init__(self, layers: list[TwoPartLowering]) -> None:
        self._layers = layers

    @property
    def returned(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """See :class:`~specexport.graphs.attention.TwoPartLowering`."""
        return [one.returned[layer] for layer, one in enumerate(self._layers)]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return self._layers[call.layer].attend(call)


def block_lowering(
    causal: Sequence[bool],
    past: KeyValues,
    past_length: torch.Tensor,
    last_row: torch.Tensor,
    block_rows: torch.Tensor,
    T: int,
    rows: int,
) -> tuple[EachLayer, torch.Tensor, torch.Tensor]:
    """What the rows of blocks see, of caches, T rows of the context behind these, and as many rows of their own.

    Args:
        causal: of each layer, whether a row of a block sees only those before it and itself.
        past: caches.
        past_length: int64 ``[B]``, see :class:`DFlashModule` as for all that follow.
        last_row: int64 ``[B]``.
        block_rows: int64 ``[B]``.
        T: rows of the context.
        rows: of each block, padding among them.

    Returns:
        The lowering, and the positions that :class:`DFlashDraft` is given: of blocks, and of all new rows.
    """
    at, own = torch.arange(T), torch.arange(rows)
    block_positions = (past_length + last_row + 1)[:, None] + own
    positions = torch.cat([past_length[:, None] + at, block_positions], 1)
    # All rows of a block see the same of the context and of the block, or none behind themselves.
    real = torch.cat([at <= last_row[:, None], own < block_rows[:, None]], 1)[:, None, :].expand(-1, rows, -1)
    behind = torch.cat([torch.zeros_like(at), own])[None, :] > own[:, None]
    return each_layer(causal, past, past_length, real, behind, positions), block_positions, positions


def each_layer(
    causal: Sequence[bool],
    past: KeyValues,
    past_length: torch.Tensor,
    seen: torch.Tensor,
    behind: torch.Tensor,
    positions: torch.Tensor,
) -> EachLayer:
    """A lowering of layers, see :class:`~specexport.graphs.attention.TwoPartLowering`.

    In layers that are ``causal`` rows do not see what is ``behind`` them, bool ``[T,F]``.
    """
    kinds = {
        one: TwoPartLowering(past, past_length, seen & ~behind if one else seen, positions) for one in sorted({*causal})
    }
    return EachLayer([kinds[one] for one in causal])


class DFlashModule(torch.nn.Module):
    """The propose graph: context rows for the cache and a block behind them, in one pass."""

    def __init__(self, draft: DFlashDraft, kind: LoweredAs) -> None:
        super().__init__()
        self.model = draft
        self.kind: LoweredAs = kind

    def forward(
        self,
        input_ids: torch.Tensor,
        layer_states: torch.Tensor,
        last_row: torch.Tensor,
        past_length: torch.Tensor,
        block_rows: torch.Tensor,
        uniform: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        past: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Drafts K tokens in every slot.

        Args:
            input_ids: int64 ``[B,1]``, the roots.
            layer_states: float32 ``[B,T,n*H]``, of the text's tokens that have no row in the cache yet.
            last_row: int64 ``[B]``, the last of the T that is no padding.
            past_length: int64 ``[B]``, valid rows of the cache.
            block_rows: int64 ``[B]``, rows of each slot's block; others of the 1 + K are not seen.
            uniform: float32 ``[B,K]``.
            temperature: ``[B]`` as all that follow; see :func:`~specexport.graphs.propose.draw_candidate`.
            top_k: likewise.
            top_p: likewise.
            min_p: likewise.
            past: caches.

        Returns:
            ``(token [K,B], ids [K,B,M], probs [K,B,M], caches...)``, tokens as the target numbers them. Lowered
            portably, rows ``[B,Hkv,T+K-1,D]`` in the place of caches; those of the context come first.
        """
        T, rows = layer_states.shape[1], uniform.shape[1] + 1
        active, block_positions, positions = block_lowering(
            self.model.shape.causal, pairs(past), past_length, last_row, block_rows, T, rows
        )
        with lowering(active):
            block = self.model.block(input_ids[:, 0], rows)
            output = self.model(block, self.model.context(layer_states), block_positions, positions)
        logits = self.model.logits(output[:, 1:])
        token, ids, probs = draw_candidate(
            logits, uniform, temperature[:, None], top_k[:, None], top_p[:, None], min_p[:, None]
        )
        if self.model.target_ids is not None:
            token, ids = self.model.target_ids[token], self.model.target_ids[ids]
        # As many rows as other drafts return; beyond the context's they are the block's, which nobody keeps.
        made = [new[:, :, : T + rows - 2] for new in flat(active.returned)]
        if self.kind == "native":
            made = [tensor_scatter(cache, new, past_length) for cache, new in zip(past, made, strict=True)]
        return (token.transpose(0, 1), ids.transpose(0, 1), probs.transpose(0, 1), *made)
