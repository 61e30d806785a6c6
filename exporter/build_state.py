"""The state of a build, and its plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from specexport.contract.manifest import GenerationDefaults, Manifest
from specexport.contract.methods import Method, verified_widths
from specexport.contract.model import Model
from specexport.contract.shapes import ShapePoint, Strict, batch_points, cache_buckets
from specexport.contract.values import Progress
from specexport.exporter.options import PREFILL_CHUNK

if TYPE_CHECKING:
    from specexport.exporter.checkpoints.tokenizer import TokenizerFiles
    from specexport.exporter.options import BuildOptions

BATCH_DRAFT_TOKENS = (1, 2)
"""Draft tokens of the shorter chains that a full batch may fall back to, for methods with a model."""
TEXT_DRAFT_TOKENS = (2, 4, 8)
"""Draft tokens of the chains that every bundle verifies, for methods without a graph."""


@contextmanager
def during(progress: Progress, title: str) -> Iterator[None]:
    """Reports the start and the end of a step."""
    progress(title, 0, 1)
    yield
    progress(title, 1, 1)


class BuildPlan(Strict, frozen=True):
    """The trees and shapes of a bundle.

    Attributes:
        methods: the methods with their trees, the default method first.
        widths: T of plain and verify steps, ascending.
        chains: draft tokens of the shorter chains that a full batch may fall back to.
    """

    methods: tuple[Method, ...]
    widths: tuple[int, ...]
    chains: tuple[int, ...]
    batches: tuple[int, ...]
    caches: tuple[int, ...]
    max_seq_len: int

    @classmethod
    def of(cls, methods: tuple[Method, ...], options: BuildOptions, max_seq_len: int) -> BuildPlan:
        """The plan for methods whose trees are known."""
        batches = batch_points(options.max_batch_size)
        deepest = max(
            (tree.depth for method in methods if method.needs_graph for tree in method.token_trees()), default=0
        )
        chains = tuple(k for k in BATCH_DRAFT_TOKENS if k < deepest) if batches[-1] > 1 else ()
        needed = {width for method in methods for width in (*method.widths(), *(len(t) for t in method.token_trees()))}
        widths = tuple(sorted({1, *needed, *(k + 1 for k in (*chains, *TEXT_DRAFT_TOKENS))}))
        caches = cache_buckets(max_seq_len, max(*widths, PREFILL_CHUNK))
        return cls(
            methods=methods, widths=widths, chains=chains, batches=batches, caches=caches, max_seq_len=max_seq_len
        )

    @classmethod
    def of_bundle(cls, manifest: Manifest) -> BuildPlan:
        points = manifest.target.graph.points
        widths = tuple(sorted(verified_widths(manifest.target)))
        return cls(
            methods=manifest.methods,
            widths=widths,
            chains=tuple(k for k in BATCH_DRAFT_TOKENS if k + 1 in widths) if len(manifest.batch_sizes) > 1 else (),
            batches=manifest.batch_sizes,
            caches=tuple(sorted({point.cache for point in points})),
            max_seq_len=manifest.max_seq_len,
        )

    # --- shape points -------------------------------------------------------------------------------------------------
    def target_points(self) -> tuple[ShapePoint, ...]:
        """Shape points of the target's step graph: steps at every batch size, and prefill chunks of one slot."""
        steps = ((batch, width, width, 0) for width in self.widths for batch in self.batches)
        return self.at_caches([*steps, (1, PREFILL_CHUNK, 1, 0)])

    def propose_points(self, method: Method) -> tuple[ShapePoint, ...]:
        """Shape points of a propose graph: every depth of the method's trees, and the shorter chains."""
        runs = [(batch, method.catch_up, 0, depth) for depth in self.depths(method) for batch in self.batches]
        return self.at_caches([*runs, (1, PREFILL_CHUNK, 0, 1)])

    def depths(self, method: Method) -> list[int]:
        """The numbers of draft tokens that a method's graph is built for, ascending."""
        deep = {tree.depth for tree in method.token_trees()}
        return [depth for depth in sorted({*deep, *self.chains}) if depth <= max(deep)]

    def at_caches(
        self, shapes: Iterable[tuple[int, int, int, int]], caches: tuple[int, ...] | None = None
    ) -> tuple[ShapePoint, ...]:
        """Shape points for each (batch, tokens, rows, drafts) at every cache size."""
        sizes = self.caches if caches is None else caches
        return tuple(
            ShapePoint(batch, tokens, cache, rows, drafts)
            for (batch, tokens, rows, drafts), cache in itertools.product(shapes, sizes)
        )


class WrittenTarget(Strict, frozen=True):
    """The target as it was written.

    Attributes:
        plan: the plan of the whole build; its methods include the models that were written with the target.
    """

    model: Model
    plan: BuildPlan
    eos_token_ids: tuple[int, ...]
    generation: GenerationDefaults


@dataclass
class Build:
    """The state of a build, which its steps and methods share."""

    options: BuildOptions
    folder: Path
    progress: Progress
    source: Path
    tokenizer: TokenizerFiles
    target: WrittenTarget = field(init=False)

    @property
    def plan(self) -> BuildPlan:
        return self.target.plan

    @property
    def vocab_size(self) -> int:
        return self.target.model.vocab_size

    @property
    def max_positions(self) -> int:
        """The longest text that the target supports, in tokens."""
        return self.target.model.max_positions

    def during(self, title: str) -> AbstractContextManager[None]:
        return during(self.progress, title)
