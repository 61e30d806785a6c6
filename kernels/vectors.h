// Vectors of floats, eight or with AVX-512 sixteen, and functions on them. Included by kernels_impl.h alone.
#pragma once

#include <cmath>
#include <cstring>

#include "half.h"
#include "kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace specexport {
namespace {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define SPECEXPORT_AVX512 1
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Unsigned __attribute__((vector_size(4 * kLanes)));

inline Vec load(const void* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
// Set lane by lane: `Vec{} + x` would be an addition, which compilers cannot omit because of -0.
inline Vec all(float x) {
#if SPECEXPORT_AVX512
  return Vec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#else
  return Vec{x, x, x, x, x, x, x, x};
#endif
}
inline Ints all(int32_t x) { return Ints{} + x; }
// The first `count` numbers of a vector, followed by zeros.
inline Vec load_some(const float* p, int count) {
  float padded[kLanes] = {};
  std::memcpy(padded, p, sizeof(float) * size_t(count));
  return load(padded);
}
inline void store_some(float* p, Vec v, int count) {
  float padded[kLanes];
  store(padded, v);
  std::memcpy(p, padded, sizeof(float) * size_t(count));
}

inline Vec fma(Vec a, Vec b, Vec c) {
#if SPECEXPORT_AVX512
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  float32x4_t x[2], y[2], z[2];
  std::memcpy(x, &a, sizeof a);
  std::memcpy(y, &b, sizeof b);
  std::memcpy(z, &c, sizeof c);
  for (int i = 0; i < 2; i++) z[i] = vfmaq_f32(z[i], x[i], y[i]);
  std::memcpy(&c, z, sizeof c);
  return c;
#else
  return a * b + c;
#endif
}

inline Vec to_floats(Ints v) { return __builtin_convertvector(v, Vec); }

// The lower and the upper half of a vector of sixteen lanes.
template <typename Half, typename Whole>
inline void halves(const Whole& v, Half* low, Half* high) {
  std::memcpy(low, &v, sizeof *low);
  std::memcpy(high, reinterpret_cast<const char*>(&v) + sizeof *low, sizeof *high);
}

// The sum of all lanes, always in the same order.
inline float sum(Vec v) {
#if SPECEXPORT_AVX512
  __m256 a, b;
  halves(v, &a, &b);
  const __m256 e = a + b;
#else
  const Vec e = v;
#endif
  float s0 = e[0] + e[4], s1 = e[1] + e[5], s2 = e[2] + e[6], s3 = e[3] + e[7];
  return (s0 + s2) + (s1 + s3);
}

template <typename Vector>
inline Vector larger(Vector u, Vector v) {
  return u > v ? u : v;
}
// The lanes combined by a function that adds or compares lanes in any order.
template <typename Function>
inline int32_t fold(Ints v, Function function) {
#if defined(__AVX2__)
  typedef int32_t Eight __attribute__((vector_size(32)));
#if SPECEXPORT_AVX512
  Eight e, other;
  halves(v, &e, &other);
  e = function(e, other);
#else
  Eight e = v;
#endif
  auto with = [&](__m256i moved) { e = function(e, (Eight)moved); };
  with(_mm256_permute2x128_si256((__m256i)e, (__m256i)e, 1));
  with(_mm256_shuffle_epi32((__m256i)e, 0x4e));
  with(_mm256_shuffle_epi32((__m256i)e, 0xb1));
  return e[0];
#else
  for (int half = 4; half; half /= 2) {
    Ints moved = v;
    for (int i = 0; i < half; i++) moved[i] = v[i + half];
    v = function(v, moved);
  }
  return v[0];
#endif
}
inline int32_t sum(Ints v) { return fold(v, [](auto a, auto b) { return a + b; }); }

inline Vec select(Ints mask, Vec yes, Vec no) {
#if SPECEXPORT_AVX512
  return mask < 0 ? yes : no;
#else
  return (Vec)((mask & (Ints)yes) | (~mask & (Ints)no));
#endif
}
inline Vec vmin(Vec a, Vec b) { return select(a < b, a, b); }
inline Vec vmax(Vec a, Vec b) { return select(a > b, a, b); }

inline Vec round_even(Vec x) {
#if SPECEXPORT_AVX512
  return (Vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (Vec)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const Vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Vec r = (x + magic) - magic;
  Ints small = (Ints)(x < all(4194304.0f)) & (Ints)(x > all(-4194304.0f));
  return select(small, r, x);
#endif
}

// e^x to about one unit in the last place: 2^n times a polynomial in the rest, whose coefficients are Taylor's.
inline Vec exp(Vec x) {
  Vec clipped = vmin(vmax(x, all(-87.33f)), all(88.72f));
  Vec n = round_even(clipped * all(1.44269504f));
  Vec r = fma(n, all(-0.693359375f), clipped);
  r = fma(n, all(2.12194440e-4f), r);
  Vec p = all(1.0f / 5040);
  p = fma(p, r, all(1.0f / 720));
  p = fma(p, r, all(1.0f / 120));
  p = fma(p, r, all(1.0f / 24));
  p = fma(p, r, all(1.0f / 6));
  p = fma(p, r, all(0.5f));
  p = fma(p, r, all(1.0f));
  p = fma(p, r, all(1.0f));
  // In two halves, as 2^128 overflows.
  Ints k = __builtin_convertvector(n, Ints);
  Ints low = k >> 1, high = k - low;
  Vec y = p * (Vec)((low + 127) << 23) * (Vec)((high + 127) << 23);
  y = select((Ints)(x < all(-87.33f)), all(0.0f), y);
  y = select((Ints)(x > all(88.72f)), all(__builtin_inff()), y);
  return select((Ints)(x != x), x, y);
}

inline Vec sigmoid(Vec x) { return all(1.0f) / (all(1.0f) + exp(-x)); }

inline Vec tanh(Vec x) {
  // Near zero by its series, as 1 - 2 / (e^2x + 1) would lose digits.
  Vec x2 = x * x;
  Vec p = all(-17.0f / 315);
  p = fma(p, x2, all(2.0f / 15));
  p = fma(p, x2, all(-1.0f / 3));
  Vec small = fma(x * x2, p, x);
  Vec big = all(1.0f) - all(2.0f) / (exp(x + x) + all(1.0f));
  Ints near = (Ints)(x < all(0.15f)) & (Ints)(x > all(-0.15f));
  return select(near, small, big);
}

// The lane sums of as many vectors as they have lanes, each in the same order, whatever its position.
inline Vec sums(const Vec t[kLanes]) {
#if SPECEXPORT_AVX512
  auto add = [](__m512 a, __m512 b) { return (__m512)((Vec)a + (Vec)b); };
  auto two = [&](Vec a, Vec b) { return add(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b)); };
  auto four = [&](const Vec* v) {
    const __m512d a = (__m512d)two(v[0], v[1]), b = (__m512d)two(v[2], v[3]);
    return add((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
  };
  auto eight = [&](const Vec* v) {
    const __m512 a = four(v), b = four(v + 4);
    return add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  };
  const __m512 a = eight(t), b = eight(t + 8);
  return (Vec)add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
#elif defined(__AVX2__)
  auto add = [](Vec a, Vec b) { return (Vec)_mm256_hadd_ps((__m256)a, (__m256)b); };
  Vec low = add(add(t[0], t[1]), add(t[2], t[3])), high = add(add(t[4], t[5]), add(t[6], t[7]));
  return (Vec)_mm256_permute2f128_ps((__m256)low, (__m256)high, 0x20) +
         (Vec)_mm256_permute2f128_ps((__m256)low, (__m256)high, 0x31);
#else
  Vec r;
  for (int i = 0; i < 8; i++) {
    Vec v = t[i];
    r[i] = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
  }
  return r;
#endif
}

inline Vec load_half(const uint8_t* p) {
#if SPECEXPORT_AVX512
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  uint16_t h[8];
  std::memcpy(h, p, sizeof h);
  Vec v;
  for (int i = 0; i < 8; i++) v[i] = half_to_float(h[i]);
  return v;
#endif
}

constexpr int kVectors = 16 / kLanes;  // of sixteen numbers

// Narrows sixteen integers to 16 bits, which they fit into.
inline void store_shorts(int16_t* to, const Ints v[kVectors]) {
#if defined(__AVX2__) && !SPECEXPORT_AVX512
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]), 0xd8);
  std::memcpy(to, &packed, sizeof packed);
#else
  typedef int16_t Shorts __attribute__((vector_size(2 * kLanes)));
  for (int i = 0; i < kVectors; i++) {
    const Shorts narrow = __builtin_convertvector(v[i], Shorts);
    std::memcpy(to + i * kLanes, &narrow, sizeof narrow);
  }
#endif
}

constexpr float kLeast = 1e-30f;  // a block of smaller numbers is rounded to zeros

// The largest absolute value of a block, whose size is a multiple of 16; NaN if it contains a NaN or an infinity.
inline float largest_of(const float* x, int block) {
  Ints most[kVectors] = {};
  // Compared as integers, among which NaN is the largest.
  for (int i = 0; i < block; i += 16)
    for (int v = 0; v < kVectors; v++) most[v] = larger((Ints)load(x + i + v * kLanes) & 0x7fffffff, most[v]);
  const int32_t top = fold(larger(most[0], most[kVectors - 1]), [](auto a, auto b) { return larger(a, b); });
  if (top >= 0x7f800000) return __builtin_nanf("");
  float largest;
  std::memcpy(&largest, &top, 4);
  return largest;
}

}  // namespace
}  // namespace specexport
