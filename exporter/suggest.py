"""Which methods suit a target: rules of the field, before anything is built."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from specexport.checkpoints.checkpoint import load_tokenizer, require_same_tokenizer
from specexport.checkpoints.config import meta_model
from specexport.checkpoints.locate import locate
from specexport.contract.errors import BuildError
from specexport.contract.folders import expanded
from specexport.contract.manifest import MANIFEST_NAME
from specexport.contract.methods import known, method_type, part
from specexport.exporter.methods import SMALLER, Device, Suggestion, Wanted
from specexport.exporter.plan import active_parameters
from specexport.runtime.bundle import Bundle

_USABLE = (3.0, 50.0)
"""How many times smaller a draft must be to be proposed at all."""


@dataclass(frozen=True)
class Advice:
    """What suits a target, the better ones first, and why drafts that were offered do not do, by name.

    Attributes:
        active: parameters that one token uses, which sizes are compared by.
    """

    parameters: int
    active: int
    suggestions: tuple[Suggestion, ...]
    refused: dict[str, str]


def suggest(target: str, drafts: Sequence[str], device: Device) -> Advice:
    """Looks at checkpoints, not at their weights, and says what suits the target.

    Args:
        target: bundle, folder or hub id.
        drafts: smaller models to choose from.
        device: where the bundle is to run: on a GPU the nodes of a step are nearly free, on a CPU every one costs.

    Raises:
        BuildError: the target, or a draft, is no checkpoint.
    """
    path = expanded(target)
    if (path / MANIFEST_NAME).is_file():
        bundle = Bundle.open(path, check_hashes=False)
        parameters = size = bundle.manifest.target.parameters
        tokenizer = bundle.tokenizer()
    else:
        path = locate(target)
        model = meta_model(path)
        parameters, size = model.num_parameters(), active_parameters(model, model.config)
        tokenizer = load_tokenizer(path).tokenizer
    found, refused = _drafts(path, tokenizer, size, drafts)
    wanted = Wanted(path, size, device, tuple(found))
    kinds = map(method_type, known())
    made = [one for kind in kinds if (one := part(kind, "exporter").EXPORTER.suggest(kind, wanted)) is not None]
    made.sort(key=lambda one: one.rank)
    return Advice(parameters, size, tuple(made), refused)


def _drafts(
    target: Path, tokenizer: Tokenizer, size: int, names: Sequence[str]
) -> tuple[list[tuple[str, float]], dict[str, str]]:
    """Drafts that do, with how many times smaller they are, the best first; and why the others do not."""
    found: list[tuple[str, float]] = []
    refused: dict[str, str] = {}
    for name in names:
        path = locate(name)
        draft = meta_model(path)
        ratio = size / active_parameters(draft, draft.config)
        try:
            require_same_tokenizer(tokenizer, load_tokenizer(path).tokenizer, target, path)
        except BuildError as error:
            refused[name] = str(error)
            continue
        if not _USABLE[0] <= ratio <= _USABLE[1]:
            refused[name] = f"{ratio:.1f} times smaller than the target; expected {SMALLER[0]:g} to {SMALLER[1]:g}"
            continue
        found.append((name, ratio))
    middle = math.log(math.sqrt(SMALLER[0] * SMALLER[1]))
    return sorted(found, key=lambda one: abs(math.log(one[1]) - middle)), refused
