"""The shape points a bundle's graphs are made for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specexport.contract.shapes import CATCH_UP_TOKENS, ShapePoint
from specexport.contract.tree import TokenTree
from specexport.exporter.methods import LOOKUP_DRAFT_TOKENS, Plan

PREFILL_CHUNK = 64
BATCH_DRAFT_TOKENS = (1, 2)
"""Chains that a full batch may go back to, where a model proposes; lookups have shorter chains of their own."""


def chains(plan: Plan, batches: Sequence[int]) -> tuple[int, ...]:
    """Draft tokens of the chains that steps of a batch may verify beside the methods' own trees."""
    if batches[-1] == 1:
        return ()
    deepest = max((_depth(trees) for name, trees in plan.items() if name not in LOOKUP_DRAFT_TOKENS), default=0)
    return tuple(k for k in BATCH_DRAFT_TOKENS if k < deepest)


def verify_widths(plan: Plan, batches: Sequence[int], others: Iterable[int]) -> tuple[int, ...]:
    """T of plain and verify steps, ascending; ``others`` are those that no tree alone says."""
    trees = {len(tree) for trees in plan.values() for tree in trees}
    return tuple(sorted({1, *others, *trees, *(k + 1 for k in chains(plan, batches))}))


def of_target(
    plan: Plan, batches: Sequence[int], caches: Sequence[int], others: Iterable[int] = ()
) -> tuple[ShapePoint, ...]:
    """Of the target's step graph: verify steps at every batch size, prefill chunks of one slot."""
    steps = ((width, width) for width in verify_widths(plan, batches, others))
    return _pinned([*((b, t, r, 0) for t, r in steps for b in batches), (1, PREFILL_CHUNK, 1, 0)], caches)


def of_draft(plan: Plan, name: str, batches: Sequence[int], caches: Sequence[int]) -> tuple[ShapePoint, ...]:
    """Of the propose graph of the draft of a method."""
    depths = sorted({*(tree.depth for tree in plan[name]), *chains(plan, batches)})
    runs = [(b, CATCH_UP_TOKENS, 0, k) for k in depths if k <= _depth(plan[name]) for b in batches]
    return _pinned([*runs, (1, PREFILL_CHUNK, 0, 1)], caches)


def of_draft_with_heads(plan: Plan, batches: Sequence[int], caches: Sequence[int]) -> tuple[ShapePoint, ...]:
    """Of the step graph of a draft with heads, which sees all that a step can commit."""
    width = 1 + _depth(plan["medusa_draft"])
    return _pinned([*((b, width, 1, 0) for b in batches), (1, PREFILL_CHUNK, 1, 0)], caches)


def of_speculator(plan: Plan, batches: Sequence[int]) -> tuple[ShapePoint, ...]:
    """Of the propose graph of an MLP speculator: every depth of its trees at every width of their levels."""
    trees = plan["mlp_speculator"]
    depths = sorted({*(tree.depth for tree in trees), *chains(plan, batches)})
    widths = sorted({1, *(tree.level_width for tree in trees)})
    return _pinned([(b, w, 0, k) for k in depths if k <= _depth(trees) for w in widths for b in batches], (0,))


def _pinned(shapes: Iterable[tuple[int, int, int, int]], caches: Sequence[int]) -> tuple[ShapePoint, ...]:
    return tuple(
        ShapePoint(batch, tokens, cache, rows, drafts) for batch, tokens, rows, drafts in shapes for cache in caches
    )


def _depth(trees: Iterable[TokenTree]) -> int:
    return max(tree.depth for tree in trees)
