"""Draw a token tree as SVG.

Example:
    specexport draw mc_sim_7b_63 -o tree.svg
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from specexport import report
from specexport.commands.inspect import summary, tree_of
from specexport.contract.manifest import Manifest
from specexport.contract.options import Options, option
from specexport.contract.tree import TokenTree

_STEP, _ROW, _RADIUS = 72, 30, 12
"""Pixels between depths, between leaves, and of a node."""
_STYLE = """
.tree { color-scheme: light dark; --line: #8a8f98; --text: #1f2328; --node: #ffffff; --first: #cfe3ff; }
@media (prefers-color-scheme: dark) { .tree { --line: #768390; --text: #e6edf3; --node: #22272e; --first: #1f4a7d; } }
.tree path { fill: none; stroke: var(--line); stroke-width: 1.5 }
.tree circle { fill: var(--node); stroke: var(--line); stroke-width: 1.5 }
.tree circle.first { fill: var(--first) }
.tree text { fill: var(--text); font: 11px sans-serif; text-anchor: middle; dominant-baseline: central }
"""


class Command(Options, frozen=True, kw_only=True):
    """Options of ``specexport draw``.

    Attributes:
        tree: a bundle, a tree's JSON file or a preset's name.
        output: the picture to write.
        method: whose tree (default: the bundle's first).
    """

    tree: Annotated[Path, option("BUNDLE_OR_TREE", positional=True)]
    output: Annotated[Path, option("SVG", short="-o")]
    method: Annotated[str | None, option("NAME")] = None


def main(command: Command) -> int:
    """Runs ``specexport draw``."""
    tree = tree_of(command.tree, command.method)
    command.output.write_text(svg(tree), encoding="utf-8")
    print(f"{command.output}: {len(tree)} nodes with the root, depth {tree.depth}")
    return 0


def about(folder: Path, manifest: Manifest) -> list[report.Part]:
    """A bundle's summary and the trees of its methods, for the end of a report."""
    trees = (report.Figure(f"Default tree of {m.name}", svg(m.token_trees()[0])) for m in manifest.methods)
    return [*summary(folder, manifest), *trees]


def svg(tree: TokenTree) -> str:
    """A tree from left to right: every node with its number in the step's order, first choices coloured."""
    rows = dict(zip((path[-1] for path in sorted(tree.leaf_paths)), range(len(tree)), strict=False))
    y = {leaf: (row + 0.5) * _ROW for leaf, row in rows.items()}
    for node in reversed(range(len(tree))):  # a parent is centred on its children
        if below := tree.children[node]:
            y[node] = (y[below[0]] + y[below[-1]]) / 2
    x = [_STEP // 2 + _STEP * int(depth) for depth in tree.depths]
    width, height = max(x) + _STEP // 2, len(rows) * _ROW
    half = _STEP // 2
    lines = [
        f'<path d="M{x[up]} {y[up]:g}c{half} 0 {half} {y[node] - y[up]:g} {_STEP} {y[node] - y[up]:g}"/>'
        for node, up in enumerate(tree.parents)
        if node
    ]
    classes = ("other", "first")
    nodes = [
        f'<g><title>node {node}, rank {rank}</title><circle cx="{x[node]}" cy="{y[node]:g}" r="{_RADIUS}" '
        f'class="{classes[rank == 0]}"/><text x="{x[node]}" y="{y[node]:g}">{node}</text></g>'
        for node, rank in enumerate(tree.ranks)
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tree" viewBox="0 0 {width} {height:g}" width="{width}" '
        'role="img">'
    )
    title = f"<title>A token tree of {len(tree)} nodes, depth {tree.depth}</title><style>{_STYLE}</style>"
    return "\n".join([head, title, *lines, *nodes, "</svg>", ""])
