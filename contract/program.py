"""The shapes that the step program's graphs run at."""

from __future__ import annotations

from specexport.contract.engines import Accept, Fill, ProgramGraph
from specexport.contract.manifest import Manifest
from specexport.contract.methods.base import Method
from specexport.contract.shapes import ShapePoint
from specexport.contract.tree import TokenTree


def program_points(graph: ProgramGraph, manifest: Manifest, batch: int, cache: int) -> tuple[ShapePoint, ...]:
    """The shapes of a graph of the step program, one for every size of a tree that needs it; ascending.

    Acceptance is decided for the widest step too, so that it can be for methods which need no graph. Logits of one slot
    are those of its first N tokens, whatever the target saw behind them. Those of several slots lie as far apart as the
    target saw tokens: there N is T.
    """
    trees = {tree for method in manifest.methods for tree in method.token_trees()}
    verified = {point for point in manifest.target.graph.points if point.batch == batch}
    widths = {point.tokens for point in verified if point.rows == point.tokens > 1}
    if isinstance(graph, Accept):
        sizes = widths if batch > 1 or not widths else {max(widths), *map(len, trees)}
        points = {ShapePoint(batch, nodes, 0, nodes) for nodes in sizes}
    elif isinstance(graph, Fill):
        methods = [method for method in manifest.methods if fills(graph, method)]
        points = {fill_point(method, tree, batch) for method in methods for tree in filled_trees(method)}
    else:
        branching = {len(tree) for tree in trees if not tree.is_chain}
        sizes = {width for width in widths if width >= min(branching)} if batch > 1 and branching else branching
        points = {ShapePoint(batch, nodes, cache) for nodes in sizes}
    return tuple(sorted(points))


def fills(graph: Fill, method: Method) -> bool:
    """Whether a fill graph makes the trees of a method."""
    stages_of = (method.support, method.drafted_stages)
    return bool(filled_trees(method)) and stages_of == (graph.candidates, graph.stages)


def filled_trees(method: Method) -> list[TokenTree]:
    """The trees of a method that a fill graph makes."""
    staged = method.drafted_stages > 0
    drafted = [tree for tree in method.token_trees() if method.device_run(tree) is not None]
    return [tree for tree in drafted if staged or not tree.is_chain]


def fill_point(method: Method, tree: TokenTree, batch: int) -> ShapePoint:
    """The shape of the fill graph that makes a tree of a method that drafts on the device."""
    tokens, drafts = method.device_run(tree) or (0, 0)
    return ShapePoint(batch, len(tree), 0, tokens if method.drafted_stages else 0, drafts)


def program_sizes(point: ShapePoint, vocab: int) -> dict[str, int]:
    """Every symbolic dimension of such a graph at a shape; N are its tokens, V the width of the target's logits."""
    nodes = point.tokens
    return point.sizes | {"N": nodes, "N-1": nodes - 1, "drafts": nodes - 1, "drafts + 1": nodes, "V": vocab}
