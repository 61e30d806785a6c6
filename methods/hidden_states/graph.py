"""Modules of drafts that read the target's states, and their own state at tokens that the target has not read yet.

Each row of such a draft belongs to a token of the text and has two inputs: the target's states at that token, and the
embedding of the next token. It predicts the token after that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from specexport.contract.model import CacheLayer
from specexport.graphs.attention import Probe, TwoPartLowering, lowering
from specexport.graphs.propose import draw_next
from specexport.graphs.step import flat, pairs


class OwnStateModule(torch.nn.Module, ABC):
    """Base of the torch modules of such drafts.

    Attributes:
        states_width: width of the target's concatenated states.
        hidden: H, width of the draft's state.
        target_ids: int64 ``[draft_vocab]``, the target's ids of the draft's tokens; None if ids are the same.
    """

    embed_tokens: torch.nn.Embedding
    layers: torch.nn.ModuleList
    lm_head: torch.nn.Linear
    states_width: int
    hidden: int
    target_ids: torch.Tensor | None

    @abstractmethod
    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Fuses the target's states, all layers concatenated, ``[B,T,states_width]`` to ``[B,T,H]``."""

    @abstractmethod
    def forward(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes rows under the active lowering.

        Args:
            input_ids: int64 ``[B,T]``, the token after each row's token.
            hidden: ``[B,T,H]``, fused states, or the state returned for the row before.
            position_ids: int64 ``[B,T]``.

        Returns:
            States that later rows may read instead of fused states, and the input of ``lm_head``, ``[B,T,H]`` each.
        """

    def cache(self) -> tuple[CacheLayer, ...]:
        """The cache of each layer, as a run over two rows shows it."""
        probe, weight = Probe(), self.lm_head.weight
        ids = torch.zeros(1, 2, dtype=torch.int64, device=weight.device)
        with torch.no_grad(), lowering(probe):
            self(ids, weight.new_zeros(1, 2, self.hidden), torch.arange(2, device=weight.device)[None])
        return tuple(probe.seen[layer] for layer in range(len(self.layers)))


class OwnStateStart(torch.nn.Module):
    """Computes the first pass's inputs: fused states, and an empty mask of earlier rows."""

    def __init__(self, draft: OwnStateModule) -> None:
        super().__init__()
        self.model = draft

    def forward(
        self, layer_states: torch.Tensor, own_state: torch.Tensor, reads_own: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps states ``[B,T,n*H]``, or the draft's own ``[B,H]`` where ``reads_own``, to ``[B,T,H]`` and ``[B,0]``.

        See :class:`OwnStatePass`. In slots that read the draft's own state, all rows except the first are padding.
        """
        hidden = torch.where(reads_own[:, None, None], own_state[:, None], self.model.fuse(layer_states))
        return hidden, layer_states[:, :0, 0]


class OwnStatePass(torch.nn.Module):
    """One pass of the draft, like :class:`~specexport.graphs.propose.DraftPass`, with a state carried between passes.

    Rows may be padding: each slot has as many rows as the target's last step committed tokens for it.
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
        sampling: list[torch.Tensor],
        past: list[torch.Tensor],
        rows: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Computes rows after the cache and after the call's R earlier rows, which are not in it yet.

        ``hidden`` is that of :meth:`OwnStateModule.forward`; ``real``, float32 ``[B,R]``, is 1 for earlier rows and 0
        for padding; ``sampling`` holds the last arguments of :func:`~specexport.graphs.propose.draw_candidate`.

        Returns:
            ``(token [B], ids [B,M], probs [B,M], hidden [B,1,H], real [B,R+T], rows...)`` with the target's token ids.
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
        logits = self.model.lm_head(output.gather(1, row)).float()
        token, ids, probs = draw_next(logits, uniform, sampling)
        if self.model.target_ids is not None:
            token, ids = self.model.target_ids[token], self.model.target_ids[ids]
        return (token, ids, probs, state.gather(1, row), real, *flat(two_part.returned))
