"""Rotary embeddings: fused into one operator (opset 23), with frequencies that do not depend on the text's length."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

_NAME = "apply_rotary_pos_emb"


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The usual rotation of the first R channels of each head, in pairs of one channel from each half.

    ``q, k`` are ``[B,H,T,D]``; ``cos, sin`` are ``[B,T,R]``, with equal halves.
    """
    width = cos.shape[-1]
    cos, sin = cos[..., : width // 2], sin[..., : width // 2]
    partial = width if width < q.shape[-1] else 0  # 0: whole heads
    return (
        torch.onnx.ops.rotary_embedding(q, cos, sin, rotary_embedding_dim=partial),
        torch.onnx.ops.rotary_embedding(k, cos, sin, rotary_embedding_dim=partial),
    )


def _is_usual_rotation(original: Any) -> bool:
    """Whether the function of a model family equals :func:`_rotate` on random numbers."""
    generator = torch.Generator().manual_seed(0)
    q, k, angle = (torch.randn(shape, generator=generator) for shape in ((1, 2, 3, 12), (1, 1, 3, 12), (1, 3, 4)))
    angle = torch.cat([angle, angle], dim=-1)
    # Most families rotate whole heads only and fail on parts of heads; families that do not fail must agree with us.
    return _matches(original, q[..., :8], k[..., :8], angle) is True and _matches(original, q, k, angle) is not False


def _matches(original: Any, q: torch.Tensor, k: torch.Tensor, angle: torch.Tensor) -> bool | None:
    """Whether ``original`` equals :func:`_rotate`; None if it does not accept these arguments."""
    try:
        theirs = original(q, k, angle.cos(), angle.sin())
    except (TypeError, RuntimeError, ValueError, IndexError):
        return None
    if not isinstance(theirs, tuple) or len(theirs) != 2:
        return False
    ours = _rotate(q, k, angle.cos(), angle.sin())
    return all(a.shape == b.shape and torch.allclose(a, b, atol=1e-6) for a, b in zip(theirs, ours, strict=True))


@contextlib.contextmanager
def fused_rotary(model: torch.nn.Module) -> Iterator[None]:
    """Context in which the family of ``model`` uses the RotaryEmbedding operator, if it rotates the usual way."""
    family = sys.modules[type(model).__module__]
    original = getattr(family, _NAME, None)
    if original is None or not _is_usual_rotation(original):
        yield
        return

    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        # Further arguments mean that heads or positions are laid out differently.
        return original(q, k, cos, sin, *args, **kwargs) if args or kwargs else _rotate(q, k, cos, sin)

    with mock.patch.object(family, _NAME, rotate):
        yield


def take_one_position_row(model: torch.nn.Module) -> None:
    """Makes rotary embeddings read a single row of positions (M-RoPE), as the three rows of pure text are equal.

    Some families write the rows into each other, which takes scatters and makes torch decompose the whole trace.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "mrope_section") and hasattr(module, "recomposition_frequencies"):
            row = torch.randn(1, 2, len(module.inv_freq), generator=torch.Generator().manual_seed(0))
            with contextlib.suppress(TypeError, RuntimeError):  # other families lay out rows differently
                if torch.equal(module.recomposition_frequencies(row.repeat(3, 1, 1)), _both_halves(row)):
                    module.recomposition_frequencies = _both_halves


def _both_halves(frequencies: torch.Tensor) -> torch.Tensor:
    return torch.cat((frequencies[0], frequencies[0]), dim=-1)


def freeze_frequencies(model: torch.nn.Module, max_positions: int) -> int:
    """Stops rotary embeddings from changing their frequencies with the length of the text.

    A cached key keeps its rotation, so changed frequencies would not match it. Returns the length up to which
    transformers also keeps the initial frequencies, at most ``max_positions``.
    """
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)  # a name, or a name for each type of layer
        if not isinstance(kinds, str | dict):
            continue
        parameters = module.config.rope_parameters
        rope_types = [(kinds, parameters)] if isinstance(kinds, str) else [(kinds[of], parameters[of]) for of in kinds]
        changing = [int(of["original_max_position_embeddings"]) for kind, of in rope_types if kind == "longrope"]
        max_positions = min([max_positions, *changing])
        module.rope_type = (
            _fixed_type(kinds) if isinstance(kinds, str) else {of: _fixed_type(kinds[of]) for of in kinds}
        )
    return max_positions


def _fixed_type(kind: str) -> str:
    """The rope type with which a forward pass leaves the frequencies unchanged."""
    return "default" if kind == "longrope" or "dynamic" in kind else kind
