"""Gives a method of a finished bundle another tree, or other sizes: pins the graphs, then exchanges the manifest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec

from specexport.contract.errors import BuildError
from specexport.contract.manifest import Manifest
from specexport.contract.methods import DraftModel, Lookahead, MedusaDraft, Method, MlpSpeculator, method_name
from specexport.contract.model import Model, PointGraph
from specexport.contract.reading import check_files, exchange_manifest, file_entry, read_manifest
from specexport.contract.shapes import CATCH_UP_TOKENS, ShapePoint
from specexport.contract.tree import TokenTree
from specexport.exporter import static


def set_default_tree(folder: Path, name: str, tree: TokenTree) -> Manifest:
    """Makes a tree the default of a method; the trees there were can still be chosen.

    Graphs are written first and the manifest is exchanged at the end, so that a bundle is whole at every moment.

    Args:
        folder: the bundle.
        name: of the method.
        tree: one the method can fill.

    Returns:
        The new manifest.

    Raises:
        BuildError: the bundle lacks the method, its cache has no room for so wide a step, or it has graphs and engines
            that are made for its trees.
        BundleError: the bundle is not whole, or the method cannot fill the tree.
    """
    manifest = _changeable(folder, name, len(tree), f"this tree: {[list(path) for path in tree.choices]}")
    method, caches = manifest.method(name), _caches(manifest)
    assert method is not None
    others = [other for other in method.token_trees() if len(other) != len(tree)]
    changed = msgspec.structs.replace(method, trees=tuple(one.choices for one in (tree, *others)))
    target = _with_points(folder, manifest.target, (len(tree), len(tree), 0), manifest.batch_sizes, caches)
    if isinstance(changed, MlpSpeculator):
        changed = _with_level_points(folder, changed, manifest.batch_sizes)
    elif isinstance(changed, DraftModel):
        draft = _with_points(folder, changed.draft, (CATCH_UP_TOKENS, 0, tree.depth), manifest.batch_sizes, caches)
        changed = msgspec.structs.replace(changed, draft=draft)
    elif isinstance(changed, MedusaDraft):
        width = 1 + max(one.depth for one in changed.token_trees())
        draft = _with_points(folder, changed.draft, (width, 1, 0), manifest.batch_sizes, caches)
        changed = msgspec.structs.replace(changed, draft=draft)
    return _exchanged(folder, manifest, target, changed)


def set_lookahead(folder: Path, method: Lookahead) -> Manifest:
    """Gives lookahead decoding other sizes, W, N and G, in the place of those there were.

    Args:
        folder: the bundle, which has lookahead decoding.
        method: of the new sizes.

    Returns:
        The new manifest.

    Raises:
        BuildError: the bundle lacks the method, its cache has no room for so wide a step, or it has graphs and engines
            that are made for the sizes it has.
        BundleError: the bundle is not whole.
    """
    widest, sizes = max(method.widths()), f"--lookahead {method.window},{method.ngram},{method.guesses}"
    manifest = _changeable(folder, method_name(method), widest, sizes)
    target = manifest.target
    for width in method.widths():
        target = _with_points(folder, target, (width, width, 0), manifest.batch_sizes, _caches(manifest))
    return _exchanged(folder, manifest, target, method)


def _changeable(folder: Path, name: str, widest: int, instead: str) -> Manifest:
    """The manifest of a bundle whose method can be given steps of ``widest`` tokens."""
    manifest = read_manifest(folder)
    check_files(folder, manifest, hashes=False)
    if manifest.method(name) is None:
        raise BuildError(f"{folder}: has no method {name!r}")
    if manifest.program or manifest.engines:
        raise BuildError(
            f"{folder}: is built for {manifest.backend}; its step program and engines are made for its trees, so "
            f"build it again with {instead}"
        )
    rows = _caches(manifest)[-1]
    if manifest.max_seq_len + widest > rows + 1:
        raise BuildError(
            f"{folder}: a step of {widest} tokens does not fit behind a context of {manifest.max_seq_len} in {rows} "
            "cache rows; build the bundle for such steps instead"
        )
    return manifest


def _caches(manifest: Manifest) -> list[int]:
    return sorted({graph.point.cache for graph in manifest.target.graph.points})


def _exchanged(folder: Path, manifest: Manifest, target: Model, changed: Method) -> Manifest:
    """Puts a manifest with a changed method in the place of the old one."""
    name = method_name(changed)
    methods = tuple(changed if method_name(one) == name else one for one in manifest.methods)
    new = msgspec.structs.replace(manifest, target=target, methods=methods)
    listed = {entry.path for entry in manifest.files}
    used = [graph.file for model in new.models.values() for graph in model.graph.points]
    added = tuple(file_entry(folder, file) for file in dict.fromkeys(used) if file not in listed)
    new = msgspec.structs.replace(new, files=(*manifest.files, *added))
    exchange_manifest(folder, new)
    return new


def _with_level_points(folder: Path, method: MlpSpeculator, batches: Sequence[int]) -> MlpSpeculator:
    """An MLP speculator with every depth of its trees, and all its stages, pinned at every width of their levels."""
    trees, draft = method.token_trees(), method.draft
    depths, widths = {method.stages, *(tree.depth for tree in trees)}, {tree.level_width for tree in trees}
    for depth, width in itertools.product(depths, widths):
        draft = _with_points(folder, draft, (width, 0, depth), batches, [0])
    return msgspec.structs.replace(method, draft=draft)


def _with_points(
    folder: Path, model: Model, wanted: tuple[int, int, int], batches: Sequence[int], caches: Sequence[int]
) -> Model:
    """A model with (tokens, rows, drafts) pinned at every batch and cache size."""
    master = folder / model.graph.master
    points = {graph.point: graph for graph in model.graph.points}
    tokens, rows, drafts = wanted
    for batch, cache in itertools.product(batches, caches):
        point = ShapePoint(batch, tokens, cache, rows, drafts)
        if point not in points:
            file = master.with_name(f"{master.stem}.{point}.onnx")
            static.pin(master, point, file)
            points[point] = PointGraph(point=point, file=file.relative_to(folder).as_posix())
    return msgspec.structs.replace(model, graph=msgspec.structs.replace(model.graph, points=tuple(points.values())))
