"""Which steps a bundle can take on a device, and which of them a batch's next step is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from specexport.contract.engines import Accept, Fill
from specexport.contract.manifest import Manifest
from specexport.contract.shapes import ShapePoint
from specexport.contract.tree import TokenTree
from specexport.runtime.cuda.graph import DeviceGraph
from specexport.runtime.cuda.step_variant import Drafting, StepVariant
from specexport.runtime.cuda.steps import READ_BACK, ProgramGraphs, graphs_of
from specexport.runtime.program import Speculation
from specexport.runtime.proposal import SlotView


class StepVariants:
    """The variants of a step that are captured, by what requests ask for.

    One accept graph decides for all slots of a step: they accept by one rule, and draw from drafts of one M at most.
    """

    def __init__(
        self, manifest: Manifest, target: DeviceGraph, speculations: Mapping[str, Speculation], graphs: ProgramGraphs
    ) -> None:
        self._slots = target.sizes[-1]
        self._accepts = tuple(accept for accept, _ in graphs_of(graphs, Accept))
        self._support = {name: one.method.support for name, one in speculations.items()}
        trees = {
            name: one.method.smaller_trees(manifest.target)
            for name, one in speculations.items()
            if one.proposer.observes <= READ_BACK
        }
        self._longest = {name: max(map(len, known)) for name, known in trees.items()}
        lengths = {1, *(len(tree) for known in trees.values() for tree in known)}
        made: dict[tuple[int, int, int], StepVariant] = {}
        self._verified: dict[tuple[int, int], StepVariant] = {}
        self._drafted: dict[tuple[int, str], list[StepVariant]] = {}
        for at, (accept, executor) in enumerate(graphs_of(graphs, Accept)):
            nodes = {point.tokens for point in executor.points if point.batch == self._slots}
            for length in lengths:
                T, N = self._fitting(target.widths(self._slots), nodes, length)
                if T and N:
                    self._verified[at, length] = made.setdefault((at, T, N), StepVariant(accept, T, N))
        for name, known in trees.items():
            for drafting in self._fillable(name, speculations[name], known, graphs):
                length = len(drafting.tree)
                for at, accept in enumerate(self._accepts):
                    variant = self._verified.get((at, length))
                    exact = variant is not None and variant.tokens == variant.nodes == length
                    if exact and (accept.rule == "typical" or accept.candidates == self._support[name]):
                        self._drafted.setdefault((at, name), []).append(StepVariant(accept, length, length, drafting))
        self.all = (*made.values(), *(variant for variants in self._drafted.values() for variant in variants))

    def deciding(self, views: Sequence[SlotView]) -> int | None:
        """Which accept graph decides a step of these requests; None where the host has to look into it."""
        params = [view.params for view in views]
        if any(one.logprobs is not None or one.acceptance == "relaxed" for one in params):
            return None
        methods = {view.method for view in views if view.method is not None}
        if any(view.constraint is not None for view in views) or not methods <= self._longest.keys():
            return None
        rules = {"typical" if one.acceptance == "typical" and not one.greedy else "lossless" for one in params}
        supports = {self._support[method] for method in methods} - {0}
        longest = max((self._longest[method] for method in methods), default=1)
        for at, accept in enumerate(self._accepts):
            fits = accept.rule == "typical" or supports <= {accept.candidates}
            if rules == {accept.rule} and fits and self._at_least(at, longest) is not None:
                return at
        return None

    def verified(self, at: int, trees: Collection[TokenTree]) -> StepVariant:
        """The step in which an accept graph decides on trees that the host filled."""
        # Smaller trees than any that was captured run in the next larger one's step.
        variant = self._at_least(at, max(map(len, trees)))
        assert variant is not None
        return variant

    def drafted(self, at: int, method: str, trees: Collection[TokenTree]) -> StepVariant | None:
        """The step in which a draft fills the trees on the device; None where there is none."""
        known = self._drafted.get((at, method), ())
        return next(
            (variant for variant in known if variant.drafting and all(map(variant.drafting.holds, trees))), None
        )

    def _at_least(self, at: int, length: int) -> StepVariant | None:
        fits = [captured for known, captured in self._verified if known == at and captured >= length]
        return self._verified[at, min(fits)] if fits else None

    def _fitting(self, widths: Collection[int], nodes: Collection[int], length: int) -> tuple[int, int]:
        """T and N of a step for trees of a length, 0 where there is none.

        Several slots' logits lie T apart, so that N is T.
        """
        if self._slots > 1:
            widths = nodes = {*widths} & {*nodes}
        T, N = (min((size for size in sizes if size >= length), default=0) for sizes in (widths, nodes))
        return T, N

    def _fillable(
        self, name: str, speculation: Speculation, trees: Collection[TokenTree], graphs: ProgramGraphs
    ) -> list[Drafting]:
        """The trees of a method that its draft can fill on the device, the smallest first."""
        draft, found = speculation.proposer.device_draft, list[Drafting]()
        graph = draft.graph if draft is not None else None
        if not isinstance(graph, DeviceGraph) or not graph.self_contained:
            return []
        for tree in sorted(trees, key=len):
            point = ShapePoint(self._slots, len(tree), 0, 0, tree.depth)
            fills = [fill for fill, executor in graphs_of(graphs, Fill) if point in executor.points]
            fill = next((fill for fill in fills if fill.candidates == self._support[name]), None)
            if tree.is_chain or fill is not None:
                found.append(Drafting(graph, tree, None if tree.is_chain else fill))
        return found
