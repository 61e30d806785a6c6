"""Medusa heads predict the tokens after the next one from one hidden state (Cai et al., arXiv 2401.10774)."""

from __future__ import annotations

import torch

from specexport.contract import tensors
from specexport.graphs.propose import most_probable
from specexport.graphs.step import Addition


class ResBlock(torch.nn.Module):
    """``x + SiLU(W x + b)``; W and b start at zero, so that a new block is the identity."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(hidden, hidden)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.silu(self.linear(x))


class MedusaHeads(torch.nn.ModuleList):
    """Heads of residual blocks, each followed by a projection to the vocabulary, its own or the model's.

    Head i reads the hidden state after the final norm, from which the model predicts token t+1, and predicts token
    t+2+i. Parameters have the names of ``FasterDecoding/Medusa``: ``{i}.{j}.linear.weight``, ``{i}.{j}.linear.bias``
    and ``{i}.{layers}.weight``, the projection ``[V,H]``. Tied heads factor it into the model's own head ``[V,H]`` and
    ``{i}.{layers}.weight [H,H]``, which is V/H times smaller. (The blocks alone cannot turn a state that predicts t+1
    into one that predicts t+2 through the same head: SiLU hardly subtracts anything.)

    Args:
        layers: residual blocks per head.
        hidden: H, the model's hidden size.
        vocab: V, the width of the model's logits.
        tied: heads end in the model's own language-model head.
    """

    def __init__(self, heads: int, layers: int, hidden: int, vocab: int, *, tied: bool) -> None:
        super().__init__()
        self.layers = layers
        self.hidden = hidden
        self.vocab = vocab
        self.tied = tied
        for _ in range(heads):
            blocks: list[torch.nn.Module] = [ResBlock(hidden) for _ in range(layers)]
            last = torch.nn.Linear(hidden, hidden if tied else vocab, bias=False)
            if tied:
                torch.nn.init.eye_(last.weight)
            blocks.append(last)
            self.append(torch.nn.Sequential(*blocks))

    def logits(self, hidden: torch.Tensor, lm_head: torch.nn.Module) -> torch.Tensor:
        """Every head's logits, ``[N, ..., V]``, from hidden states after the final norm, ``[..., H]``."""
        states = torch.stack([head(hidden) for head in self])  # if tied, the input of the model's head
        return lm_head(states) if self.tied else states


class HeadCandidates(Addition):
    """The most probable tokens of each head, int64 ``[B,N,R,M]``, best first, as the output ``candidates``.

    Args:
        vocab_size: number of tokens that may be proposed; None for all.
        depth_1: whether the model's own head proposes the first depth.
    """

    prefix = "medusa_head"

    def __init__(
        self,
        heads: MedusaHeads,
        model: torch.nn.Module,
        candidates: int,
        vocab_size: int | None = None,
        *,
        depth_1: bool = False,
    ) -> None:
        super().__init__()
        self.heads = (heads,)  # in a tuple, so that torch does not register it under another name
        for number, head in enumerate(heads):
            self.add_module(str(number), head)
        self.lm_head = _own_projection(model) if heads.tied else torch.nn.Identity()
        self.candidates = candidates
        self.vocab_size = vocab_size
        self.depth_1 = depth_1

    def forward(self, hidden: torch.Tensor, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        (heads,) = self.heads
        ahead = self._best(heads.logits(hidden, self.lm_head).transpose(0, 1).float())
        return {tensors.CANDIDATES: torch.cat([self._best(logits[:, None]), ahead], 1) if self.depth_1 else ahead}

    def _best(self, logits: torch.Tensor) -> torch.Tensor:
        return most_probable(logits[..., : self.vocab_size], self.candidates)[1]


def _own_projection(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model's head, for heads that are tied to it.

    Proposals tolerate fewer bits than the model's logits, and the product is a separate one anyway, as it has several
    rows for each of the model's.
    """
    weight: torch.Tensor = model.get_output_embeddings().weight  # type: ignore[operator]
    copy = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    copy.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    vars(copy.weight).update(vars(weight))  # the stored tensor, if it is a stand-in (checkpoints/stored.py)
    return copy
