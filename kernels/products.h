// Products with packed weights, in vectors of eight columns, or of sixteen with AVX-512. Included by kernels_impl.h alone.
#pragma once

#include <type_traits>

#include "vectors.h"

namespace specexport {
namespace {

constexpr Layout kLayout = Layout::kPairs;

constexpr int kParts = kTile / kLanes;  // vectors per row of a tile
typedef uint16_t Shorts __attribute__((vector_size(4 * kLanes)));

// A sum of integers of a block as a pair of 16-bit integers, lower + 256 * upper: in this form it is multiplied by zero
// points like the integers by weights.
inline int32_t in_pairs(int32_t sum) { return int32_t(uint32_t(sum >> 8) << 16 | (uint32_t(sum) & 255)); }

void quantize(const float* x, int depth, int block, int16_t* integers, float* scales, int32_t* sums) {
  for (int b = 0; b < depth / block; b++, x += block, integers += block) {
    const float largest = largest_of(x, block);
    if (!(largest >= kLeast)) {
      std::memset(integers, 0, sizeof(int16_t) * size_t(block));
      scales[b] = largest != largest ? largest : 0.0f;
      sums[b] = 0;
      continue;
    }
    const Vec factor = all(32767.0f / largest);
    Ints total = Ints{}, rounded[kVectors];
    for (int i = 0; i < block; i += 16) {
      for (int v = 0; v < kVectors; v++) {
        rounded[v] = __builtin_convertvector(round_even(load(x + i + v * kLanes) * factor), Ints);
        total += rounded[v];
      }
      store_shorts(integers + i, rounded);
    }
    scales[b] = largest / 32767.0f;
    sums[b] = in_pairs(-sum(total));
  }
}

inline Ints integers_at(const uint8_t* p) {
  Ints v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
// Two consecutive rows of activations, for all columns.
inline Ints pair_at(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return all(pair);
}

// Bytes ahead at which to ask for weights: processors do not look beyond a page by themselves. Integers take more
// instructions a byte; they are fetched into the second cache far ahead, and from there into the nearest one.
constexpr size_t kVecAhead = 4096, kFar = 32768, kNear = 4096;

template <bool kNearest>
inline void fetch(const uint8_t* p) {
#if defined(__AVX2__)
  _mm_prefetch(reinterpret_cast<const char*>(p), kNearest ? _MM_HINT_T0 : _MM_HINT_T1);
#else
  __builtin_prefetch(p, 0, kNearest ? 3 : 2);
#endif
}
// How far from place `at` of a tile the bytes are that are read `bytes` later: where tiles are read side by side, a tile
// is followed by the one behind the others.
template <int kTiles>
inline size_t distance(size_t bytes, size_t at, size_t tile_bytes) {
  return bytes + (at + bytes < tile_bytes ? 0 : (kTiles - 1) * tile_bytes);
}

#if SPECEXPORT_AVX512
inline Ints pairs(Ints a, Ints b, Ints total) {
  return (Ints)_mm512_dpwssd_epi32((__m512i)total, (__m512i)a, (__m512i)b);
}
inline Ints widen(const uint8_t* p) {
  return (Ints)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Ints bytes_at(const uint8_t* p) {
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// Numbers of a table of 32, by the last five bits of 32 indices.
inline Ints permute(Shorts indices, Shorts table) {
  return (Ints)_mm512_permutexvar_epi16((__m512i)indices, (__m512i)table);
}
#else
// Sums of products of pairs of 16-bit integers, in 32 bits.
inline Ints pairs(Ints a, Ints b, Ints total) {
#if defined(__AVXVNNI__)
  return (Ints)_mm256_dpwssd_avx_epi32((__m256i)total, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__)
  total += (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
  // Otherwise GCC postpones the additions, spills the products, and takes 1.5 times as long.
  asm("" : "+x"(total));
  return total;
#else
  // A number's lower half with its sign, and its upper half.
  return total + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}
inline Ints widen(const uint8_t* p) {
#if defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  typedef int8_t Bytes __attribute__((vector_size(16)));
  typedef int16_t Shorts __attribute__((vector_size(32)));
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return (Ints)__builtin_convertvector(bytes, Shorts);
#endif
}
inline Ints bytes_at(const uint8_t* p) {
#if defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  typedef int8_t Bytes __attribute__((vector_size(8)));
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, Ints);
#endif
}
#endif

constexpr bool is_quantized(WeightKind kind) { return kind == WeightKind::kInt8 || kind == WeightKind::kInt4; }

#if SPECEXPORT_AVX512
// Nine rows of integers are a look-up of eight tokens and the root; with twelve, eight rows of int4 take 1.1 times as long.
constexpr int most_rows(WeightKind kind) { return is_quantized(kind) ? 10 : 8; }
constexpr int rows_of_many(WeightKind) { return 8; }
// Side by side: the next addition to a sum starts four or five cycles later, in which eight or ten others can start. A
// single row of integers has two sums for each column instead (see chains()).
constexpr int tiles_at_once(WeightKind kind, int rows) { return is_quantized(kind) && rows == 1 ? 1 : 2; }
#else
// Two sums for each, a row of the tile and a broadcast must fit into sixteen registers; integers need more of them.
constexpr int most_rows(WeightKind kind) { return is_quantized(kind) ? 5 : 6; }
// Six rows of halves need one register too many. That costs less than reading the weights twice; but where they are in the
// cache, five rows at once are faster.
constexpr int rows_of_many(WeightKind kind) { return kind == WeightKind::kFloat ? 6 : 5; }
// Of one or two rows of floats, side by side, as an addition has a latency of four cycles.
constexpr int tiles_at_once(WeightKind kind, int rows) { return is_quantized(kind) || rows > 2 ? 1 : 2; }
#endif

// Zero points, each as the pair of it and 256 times it.
inline Ints zeros_in_pairs(Ints v) { return (v & all(0xffff)) | (v << 24); }

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
// Partial sums per column; without VNNI the next addition can start after one cycle.
constexpr int chains(int rows) { return rows <= 2 ? 2 : 1; }
#else
constexpr int chains(int) { return 1; }
#endif

template <WeightKind kKind, int kRows, int kTiles>
void multiply_integers(const PackedWeights& w, const uint8_t* tile, const Activations& x, int row, float* y,
                       ptrdiff_t stride) {
  constexpr int kVector = 4 * kLanes;  // bytes
  constexpr int kChains = chains(kRows * kTiles);
  constexpr int kSums = kTiles * kParts;  // of a row
  const int block = w.block, blocks = w.depth / block, depth = x.depth;
  const bool half_scales = w.half_scales, zero_points = w.zero_points;
  const int scale_bytes = half_scales ? 2 : 4;
  const size_t tile_bytes = w.tile_bytes(), block_bytes = w.block_bytes();
  Vec total[kRows][kSums];
  for (int m = 0; m < kRows; m++)
    for (int p = 0; p < kSums; p++) total[m][p] = all(0.0f);
  const int16_t* q = x.integers + size_t(row) * size_t(x.depth);
  const float* scales = x.scales + size_t(row) * size_t(blocks);
  const int32_t* sums = x.sums + size_t(row) * size_t(blocks);
  // Where a vector of a tile begins that is `bytes` behind others.
  auto at = [&](const uint8_t* p, int part, int bytes) {
    return p + size_t(part / kParts) * tile_bytes + part % kParts * bytes;
  };
  for (int b = 0; b < blocks; b++) {
    const uint8_t *const scale = tile, *const zero = tile + kTile * scale_bytes;
    const size_t far = distance<kTiles>(kFar / kTiles, size_t(b) * block_bytes, tile_bytes);
    const size_t near = distance<kTiles>(kNear / kTiles, size_t(b) * block_bytes, tile_bytes);
    auto prefetch = [&] {
      for (int i = 0; i < kTiles; i++) {
        fetch<false>(tile + i * tile_bytes + far);
        fetch<true>(tile + i * tile_bytes + near);
      }
    };
    tile = zero + (zero_points ? kTile : 0);
    Ints t[kRows][kSums][kChains];
    for (int m = 0; m < kRows; m++)
      for (int p = 0; p < kSums; p++)
        for (int c = 0; c < kChains; c++) t[m][p][c] = Ints{};
    if (zero_points || kKind == WeightKind::kInt4) {
      // Without a zero point, four bits represent a weight plus eight. A pair is multiplied by zero and 256 * zero.
      Ints zeros[kSums];
      for (int p = 0; p < kSums; p++)
        zeros[p] = zero_points ? zeros_in_pairs(bytes_at(at(zero, p, kLanes))) : all(0x08000008);
      for (int m = 0; m < kRows; m++) {
        const Ints a = all(sums[m * blocks + b]);
        for (int p = 0; p < kSums; p++) t[m][p][0] = pairs(zeros[p], a, t[m][p][0]);
      }
    }
    if (kKind == WeightKind::kInt8) {
      for (int k = 0; k < block; k += 4) {
        prefetch();
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++, tile += 2 * kTile) {
          Ints v[kSums];
          for (int p = 0; p < kSums; p++) v[p] = widen(at(tile, p, 2 * kLanes));
#pragma GCC unroll 10
          for (int m = 0; m < kRows; m++) {
            const Ints a = pair_at(q + m * depth + k + 2 * i);
            for (int p = 0; p < kSums; p++) t[m][p][i % kChains] = pairs(v[p], a, t[m][p][i % kChains]);
          }
        }
      }
    } else {
      const Ints low = all(0x000f000f);
      for (int k = 0; k < block; k += 8, tile += 4 * kTile) {
        prefetch();
        Ints rows[kSums];  // eight, in four bits each
        for (int p = 0; p < kSums; p++) {
          rows[p] = integers_at(at(tile, p, kVector));
#if defined(__AVX512F__)
          asm("" : "+v"(rows[p]));  // otherwise GCC reads it anew for every shift
#endif
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
          Ints four[kSums];
          // As 32-bit numbers: bits from the upper half are masked. The last four bits of 16 need no mask.
          for (int p = 0; p < kSums; p++) four[p] = i < 3 ? rows[p] >> 4 * i & low : (Ints)((Shorts)rows[p] >> 12);
#pragma GCC unroll 10
          for (int m = 0; m < kRows; m++) {
            const Ints a = pair_at(q + m * depth + k + 2 * i);
            for (int p = 0; p < kSums; p++) t[m][p][i % kChains] = pairs(four[p], a, t[m][p][i % kChains]);
          }
        }
      }
    }
    Vec s[kSums];
    for (int p = 0; p < kSums; p++)
      s[p] = half_scales ? load_half(at(scale, p, 2 * kLanes)) : load(at(scale, p, kVector));
    for (int m = 0; m < kRows; m++)
      for (int p = 0; p < kSums; p++) {
        Ints sum = t[m][p][0];
        if (kChains == 2) sum += t[m][p][kChains - 1];
        total[m][p] = fma(to_floats(sum), s[p] * all(scales[m * blocks + b]), total[m][p]);
      }
    q += block;
  }
  for (int m = 0; m < kRows; m++)
    for (int p = 0; p < kSums; p++) std::memcpy(y + m * stride + p * kLanes, &total[m][p], kVector);
}

// A row of a tile. With AVX-512, columns of bfloat16 are in the order 0, 8, 1, 9, …
template <WeightKind kKind>
inline void weights_at(const uint8_t* p, Vec v[kParts]) {
  if (kKind == WeightKind::kFloat) {
    for (int i = 0; i < kParts; i++) v[i] = load(p + i * 4 * kLanes);
  } else if (kKind == WeightKind::kFloat16) {
    for (int i = 0; i < kParts; i++) v[i] = load_half(p + i * 2 * kLanes);
  } else {
#if SPECEXPORT_AVX512
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    v[0] = (Vec)_mm512_slli_epi32(wide, 16);
#else
    const Ints both = integers_at(p);
    v[0] = (Vec)(both << 16);
    v[kParts - 1] = (Vec)(both & all(int32_t(0xffff0000)));
#endif
  }
}

template <WeightKind kKind, int kRows, int kTiles>
void multiply_floats(const PackedWeights& w, const uint8_t* tile, const Activations& x, int row, Span span, float* y,
                     ptrdiff_t stride) {
  constexpr int kStep = kKind == WeightKind::kFloat ? 4 * kTile : 2 * kTile;  // bytes of a row of a tile
  const size_t tile_bytes = size_t(w.depth) * kStep;
  Vec total[kTiles][kRows][kParts];
  for (int t = 0; t < kTiles; t++)
    for (int m = 0; m < kRows; m++)
      for (int p = 0; p < kParts; p++)
        total[t][m][p] = span.from || x.adds ? load(y + m * stride + t * kTile + p * kLanes) : all(0.0f);
  tile += size_t(span.from) * kStep;
  const float* a = x.values + row * x.stride + span.from;
  const int depth = span.to - span.from;
  auto add = [&](int k) __attribute__((always_inline)) {
    Vec v[kTiles][kParts];
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) weights_at<kKind>(tile + size_t(t) * tile_bytes + size_t(k) * kStep, v[t]);
#pragma GCC unroll 10
    for (int m = 0; m < kRows; m++) {
      const Vec number = all(a[m * x.stride + k]);
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++)
        for (int p = 0; p < kParts; p++) total[t][m][p] = fma(v[t][p], number, total[t][m][p]);
    }
  };
  int k = 0;
  for (; k + 2 <= depth; k += 2) {
    const size_t at = size_t(k) * kStep;
    const size_t ahead = at + distance<kTiles>(kVecAhead, size_t(span.from) * kStep + at, tile_bytes);
    for (int t = 0; t < kTiles; t++) {
      fetch<true>(tile + size_t(t) * tile_bytes + ahead);
      if (kStep == 64) fetch<true>(tile + size_t(t) * tile_bytes + ahead + kStep);
    }
    add(k);
    add(k + 1);
  }
  if (k < depth) add(k);
  for (int t = 0; t < kTiles; t++)
    for (int m = 0; m < kRows; m++)
      for (int p = 0; p < kParts; p++) {
        Vec v = total[t][m][p];
#if SPECEXPORT_AVX512
        if (kKind == WeightKind::kBfloat16 && span.to == w.depth) {
          const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
          v = (Vec)_mm512_permutexvar_ps(order, (__m512)v);
        }
#endif
        std::memcpy(y + m * stride + t * kTile + p * kLanes, &v, sizeof v);
      }
}

// Multiplies a number of rows by some of the `left` tiles at once, and returns by how many.
template <WeightKind kKind, int kRows>
int multiply(const PackedWeights& w, const uint8_t* tile, int left, const Activations& x, int row, Span span, float* y,
             ptrdiff_t stride) {
  constexpr int kTiles = tiles_at_once(kKind, kRows);
  auto by = [&](auto tiles) {
    if constexpr (is_quantized(kKind))
      multiply_integers<kKind, kRows, tiles.value>(w, tile, x, row, y, stride);
    else
      multiply_floats<kKind, kRows, tiles.value>(w, tile, x, row, span, y, stride);
    return tiles.value;
  };
  return left >= kTiles ? by(std::integral_constant<int, kTiles>()) : by(std::integral_constant<int, 1>());
}

}  // namespace
}  // namespace specexport
