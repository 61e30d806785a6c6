"""Shape points: the static shapes at which a bundle's graphs run."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

Size = Annotated[int, Meta(ge=1, le=2**24)]
"""A dimension of a tensor; bounded, so that a forged manifest cannot ask for absurd allocations."""
_BUCKET_GRAIN = 64

CATCH_UP_TOKENS = 2
"""Tokens of a draft's first pass. Of K accepted draft tokens the last was never fed to the draft, so each first pass
reads the last two tokens of the text. If the first of them was read before, its row is written again with the same
content, which keeps the shape static."""


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the manifest's records: fields by name, and no others."""


class ShapePoint(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """One static shape of a graph.

    Attributes:
        batch: slots, ``B``.
        tokens: query tokens a slot, ``T``.
        cache: cache rows a slot, ``S``; 0 for graphs without a cache.
        rows: rows for which a step graph computes logits or candidates, ``R``: all tokens in a decode or verify step,
            one in a prefill chunk; 0 for a propose graph, which needs one row.
        drafts: tokens that a propose graph drafts, ``K``; 0 for a step graph.
    """

    batch: Annotated[int, Meta(ge=1, le=2**12)]
    tokens: Annotated[int, Meta(ge=1, le=2**16)]
    cache: Annotated[int, Meta(ge=0, le=2**24)]
    rows: Annotated[int, Meta(ge=0, le=2**16)] = 0
    drafts: Annotated[int, Meta(ge=0, le=32)] = 0

    @property
    def fed(self) -> int:
        """Tokens fed to the model, each with a cache row, ``F``: all tokens of a call but the last draft token."""
        return self.tokens + max(0, self.drafts - 1)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of a master's symbolic dimensions at this point."""
        return {"B": self.batch, "T": self.tokens, "S": self.cache, "R": self.rows, "K": self.drafts, "F": self.fed}

    def size(self, dim: int | str) -> int:
        """The length of an axis named by a symbol such as ``T``, or by a sum or product such as ``S + 2*T``.

        Raises:
            KeyError: there is no such symbol.
        """
        terms = [term.strip().split("*") for term in str(dim).split("+")]
        return sum(
            math.prod(int(factor) if factor.isdecimal() else self.sizes[factor] for factor in term) for term in terms
        )

    def __str__(self) -> str:
        rows = f".r{self.rows}" if self.rows else ""
        return f"b{self.batch}.t{self.tokens}.s{self.cache}{rows}" + (f".k{self.drafts}" if self.drafts else "")


def cache_buckets(max_seq_len: int, widest: int) -> tuple[int, ...]:
    """The sizes through which a slot's cache grows, in rows, ascending.

    Attention over a static cache costs its whole length, so a short text should not pay for a long context: sizes grow
    by about 1.4x from 128 rows. The last size has room for a step of ``widest`` tokens at the end of the context, so
    that such steps run at the usual shapes.
    """
    top = -(-(max_seq_len + widest) // _BUCKET_GRAIN) * _BUCKET_GRAIN
    sizes: list[int] = []
    size = 128
    while size < top:
        sizes.append(size)
        # 128, 192, 256, 384, 512, 768, ...: powers of two and the midpoints between them.
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return (*sizes, top)


def batch_points(most: int) -> tuple[int, ...]:
    """The batch sizes to build graphs for, ascending: the powers of two below ``most``, and ``most`` itself."""
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return tuple(dict.fromkeys((*sizes, most)))


def uncached_points(points: Collection[ShapePoint]) -> list[ShapePoint]:
    """The points at which a GPU runs a propose graph without a cache, ascending.

    They have all stages, and every level width above one node, unless there is none. They also serve shallower trees
    and narrower levels, as further points would store the weights again.
    """
    stages = max(point.drafts for point in points)
    whole = sorted(point for point in points if point.drafts == stages)
    return [point for point in whole if point.tokens > 1] or whole


def window(slots: Collection[int], sizes: Sequence[int]) -> range:
    """The window of a run that includes these slots: neighbours, as many as the smallest batch size that spans them."""
    first, last = min(slots), max(slots)
    size = next(size for size in sizes if size > last - first)
    # Aligned if possible, so that there are few different windows.
    aligned = first // size * size
    start = aligned if last < aligned + size <= sizes[-1] else min(first, sizes[-1] - size)
    return range(start, start + size)
