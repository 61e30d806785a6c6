"""Gives a method of a finished bundle another tree: pins the graphs it needs, then exchanges the manifest."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from specexport.contract import manifest as mf
from specexport.contract.errors import BuildError
from specexport.contract.shapes import CATCH_UP_TOKENS, ShapePoint
from specexport.contract.tree import TokenTree
from specexport.exporter import static


def set_default_tree(folder: Path, name: str, tree: TokenTree) -> mf.Manifest:
    """Makes a tree the default of a method; the trees there were can still be chosen.

    Graphs are written first and the manifest is exchanged at the end, so that a bundle is whole at every moment.

    Args:
        folder: the bundle.
        name: of the method.
        tree: one the method can fill.

    Returns:
        The new manifest.

    Raises:
        BuildError: the bundle lacks the method, or its cache has no room for so wide a step.
        BundleError: the bundle is not whole, or the method cannot fill the tree.
    """
    manifest = mf.read_manifest(folder)
    mf.check_files(folder, manifest, hashes=False)
    method = manifest.method(name)
    if method is None:
        raise BuildError(f"{folder}: has no method {name!r}")
    caches = sorted({graph.point.cache for graph in manifest.target.graph.points})
    if manifest.max_seq_len + len(tree) > caches[-1] + 1:
        raise BuildError(
            f"{folder}: a step of {len(tree)} tokens does not fit behind a context of {manifest.max_seq_len} in "
            f"{caches[-1]} cache rows; build the bundle with this tree instead"
        )
    others = [other for other in method.token_trees() if len(other) != len(tree)]
    changed = msgspec.structs.replace(method, trees=tuple(one.choices for one in (tree, *others)))
    target = _with_points(folder, manifest.target, (len(tree), len(tree), 0), manifest.batch_sizes, caches)
    if isinstance(changed, mf.DraftModel):
        draft = _with_points(folder, changed.draft, (CATCH_UP_TOKENS, 0, tree.depth), manifest.batch_sizes, caches)
        changed = msgspec.structs.replace(changed, draft=draft)
    elif isinstance(changed, mf.MedusaDraft):
        width = 1 + max(one.depth for one in changed.token_trees())
        draft = _with_points(folder, changed.draft, (width, 1, 0), manifest.batch_sizes, caches)
        changed = msgspec.structs.replace(changed, draft=draft)
    methods = tuple(changed if mf.method_name(one) == name else one for one in manifest.methods)
    new = msgspec.structs.replace(manifest, target=target, methods=methods)
    listed = {entry.path for entry in manifest.files}
    used = [graph.file for model in new.models.values() for graph in model.graph.points]
    added = tuple(mf.file_entry(folder, file) for file in dict.fromkeys(used) if file not in listed)
    new = msgspec.structs.replace(new, files=(*manifest.files, *added))
    _exchange(folder, new)
    return new


def _with_points(
    folder: Path, model: mf.Model, wanted: tuple[int, int, int], batches: Sequence[int], caches: Sequence[int]
) -> mf.Model:
    """A model with (tokens, rows, drafts) pinned at every batch and cache size."""
    master = folder / model.graph.master
    points = {graph.point: graph for graph in model.graph.points}
    tokens, rows, drafts = wanted
    for batch, cache in itertools.product(batches, caches):
        point = ShapePoint(batch, tokens, cache, rows, drafts)
        if point not in points:
            file = master.with_name(f"{master.stem}.{point}.onnx")
            static.pin(master, point, file)
            points[point] = mf.PointGraph(point=point, file=file.relative_to(folder).as_posix())
    return msgspec.structs.replace(model, graph=msgspec.structs.replace(model.graph, points=tuple(points.values())))


def _exchange(folder: Path, manifest: mf.Manifest) -> None:
    """Checks a manifest as a reader would, then puts it in the place of the old one."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.tree-") as beside:
        mf.write_manifest(Path(beside), manifest)
        mf.read_manifest(Path(beside))
        (Path(beside) / mf.MANIFEST_NAME).replace(folder / mf.MANIFEST_NAME)
