"""Which steps a bundle can take on a device, and which of them a request's next step is."""

from __future__ import annotations

from collections.abc import Mapping

from specexport.contract import tensors
from specexport.contract.engines import Accept, Fill
from specexport.contract.manifest import Manifest
from specexport.contract.methods import DraftModel
from specexport.contract.shapes import ShapePoint
from specexport.contract.tree import TokenTree
from specexport.runtime.cuda.graph import DeviceGraph
from specexport.runtime.cuda.steps import Drafting, Kind, ProgramGraphs
from specexport.runtime.params import SamplingParams
from specexport.runtime.proposers import SlotView
from specexport.runtime.proposers.draft_model import DraftModelProposer
from specexport.runtime.sampling import Distributions
from specexport.runtime.step import Speculation

READ_BACK = frozenset({tensors.CANDIDATES})
"""What of the target's outputs comes back with a step that is taken on the device."""


class Kinds:
    """The kinds of steps that are captured, by what a request asks for.

    Args:
        manifest: the bundle's.
        target: the target's graph.
        speculations: the ways to propose, by the name of their method.
        graphs: the step program's graphs, as far as they were compiled for this device.
    """

    def __init__(
        self,
        manifest: Manifest,
        target: DeviceGraph,
        speculations: Mapping[str, Speculation],
        graphs: ProgramGraphs,
    ) -> None:
        self._accepts = tuple(accept for accept, _ in graphs.of(Accept))
        self._support = {name: _support(manifest, name) for name in speculations}
        self._verified: dict[tuple[int, int], Kind] = {}
        self._drafted: dict[tuple[int, str, TokenTree], Kind] = {}
        observing = {name: one for name, one in speculations.items() if one.proposer.observes <= READ_BACK}
        lengths = {1, *(len(tree) for one in observing.values() for tree in one.trees)}
        made: dict[tuple[int, int, int], Kind] = {}
        for at, (accept, executor) in enumerate(graphs.of(Accept)):
            nodes = sorted(point.tokens for point in executor.points)
            for length in sorted(lengths):
                T = next((width for width in target.widths(1) if width >= length), 0)
                N = next((width for width in nodes if width >= length), 0)
                if T and N:
                    self._verified[at, length] = made.setdefault((at, T, N), Kind(accept, T, N))
        for name, one in observing.items():
            for tree, drafting in self._fillable(name, one, graphs).items():
                for at, accept in enumerate(self._accepts):
                    kind = self._verified.get((at, len(tree)))
                    exact = kind is not None and kind.tokens == kind.nodes == len(tree)
                    if exact and (accept.rule == "typical" or accept.candidates == self._support[name]):
                        self._drafted[at, name, tree] = Kind(accept, len(tree), len(tree), drafting)
        self._served = {
            name: {1, *map(len, one.trees)} <= {length for _, length in self._verified}
            for name, one in observing.items()
        }
        self.all = (*made.values(), *self._drafted.values())

    def serves(self, view: SlotView) -> bool:
        """Whether a request's steps can be taken on the device: the host need not look into them."""
        params = view.params
        unseen = view.constraint is None and params.logprobs is None and params.acceptance != "relaxed"
        known = view.method is None or self._served.get(view.method, False)
        support = self._support[view.method] if view.method is not None else 0
        return unseen and known and self._accept(params, support) is not None

    def verified(self, params: SamplingParams, tree: TokenTree, q: Distributions | None) -> Kind:
        """The step that verifies a tree which the host filled."""
        at = self._accept(params, 0 if q is None else q.ids.shape[1])
        assert at is not None
        # A smaller tree than any that was captured, as budgets hand out, runs in the next larger one's step.
        length = min(length for known, length in self._verified if known == at and length >= len(tree))
        return self._verified[at, length]

    def drafted(self, view: SlotView) -> Kind | None:
        """The step in which a request's draft fills its tree on the device; None where there is none."""
        if view.method is None:
            return None
        at = self._accept(view.params, self._support[view.method])
        return None if at is None else self._drafted.get((at, view.method, view.tree))

    def _accept(self, params: SamplingParams, support: int) -> int | None:
        """Which accept graph decides; where tokens are chosen without drawing any of its rule does."""
        typical = params.acceptance == "typical" and not params.greedy
        fits = (
            at
            for at, accept in enumerate(self._accepts)
            if (accept.rule == "typical") == typical and (typical or support in (0, accept.candidates))
        )
        return next(fits, None)

    def _fillable(self, name: str, speculation: Speculation, graphs: ProgramGraphs) -> dict[TokenTree, Drafting]:
        """The trees that a method's draft can fill on the device.

        Lowered portably there are none: the rows of a call are copied to where the host says before the next call.
        """
        proposer = speculation.proposer
        if not isinstance(proposer, DraftModelProposer) or not isinstance(proposer.graph, DeviceGraph):
            return {}
        graph, found = proposer.graph, dict[TokenTree, Drafting]()
        for tree in speculation.trees if graph.in_place else ():
            point = ShapePoint(1, len(tree), 0, 0, tree.depth)
            fills = [fill for fill, executor in graphs.of(Fill) if point in executor.points]
            fill = next((fill for fill in fills if fill.candidates == self._support[name]), None)
            if tree.is_chain or fill is not None:
                found[tree] = Drafting(graph, tree, None if tree.is_chain else fill)
        return found


def _support(manifest: Manifest, name: str) -> int:
    """M of the distributions a method draws from; 0 where it draws from none."""
    method = manifest.method(name)
    return method.candidates if isinstance(method, DraftModel) else 0
