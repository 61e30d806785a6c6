"""A cache that becomes larger piece by piece holds what one that was copied at once would hold."""

from __future__ import annotations

import numpy as np
import pytest

from specexport.contract.model import CacheLayer
from specexport.runtime.backends.onnxruntime.cache import GrowingCache

LAYERS = [CacheLayer(heads=2, key_size=4, value_size=4), CacheLayer(heads=1, key_size=8, value_size=4)]
SIZES, SLOTS = (32, 48, 96, 192), 3


@pytest.mark.parametrize("seed", range(6))
def test_rows_survive_growth_whatever_is_written_meanwhile(seed: int) -> None:
    random = np.random.default_rng(seed)
    cache = GrowingCache(LAYERS, SLOTS, SIZES)
    cache.resize(SIZES[0], [0] * SLOTS)
    written = [np.zeros((*block.shape[:3], SIZES[-1], block.shape[4]), np.float32) for block in cache.now.blocks]
    filled, early = [0] * SLOTS, 0
    for _ in range(120):
        cache.advance(filled)
        slot = int(random.integers(SLOTS))
        # Now and then a text ends in the midst, and another goes on from there.
        past = int(random.integers(filled[slot] + 1)) if random.random() < 0.05 else filled[slot]
        count = min(int(random.integers(1, 6)), SIZES[-1] - past)
        if past + count > cache.now.rows:
            early += int(cache._copied.any())
            cache.resize(next(size for size in SIZES if size >= past + count), filled)
        for block, kept in zip(cache.now.blocks, written, strict=True):
            rows = random.normal(size=(*block.shape[:1], block.shape[2], count, block.shape[4])).astype(np.float32)
            block[:, slot, :, past : past + count] = kept[:, slot, :, past : past + count] = rows
        cache.mark_changed(slot, past)
        filled[slot] = past + count
        for block, kept in zip(cache.now.blocks, written, strict=True):
            for at, rows in enumerate(filled):
                np.testing.assert_array_equal(block[:, at, :, :rows], kept[:, at, :, :rows])
    assert early, "no cache was begun before it was needed"
