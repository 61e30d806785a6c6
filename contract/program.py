"""The shapes that the step program's graphs run at."""

from __future__ import annotations

from specexport.contract.engines import Accept, Fill, ProgramGraph
from specexport.contract.manifest import Manifest
from specexport.contract.shapes import ShapePoint


def program_points(graph: ProgramGraph, manifest: Manifest, batch: int, cache: int) -> tuple[ShapePoint, ...]:
    """The shapes of a graph of the step program, one for every size of a tree that needs it; ascending.

    Logits of one slot are those of its first N tokens, whatever the target saw behind them. Those of several slots lie
    as far apart as the target saw tokens: there N is T, of every step but that of one token.
    """
    trees = {tree for method in manifest.methods for tree in method.token_trees()}
    verified = {point for point in manifest.target.graph.points if point.batch == batch}
    widths = {point.tokens for point in verified if point.rows == point.tokens > 1}
    if isinstance(graph, Accept):
        sizes = widths if batch > 1 else set(map(len, trees))
        points = {ShapePoint(batch, nodes, 0, nodes) for nodes in sizes}
    elif isinstance(graph, Fill):
        drafts = [method for method in manifest.methods if method.drafts_chain]
        drawn = {tree for method in drafts for tree in method.token_trees() if not tree.is_chain}
        points = {ShapePoint(batch, len(tree), 0, 0, tree.depth) for tree in drawn}
    else:
        branching = {len(tree) for tree in trees if not tree.is_chain}
        sizes = {width for width in widths if width >= min(branching)} if batch > 1 and branching else branching
        points = {ShapePoint(batch, nodes, cache) for nodes in sizes}
    return tuple(sorted(points))


def program_sizes(point: ShapePoint, vocab: int) -> dict[str, int]:
    """Every symbolic dimension of such a graph at a shape; N are its tokens, V the width of the target's logits."""
    nodes = point.tokens
    return point.sizes | {"N": nodes, "drafts": nodes - 1, "drafts + 1": nodes, "V": vocab}
