"""Changes the default tree of a method in a finished bundle, by replacing the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from specexport.contract.errors import BuildError
from specexport.contract.manifest import Manifest
from specexport.contract.methods import with_draft, with_trees
from specexport.contract.model import Model
from specexport.contract.reading import changing, check_files, exchange_manifest
from specexport.contract.shapes import ShapePoint
from specexport.contract.tree import TokenTree
from specexport.exporter.build_state import BuildPlan
from specexport.exporter.method import exporter_of


def require_replaceable_trees(folder: Path, manifest: Manifest) -> None:
    """Refuses a bundle with a step program or engines."""
    if manifest.program or manifest.engines:
        raise BuildError(
            f"{folder}: is built for {manifest.backend}; its step program and engines are compiled for its trees, "
            "which cannot be replaced. Tune a bundle built for onnxruntime, and build this one with the best tree"
        )


def set_default_tree(folder: Path, name: str, tree: TokenTree) -> Manifest:
    """Makes a tree the default of a method; its other trees can still be chosen.

    Raises:
        BuildError: the bundle lacks the method, its cache has no room for a step that wide, or its trees cannot be
            replaced.
        BundleError: the bundle is incomplete, or the method cannot fill the tree.
    """
    with changing(folder) as manifest:
        check_files(folder, manifest, hashes=False)
        method = manifest.method(name)
        if method is None:
            raise BuildError(f"{folder}: has no method {name!r}")
        require_replaceable_trees(folder, manifest)
        method = with_trees(method, (tree, *(other for other in method.token_trees() if len(other) != len(tree))))
        plan = msgspec.structs.replace(BuildPlan.of_bundle(manifest), methods=(method,))
        widest, rows = max(method.widths()), plan.caches[-1]
        if manifest.max_seq_len + widest > rows + 1:
            raise BuildError(
                f"{folder}: a step of {widest} tokens does not fit after a context of {manifest.max_seq_len} in "
                f"{rows} cache rows; build the bundle for such steps instead"
            )
        target = manifest.target
        for width in method.widths():
            target = _with_points(target, plan.at_caches([(batch, width, width, 0) for batch in plan.batches]))
        if method.draft is not None:
            points = exporter_of(method).points(method, plan)
            method = with_draft(method, _with_points(method.draft, points))
        methods = tuple(method if old.name == name else old for old in manifest.methods)
        new = msgspec.structs.replace(manifest, target=target, methods=methods)
        exchange_manifest(folder, new)
        return new


def _with_points(model: Model, added: Sequence[ShapePoint]) -> Model:
    """A model that also runs at these points."""
    points = tuple(dict.fromkeys((*model.graph.points, *added)))
    return msgspec.structs.replace(model, graph=msgspec.structs.replace(model.graph, points=points))
