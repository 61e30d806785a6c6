"""The sizes of a checkpoint's model, without its weights, and what else its small files tell."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from specexport.contract.errors import BuildError
from specexport.exporter.checkpoints.documents import CONFIG, INDEX, SINGLE, read_index, read_object
from specexport.exporter.checkpoints.locate import locate

MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Configuration fields with the number of MTP layers."""


class Parameter(NamedTuple):
    """A parameter of a model.

    Attributes:
        share: for a stack of experts, the share that a token uses; None for other parameters.
    """

    shape: tuple[int, ...]
    table: bool
    head: bool
    share: float | None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model.

    Attributes:
        row: bytes of a token's keys and values in all layers, at 16 bits each.
        positions: the longest supported text, in tokens; None if the configuration does not say.
    """

    parameters: tuple[Parameter, ...]
    hidden: int
    intermediate: int
    vocab: int
    layers: int
    layer_types: frozenset[str]
    row: int
    positions: int | None

    @property
    def total(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def active(self) -> int:
        """The number of parameters that a token uses."""
        return round(
            sum((1 if parameter.share is None else parameter.share) * parameter.numel for parameter in self.parameters)
        )


_DRAFTS = {"eagle3": "--eagle3", "dflash": "--dflash", "medusa": "--medusa", "mlpspeculator": "--mlp-speculator"}
"""Words in the architectures of checkpoints that are no whole models, and the flags for these."""


def require_whole_model(folder: Path) -> None:
    """Refuses the checkpoint of a method's draft or heads.

    Raises:
        BuildError: it is one; names the flag for it.
    """
    config = read_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    kinds = [config.get(key) for key in ("architectures", "model_type", "speculators_model_type")]
    described = str(kinds).lower().replace("_", "")
    for kind, flag in _DRAFTS.items():
        if kind in described:
            raise BuildError(
                f"{folder / CONFIG}: describes no model of its own, but what another method drafts with; pass the "
                f"folder with {flag}"
            )


def model_sizes(source: str | Path) -> ModelSizes:
    """The sizes of a checkpoint's model, from its configuration only; for an adapter, of its base model.

    Raises:
        BuildError: the configuration cannot be read.
        ImportError: torch or transformers is not installed.
    """
    # Imported here, as torch takes seconds, and bundles have their own sizes.
    from specexport.exporter.checkpoints.config import meta_model, sizes_of

    model = meta_model(locate(str(source), weights=False))
    return sizes_of(model, model.config)


def require_positions(tokens: int, positions: int, source: str) -> None:
    """Checks that a model supports a context."""
    if tokens > positions:
        raise BuildError(
            f"max_seq_len (max_model_len) is {tokens}, but {source} was made for {positions} positions; expected at "
            f"most {positions}",
            param="max_seq_len",
        )


def has_mtp(folder: Path, layers: int) -> bool:
    """Whether a checkpoint has exactly one MTP layer, by the names of its tensors."""
    try:
        config = read_object(folder / CONFIG)
        counts = (config.get(field) for field in MTP_COUNTS)
        if any(isinstance(count, int) and count > 1 for count in counts):
            return False
        if (folder / SINGLE).is_file():
            # Imported here, as running bundles does not need it.
            from safetensors import safe_open

            with safe_open(folder / SINGLE, framework="numpy") as file:
                names = list(file.keys())
        else:
            names = list(read_index(folder / INDEX))
    except Exception:  # a build reports the fault of the file
        return False
    return any(name.startswith(("mtp.", f"model.layers.{layers}.")) for name in names)
