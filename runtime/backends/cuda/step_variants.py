"""The variants of a step on a device: their shapes, drafts and inputs, and the choice of a step's variant."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from specexport.contract import tensors
from specexport.contract.engines import LARGEST_TOP_K, Accept, Commit, Fill, ProgramGraph
from specexport.contract.manifest import Manifest, fill_point, filled_trees, fills
from specexport.contract.shapes import ShapePoint
from specexport.contract.signature import accept_signature, fill_signature
from specexport.contract.tree import TokenTree
from specexport.runtime.backend import Array, RunShape
from specexport.runtime.backends.cuda.api import Launch
from specexport.runtime.backends.cuda.graph import DeviceGraph, RunBuffers
from specexport.runtime.backends.cuda.library import Executor
from specexport.runtime.backends.cuda.memory import StagingBuffers
from specexport.runtime.proposal import DeviceDraft, Proposer, SlotView

G = TypeVar("G", Accept, Fill, Commit)
ProgramGraphs = Mapping[ProgramGraph, Executor]
"""The step program's own graphs, with their executors."""


def read_back(names: Collection[str]) -> list[str]:
    """The names of the target's outputs that a step copies to the host for proposers: all but the logits."""
    return sorted(name for name in names if name != tensors.LOGITS)


def graphs_of(graphs: ProgramGraphs, cls: type[G]) -> list[tuple[G, Executor]]:
    """The graphs of one class."""
    return [(graph, executor) for graph, executor in graphs.items() if isinstance(graph, cls)]


@dataclass(frozen=True, eq=False)
class Drafting:
    """A draft's run within a step on the device.

    Attributes:
        shape: the shape of the draft's run, over all slots.
        candidates: M of q.
        tree: the largest tree that it fills.
        at: the shape of the fill graph.
        fill: the graph that fills the tree; None for a chain, whose nodes are the draft's tokens.
    """

    draft: DeviceDraft
    graph: DeviceGraph
    shape: RunShape
    candidates: int
    tree: TokenTree
    at: ShapePoint
    fill: Fill | None

    @property
    def buffers(self) -> RunBuffers:
        """The buffers and launches of the draft's run."""
        return self.graph.buffers(self.shape)

    def can_fill(self, tree: TokenTree) -> bool:
        """Whether it can fill a tree, also a smaller one, as draft tokens beyond the tree are never accepted."""
        largest = self.tree
        fits = len(tree) <= len(largest) and tree.depth <= largest.depth and tree.level_width <= largest.level_width
        return fits and (tree.is_chain or self.fill is not None)


@dataclass(eq=False)
class StepVariant:
    """A variant of a step, which one CUDA graph runs at each cache size.

    Attributes:
        shape: the shape of the target's run, over all slots: T tokens with the logits of each.
        nodes: N of the tree; a smaller tree is padded with nodes that are never accepted.
        drafting: how a draft proposes on the device; None if the host writes the draft tokens and q.
        inputs: what the host writes, in addition to the target's and the draft's inputs, once the step is prepared.
        outputs: the results that the host reads.
        commits: whether the device makes the rows of the accepted path contiguous.
        launches: the work, a part for each graph or all together, by cache size.
    """

    accept: Accept
    shape: RunShape
    nodes: int
    drafting: Drafting | None = None
    inputs: StagingBuffers = field(init=False)
    outputs: StagingBuffers = field(init=False)
    commits: bool = False
    launches: dict[int, list[Launch]] = field(default_factory=dict)

    def launch(self, cache: int) -> None:
        for launch in self.launches[cache]:
            launch.run()

    def input_arrays(self) -> dict[str, Array]:
        """A slot's inputs of the accept and fill graphs that the host writes, initially for a greedy chain.

        Slots that take no part in a step keep the inputs of an earlier step, which are always valid.
        """
        arrays = {
            str(tensor): tensor.array(self._sizes)
            for tensor in accept_signature(self.accept.rule, self.accept.candidates).inputs
            if tensor != tensors.LOGITS and (self.drafting is None or tensor not in tensors.DRAFTED)
        }
        if self.drafting is not None and self.drafting.fill is not None:
            arrays[tensors.TREE_ROWS] = tensors.TREE_ROWS.array(self._sizes)
            arrays[tensors.TREE_RANKS] = np.array([self.drafting.tree.ranks[1:]], np.int64)
        return arrays

    def output_arrays(self) -> dict[str, Array]:
        """The accept graph's outputs for a slot."""
        outputs = accept_signature(self.accept.rule, self.accept.candidates).outputs
        return {str(tensor): tensor.zeros(self._sizes) for tensor in outputs}

    def draft_arrays(self) -> dict[str, Array]:
        """A slot's draft that stays on the device, with a row for each node, as the fill graph returns it."""
        if self.drafting is None:
            return {}
        filled = fill_signature(self.drafting.candidates).outputs
        return {str(name): tensor.zeros(self._sizes) for name, tensor in zip(tensors.DRAFTED, filled, strict=True)}

    @property
    def _sizes(self) -> dict[str, int]:
        return {"B": 1, "N": self.nodes, "N-1": self.nodes - 1}


class StepVariants:
    """The captured variants of a step, and the choice among them for a batch of requests.

    One accept graph decides for all slots of a step, so they share an acceptance rule and at most one M.
    """

    def __init__(
        self, manifest: Manifest, target: DeviceGraph, proposers: Mapping[str, Proposer], graphs: ProgramGraphs
    ) -> None:
        self._slots = target.sizes[-1]
        self._accepts = tuple(accept for accept, _ in graphs_of(graphs, Accept))
        self._support = {name: proposer.method.support for name, proposer in proposers.items()}
        self._host_driven = {name for name, proposer in proposers.items() if tensors.LOGITS in proposer.observes}
        trees = {
            name: proposer.method.smaller_trees(manifest.target)
            for name, proposer in proposers.items()
            if name not in self._host_driven
        }
        # By the accept graph's index, and by the length of a tree or by the method.
        self._verified: dict[tuple[int, int], StepVariant] = {}
        self._drafted: dict[tuple[int, str], list[StepVariant]] = {}
        lengths = {1, *(len(tree) for of_method in trees.values() for tree in of_method)}
        self._add_verified(target.widths(self._slots), lengths, graphs)
        for name, of_method in trees.items():
            for drafting in self._draftings(proposers[name], of_method, graphs):
                self._add_drafted(name, drafting)
        drafted = (variant for variants in self._drafted.values() for variant in variants)
        self.all = (*dict.fromkeys(self._verified.values()), *drafted)

    def _add_verified(self, widths: Collection[int], lengths: Collection[int], graphs: ProgramGraphs) -> None:
        """Adds variants for trees of these lengths that the host fills; lengths of one shape share a variant."""
        for at, (accept, executor) in enumerate(graphs_of(graphs, Accept)):
            nodes = {point.tokens for point in executor.points if point.batch == self._slots}
            by_shape: dict[tuple[int, int], StepVariant] = {}
            for length in lengths:
                T, N = self._fitting(widths, nodes, length)
                if T and N:
                    self._verified[at, length] = by_shape.setdefault((T, N), self._variant(accept, T, N))

    def _add_drafted(self, name: str, drafting: Drafting) -> None:
        """Adds the variants in which a method's draft fills a tree: one for each accept graph that takes its q."""
        length = len(drafting.tree)
        for at, accept in enumerate(self._accepts):
            variant = self._verified.get((at, length))
            exact = variant is not None and variant.shape.tokens == variant.nodes == length
            if exact and (accept.rule != "lossless" or accept.candidates == self._support[name]):
                self._drafted.setdefault((at, name), []).append(self._variant(accept, length, length, drafting))

    def _variant(self, accept: Accept, T: int, N: int, drafting: Drafting | None = None) -> StepVariant:
        return StepVariant(accept, RunShape(T, T, slots=range(self._slots)), N, drafting)

    def accept_graph(self, views: Sequence[SlotView]) -> int | None:
        """The index of the accept graph for a step of these requests; None if the host has to decide."""
        params = [view.params for view in views]
        if any(p.logprobs is not None or p.acceptance == "relaxed" for p in params):
            return None
        if any((p.top_k > LARGEST_TOP_K or p.rules.filter_tokens) and not p.greedy for p in params):
            return None
        methods = {view.method for view in views if view.method is not None}
        if any(view.processors for view in views) or methods & self._host_driven:
            return None
        rules = {"greedy" if p.greedy else "typical" if p.acceptance == "typical" else "lossless" for p in params}
        if rules == {"greedy", "lossless"} or not any(accept.rule == "greedy" for accept in self._accepts):
            rules = {"lossless" if rule == "greedy" else rule for rule in rules}
        supports = {self._support.get(method, 0) for method in methods} - {0}
        longest = max(len(view.tree) for view in views)
        for at, accept in enumerate(self._accepts):
            fits = accept.rule != "lossless" or supports <= {accept.candidates}
            if rules == {accept.rule} and fits and self._at_least(at, longest) is not None:
                return at
        return None

    def for_proposals(self, at: int, trees: Collection[TokenTree]) -> StepVariant:
        """The variant for trees that the host filled, with the accept graph of index ``at``."""
        # A tree that is smaller than any captured one runs in the step of the next larger one.
        variant = self._at_least(at, max(map(len, trees)))
        assert variant is not None
        return variant

    def for_draft(self, at: int, method: str, trees: Collection[TokenTree]) -> StepVariant | None:
        """The variant in which a draft fills the trees on the device; None if there is none."""
        variants = self._drafted.get((at, method), ())
        return next((v for v in variants if v.drafting and all(map(v.drafting.can_fill, trees))), None)

    def _at_least(self, at: int, length: int) -> StepVariant | None:
        fits = [captured for index, captured in self._verified if index == at and captured >= length]
        return self._verified[at, min(fits)] if fits else None

    def _fitting(self, widths: Collection[int], nodes: Collection[int], length: int) -> tuple[int, int]:
        """T and N of a step for trees of a length; 0 if there are none.

        With several slots N is T, as their logits are T rows apart.
        """
        if self._slots > 1:
            widths = nodes = {*widths} & {*nodes}
        T, N = (min((size for size in sizes if size >= length), default=0) for sizes in (widths, nodes))
        return T, N

    def _draftings(self, proposer: Proposer, trees: Collection[TokenTree], graphs: ProgramGraphs) -> list[Drafting]:
        """The trees of a method that its draft can fill on the device, the smallest first."""
        draft, method, draftings = proposer.device_draft, proposer.method, list[Drafting]()
        if draft is None or not isinstance(graph := draft.graph, DeviceGraph) or not graph.self_contained:
            return []
        with_fill_graph = filled_trees(method)
        for tree in sorted(trees, key=len):
            if (run := method.device_run(tree)) is None:
                continue
            point = fill_point(method, tree, self._slots)
            fitting = [fill for fill, ex in graphs_of(graphs, Fill) if fills(fill, method) and point in ex.points]
            fill = fitting[0] if fitting and tree in with_fill_graph else None
            if fill is not None or (tree.is_chain and not method.drafted_stages):
                tokens, drafts = run
                shape = RunShape(tokens, drafts=drafts, slots=range(self._slots))
                draftings.append(Drafting(draft, graph, shape, method.support, tree, point, fill))
        return draftings
