"""What tests put into a bundle's manifest: what no build would write, and what no machine would measure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specexport.contract.costs import Cost, CostCurve, MethodCosts
from specexport.contract.manifest import MANIFEST_NAME, Manifest
from specexport.contract.methods import method_name
from specexport.contract.tree import TokenTree
from specexport.runtime.machine import cpu_name

Document = dict[str, Any]
Price = Callable[[int, int], float]
"""Seconds by slots and tokens."""

DEVICE = f"onnxruntime, {cpu_name()}, 1 thread"


def rewritten(folder: Path, change: Callable[[Document], object]) -> None:
    """Changes the manifest's JSON."""
    path = folder / MANIFEST_NAME
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")


def trees_of(manifest: Manifest, name: str) -> tuple[TokenTree, ...]:
    """The trees that a step may verify for a method."""
    return next(method.smaller_trees(manifest.target) for method in manifest.methods if method_name(method) == name)


def curve(manifest: Manifest, step: Price, propose: Price = lambda *_: 0.0, read: float = 0.0) -> CostCurve:
    """A made-up curve for a bundle."""
    points = manifest.target.graph.points
    widths = sorted({point.tokens for point in points if point.rows == point.tokens})
    cache = min(point.cache for point in points)

    def costs(price: Price, tokens: Sequence[int]) -> tuple[Cost, ...]:
        return tuple(
            Cost(batch=batch, tokens=count, cache=cache, seconds=price(batch, count))
            for batch, count in itertools.product(manifest.batch_sizes, tokens)
        )

    methods = [
        MethodCosts(method=name, propose=costs(propose, [len(tree) for tree in trees_of(manifest, name)]), read=read)
        for name in map(method_name, manifest.methods)
    ]
    return CostCurve(device=DEVICE, versions={}, steps=costs(step, widths), methods=tuple(methods))
