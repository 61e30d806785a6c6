"""What tests put into a bundle's manifest: what no build would write, and what no machine would measure."""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from specexport.contract.manifest import MANIFEST_NAME, Manifest
from specexport.contract.methods import method_name
from specexport.contract.reading import file_entry
from specexport.contract.tree import TokenTree
from specexport.runtime.speculation.costs import Cost, CostCurve, MethodCosts

Document = dict[str, Any]
Price = Callable[[int, int], float]
"""Seconds by slots and tokens."""


def rewritten(folder: Path, change: Callable[[Document], object]) -> None:
    """Changes the manifest's JSON."""
    path = folder / MANIFEST_NAME
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")


def at(document: Document, place: str) -> tuple[Any, Any]:
    """What holds the value at a place like ``target.cache.0.heads``, and its key there."""
    *parents, last = [int(part) if part.isdecimal() else part for part in place.split(".")]
    for parent in parents:
        document = document[parent]
    return document, last


def put(folder: Path, place: str, value: Any) -> None:
    """Sets the value at a place of a bundle's manifest."""

    def change(document: Document) -> None:
        holder, key = at(document, place)
        holder[key] = value

    rewritten(folder, change)


def relist(folder: Path, *added: str) -> None:
    """Makes the sizes and hashes of the manifest those of the files there; ``added`` are listed too."""

    def change(document: Document) -> None:
        names = dict.fromkeys([*(file["path"] for file in document["files"]), *added])
        document["files"] = [msgspec.to_builtins(file_entry(folder, name)) for name in names]

    rewritten(folder, change)


def trees_of(manifest: Manifest, name: str) -> tuple[TokenTree, ...]:
    """The trees that a step may verify for a method."""
    return next(method.smaller_trees(manifest.target) for method in manifest.methods if method_name(method) == name)


def curve(manifest: Manifest, step: Price, propose: Price = lambda *_: 0.0, read: float = 0.0) -> CostCurve:
    """A made-up curve for a bundle."""
    points = manifest.target.graph.points
    widths = sorted({point.tokens for point in points if point.rows == point.tokens})

    def costs(price: Price, tokens: Sequence[int]) -> tuple[Cost, ...]:
        return tuple(
            Cost(batch=batch, tokens=count, seconds=price(batch, count) or 1e-9)
            for batch, count in itertools.product(manifest.batch_sizes, tokens)
        )

    methods = [
        MethodCosts(method=name, propose=costs(propose, [len(tree) for tree in trees_of(manifest, name)]), read=read)
        for name in map(method_name, manifest.methods)
    ]
    return CostCurve(text=1, steps=costs(step, widths), longer_text=1, longer=(), methods=tuple(methods))


def cached_as_the_hub_does(bundle: Path, repository: Path, under: str = "") -> Path:
    """A copy of a bundle as the hub's client caches it: the folder of a snapshot, or one under it, of links."""
    (repository / "blobs").mkdir(parents=True)
    folder = repository / "snapshots" / ("0" * 40) / under
    for file in [path for path in bundle.rglob("*") if path.is_file()]:
        blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        link = folder / file.relative_to(bundle)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return folder
