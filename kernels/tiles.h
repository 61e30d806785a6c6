// Products of any number of rows, composed of those of a few rows with a tile. Included by kernels_impl.h alone.
#pragma once

#if defined(__ARM_FEATURE_DOTPROD)
#include "products_neon.h"
#else
#include "products.h"
#endif

namespace specexport {
namespace {

// multiply() for a number of rows known at run time.
template <WeightKind kKind, int kRows = most_rows(kKind)>
int multiply_rows(int rows, const PackedWeights& w, const uint8_t* tile, int left, const Activations& x, int row,
                  float* y, ptrdiff_t stride) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply_rows<kKind, kRows - 1>(rows, w, tile, left, x, row, y, stride);
  }
  return multiply<kKind, kRows>(w, tile, left, x, row, y, stride);
}

constexpr int kTilesOfPanel = 4;  // processed by all rows before the next ones are read

template <WeightKind kKind>
void product_of(const PackedWeights& w, const Activations& x, int first, int last, float* y, ptrdiff_t stride) {
  constexpr int kMost = most_rows(kKind);
  const size_t tile_bytes = w.tile_bytes();
  float whole[kMost * kTile];
  for (int t = first; t < last;) {
    const int full = w.columns / kTile - t, panel = full > last - t ? last - t : full;
    const int tiles = panel > kTilesOfPanel ? kTilesOfPanel : panel > 0 ? panel : 1;
    for (int row = 0; row < x.rows;) {
      const int left = x.rows - row;
      // Rows are divided evenly: seven as four and three.
      const int passes = (left + kMost - 1) / kMost, rows = (left + passes - 1) / passes;
      if (full > 0) {
        for (int i = 0; i < tiles;)
          i += multiply_rows<kKind>(rows, w, w.data + size_t(t + i) * tile_bytes, tiles - i, x, row,
                                    y + row * stride + (t + i) * kTile, stride);
      } else {
        multiply_rows<kKind>(rows, w, w.data + size_t(t) * tile_bytes, 1, x, row, whole, kTile);
        for (int m = 0; m < rows; m++)
          std::memcpy(y + (row + m) * stride + t * kTile, whole + m * kTile,
                      sizeof(float) * size_t(w.columns - t * kTile));
      }
      row += rows;
    }
    t += tiles;
  }
}

void product(const PackedWeights& w, const Activations& x, int first, int last, float* y, ptrdiff_t stride) {
  switch (w.kind) {
    case WeightKind::kInt8: return product_of<WeightKind::kInt8>(w, x, first, last, y, stride);
    case WeightKind::kInt4: return product_of<WeightKind::kInt4>(w, x, first, last, y, stride);
    case WeightKind::kBfloat16: return product_of<WeightKind::kBfloat16>(w, x, first, last, y, stride);
    case WeightKind::kFloat16: return product_of<WeightKind::kFloat16>(w, x, first, last, y, stride);
    case WeightKind::kFloat: return product_of<WeightKind::kFloat>(w, x, first, last, y, stride);
  }
}

}  // namespace
}  // namespace specexport
