"""``specexport draw``, and token trees for the terminal and for reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from specexport.commands import report
from specexport.commands.flags import UsageError
from specexport.contract.errors import RequestError
from specexport.contract.folders import write_file
from specexport.contract.manifest import Manifest
from specexport.contract.options import Options, option
from specexport.contract.reading import read_manifest
from specexport.contract.tree import TokenTree
from specexport.contract.values import counted
from specexport.runtime.speculative import available_methods

_STEP, _ROW, _RADIUS = 72, 30, 12
"""Pixels between depths, between leaves, and of a node."""


class DrawOptions(Options, frozen=True, kw_only=True):
    """Options of ``specexport draw``.

    Attributes:
        tree: a bundle, the JSON file of a tree, or the name of a preset.
        output: picture to write; - for standard output.
        method: method of the bundle whose tree to draw (default: the first).
    """

    tree: Annotated[Path, option("BUNDLE_OR_TREE", positional=True)]
    output: Annotated[Path, option("SVG", short="-o")]
    method: Annotated[str | None, option("NAME")] = None


def draw_command(command: DrawOptions) -> int:
    """Draw a token tree as SVG.

    Example:
        specexport draw mc_sim_7b_63 -o tree.svg
    """
    report.check_suffix("--output", command.output, ".svg")
    tree = tree_of(command.tree, command.method)
    if str(command.output) == "-":
        print(svg(tree), end="")
        return 0
    write_file(command.output, svg(tree).encode())
    print(f"{command.output}: {size_of(tree)}")
    return 0


def tree_of(source: Path, method: str | None) -> TokenTree:
    """The tree of a bundle's method, None for its first; or of a file or a preset."""
    if source.is_dir():
        return _bundled_tree(read_manifest(source), method)
    if method is not None:
        raise UsageError("--method was given with a tree; it chooses a method of a bundle")
    return TokenTree.load(source)


def size_of(tree: TokenTree) -> str:
    """The nodes and the depth of a tree, in words."""
    return f"{counted(len(tree), 'node')} with the root, depth {tree.depth}"


def terminal_tree(tree: TokenTree) -> str:
    """A drawing with a line per node: its number in the step's order, and its rank among its siblings."""
    lines = ["0  last token"]

    def draw(children: Sequence[int], indent: str) -> None:
        for child in children:
            corner, below = ("└── ", "    ") if child == children[-1] else ("├── ", "│   ")
            lines.append(f"{indent}{corner}{child}  rank {tree.ranks[child]}")
            draw(tree.children[child], indent + below)

    draw(tree.children[0], "")
    return "\n".join(lines)


def _bundled_tree(manifest: Manifest, name: str | None) -> TokenTree:
    methods = {method.name: method for method in available_methods(manifest)}
    if name is None:
        if not manifest.methods:
            raise RequestError(f"the bundle was built without a method; name one of {', '.join(methods)} as --method")
        name = manifest.methods[0].name
    if name not in methods:
        raise RequestError(f"method is {name!r}; the bundle has {', '.join(methods)}", param="method")
    return methods[name].token_trees()[0]


def svg(tree: TokenTree) -> str:
    """A drawing from left to right: nodes with their numbers in the step's order, and first choices in colour."""
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
    title = (
        f"<title>A token tree of {len(tree)} nodes, depth {tree.depth}</title><style>{report.asset('tree.css')}</style>"
    )
    return "\n".join([head, title, *lines, *nodes, "</svg>", ""])
