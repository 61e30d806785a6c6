"""``specexport verify`` on an MLP speculator: its graph against its checkpoint, computed from the formulas alone."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from specexport.contract.manifest import Manifest
from specexport.contract.methods import MlpSpeculator
from specexport.verify.logits import LIMITS, Agreement, Limits
from specexport.verify.runners import Array, load_reference, reference_states


class ReferenceSpeculator:
    """A checkpoint of ``ibm-fms``, a tensor operation a term of its formulas (arXiv 2404.19124).

    Args:
        folder: of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self._config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._tensors = {
            name.removeprefix("speculator."): tensor.float()
            for file in sorted(folder.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }

    def logits(self, hidden: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """What each stage says, ``[D,V]``.

        Args:
            hidden: ``[H]``, what the target's head reads.
            tokens: the D tokens before those that are asked for: the root, then draft tokens.
        """
        inner = self._config.get("inner_dim") or self._config["emb_dim"]
        state_weight = 0.5 ** (0.5 / self._config["n_predict"])
        token_weight = math.sqrt((1 - state_weight**2) * inner / 2)
        state = hidden
        if self._config.get("scale_input"):
            state = F.rms_norm(state, (len(state),), eps=1e-6) / math.sqrt(2)
        said = []
        for stage, token in enumerate(tokens):
            mixed = self._of("proj", stage) @ state * state_weight + self._of("emb", stage)[token] * token_weight
            normed = F.rms_norm(mixed, (inner,), self._of("ln", stage), 1e-6) + self._of("ln", stage, "bias")
            state = 0.5 * normed * (1 + torch.erf(normed / math.sqrt(2)))
            said.append(self._of("head", stage) @ state)
        return torch.stack(said)

    def _of(self, part: str, stage: int, kind: str = "weight") -> torch.Tensor:
        if self._config.get("tie_weights"):
            stage = min(stage, 1) if part == "proj" else 0
        tensor: torch.Tensor = self._tensors[f"{part}.{stage}.{kind}"]
        return tensor


def speculator_limits(manifest: Manifest, method: MlpSpeculator) -> Limits:
    """How far its tokens may be from the original's: what rounds more decides, the target or the stages."""
    stored = (manifest.target.precision.weights, method.draft.precision.weights)
    return max((LIMITS[kind] for kind in stored), key=lambda limits: limits.rms)


def compare_speculator(
    checkpoint: Path,
    speculator: Path,
    manifest: Manifest,
    method: MlpSpeculator,
    made: Sequence[tuple[list[int], Array]],
) -> Agreement:
    """Compares draft tokens with the original's, on the original target: each must be its stage's most probable one.

    Args:
        checkpoint: the target's.
        speculator: folder of the original speculator.
        manifest: the bundle's.
        method: of the bundle.
        made: texts, and the chain that was proposed after each.

    Raises:
        BundleError: the target's checkpoint is another model.
    """
    model, stages = load_reference(checkpoint, manifest.target), ReferenceSpeculator(speculator)
    limits, agreement = speculator_limits(manifest, method), Agreement()
    for text, drafted in made:
        # The target's cache holds all tokens but the last, the root.
        _, hidden = reference_states(model, np.array(text[:-1]))
        said = stages.logits(hidden[-1], [text[-1], *drafted[:-1].tolist()])
        agreement.count(said.numpy(), drafted, limits)
    return agreement
