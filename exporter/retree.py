"""Gives a method of a finished bundle other trees: pins the graphs they need, then exchanges the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from specexport.contract.errors import BuildError
from specexport.contract.manifest import Manifest
from specexport.contract.methods import Method, with_trees
from specexport.contract.model import Model, PointGraph
from specexport.contract.reading import changing, check_files, exchange_manifest, file_entry, read_manifest
from specexport.contract.shapes import ShapePoint
from specexport.contract.tree import TokenTree
from specexport.exporter import static
from specexport.exporter.build_plan import BuildPlan
from specexport.exporter.methods import exporter_of


def set_default_tree(folder: Path, name: str, tree: TokenTree) -> Manifest:
    """Makes a tree the default of a method; the trees there were can still be chosen.

    Args:
        folder: the bundle.
        name: of the method.
        tree: one the method can fill.

    Returns:
        The new manifest.

    Raises:
        BuildError: the bundle lacks the method, or see :func:`exchange_method`.
        BundleError: the bundle is not whole, or the method cannot fill the tree.
    """
    method = read_manifest(folder).method(name)
    if method is None:
        raise BuildError(f"{folder}: has no method {name!r}")
    others = [other for other in method.token_trees() if len(other) != len(tree)]
    return exchange_method(folder, with_trees(method, (tree, *others)))


def exchange_method(folder: Path, changed: Method) -> Manifest:
    """Puts a method with other trees in the place of the one of its name.

    Graphs are written first and the manifest is exchanged at the end, so that a bundle is whole at every moment.

    Args:
        folder: the bundle.
        changed: the method.

    Returns:
        The new manifest.

    Raises:
        BuildError: the bundle lacks the method, its cache has no room for so wide a step, or it has graphs and engines
            that are made for the trees it has.
        BundleError: the bundle is not whole, or the method cannot fill a tree.
    """
    with changing(folder) as manifest:
        return _exchanged(folder, manifest, changed)


def _exchanged(folder: Path, manifest: Manifest, changed: Method) -> Manifest:
    plan = _plan(folder, manifest, changed)
    target = manifest.target
    for width in changed.widths():
        target = _with_points(folder, target, plan.pinned([(batch, width, width, 0) for batch in plan.batches]))
    plan = msgspec.structs.replace(plan, methods=(changed,))
    models = {
        role: _with_points(folder, model, exporter_of(changed).points(changed, plan))
        for role, model in changed.models.items()
    }
    changed = changed.with_models(models) if models else changed
    methods = tuple(changed if one.name == changed.name else one for one in manifest.methods)
    new = msgspec.structs.replace(manifest, target=target, methods=methods)
    listed = {entry.path for entry in manifest.files}
    used = [graph.file for model in new.models.values() for graph in model.graph.points]
    added = tuple(file_entry(folder, file) for file in dict.fromkeys(used) if file not in listed)
    new = msgspec.structs.replace(new, files=(*manifest.files, *added))
    exchange_manifest(folder, new)
    return new


def _plan(folder: Path, manifest: Manifest, changed: Method) -> BuildPlan:
    check_files(folder, manifest, hashes=False)
    if manifest.method(changed.name) is None:
        raise BuildError(f"{folder}: has no method {changed.name!r}")
    if manifest.program or manifest.engines:
        trees = [[list(path) for path in tree.choices] for tree in changed.token_trees()]
        raise BuildError(
            f"{folder}: is built for {manifest.backend}; its step program and engines are made for its trees, so "
            f"build it again with these: {trees}"
        )
    plan = BuildPlan.of_bundle(manifest)
    widest, rows = max(changed.widths()), plan.caches[-1]
    if manifest.max_seq_len + widest > rows + 1:
        raise BuildError(
            f"{folder}: a step of {widest} tokens does not fit behind a context of {manifest.max_seq_len} in {rows} "
            "cache rows; build the bundle for such steps instead"
        )
    return plan


def _with_points(folder: Path, model: Model, wanted: Sequence[ShapePoint]) -> Model:
    """A model with points pinned that it may lack."""
    master = folder / model.graph.master
    points = {graph.point: graph for graph in model.graph.points}
    for point in wanted:
        if point not in points:
            file = master.with_name(f"{master.stem}.{point}.onnx")
            static.pin(master, point, file)
            points[point] = PointGraph(point=point, file=file.relative_to(folder).as_posix())
    return msgspec.structs.replace(model, graph=msgspec.structs.replace(model.graph, points=tuple(points.values())))
