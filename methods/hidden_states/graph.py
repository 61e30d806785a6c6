"""A chain drafted from the target's states, and where the target has not been yet from the draft's own.

A row of such a draft belongs to a token of the text and sees two things: what the target says at that token, and the
embedding of the token after it. It says what comes after that one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from specexport.contract.model import CacheLayer
from specexport.graphs.attention import Probe, TwoPartLowering, lowering
from specexport.graphs.propose import draw_candidate
from specexport.graphs.step import flat, pairs


class OwnStateModule(torch.nn.Module, ABC):
    """What a row of a draft computes.

    Attributes:
        embed_tokens: of the tokens that it reads.
        layers: decoder layers as transformers has them.
        lm_head: makes its logits.
        reads: how wide the target's states are side by side.
        hidden: H, the width of its own.
        target_ids: int64 ``[draft_vocab]``, the target's number of each token it may propose; None where alike.
    """

    embed_tokens: torch.nn.Embedding
    layers: torch.nn.ModuleList
    lm_head: torch.nn.Linear
    reads: int
    hidden: int
    target_ids: torch.Tensor | None

    @abstractmethod
    def fused(self, states: torch.Tensor) -> torch.Tensor:
        """What a row sees of the target, ``[B,T,H]``, of the states of all layers side by side, ``[B,T,reads]``."""

    @abstractmethod
    def forward(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs rows under the lowering in force.

        Args:
            input_ids: int64 ``[B,T]``, of each row the token after its own.
            hidden: ``[B,T,H]``, :meth:`fused` states, or what this returned for the row before.
            position_ids: int64 ``[B,T]``.

        Returns:
            What the next rows may see instead of fused states, and what ``lm_head`` reads, ``[B,T,H]`` each.
        """

    def cache(self) -> tuple[CacheLayer, ...]:
        """Heads and sizes of each layer's keys and values, learnt by a run of two rows."""
        probe, weight = Probe(), self.lm_head.weight
        ids = torch.zeros(1, 2, dtype=torch.int64, device=weight.device)
        with torch.no_grad(), lowering(probe):
            self(ids, weight.new_zeros(1, 2, self.hidden), torch.arange(2, device=weight.device)[None])
        return tuple(probe.seen[layer] for layer in range(len(self.layers)))


class OwnStateStart(torch.nn.Module):
    """What the first pass is given: fused states, and that no row was made before."""

    def __init__(self, draft: OwnStateModule) -> None:
        super().__init__()
        self.model = draft

    def forward(
        self, layer_states: torch.Tensor, own_state: torch.Tensor, reads_own: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States ``[B,T,n*H]``, or where bool ``[B]`` says so the draft's own ``[B,H]``, to ``[B,T,H]``; and ``[B,0]``.

        See :class:`OwnStatePass`. Where it reads its own, the first row is the only one that is no padding.
        """
        hidden = torch.where(reads_own[:, None, None], own_state[:, None], self.model.fused(layer_states))
        return hidden, layer_states[:, :0, 0]


class OwnStatePass(torch.nn.Module):
    """One pass of the draft, as :class:`~specexport.graphs.propose.DraftPass`, with a state carried from pass to pass.

    Its rows may be padded: each slot has as many as the target's last step accepted tokens for it.
    """

    def __init__(self, draft: OwnStateModule) -> None:
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
            input_ids: int64 ``[B,T]``, see :meth:`OwnStateModule.forward`.
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
