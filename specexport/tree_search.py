"""Finds the token tree that decodes fastest on this machine, by measured acceptance and costs of steps; stores it."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from specexport.contract import tensors
from specexport.contract.errors import BuildError, RequestError
from specexport.contract.manifest import Manifest
from specexport.contract.methods import Method, with_draft, with_trees
from specexport.contract.model import Model
from specexport.contract.reading import changing, check_files, exchange_manifest
from specexport.contract.shapes import ShapePoint
from specexport.contract.tree import TokenTree
from specexport.contract.values import Progress
from specexport.exporter.build_state import BuildPlan
from specexport.exporter.method import exporter_of
from specexport.runtime.backend import RunShape, open_target
from specexport.runtime.bundle import Bundle
from specexport.runtime.engine import Engine
from specexport.runtime.params import SamplingParams
from specexport.runtime.proposal import Ints, Proposal, SlotView
from specexport.runtime.request import Stats
from specexport.runtime.speculation.timing import SECONDS, in_turns, timed

RankPath = tuple[int, ...]

_WIDTHS = (*range(1, 13), 14, 16, 20, 24, 32, 48, 64)
"""Widths at which steps are timed; costs of other widths are interpolated."""


@dataclass(frozen=True)
class Observed:
    """Observations of decoding with a method.

    Attributes:
        paths: number of times that the target followed each path of ranks from the root.
        stats: sums of the requests' counters and times.
    """

    paths: Counter[RankPath]
    steps: int
    stats: Stats
    depth: int

    def weight(self, path: RankPath) -> float:
        """The probability that a path is accepted."""
        return self.paths[path] / max(1, self.steps)


@dataclass(frozen=True)
class TreeCandidate:
    """A tree and the expected figures of its steps.

    Attributes:
        tokens: number of tokens that a step commits, the bonus token included.
        speed_up: tokens per second over plain decoding's.
    """

    tree: TokenTree
    tokens: float
    seconds: float
    speed_up: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def observe(
    engine: Engine, name: str, prompts: Sequence[Sequence[int]], params: SamplingParams, progress: Progress
) -> Observed:
    """Decodes prompts with a method, and counts which of its candidates are right, even outside the tree.

    The candidates of a draft model or a speculator follow its own chain of draft tokens, so any other token ends a
    path.

    Raises:
        RequestError: the draft is drawn at random, or no step had a proposal.
    """
    method = engine.methods[name]
    chained = method.support > 0
    if chained and not params.greedy:
        raise RequestError("the tree of a draft that is drawn can only be tuned for greedy decoding: temperature 0")
    deepest = max(method.token_trees(), key=lambda tree: tree.depth)
    paths: Counter[RankPath] = Counter()
    total, steps = Stats(), 0
    with record_proposals(engine, name) as recorder:
        for index, prompt in enumerate(prompts):
            recorder.clear()
            completion = engine.generate(prompt, params, {"method": name, "num_speculative_tokens": len(deepest) - 1})
            whole = [*prompt, *completion.token_ids]
            for length, proposal in recorder:
                ahead = whole[length : length + len(proposal.candidates)]
                if len(ahead) == len(proposal.candidates):  # the end of a text is not a rejection
                    steps += 1
                    path = _path(proposal.candidates, ahead, chained)
                    paths.update(path[:end] for end in range(1, len(path) + 1))
            total += completion.stats
            progress("decoding", index + 1, len(prompts))
    if not steps:
        raise RequestError("no step had a proposal to learn from; give more or longer prompts, or more tokens")
    return Observed(paths, steps, total, deepest.depth)


def _path(candidates: Ints, ahead: Sequence[int], chained: bool) -> RankPath:
    """The ranks of the text's tokens among the candidates at each depth, up to the first that is no candidate."""
    path: list[int] = []
    for row, token in zip(candidates, ahead, strict=True):
        ranks = np.flatnonzero(row == token)
        if not len(ranks) or (chained and path and path[-1] != 0):
            break
        path.append(int(ranks[0]))
    return tuple(path)


def step_costs(bundle: Bundle, rows: int, widest: int, threads: int | None, progress: Progress) -> list[float]:
    """The seconds c(1), c(2), ... of steps of 1 to ``widest`` tokens of the target, over ``rows`` rows of cache."""
    widths = [width for width in _WIDTHS if width < widest] + [widest]
    model = bundle.manifest.target
    graph = open_target(bundle, threads=threads)
    graph.reserve(rows + widest)
    for width in widths:
        inputs = graph.inputs(RunShape(width, width))
        inputs[tensors.POSITION_IDS][:] = np.minimum(rows + np.arange(width), model.max_positions - 1)
        inputs[tensors.PAST_LENGTH][:] = rows
    trials = {("", width): timed(partial(graph.run, RunShape(width, width))) for width in widths}
    seconds, _ = in_turns(trials, SECONDS, "timing steps", progress)
    # Wider steps are never cheaper, except by noise.
    rising = list(itertools.accumulate((seconds["", width] for width in widths), max))
    return [float(cost) for cost in np.interp(np.arange(1, widest + 1), widths, rising)]


def candidates(method: Method, observed: Observed, costs: Sequence[float]) -> list[TreeCandidate]:
    """The fastest tree of each number of nodes, in descending order of speed; ``costs`` are those of all sizes."""
    stats = observed.stats
    overhead = (stats.accept + stats.host) / stats.steps
    propose = stats.propose / max(1, stats.steps_with_draft)
    plain = 1 / (costs[0] + overhead)
    depths = max((len(path) for path in observed.paths), default=0)
    best: dict[int, TreeCandidate] = {}
    for depth in range(1, depths + 1):
        # Draft models run a pass, and speculators a stage, for each depth; heads propose all depths at once.
        proposing = propose * depth / observed.depth if method.support else propose
        for nodes in range(2, len(costs) + 1):
            tree = TokenTree.best(observed.weight, nodes, method.ranks, depth)
            if len(tree) < nodes:
                break
            tokens = 1 + sum(observed.weight(path) for path in tree.choices)
            seconds = costs[nodes - 1] + proposing + overhead
            candidate = TreeCandidate(tree, tokens, seconds, tokens / seconds / plain)
            if nodes not in best or candidate.tokens_per_second > best[nodes].tokens_per_second:
                best[nodes] = candidate
    return sorted(best.values(), key=lambda candidate: -candidate.tokens_per_second)


@contextlib.contextmanager
def record_proposals(engine: Engine, method: str) -> Iterator[list[tuple[int, Proposal]]]:
    """Yields a list to which a method's proposals are added, with the lengths of the texts before them.

    Nothing else may use the engine meanwhile.
    """
    proposer = engine.proposers[method]
    propose = proposer.propose
    records: list[tuple[int, Proposal]] = []

    def recording(views: Sequence[SlotView]) -> dict[int, Proposal]:
        proposals = propose(views)
        records.extend((len(view.tokens), proposals[view.slot]) for view in views if view.slot in proposals)
        return proposals

    proposer.propose = recording  # type: ignore[method-assign]
    try:
        yield records
    finally:
        del proposer.propose


def require_replaceable_trees(folder: Path, manifest: Manifest) -> None:
    """Refuses a bundle with a step program or engines."""
    if manifest.program or manifest.engines:
        raise BuildError(
            f"{folder}: is built for {manifest.backend}; its step program and engines are compiled for its trees, "
            "which cannot be replaced. Tune a bundle built for onnxruntime, and build this one with the best tree"
        )


def set_default_tree(folder: Path, name: str, tree: TokenTree) -> Manifest:
    """Makes a tree the default of a method; its other trees can still be chosen.

    Raises:
        BuildError: the bundle lacks the method, its cache has no room for a step that wide, or its trees cannot be
            replaced.
        BundleError: the bundle is incomplete, or the method cannot fill the tree.
    """
    with changing(folder) as manifest:
        check_files(folder, manifest, hashes=False)
        method = manifest.method(name)
        if method is None:
            raise BuildError(f"{folder}: has no method {name!r}")
        require_replaceable_trees(folder, manifest)
        method = with_trees(method, (tree, *(other for other in method.token_trees() if len(other) != len(tree))))
        plan = msgspec.structs.replace(BuildPlan.of_bundle(manifest), methods=(method,))
        widest, rows = max(method.widths()), plan.caches[-1]
        if manifest.max_seq_len + widest > rows + 1:
            raise BuildError(
                f"{folder}: a step of {widest} tokens does not fit after a context of {manifest.max_seq_len} in "
                f"{rows} cache rows; build the bundle for such steps instead"
            )
        target = manifest.target
        for width in method.widths():
            target = _with_points(target, plan.at_caches([(batch, width, width, 0) for batch in plan.batches]))
        if method.draft is not None:
            points = exporter_of(method).points(method, plan)
            method = with_draft(method, _with_points(method.draft, points))
        methods = tuple(method if old.name == name else old for old in manifest.methods)
        new = msgspec.structs.replace(manifest, target=target, methods=methods)
        exchange_manifest(folder, new)
        return new


def _with_points(model: Model, added: Sequence[ShapePoint]) -> Model:
    """A model that also runs at these points."""
    points = tuple(dict.fromkeys((*model.graph.points, *added)))
    return msgspec.structs.replace(model, graph=msgspec.structs.replace(model.graph, points=points))
