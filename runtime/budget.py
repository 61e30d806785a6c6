"""How much each request of a batch may speculate: K shrinks as the batch fills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specexport.contract.manifest import Manifest
from specexport.contract.methods import DraftModel, Lookup, method_name
from specexport.contract.tree import TokenTree
from specexport.runtime.request import Request
from specexport.runtime.step import ROOT, Speculation


class Budget:
    """Chooses the tree each request verifies in a step.

    A request alone gets what it asked for. In a batch its share of a step is what its method's default tree, made for
    one, would be for each of them: so a step verifies hardly more tokens than the bundle was built to verify at once.

    Args:
        manifest: the bundle's.
        speculations: its ways to propose.
    """

    def __init__(self, manifest: Manifest, speculations: Mapping[str, Speculation]) -> None:
        self._tokens = {name: len(one.trees[0]) for name, one in speculations.items()}
        self._smaller = {
            method_name(method): smaller_trees(manifest, method_name(method)) for method in manifest.methods
        }

    def assign(self, requests: Sequence[Request]) -> None:
        """Sets the tree of each request's next step."""
        for request in requests:
            # The last token of an output needs no draft.
            request.view.tree = ROOT if request.room <= 1 else self._share(request, len(requests))

    def _share(self, request: Request, others: int) -> TokenTree:
        method = request.view.method
        if method is None or others == 1:
            return request.tree
        nodes = min(self._tokens[method] // others, len(request.tree))
        return next((tree for tree in self._smaller[method] if len(tree) <= nodes), ROOT)


def smaller_trees(manifest: Manifest, name: str) -> tuple[TokenTree, ...]:
    """Trees that a method can fill and the bundle's graphs verify at every batch size, the largest first.

    They are those the bundle was built for and, where a model proposes, chains of its most probable tokens.
    """
    method = manifest.method(name)
    assert method is not None
    trees = {len(tree): tree for tree in method.token_trees()}
    if not isinstance(method, Lookup):
        deepest = max(tree.depth for tree in trees.values())
        drafted = (
            {graph.point.drafts for graph in method.draft.graph.points} if isinstance(method, DraftModel) else None
        )
        for graph in manifest.target.graph.points:
            nodes = graph.point.tokens
            known = drafted is None or nodes - 1 in drafted
            if graph.point.rows == nodes and 1 < nodes <= deepest + 1 and known:
                trees.setdefault(nodes, TokenTree.chain(nodes))
    return tuple(tree for _, tree in sorted(trees.items(), reverse=True))
