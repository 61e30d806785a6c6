"""Suggests methods for a target by rules of thumb, before anything is built."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specexport.contract.errors import BuildError
from specexport.contract.folders import expanded
from specexport.contract.manifest import Manifest
from specexport.contract.methods import known, method_type
from specexport.contract.methods.suggestion import SMALLER, Device, Suggestion, TargetProfile
from specexport.contract.reading import is_bundle
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.checkpoints.sizes import has_mtp, model_sizes, require_whole_model
from specexport.exporter.checkpoints.tokenizer import load_tokenizer, require_same_tokenizer
from specexport.runtime.bundle import Bundle

_USABLE = (3.0, 50.0)
"""The range of the target's size over a draft's in which the draft is suggested at all."""


@dataclass(frozen=True)
class Advice:
    """Suggestions for a target.

    Attributes:
        active: number of parameters that one token uses, by which sizes are compared.
        suggestions: the best first.
        refused: the reasons against drafts, by name.
    """

    parameters: int
    active: int
    suggestions: tuple[Suggestion, ...]
    refused: dict[str, str]


def suggest(target: str, drafts: Sequence[str], device: Device) -> Advice:
    """Suggests methods for a target from configurations, without reading weights.

    Args:
        target: bundle, folder or hub id.
        drafts: smaller models to choose from.
        device: the device of the bundle; nodes of a step are nearly free on a GPU, but not on a CPU.

    Raises:
        BuildError: the target, or a draft, is not a checkpoint.
        ImportError: one is not a bundle, and torch or transformers is not installed.
    """
    path, bundle, layer = expanded(target), None, False
    if is_bundle(path):
        bundle = Bundle.open(path, check_hashes=False)
        total = size = bundle.manifest.target.parameters
    else:
        path = locate(target, weights=False)
        model = model_sizes(path)
        total, size = model.total, model.active
        layer = has_mtp(path, model.layers)
    usable, refused = _drafts(path, bundle, size, drafts)
    usable += [] if bundle is None else _built(bundle.manifest)
    profile = TargetProfile(size, device, tuple(usable), layer)
    suggestions = (suggestion for kind in map(method_type, known()) if (suggestion := kind.suggest(profile)))
    return Advice(total, size, tuple(sorted(suggestions, key=lambda suggestion: suggestion.rank)), refused)


def _drafts(
    target: Path, bundle: Bundle | None, size: int, names: Sequence[str]
) -> tuple[list[tuple[str, float]], dict[str, str]]:
    """Usable drafts, the best first, with the ratio of the target's size to theirs; and the reasons against others."""
    if not names:
        return [], {}
    tokenizer = load_tokenizer(target).tokenizer if bundle is None else bundle.tokenizer()
    smaller: list[tuple[str, float]] = []
    refused: dict[str, str] = {}
    for name in names:
        path = locate(name, weights=False)
        try:
            require_whole_model(path)
            require_same_tokenizer(tokenizer, load_tokenizer(path).tokenizer, name)
        except BuildError as error:
            refused[name] = str(error)
            continue
        ratio = size / model_sizes(path).active
        if not _USABLE[0] <= ratio <= _USABLE[1]:
            refused[name] = f"{ratio:.1f} times smaller than the target; expected {SMALLER[0]:g} to {SMALLER[1]:g}"
            continue
        smaller.append((name, ratio))
    middle = math.log(math.sqrt(SMALLER[0] * SMALLER[1]))
    return sorted(smaller, key=lambda candidate: abs(math.log(candidate[1]) - middle)), refused


def _built(manifest: Manifest) -> list[tuple[str, float]]:
    """A bundle's own draft with the target's tokenizer, if any, and the ratio of the target's size to its size."""
    return [
        (method.draft.source, manifest.target.parameters / method.draft.parameters)
        for method in manifest.methods
        if method.whole_model and not method.files and method.draft is not None
    ]
