"""The accuracy of Medusa heads and speculator stages, as trainings measure it and checkpoints store it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from specexport.contract.errors import BuildError
from specexport.contract.model import Count, Probability

_NEXT_RANK = 0.3
"""Assumed ratio of the accuracies of a candidate and of the next better one."""


@dataclass(frozen=True)
class HeadAccuracy:
    """The accuracy of Medusa heads, or of the stages of an MLP speculator, over held-out text.

    Attributes:
        ranks: share of tokens that are each head's rank-r candidate, ``[heads][ranks]``.
        paths: the most frequent paths of ranks, each with the share of positions at which every head's candidate of
            that rank was right. Token trees are chosen by these shares, not by products of ``ranks``, as heads tend to
            be right together.
    """

    ranks: Sequence[Sequence[float]]
    paths: Mapping[tuple[int, ...], float]

    @property
    def chain_length(self) -> float:
        """Expected tokens per step of the longest chain, bonus token included, over texts like the measured ones.

        Greedy decoding reaches it on texts that the model itself would write.
        """
        return 1 + sum(self.paths.get((0,) * depth, 0.0) for depth in range(1, len(self.ranks) + 1))


class MeasuredConfig(msgspec.Struct, kw_only=True):
    """The fields of a ``config.json`` with the accuracy of heads or stages."""

    head_accuracy: list[list[Probability]] | None = None
    path_accuracy: list[tuple[list[Count], Probability]] | None = None

    def accuracy(self, path: Path, count: int, parts: str) -> HeadAccuracy | None:
        """The accuracy of ``count`` heads or stages; None if not stored."""
        if self.head_accuracy is None or self.path_accuracy is None:
            return None
        paths = {tuple(ranks): share for ranks, share in self.path_accuracy}
        if len(self.head_accuracy) != count or any(not 1 <= len(ranks) <= count for ranks in paths):
            raise BuildError(
                f"{path}: head_accuracy and path_accuracy: expected shares of {count} {parts}, and of paths that are "
                "at most as long"
            )
        return HeadAccuracy(self.head_accuracy, paths)


def accuracy_config(accuracy: HeadAccuracy | None) -> dict[str, Any]:
    """The accuracy's fields in ``config.json``."""
    if accuracy is None:
        return {}
    return {
        "head_accuracy": [[round(float(share), 5) for share in row] for row in accuracy.ranks],
        "path_accuracy": [[list(path), round(float(share), 5)] for path, share in accuracy.paths.items()],
    }


def assumed_chance(path: Sequence[int], best: Sequence[float]) -> float:
    """The probability of a path of ranks that was not measured, from the accuracy of the best candidate at each depth.

    The last of ``best`` holds for all further depths.
    """
    return math.prod(best[min(at, len(best) - 1)] * _NEXT_RANK**rank for at, rank in enumerate(path))
