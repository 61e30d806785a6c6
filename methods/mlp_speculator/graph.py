"""MLP speculators: stages predict the next tokens, each from a state and the token before (arXiv 2404.19124).

Stage i of ``foundation-model-stack/fms-extras``: ``s = GELU(LN_i(proj_i(s) * sw + emb_i(token) * ew))``, and its logits
are ``head_i(s)``. The first state is the input of the target's language-model head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specexport.graphs.propose import MAX_CANDIDATES, draw_candidate, place_of_rank

EPSILON = 1e-6
"""Epsilon of the norms."""


class RmsNorm(torch.nn.Module):
    """``x / rms(x) * weight + bias``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.bias = torch.nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * rms_normalize(x) + self.bias


def rms_normalize(x: torch.Tensor) -> torch.Tensor:
    """``x / rms(x)`` over the last axis."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)


class SpeculatorStages(torch.nn.Module):
    """The stages, with parameters named as in checkpoints of ``ibm-fms``, without the prefix ``speculator.``.

    Args:
        vocab: V, the width of the target's logits.
        hidden: H, the target's hidden size (``emb_dim``).
        inner: I, the width of the states between stages (``inner_dim``).
        scale_input: normalize the hidden state first, and divide it by the root of 2.
        tied: all stages share embedding, head and norm, and all but the first the projection (``tie_weights``).
    """

    def __init__(self, vocab: int, hidden: int, inner: int, stages: int, *, scale_input: bool, tied: bool) -> None:
        super().__init__()
        self.vocab = vocab
        self.hidden = hidden
        self.inner = inner
        self.scale_input = scale_input
        self.tied = tied
        # Half of the first state's weight remains after the last stage.
        self.state_weight = 0.5 ** (0.5 / stages)
        self.token_weight = ((1 - self.state_weight**2) * inner / 2) ** 0.5
        count = 1 if tied else stages
        emb = [torch.nn.Embedding(vocab, inner) for _ in range(count)]
        proj = [torch.nn.Linear(hidden if i == 0 else inner, inner, bias=False) for i in range(min(count + 1, stages))]
        head = [torch.nn.Linear(inner, vocab, bias=False) for _ in range(count)]
        ln = [RmsNorm(inner) for _ in range(count)]
        self.emb, self.proj, self.head, self.ln = (
            torch.nn.ModuleList([*parts, *parts[-1:] * (stages - len(parts))]) for parts in (emb, proj, head, ln)
        )

    def __len__(self) -> int:
        return len(self.head)

    def keep_first(self, stages: int) -> None:
        """Removes all stages after the first ``stages``, whose results do not change."""
        for name in ("emb", "proj", "head", "ln"):
            setattr(self, name, getattr(self, name)[:stages])

    def first_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """The first stage's input, ``[..., H]``, from the target's hidden state."""
        return rms_normalize(hidden) / 2**0.5 if self.scale_input else hidden

    def advance(self, stage: int, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The state ``[..., I]`` of a stage, from the token and the state before, ``[..., H]`` for the first stage."""
        mixed = self.proj[stage](state) * self.state_weight + self.emb[stage](tokens) * self.token_weight
        return F.gelu(self.ln[stage](mixed))

    def logits(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The logits ``[D,V]`` of the first D stages, from the target's hidden state ``[H]`` and tokens ``[D]``."""
        state, logits = self.first_state(hidden), []
        for stage, token in enumerate(tokens):
            state = self.advance(stage, state, token)
            logits.append(self.head[stage](state))
        return torch.stack(logits)


class SpeculatorModule(torch.nn.Module):
    """The propose graph: computes candidates for every node of a token tree that has children, level by level."""

    def __init__(self, speculator: SpeculatorStages) -> None:
        super().__init__()
        self.speculator = speculator
        self.candidates = min(MAX_CANDIDATES, speculator.vocab)

    def forward(
        self,
        hidden_state: torch.Tensor,
        input_ids: torch.Tensor,
        level_parents: torch.Tensor,
        level_ranks: torch.Tensor,
        uniform: torch.Tensor,
        sampling: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Runs the stages over the levels of a tree; see ``contract.tensors`` for shapes.

        Returns:
            ``(token, ids, probs)``, the stages concatenated.
        """
        drafted: list[torch.Tensor] = []
        state, tokens = self.speculator.first_state(hidden_state)[:, None], input_ids
        for stage in range(len(self.speculator)):
            if stage:
                parents = level_parents[:, stage]
                drawn, ids, _ = drafted[-3:]
                candidates = _of_parents(ids, parents)
                place = place_of_rank(candidates, drawn.gather(1, parents), level_ranks[:, stage])
                tokens = candidates.gather(2, place[..., None])[..., 0]
                state = _of_parents(state, parents)
            state = self.speculator.advance(stage, state, tokens)
            logits = self.speculator.head[stage](state).float()
            noise = uniform[:, stage, :1] if stage == 0 else uniform[:, stage]
            drafted += draw_candidate(logits, noise, *(parameter[:, None] for parameter in sampling))
        return tuple(drafted)


def _of_parents(rows: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """Each node's parent row: ``[B,T,N]`` from ``[B,P,N]``."""
    return rows.gather(1, parents[..., None].expand(-1, -1, rows.shape[-1]))
