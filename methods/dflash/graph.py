"""DFlash: a few decoder layers draft a whole block of tokens in one pass (arXiv 2602.06036; z-lab/dflash).

The draft's cache has a row for each token of the text: in every layer, a key and a value computed from the target's
states at that token, which ``fc`` and ``hidden_norm`` fuse into one vector. A block consists of the text's last token,
the *root*, followed by a mask token for each token to draft. Its rows attend to the whole context and to each other;
row i predicts the token i positions after the root, independently of the other predictions. Rows of blocks are dropped
after each pass.

Parameters are named as in ``z-lab``'s checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from specexport.contract.model import CacheLayer, LoweredAs
from specexport.graphs.attention import AttentionCall, KeyValues, Lowering, TwoPartLowering, attend, lowering
from specexport.graphs.ops import tensor_scatter
from specexport.graphs.propose import draw_candidate
from specexport.graphs.step import flat, pairs

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of positions, ``[B,N,D]``."""


@dataclass(frozen=True, kw_only=True)
class BlockSettings:
    """The settings of a draft's blocks.

    Attributes:
        causal: for each layer, whether a block's row sees only itself and the rows before it.
        logit_softcap: bound of the scaled logits, by tanh; None for no bound.
    """

    block_size: int
    mask_token: int
    causal: tuple[bool, ...]
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None


class DFlashDraft(torch.nn.Module):
    """The draft's parameters and computations.

    Args:
        config: the layers' Qwen3 configuration; ``hidden_size`` is H, ``vocab_size`` the number of input tokens.
        states_width: width of the target's states that it reads, all layers concatenated.
        draft_vocab: number of tokens that it may propose.

    Attributes:
        target_ids: int64 ``[draft_vocab]``, the target's ids of these tokens; None if ids are the same.
    """

    target_ids: torch.Tensor | None

    def __init__(self, config: Any, settings: BlockSettings, states_width: int, draft_vocab: int) -> None:
        super().__init__()
        self.config, self.settings = config, settings
        H, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, H)
        self.fc = torch.nn.Linear(states_width, H, bias=False)
        self.hidden_norm = qwen3.Qwen3RMSNorm(H, eps)
        self.layers = torch.nn.ModuleList(
            [qwen3.Qwen3DecoderLayer(config, index) for index in range(config.num_hidden_layers)]
        )
        self.norm = qwen3.Qwen3RMSNorm(H, eps)
        self.lm_head = torch.nn.Linear(H, draft_vocab, bias=False)
        self.rotary_emb = qwen3.Qwen3RotaryEmbedding(config)
        self.register_buffer("target_ids", None, persistent=False)

    def context(self, states: torch.Tensor) -> torch.Tensor:
        """Fuses the target's states ``[B,T,n*H]``, all layers concatenated, into the context ``[B,T,H]``."""
        return self.hidden_norm(self.fc(states))

    def block(self, roots: torch.Tensor, rows: int) -> torch.Tensor:
        """Blocks that begin with the roots ``[N]``, int64 ``[N,rows]``."""
        masks = torch.full((roots.shape[0], rows - 1), self.settings.mask_token, device=roots.device)
        # Token ids beyond the embedding, which only the target has, are read as its last one.
        return torch.cat([roots.clamp(max=self.embed_tokens.num_embeddings - 1)[:, None], masks], 1)

    def forward(
        self, block: torch.Tensor, context: torch.Tensor, block_positions: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Computes the rows of blocks under the active lowering.

        Args:
            block: int64 ``[B,R]``, see :meth:`block`.
            context: ``[B,T,H]``, see :meth:`context`; the rows that are not in the cache yet.
            block_positions: int64 ``[B,R]``, the positions of the block.
            positions: int64 ``[B,T+R]``, the positions of the context, then of the block.

        Returns:
            The input of :meth:`logits`, ``[B,R,H]``.
        """
        hidden = self.embed_tokens(block) * self.settings.embedding_scale
        block_rotary, all_rotary = self.rotary_emb(hidden, block_positions), self.rotary_emb(hidden, positions)
        layer: Any
        for layer in self.layers:
            hidden = hidden + _attended(
                layer.self_attn, layer.input_layernorm(hidden), context, block_rotary, all_rotary
            )
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.norm(hidden)

    def cache(self) -> tuple[CacheLayer, ...]:
        """The cache of each layer."""
        size = self.config.head_dim
        row = CacheLayer(heads=self.config.num_key_value_heads, key_size=size, value_size=size)
        return (row,) * len(self.layers)

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., draft_vocab]`` of rows, in float32."""
        logits: torch.Tensor = self.lm_head(output).float()
        if self.settings.logit_scale != 1.0:
            logits = logits * self.settings.logit_scale
        cap = self.settings.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def _attended(
    attention: Any, hidden: torch.Tensor, context: torch.Tensor, block_rotary: Rotary, all_rotary: Rotary
) -> torch.Tensor:
    """Attention of a block's rows over the context and the block, with one product for keys and one for values."""
    batch, rows, _ = hidden.shape
    heads = (batch, -1, attention.head_dim)
    both = torch.cat([context, hidden], 1)
    query = attention.q_norm(attention.q_proj(hidden).view(batch, rows, *heads[1:])).transpose(1, 2)
    key = attention.k_norm(attention.k_proj(both).view(batch, both.shape[1], *heads[1:])).transpose(1, 2)
    value = attention.v_proj(both).view(batch, both.shape[1], *heads[1:]).transpose(1, 2)
    # Looked up in its module, as tracing replaces the function there.
    query, _ = qwen3.apply_rotary_pos_emb(query, query, *block_rotary)
    key, _ = qwen3.apply_rotary_pos_emb(key, key, *all_rotary)
    window = attention.sliding_window
    attended, _ = attend(attention, query, key, value, None, scaling=attention.scaling, sliding_window=window)
    return attention.o_proj(attended.flatten(2))


class BlockLowering(Lowering):
    """Attention in two parts (:class:`~specexport.graphs.attention.TwoPartLowering`).

    In ``causal`` layers, rows do not see ``later`` ones, bool ``[T,F]``.
    """

    def __init__(
        self,
        causal: Sequence[bool],
        past: KeyValues,
        past_length: torch.Tensor,
        seen: torch.Tensor,
        later: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        kinds = {
            hides: TwoPartLowering(past, past_length, seen & ~later if hides else seen, positions)
            for hides in sorted({*causal})
        }
        self._layers = [kinds[hides] for hides in causal]

    @property
    def returned(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [lowering.returned[layer] for layer, lowering in enumerate(self._layers)]

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
) -> tuple[BlockLowering, torch.Tensor, torch.Tensor]:
    """The attention of blocks over the caches, T new rows of the context and the block's own rows.

    Args:
        past_length: int64 ``[B]``; see :class:`DFlashModule` for this and the following.
        T: number of new rows of the context.
        rows: number of rows of each block, including padding.

    Returns:
        The lowering, and the positions of the blocks and of all new rows, as :class:`DFlashDraft` takes them.
    """
    at, block = torch.arange(T), torch.arange(rows)
    block_positions = (past_length + last_row + 1)[:, None] + block
    positions = torch.cat([past_length[:, None] + at, block_positions], 1)
    # All rows of a block see the same rows, except that causal layers hide later ones.
    real = torch.cat([at <= last_row[:, None], block < block_rows[:, None]], 1)[:, None, :].expand(-1, rows, -1)
    later = torch.cat([torch.zeros_like(at), block])[None, :] > block[:, None]
    return BlockLowering(causal, past, past_length, real, later, positions), block_positions, positions


class DFlashModule(torch.nn.Module):
    """The propose graph: one pass computes context rows for the cache, and a block after them."""

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
        sampling: list[torch.Tensor],
        past: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Drafts K tokens in every slot; see ``block_inputs``.

        Returns:
            ``(token [K,B], ids [K,B,M], probs [K,B,M], caches...)`` with the target's token ids. The portable lowering
            returns rows ``[B,Hkv,T+K-1,D]`` instead of caches, those of the context first.
        """
        T, rows = layer_states.shape[1], uniform.shape[1] + 1
        active, block_positions, positions = block_lowering(
            self.model.settings.causal, pairs(past), past_length, last_row, block_rows, T, rows
        )
        with lowering(active):
            block = self.model.block(input_ids[:, 0], rows)
            output = self.model(block, self.model.context(layer_states), block_positions, positions)
        logits = self.model.logits(output[:, 1:])
        token, ids, probs = draw_candidate(logits, uniform, *(parameter[:, None] for parameter in sampling))
        if self.model.target_ids is not None:
            token, ids = self.model.target_ids[token], self.model.target_ids[ids]
        # As many rows as other drafts return; the block's rows, after the context's, are discarded.
        returned = [new[:, :, : T + rows - 2] for new in flat(active.returned)]
        if self.kind == "native":
            returned = [tensor_scatter(cache, new, past_length) for cache, new in zip(past, returned, strict=True)]
        return (token.transpose(0, 1), ids.transpose(0, 1), probs.transpose(0, 1), *returned)
