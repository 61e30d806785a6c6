// Products of any number of rows, composed of those of a few rows with a tile. Included by kernels_impl.h alone.
#pragma once

#include <algorithm>

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
                  Span span, float* y, ptrdiff_t stride) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply_rows<kKind, kRows - 1>(rows, w, tile, left, x, row, span, y, stride);
  }
  return multiply<kKind, kRows>(w, tile, left, x, row, span, y, stride);
}

constexpr int kTilesOfPanel = 4;  // processed by all rows before the next ones are read
constexpr int kSlice = 256;       // rows of tiles of floats that stay in the nearest cache for all rows of activations

template <WeightKind kKind>
void product_of(const PackedWeights& w, const Activations& x, int first, int last, float* y, ptrdiff_t stride) {
  constexpr int kMost = most_rows(kKind);
  // A few passes wait for memory anyway; more of them are faster with slices.
  const bool sliced = !w.quantized() && x.rows > 3 * kMost;
  const int most = sliced ? rows_of_many(kKind) : kMost, slice = sliced ? kSlice : w.depth;
  const int panel = sliced ? tiles_at_once(kKind, most) : kTilesOfPanel, full = std::min(last, w.columns / kTile);
  const size_t tile_bytes = w.tile_bytes();
  for (Span span{0, 0}; span.from < w.depth; span.from = span.to) {
    span.to = std::min(span.from + slice, w.depth);
    for (int t = first; t < last;) {
      const int tiles = t < full ? std::min(panel, full - t) : 1;
      for (int row = 0; row < x.rows;) {
        const int left = x.rows - row;
        // Rows are divided evenly: seven as four and three.
        const int passes = (left + most - 1) / most, rows = (left + passes - 1) / passes;
        float* const to = y + row * stride + t * kTile;
        if (t < full) {
          for (int i = 0; i < tiles;)
            i += multiply_rows<kKind>(rows, w, w.data + size_t(t + i) * tile_bytes, tiles - i, x, row, span,
                                      to + i * kTile, stride);
        } else if (span.from == 0) {  // y has no room for sums of missing columns
          const size_t bytes = sizeof(float) * size_t(w.columns - t * kTile);
          float whole[kMost * kTile] = {};
          for (int m = 0; x.adds && m < rows; m++) std::memcpy(whole + m * kTile, to + m * stride, bytes);
          multiply_rows<kKind>(rows, w, w.data + size_t(t) * tile_bytes, 1, x, row, {0, w.depth}, whole, kTile);
          for (int m = 0; m < rows; m++) std::memcpy(to + m * stride, whole + m * kTile, bytes);
        }
        row += rows;
      }
      t += tiles;
    }
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
