// Products with packed weights on NEON: sums of four or eight products of bytes, with 16-bit activations split into two
// bytes. Included by kernels_impl.h alone.
#pragma once

#include "vectors.h"

namespace specexport {
namespace {

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr Layout kLayout = Layout::kEights;
#else
constexpr Layout kLayout = Layout::kFours;
#endif

// The largest integer whose upper byte is at most 127 when the lower byte is signed.
constexpr int kLargest = 127 * 256 + 127;

// For every eight numbers, their eight upper bytes and then their lower ones: a = 256 * upper + lower.
void quantize(const float* x, int depth, int block, int16_t* integers, float* scales, int32_t* sums) {
  for (int b = 0; b < depth / block; b++, x += block, integers += block) {
    const float largest = largest_of(x, block);
    if (!(largest >= kLeast)) {
      std::memset(integers, 0, sizeof(int16_t) * size_t(block));
      scales[b] = largest != largest ? largest : 0.0f;
      sums[b] = 0;
      continue;
    }
    const float factor = float(kLargest) / largest;
    int32x4_t total = vdupq_n_s32(0);
    for (int i = 0; i < block; i += 8) {
      const int32x4_t q0 = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i), factor));
      const int32x4_t q1 = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i + 4), factor));
      total = vaddq_s32(total, vaddq_s32(q0, q1));
      const int16x8_t q = vcombine_s16(vmovn_s32(q0), vmovn_s32(q1));
      const int16x8_t upper = vshrq_n_s16(vaddq_s16(q, vdupq_n_s16(128)), 8);
      const int8x16_t bytes = vcombine_s8(vmovn_s16(upper), vmovn_s16(vsubq_s16(q, vshlq_n_s16(upper, 8))));
      vst1q_s8(reinterpret_cast<int8_t*>(integers + i), bytes);
    }
    scales[b] = largest / float(kLargest);
    sums[b] = vaddvq_s32(total);
  }
}

inline float32x4_t floats_at(const uint8_t* p) { return vreinterpretq_f32_u8(vld1q_u8(p)); }
inline float32x4_t halves_at(const uint8_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
}

constexpr int kAhead = 1024;  // bytes to prefetch
constexpr int kQuads = kTile / 4;

// Tiles at once: all sums must fit into 32 registers.
constexpr int most_rows(WeightKind kind) { return kind == WeightKind::kInt8 || kind == WeightKind::kInt4 ? 3 : 5; }
constexpr int rows_of_many(WeightKind kind) { return most_rows(kind); }
constexpr int tiles_at_once(WeightKind, int) { return 1; }

// Adds the products of eight rows of the weights with eight numbers; w: as the layout has them, 128 bytes.
#if defined(__ARM_FEATURE_MATMUL_INT8)
// sums[j]: of columns 2j and 2j + 1 with upper bytes, and with lower ones.
inline void add_eight(int32x4_t sums[8], const int8x16_t w[8], int8x16_t a) {
#pragma GCC unroll 8
  for (int j = 0; j < 8; j++) sums[j] = vmmlaq_s32(sums[j], a, w[j]);
}
inline int32x4_t sum_of_quad(const int32x4_t sums[8], int j) {
  const int32x4_t upper = vcombine_s32(vget_low_s32(sums[2 * j]), vget_low_s32(sums[2 * j + 1]));
  const int32x4_t lower = vcombine_s32(vget_high_s32(sums[2 * j]), vget_high_s32(sums[2 * j + 1]));
  return vaddq_s32(vshlq_n_s32(upper, 8), lower);
}
// The 16-byte vectors of w that the two halves of the bytes at 16 * j are.
constexpr int first_of(int j) { return 2 * j; }
constexpr int second_of(int j) { return 2 * j + 1; }
#else
// sums[j] and sums[4 + j]: of columns 4j to 4j + 3 with upper bytes, and with lower ones.
inline void add_eight(int32x4_t sums[8], const int8x16_t w[8], int8x16_t a) {
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    sums[j] = vdotq_laneq_s32(sums[j], w[j], a, 0);
    sums[4 + j] = vdotq_laneq_s32(sums[4 + j], w[j], a, 2);
    sums[j] = vdotq_laneq_s32(sums[j], w[4 + j], a, 1);
    sums[4 + j] = vdotq_laneq_s32(sums[4 + j], w[4 + j], a, 3);
  }
}
inline int32x4_t sum_of_quad(const int32x4_t sums[8], int j) { return vaddq_s32(vshlq_n_s32(sums[j], 8), sums[4 + j]); }
constexpr int first_of(int j) { return j; }
constexpr int second_of(int j) { return 4 + j; }
#endif

template <WeightKind kKind, int kRows>
void multiply_integers(const PackedWeights& w, const uint8_t* tile, const Activations& x, int row, float* y,
                       ptrdiff_t stride) {
  const int blocks = w.depth / w.block, scale_bytes = w.half_scales ? 2 : 4;
  float32x4_t total[kRows][kQuads];
  for (int m = 0; m < kRows; m++)
    for (int j = 0; j < kQuads; j++) total[m][j] = vdupq_n_f32(0);
  const int16_t* q = x.integers + size_t(row) * size_t(x.depth);
  const float* scales = x.scales + size_t(row) * size_t(blocks);
  const int32_t* sums = x.sums + size_t(row) * size_t(blocks);
  for (int b = 0; b < blocks; b++) {
    const uint8_t *const scale = tile, *const zero = tile + kTile * scale_bytes;
    tile = zero + (w.zero_points ? kTile : 0);
    int32x4_t t[kRows][8];
    for (int m = 0; m < kRows; m++)
      for (int j = 0; j < 8; j++) t[m][j] = vdupq_n_s32(0);
    for (int k = 0; k < w.block; k += 8) {
      int8x16_t v[8];
      __builtin_prefetch(tile + kAhead);
      if (kKind == WeightKind::kInt8) {
        __builtin_prefetch(tile + kAhead + 64);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) v[j] = vreinterpretq_s8_u8(vld1q_u8(tile + 16 * j));
        tile += 8 * kTile;
      } else {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
          const uint8x16_t both = vld1q_u8(tile + 16 * j);
          v[first_of(j)] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
          v[second_of(j)] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
        }
        tile += 4 * kTile;
      }
#pragma GCC unroll 3
      for (int m = 0; m < kRows; m++)
        add_eight(t[m], v, vld1q_s8(reinterpret_cast<const int8_t*>(q + m * x.depth + k)));
    }
    float32x4_t s[kQuads];
    int32x4_t z[kQuads];
    for (int j = 0; j < kQuads; j++) {
      s[j] = w.half_scales ? halves_at(scale + 8 * j) : floats_at(scale + 16 * j);
      z[j] = vdupq_n_s32(kKind == WeightKind::kInt4 ? 8 : 0);
    }
    if (w.zero_points) {
      const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(zero));
      const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
      z[0] = vmovl_s16(vget_low_s16(low));
      z[1] = vmovl_s16(vget_high_s16(low));
      z[2] = vmovl_s16(vget_low_s16(high));
      z[3] = vmovl_s16(vget_high_s16(high));
    }
    for (int m = 0; m < kRows; m++)
      for (int j = 0; j < kQuads; j++) {
        const int32x4_t sum = vmlsq_n_s32(sum_of_quad(t[m], j), z[j], sums[m * blocks + b]);
        total[m][j] = vfmaq_f32(total[m][j], vcvtq_f32_s32(sum), vmulq_n_f32(s[j], scales[m * blocks + b]));
      }
    q += w.block;
  }
  for (int m = 0; m < kRows; m++)
    for (int j = 0; j < kQuads; j++) vst1q_f32(y + m * stride + 4 * j, total[m][j]);
}

template <WeightKind kKind>
inline void weights_at(const uint8_t* p, float32x4_t v[kQuads]) {
  if (kKind == WeightKind::kBfloat16) {
    for (int j = 0; j < 2; j++) {
      const uint32x4_t both = vreinterpretq_u32_u8(vld1q_u8(p + 16 * j));
      v[j] = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
      v[2 + j] = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff0000)));
    }
  } else {
    for (int j = 0; j < kQuads; j++) v[j] = kKind == WeightKind::kFloat ? floats_at(p + 16 * j) : halves_at(p + 8 * j);
  }
}

template <WeightKind kKind, int kRows>
void multiply_floats(const PackedWeights&, const uint8_t* tile, const Activations& x, int row, Span span, float* y,
                     ptrdiff_t stride) {
  constexpr int kStep = kKind == WeightKind::kFloat ? 4 * kTile : 2 * kTile;
  float32x4_t total[kRows][kQuads];
  for (int m = 0; m < kRows; m++)
    for (int j = 0; j < kQuads; j++) total[m][j] = span.from || x.adds ? vld1q_f32(y + m * stride + 4 * j) : vdupq_n_f32(0);
  tile += size_t(span.from) * kStep;
  const float* a = x.values + row * x.stride;
  for (int k = span.from; k < span.to; k++, tile += kStep) {
    __builtin_prefetch(tile + kAhead);
    float32x4_t v[kQuads];
    weights_at<kKind>(tile, v);
#pragma GCC unroll 5
    for (int m = 0; m < kRows; m++)
      for (int j = 0; j < kQuads; j++) total[m][j] = vfmaq_n_f32(total[m][j], v[j], a[m * x.stride + k]);
  }
  for (int m = 0; m < kRows; m++)
    for (int j = 0; j < kQuads; j++) vst1q_f32(y + m * stride + 4 * j, total[m][j]);
}

// How many tiles to multiply a number of rows by at once: one.
template <WeightKind kKind, int kRows>
int multiply(const PackedWeights& w, const uint8_t* tile, int, const Activations& x, int row, Span span, float* y,
             ptrdiff_t stride) {
  if constexpr (kKind == WeightKind::kInt8 || kKind == WeightKind::kInt4)
    multiply_integers<kKind, kRows>(w, tile, x, row, y, stride);
  else
    multiply_floats<kKind, kRows>(w, tile, x, row, span, y, stride);
  return 1;
}

}  // namespace
}  // namespace specexport
