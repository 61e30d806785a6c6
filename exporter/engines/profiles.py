"""Which engines a bundle needs, and the shapes each runs at."""

from __future__ import annotations

from dataclasses import dataclass

from specexport.contract.engines import Accept, Commit, Fill, ProgramGraph
from specexport.contract.manifest import Manifest
from specexport.contract.methods import DraftModel
from specexport.contract.model import LoweredAs, Model
from specexport.contract.shapes import CATCH_UP_TOKENS, ShapePoint

_SLOTS = 1
"""What runs engines runs one request at a time."""
_CACHE_STEP = 4
_SMALL_CACHE = 1024


@dataclass(frozen=True)
class Job:
    """One engine to compile.

    Attributes:
        profiles: its shapes.
        vocab: V, where it is symbolic.
    """

    profiles: tuple[ShapePoint, ...]
    vocab: int = 1

    @property
    def drafts(self) -> int:
        """K of a propose graph, else 0."""
        return self.profiles[0].drafts

    @property
    def sizes(self) -> list[dict[str, int]]:
        """Every symbolic dimension, a profile each."""
        return [
            profile.sizes
            | {"N": profile.tokens, "drafts": profile.tokens - 1, "drafts + 1": profile.tokens, "V": self.vocab}
            for profile in self.profiles
        ]

    @property
    def fixed(self) -> dict[str, int]:
        """Slots and cache rows, where they are the same in all profiles."""
        first, *others = self.sizes
        return {name: first[name] for name in "BS" if all(other[name] == first[name] for other in others)}


def model_jobs(model: Model, manifest: Manifest, *, plain: bool) -> list[Job]:
    """The engines of a model: one.

    Args:
        model: of the bundle.
        manifest: the bundle's.
        plain: also run one token at a time, where more can be run too.
    """
    points = [graph.point for graph in model.graph.points if graph.point.batch == _SLOTS]
    caches = engine_caches(sorted({point.cache for point in points}), manifest.lowering)
    points = sorted(point for point in points if point.cache in caches)
    if not any(point.drafts for point in points):
        wide = [point for point in points if point.rows == point.tokens > 1]
        kept = points if plain or not wide else [point for point in points if point.tokens > 1]
        return [Job(tuple(kept))]
    # One token a call, K calls a step. Unrolled, TensorRT keeps the weights for each of the K passes (5.4 times their
    # size at K = 4), and passes over one token would want them in yet another order: each call sees two tokens.
    widths = (CATCH_UP_TOKENS, manifest.prefill_chunk)
    return [Job(tuple(ShapePoint(_SLOTS, width, s, 0, 1) for width in widths for s in caches))]


def engine_caches(sizes: list[int], lowering: LoweredAs) -> list[int]:
    """The cache sizes engines are compiled for, of those a bundle declares.

    Natively one, as TensorRT wants a cache it writes in place to be of fixed size. Portably it grows fourfold:
    attention costs for the whole cache, but on a GPU that is little beside the weights until contexts are long.
    """
    kept = [sizes[-1]]
    if lowering == "portable":
        for size in reversed(sizes):
            if _SMALL_CACHE <= size <= kept[0] // _CACHE_STEP:
                kept.insert(0, size)
    return kept


def program_jobs(graph: ProgramGraph, manifest: Manifest) -> list[Job]:
    """The engines of a graph of the step program: one, for every tree that needs it."""
    trees = {tree for method in manifest.methods for tree in method.token_trees()}
    drafted = [method for method in manifest.methods if isinstance(method, DraftModel)]
    drawn = {tree for method in drafted for tree in method.token_trees() if not tree.is_chain}
    if isinstance(graph, Accept):
        shapes = {ShapePoint(_SLOTS, len(tree), 0, len(tree)) for tree in trees}
        return [Job(tuple(sorted(shapes)), manifest.target.vocab_size)]
    if isinstance(graph, Fill):
        filled = {ShapePoint(_SLOTS, len(tree), 0, 0, tree.depth) for tree in drawn}
        return [Job(tuple(sorted(filled)))]
    assert isinstance(graph, Commit)
    caches = sorted({point.point.cache for point in manifest.target.graph.points})
    cache = engine_caches(caches, manifest.lowering)[-1]
    shapes = {ShapePoint(_SLOTS, len(tree), cache) for tree in trees if not tree.is_chain}
    return [Job(tuple(sorted(shapes)))] if shapes else []
