"""Muon against torch's, whose products are in bf16."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")

from specexport.training.loop import Muon, orthogonalized  # noqa: E402

pytestmark = pytest.mark.exporter


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_an_orthogonalized_matrix_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    values = torch.linalg.svdvals(orthogonalized(matrix))
    assert 0.6 < values.min() <= values.max() < 1.3
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    assert torch.nn.functional.cosine_similarity((left @ right).flatten(), orthogonalized(matrix).flatten(), 0) > 0.98


def test_steps_are_those_of_torch() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(32, 48), [torch.randn(32, 48) for _ in range(4)]
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    optimizers = (Muon([ours], lr=0.02, weight_decay=0.1), reference)
    for gradient in gradients:
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.03 * moved  # bf16 rounds to 3 digits
