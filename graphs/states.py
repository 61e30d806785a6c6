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

_NO_WEIGHT = -1e9
_LEAST = 1e-30


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


class LevelStart(torch.nn.Module):
    """What the first pass of a draft that expands levels is given; see :class:`LevelPass`."""

    def __init__(self, draft: OwnStateModule, expand: int) -> None:
        super().__init__()
        self.model = draft
        self.expand = expand

    def forward(
        self, layer_states: torch.Tensor, last_row: torch.Tensor, past_length: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """All that a pass is handed, of states ``[B,T,n*H]``; of the level, W times the root, the first row counts."""
        batch, tokens = layer_states.shape[:2]
        row = torch.arange(tokens)
        real = row[None, :] <= last_row[:, None]
        among = (row[None, :] <= row[:, None])[None] & real[:, None, :]
        position = past_length[:, None] + real.long().cumsum(1) - 1  # padding takes none
        rank = torch.arange(self.expand).expand(batch, -1)
        nothing = position[:, :0]
        seen = nothing[:, None, :].expand(-1, tokens, -1).float()
        weight = torch.where(rank < 1, 0.0, _NO_WEIGHT)
        return (
            self.model.fused(layer_states),
            seen,
            among.float(),
            nothing,
            position,
            last_row[:, None].expand_as(rank),
            weight,
        )


class LevelPass(torch.nn.Module):
    """One pass of a draft over a level of a tree, and the choice of the next level (EAGLE-2, arXiv 2406.16858, 4.1).

    A level are the W nodes of a depth whose paths are most probable; the first pass has the rows of the text instead,
    of which the last is the root.
    """

    def __init__(self, draft: OwnStateModule, expand: int) -> None:
        super().__init__()
        self.model = draft
        self.expand = expand

    def forward(
        self,
        input_ids: torch.Tensor,
        past_length: torch.Tensor,
        hidden: torch.Tensor,
        seen: torch.Tensor,
        among: torch.Tensor,
        positions: torch.Tensor,
        position: torch.Tensor,
        level: torch.Tensor,
        weight: torch.Tensor,
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
            past_length: int64 ``[B]``, valid rows of the cache.
            hidden: float32 ``[B,T,H]``.
            seen: float32 ``[B,T,R]``, 1 where a row sees one that was made before.
            among: float32 ``[B,T,T]``, 1 where a row sees another of this pass.
            positions: int64 ``[B,R]``.
            position: int64 ``[B,T]``.
            level: int64 ``[B,W]``, which of the T rows the level's nodes are.
            weight: float32 ``[B,W]``, the log of the probability of each node's path.
            temperature: ``[B]`` as all that follow; see :func:`~specexport.graphs.propose.draw_candidate`.
            top_k: likewise.
            top_p: likewise.
            min_p: likewise.
            past: caches.
            rows: the R rows, ``[B,Hkv,R,D]``.

        Returns:
            ``(token [B,W], ids [B,W,M], probs [B,W,M], parent [B,W])``: the next level's tokens, what may come after
            each of this level's nodes, and which of those each token of the next level comes after. Then what the next
            pass is handed, in the order above, and the rows.
        """
        W = self.expand
        visible, every = torch.cat([seen, among], 2), torch.cat([positions, position], 1)
        two_part = TwoPartLowering(pairs(past), past_length, visible > 0.5, every, pairs(rows))
        with lowering(two_part):
            state, output = self.model(input_ids, hidden, position)
        logits = self.model.lm_head(_rows_of(output, level)).float()
        same = [value[:, None].expand(-1, W) for value in (temperature, top_k, top_p, min_p)]
        _, ids, probs = draw_candidate(logits, torch.zeros_like(weight), *same)
        if self.model.target_ids is not None:
            ids = self.model.target_ids[ids]
        ranks = min(W, ids.shape[-1])
        paths = weight[:, :, None] + probs[..., :ranks].clamp(min=_LEAST).log()
        weights, best = torch.topk(paths.flatten(1), W)
        parent = best // ranks
        token = ids[..., :ranks].flatten(1).gather(1, best)
        before = level.gather(1, parent)
        alone = torch.eye(W).expand(token.shape[0], -1, -1)
        return (
            token,
            ids,
            probs,
            parent,
            _rows_of(state, before),
            _rows_of(visible, before),
            alone,
            every,
            position.gather(1, before) + 1,
            torch.arange(W).expand(token.shape[0], -1),
            weights,
            *flat(two_part.returned),
        )


def _rows_of(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``[B,W,N]``, rows of ``[B,T,N]``."""
    return values.gather(1, rows[:, :, None].expand(-1, -1, values.shape[-1]))


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
