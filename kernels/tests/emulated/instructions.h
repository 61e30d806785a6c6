// The instructions of AVX-512 and AVX-VNNI that the kernels use, lane by lane as Intel's manual defines them: processors
// with AVX2 alone run the kernels' tests for them too. The sources beside this file are compiled for AVX2.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

template <typename Lane, int kLanes>
struct Lanes {
  Lane lane[kLanes];
  template <typename From>
  static Lanes of(const From& from) {
    static_assert(sizeof(From) == sizeof(Lanes));
    Lanes lanes;
    std::memcpy(&lanes, &from, sizeof lanes);
    return lanes;
  }
  template <typename To>
  To as() const {
    static_assert(sizeof(To) == sizeof(Lanes));
    To to;
    std::memcpy(&to, this, sizeof to);
    return to;
  }
};

// Multiplies pairs of signed 16-bit integers, and adds both products to a 32-bit sum, which may wrap.
template <typename Integers>
Integers emulated_dpwssd(Integers total, Integers a, Integers b) {
  constexpr int kSums = sizeof(Integers) / 4;
  const auto x = Lanes<int16_t, 2 * kSums>::of(a), y = Lanes<int16_t, 2 * kSums>::of(b);
  auto sums = Lanes<uint32_t, kSums>::of(total);
  for (int i = 0; i < 2 * kSums; i++) sums.lane[i / 2] += uint32_t(int32_t(x.lane[i]) * y.lane[i]);
  return sums.template as<Integers>();
}

template <typename From, typename To, int kLanes, typename Narrow>
__m512i emulated_widen(Narrow narrow) {
  const auto from = Lanes<From, kLanes>::of(narrow);
  Lanes<To, kLanes> to;
  for (int i = 0; i < kLanes; i++) to.lane[i] = from.lane[i];
  return to.template as<__m512i>();
}

inline __m512 emulated_halves(__m256i halves) {
  __m256 parts[2];
  for (int i = 0; i < 2; i++) parts[i] = _mm256_cvtph_ps(i ? _mm256_extracti128_si256(halves, 1) : _mm256_castsi256_si128(halves));
  __m512 to;
  std::memcpy(&to, parts, sizeof to);
  return to;
}

inline __m512 emulated_fmadd(__m512 a, __m512 b, __m512 c) {
  __m256 x[2], y[2], z[2];
  std::memcpy(x, &a, sizeof a);
  std::memcpy(y, &b, sizeof b);
  std::memcpy(z, &c, sizeof c);
  for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
  std::memcpy(&c, z, sizeof c);
  return c;
}

// A function of the four numbers, or two, in each quarter of two vectors.
template <typename Lane, typename Vector, typename Function>
Vector emulated_quarters(Vector a, Vector b, Function function) {
  constexpr int kQuarter = 16 / sizeof(Lane), kAll = 4 * kQuarter;
  const auto x = Lanes<Lane, kAll>::of(a), y = Lanes<Lane, kAll>::of(b);
  Lanes<Lane, kAll> to;
  for (int q = 0; q < kAll; q += kQuarter) function(x.lane + q, y.lane + q, to.lane + q);
  return to.template as<Vector>();
}

template <int kFirst>
__m512 emulated_unpack(__m512 a, __m512 b) {
  return emulated_quarters<float>(a, b, [](const float* x, const float* y, float* to) {
    for (int i = 0; i < 4; i++) to[i] = (i % 2 ? y : x)[kFirst + i / 2];
  });
}

template <int kFirst>
__m512d emulated_unpack_doubles(__m512d a, __m512d b) {
  return emulated_quarters<double>(a, b, [](const double* x, const double* y, double* to) {
    to[0] = x[kFirst];
    to[1] = y[kFirst];
  });
}

// Two quarters of each of two vectors.
inline __m512 emulated_shuffle_quarters(__m512 a, __m512 b, int order) {
  const auto x = Lanes<float, 16>::of(a), y = Lanes<float, 16>::of(b);
  Lanes<float, 16> to;
  for (int i = 0; i < 16; i++) to.lane[i] = (i < 8 ? x : y).lane[4 * (order >> 2 * (i / 4) & 3) + i % 4];
  return to.as<__m512>();
}

inline __m512 emulated_round(__m512 values, int) {
  auto lanes = Lanes<float, 16>::of(values);
  for (float& lane : lanes.lane) lane = std::nearbyint(lane);
  return lanes.as<__m512>();
}

inline __m512 emulated_permute(__m512i order, __m512 values) {
  const auto from = Lanes<float, 16>::of(values);
  const auto index = Lanes<uint32_t, 16>::of(order);
  Lanes<float, 16> to;
  for (int i = 0; i < 16; i++) to.lane[i] = from.lane[index.lane[i] & 15];
  return to.as<__m512>();
}

inline __m512i emulated_shift(__m512i values, int count) {
  auto lanes = Lanes<uint32_t, 16>::of(values);
  for (uint32_t& lane : lanes.lane) lane <<= count;
  return lanes.as<__m512i>();
}

inline __m512i emulated_permute_shorts(__m512i indices, __m512i table) {
  const auto from = Lanes<uint16_t, 32>::of(table), index = Lanes<uint16_t, 32>::of(indices);
  Lanes<uint16_t, 32> to;
  for (int i = 0; i < 32; i++) to.lane[i] = from.lane[index.lane[i] & 31];
  return to.as<__m512i>();
}

template <typename... Numbers>
__m512i emulated_list(Numbers... numbers) {
  return Lanes<int32_t, sizeof...(Numbers)>{{numbers...}}.template as<__m512i>();
}

}  // namespace

#undef _mm512_setr_epi32  // macros of some compilers
#undef _mm512_slli_epi32
#undef _mm512_shuffle_f32x4
#undef _mm512_roundscale_ps
#define _mm256_dpwssd_avx_epi32 emulated_dpwssd<__m256i>
#define _mm512_dpwssd_epi32 emulated_dpwssd<__m512i>
#define _mm512_cvtepi8_epi16 emulated_widen<int8_t, int16_t, 32>
#define _mm512_cvtepi8_epi32 emulated_widen<int8_t, int32_t, 16>
#define _mm512_cvtepu16_epi32 emulated_widen<uint16_t, uint32_t, 16>
#define _mm512_cvtph_ps emulated_halves
#define _mm512_fmadd_ps emulated_fmadd
#define _mm512_permutexvar_epi16 emulated_permute_shorts
#define _mm512_permutexvar_ps emulated_permute
#define _mm512_slli_epi32 emulated_shift
#define _mm512_setr_epi32 emulated_list
#define _mm512_unpacklo_ps emulated_unpack<0>
#define _mm512_unpackhi_ps emulated_unpack<2>
#define _mm512_unpacklo_pd emulated_unpack_doubles<0>
#define _mm512_unpackhi_pd emulated_unpack_doubles<1>
#define _mm512_shuffle_f32x4 emulated_shuffle_quarters
#define _mm512_roundscale_ps emulated_round
