"""Draws token trees: in the terminal, and as an SVG image."""

from __future__ import annotations

from html import escape

from rich.tree import Tree

from specexport.contract.tree import TokenTree

_STEP, _LEVEL, _RADIUS, _MARGIN = 34, 64, 13, 28  # pixels


def terminal_tree(tree: TokenTree) -> Tree:
    """A rich tree: each node with its number in the step's order and its rank among its parent's continuations."""
    branches = [Tree("0  last token")]
    for node, parent in enumerate(tree.parents[1:], start=1):
        branches.append(branches[parent].add(f"{node}  rank {tree.ranks[node]}"))
    return branches[0]


def svg(tree: TokenTree) -> str:
    """The tree as an SVG document, root on top: node numbers inside, ranks on the edges."""
    across: list[float] = [0.0] * len(tree)
    for index, path in enumerate(sorted(tree.leaf_paths, key=lambda path: [tree.ranks[node] for node in path])):
        across[path[-1]] = index
    for node in reversed(range(len(tree))):
        below = [across[child] for child in tree.children[node]]
        if below:
            across[node] = (min(below) + max(below)) / 2
    levels = tree.depths.tolist()
    places = [(_MARGIN + _STEP * x, _MARGIN + _LEVEL * level) for x, level in zip(across, levels, strict=True)]
    width, height = (max(place[axis] for place in places) + _MARGIN for axis in (0, 1))
    lines, nodes = [], []
    for node, (x, y) in enumerate(places):
        if node:
            above_x, above_y = places[tree.parents[node]]
            lines.append(f'<line x1="{above_x:.1f}" y1="{above_y}" x2="{x:.1f}" y2="{y}"/>')
            nodes.append(
                f'<text class="rank" x="{(above_x + 2 * x) / 3:.1f}" y="{(above_y + 2 * y) / 3:.1f}">'
                f"{escape(str(tree.ranks[node]))}</text>"
            )
        nodes.append(f'<circle cx="{x:.1f}" cy="{y}" r="{_RADIUS}"/><text x="{x:.1f}" y="{y}">{node}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}"><title>Token tree of {len(tree)} nodes</title><style>line{{stroke:#888}}'
        "circle{fill:#eef3fb;stroke:#3b6fb5}text{font:11px sans-serif;text-anchor:middle;dominant-baseline:central}"
        ".rank{fill:#a04000;paint-order:stroke;stroke:#fff;stroke-width:3px}</style>"
        f"{''.join(lines)}{''.join(nodes)}</svg>\n"
    )
