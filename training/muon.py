"""Muon with products in fp32 on CPUs: torch's, in bf16, took 70 % of an EAGLE-3 step on one that has no bf16."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration: they drive singular values towards 1 fastest, and leave them between 0.7 and 1.2."""
_ITERATIONS = 5
_EPSILON = 1e-7


class Muon(torch.optim.Optimizer):
    """Momentum whose update of a matrix is orthogonalized (Jordan et al., https://kellerjordan.github.io/posts/muon/).

    Learning rates are those of AdamW: an update's root mean square is 0.2 (Liu et al., arXiv 2502.16982, section 2.2).

    Args:
        matrices: parameters ``[A,B]``.
        lr: learning rate.
        weight_decay: decoupled, as a share of the rate.
        momentum: share of the momentum that a step keeps; Nesterov's look-ahead is used.
    """

    def __init__(
        self, matrices: Iterable[torch.nn.Parameter], lr: float, weight_decay: float = 0.0, momentum: float = 0.95
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates the matrices that have gradients."""
        assert closure is None
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix.grad)
                average = state["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonalized(matrix.grad.lerp(average, group["momentum"]))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(matrix.shape)))


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """About U·Vᵀ of a matrix U·S·Vᵀ, by Newton and Schulz's iteration."""
    a, b, c = _COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide.float() if matrix.device.type == "cpu" else wide.bfloat16()
    wide = wide / wide.norm().clamp(min=_EPSILON)
    for _ in range(_ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide if matrix.shape[0] <= matrix.shape[1] else wide.T).to(matrix.dtype)
