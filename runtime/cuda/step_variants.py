"""Which steps a bundle can take on a device: their shapes, who proposes, what they are given, and which comes next."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from specexport.contract import tensors
from specexport.contract.engines import LARGEST_TOP_K, Accept, Commit, Fill, ProgramGraph
from specexport.contract.manifest import Manifest
from specexport.contract.program import fill_point, filled_trees, fills
from specexport.contract.shapes import ShapePoint
from specexport.contract.tree import TokenTree
from specexport.runtime.cuda.executor import Executor
from specexport.runtime.cuda.graph import DeviceGraph, Width
from specexport.runtime.graph import Array
from specexport.runtime.program import Speculation
from specexport.runtime.proposal import SlotView

G = TypeVar("G", Accept, Fill, Commit)
ProgramGraphs = Sequence[tuple[ProgramGraph, Executor]]
"""The step program's own graphs, with what runs them on this device."""


def read_back(names: Collection[str]) -> list[str]:
    """Those of the target's outputs that come back with a step: what is proposed from, but for logits."""
    return sorted(name for name in names if name != tensors.LOGITS)


def graphs_of(graphs: ProgramGraphs, cls: type[G]) -> list[tuple[G, Executor]]:
    """Those of one class."""
    return [(graph, executor) for graph, executor in graphs if isinstance(graph, cls)]


@dataclass(frozen=True, eq=False)
class Drafting:
    """How a draft proposes on the device.

    Attributes:
        tokens: T of the draft's run.
        drafts: K of it.
        candidates: M of q.
        at: the shape of the fill graph.
        fill: the graph that fills the tree; None for a chain whose tokens are the draft's.
    """

    graph: DeviceGraph
    tokens: int
    drafts: int
    candidates: int
    tree: TokenTree
    at: ShapePoint
    fill: Fill | None

    @property
    def width(self) -> Width:
        """What runs the draft, for all slots."""
        return self.graph.width(self.tokens, drafts=self.drafts, batch=self.graph.sizes[-1])

    def holds(self, tree: TokenTree) -> bool:
        """Whether it can fill a tree too, which may be smaller: what it proposes beyond that never stays."""
        own = self.tree
        fits = len(tree) <= len(own) and tree.depth <= own.depth and tree.level_width <= own.level_width
        return fits and (tree.is_chain or self.fill is not None)


@dataclass(frozen=True, eq=False)
class StepVariant:
    """What steps have in common that one CUDA graph runs, but for the size of the cache.

    Attributes:
        tokens: T, what the target sees.
        nodes: N, of the tree; of a smaller one the rest never stays.
        drafting: how a draft proposes on the device; None where the host writes the draft tokens and q.
    """

    accept: Accept
    tokens: int
    nodes: int
    drafting: Drafting | None = None

    def inputs(self) -> dict[str, Array]:
        """What the accept and fill graphs take of a slot from the host; at first a chain of greedy tokens.

        Slots without a part in a step keep what they had in an earlier one: all of it are trees that there may be.
        """
        nodes, drafts, rule = self.nodes, self.nodes - 1, self.accept.rule
        arrays: dict[str, Array] = {
            tensors.PARENTS: np.arange(-1, drafts)[None],
            tensors.TREE_MASK: np.tri(nodes, dtype=np.bool_)[None],
        }
        if rule != "greedy":
            arrays |= {
                tensors.UNIFORM: np.zeros((1, nodes if rule == "lossless" else 1), np.float32),
                tensors.TEMPERATURE: np.ones(1, np.float32),
                tensors.TOP_K: np.ones(1, np.int64),
                tensors.TOP_P: np.ones(1, np.float32),
                tensors.MIN_P: np.zeros(1, np.float32),
            }
        if rule == "typical":
            arrays |= {name: np.zeros(1, np.float32) for name in (tensors.THRESHOLD, tensors.ALPHA)}
        if self.drafting is None:
            arrays[tensors.DRAFT_TOKENS] = np.zeros((1, drafts), np.int64)
            if rule == "lossless":
                support = (1, drafts, self.accept.candidates)
                arrays[tensors.DRAFT_IDS] = np.broadcast_to(np.arange(support[-1]), support).copy()
                arrays[tensors.DRAFT_PROBS] = np.broadcast_to(np.eye(1, support[-1], dtype=np.float32), support).copy()
        elif self.drafting.fill is not None:
            arrays[tensors.TREE_ROWS] = np.zeros((1, drafts), np.int64)
            arrays[tensors.TREE_RANKS] = np.array([self.drafting.tree.ranks[1:]], np.int64)
        return arrays

    def outputs(self) -> dict[str, Array]:
        """The accept graph's outputs for a slot."""
        return {
            tensors.NUM_ACCEPTED: np.zeros(1, np.int64),
            tensors.TOKENS: np.zeros((1, self.nodes), np.int64),
            tensors.PATH: np.zeros((1, self.nodes), np.int64),
        }

    def between(self) -> dict[str, Array]:
        """What was drafted for one slot, which stays on the device: as the fill graph makes it, or a chain's."""
        if self.drafting is None:
            return {}
        drafts, support = self.nodes - 1, self.drafting.candidates
        filled = (tensors.TREE_TOKENS, tensors.TREE_IDS, tensors.TREE_PROBS)
        tokens, ids, probs = tensors.DRAFTED if self.drafting.fill is None else filled
        return {
            tokens: np.zeros((1, drafts), np.int64),
            ids: np.zeros((1, drafts, support), np.int64),
            probs: np.zeros((1, drafts, support), np.float32),
        }


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
            if tensors.LOGITS not in one.proposer.observes
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
                    if exact and (accept.rule != "lossless" or accept.candidates == self._support[name]):
                        self._drafted.setdefault((at, name), []).append(StepVariant(accept, length, length, drafting))
        self.all = (*made.values(), *(variant for variants in self._drafted.values() for variant in variants))

    def deciding(self, views: Sequence[SlotView]) -> int | None:
        """Which accept graph decides a step of these requests; None where the host has to look into it."""
        params = [view.params for view in views]
        if any(one.logprobs is not None or one.acceptance == "relaxed" for one in params):
            return None
        if any((one.top_k > LARGEST_TOP_K or one.rules.filter_tokens) and not one.greedy for one in params):
            return None
        methods = {view.method for view in views if view.method is not None}
        if any(view.processors for view in views) or not methods <= self._longest.keys():
            return None
        rules = {"greedy" if one.greedy else "typical" if one.acceptance == "typical" else "lossless" for one in params}
        if rules == {"greedy", "lossless"} or not any(accept.rule == "greedy" for accept in self._accepts):
            rules = {"lossless" if rule == "greedy" else rule for rule in rules}
        supports = {self._support[method] for method in methods} - {0}
        longest = max((self._longest[method] for method in methods), default=1)
        for at, accept in enumerate(self._accepts):
            fits = accept.rule != "lossless" or supports <= {accept.candidates}
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
        draft, method, found = speculation.proposer.device_draft, speculation.method, list[Drafting]()
        graph = draft.graph if draft is not None else None
        if not isinstance(graph, DeviceGraph) or not graph.self_contained:
            return []
        own = filled_trees(method)
        for tree in sorted(trees, key=len):
            if (run := method.device_run(tree)) is None:
                continue
            point = fill_point(method, tree, self._slots)
            known = [fill for fill, made in graphs_of(graphs, Fill) if fills(fill, method) and point in made.points]
            fill = known[0] if known and tree in own else None
            if fill is not None or (tree.is_chain and not method.drafted_stages):
                found.append(Drafting(graph, *run, method.support, tree, point, fill))
        return found
