// The kernels, in vectors of eight floats, compiled once for each instruction set by the files that include this one
// with SPECEXPORT_ISA_NAME and SPECEXPORT_TABLE set. Compilers must not contract or reorder sums (-ffp-contract=off).
// Everything here is static or in an unnamed namespace: code compiled for one processor must not be linked into another's.
#include <cmath>
#include <cstring>

#include "half.h"
#include "kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace specexport {
namespace {

typedef float Vec __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline Vec all(float x) { return Vec{x, x, x, x, x, x, x, x}; }
// The first `count` of eight numbers, zeros behind them.
inline Vec load_some(const float* p, int count) {
  float padded[8] = {};
  std::memcpy(padded, p, sizeof(float) * size_t(count));
  return load(padded);
}
inline void store_some(float* p, Vec v, int count) {
  float padded[8];
  store(padded, v);
  std::memcpy(p, padded, sizeof(float) * size_t(count));
}

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX2__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_FEATURE_FMA)
  Vec r;
  for (int i = 0; i < 8; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#else
  return a * b + c;
#endif
}

inline Vec to_floats(Ints v) { return __builtin_convertvector(v, Vec); }

// Sums of the eight lanes, always in the same order.
inline float sum(Vec v) {
  float s0 = v[0] + v[4], s1 = v[1] + v[5], s2 = v[2] + v[6], s3 = v[3] + v[7];
  return (s0 + s2) + (s1 + s3);
}

inline Vec select(Ints mask, Vec yes, Vec no) { return (Vec)((mask & (Ints)yes) | (~mask & (Ints)no)); }
inline Vec vmin(Vec a, Vec b) { return select(a < b, a, b); }
inline Vec vmax(Vec a, Vec b) { return select(a > b, a, b); }

inline Vec round_even(Vec x) {
#if defined(__AVX2__)
  return (Vec)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const Vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it leaves no bits behind the point
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
  // In two halves, as 2^128 is no number.
  Ints k = __builtin_convertvector(n, Ints);
  Ints low = k >> 1, high = k - low;
  Vec y = p * (Vec)((low + 127) << 23) * (Vec)((high + 127) << 23);
  y = select((Ints)(x < all(-87.33f)), all(0.0f), y);
  y = select((Ints)(x > all(88.72f)), all(__builtin_inff()), y);
  return select((Ints)(x != x), x, y);
}

inline Vec sigmoid(Vec x) { return all(1.0f) / (all(1.0f) + exp(-x)); }

inline Vec tanh(Vec x) {
  // Near zero by its own series, where 1 - 2 / (e^2x + 1) would lose digits.
  Vec x2 = x * x;
  Vec p = all(-17.0f / 315);
  p = fma(p, x2, all(2.0f / 15));
  p = fma(p, x2, all(-1.0f / 3));
  Vec small = fma(x * x2, p, x);
  Vec big = all(1.0f) - all(2.0f) / (exp(x + x) + all(1.0f));
  Ints near = (Ints)(x < all(0.15f)) & (Ints)(x > all(-0.15f));
  return select(near, small, big);
}

template <typename Function>
void map(const float* x, float* y, size_t count, Function function) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) store(y + i, function(load(x + i)));
  if (i < count) store_some(y + i, function(load_some(x + i, int(count - i))), int(count - i));
}

template <typename Function>
void map_scalars(const float* x, float* y, size_t count, Function function) {
  for (size_t i = 0; i < count; i++) y[i] = function(x[i]);
}

void unary(Unary function, const float* x, float* y, size_t count) {
  switch (function) {
    case Unary::kSigmoid: return map(x, y, count, [](Vec v) { return sigmoid(v); });
    case Unary::kSilu: return map(x, y, count, [](Vec v) { return v * sigmoid(v); });
    case Unary::kTanh: return map(x, y, count, [](Vec v) { return tanh(v); });
    case Unary::kExp: return map(x, y, count, [](Vec v) { return exp(v); });
    case Unary::kNegate: return map(x, y, count, [](Vec v) { return -v; });
    case Unary::kRelu: return map(x, y, count, [](Vec v) { return select((Ints)(v < all(0)), all(0), v); });
    case Unary::kAbs: return map(x, y, count, [](Vec v) { return (Vec)((Ints)v & 0x7fffffff); });
    case Unary::kReciprocal: return map(x, y, count, [](Vec v) { return all(1.0f) / v; });
    case Unary::kGeluTanh:
      return map(x, y, count, [](Vec v) {
        Vec inner = all(0.7978845608f) * fma(v * v * v, all(0.044715f), v);
        return all(0.5f) * v * (all(1.0f) + tanh(inner));
      });
    // The C library computes one number at a time, so that a number's place cannot matter.
    case Unary::kGelu:
      return map_scalars(x, y, count, [](float v) { return 0.5f * v * (1.0f + erff(v * 0.70710678f)); });
    case Unary::kErf: return map_scalars(x, y, count, [](float v) { return erff(v); });
    case Unary::kSqrt: return map_scalars(x, y, count, [](float v) { return sqrtf(v); });
    case Unary::kCos: return map_scalars(x, y, count, [](float v) { return cosf(v); });
    case Unary::kSin: return map_scalars(x, y, count, [](float v) { return sinf(v); });
    case Unary::kLog: return map_scalars(x, y, count, [](float v) { return logf(v); });
    case Unary::kFloor: return map_scalars(x, y, count, [](float v) { return floorf(v); });
    case Unary::kSoftplus:
      return map_scalars(x, y, count, [](float v) { return v > 20 ? v : log1pf(expf(v)); });
  }
}

template <typename Function>
void zip(const float* a, int a_stride, const float* b, int b_stride, float* y, size_t count, Function function) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8)
    store(y + i, function(a_stride ? load(a + i) : all(*a), b_stride ? load(b + i) : all(*b)));
  if (int rest = int(count - i); rest > 0)
    store_some(y + i, function(a_stride ? load_some(a + i, rest) : all(*a), b_stride ? load_some(b + i, rest) : all(*b)),
               rest);
}

void binary(Binary function, const float* a, int sa, const float* b, int sb, float* y, size_t count) {
  switch (function) {
    case Binary::kAdd: return zip(a, sa, b, sb, y, count, [](Vec u, Vec v) { return u + v; });
    case Binary::kSubtract: return zip(a, sa, b, sb, y, count, [](Vec u, Vec v) { return u - v; });
    case Binary::kMultiply: return zip(a, sa, b, sb, y, count, [](Vec u, Vec v) { return u * v; });
    case Binary::kDivide: return zip(a, sa, b, sb, y, count, [](Vec u, Vec v) { return u / v; });
    case Binary::kMaximum: return zip(a, sa, b, sb, y, count, [](Vec u, Vec v) { return vmax(u, v); });
    case Binary::kMinimum: return zip(a, sa, b, sb, y, count, [](Vec u, Vec v) { return vmin(u, v); });
    case Binary::kPower:
      for (size_t i = 0; i < count; i++) y[i] = powf(a[sa ? i : 0], b[sb ? i : 0]);
  }
}

// Sums over a row go in the order of eight interleaved partial sums, whatever comes before or after the row.
template <typename Function>
float reduce(const float* x, int size, Function term) {
  Vec total = all(0);
  int i = 0;
  for (; i + 8 <= size; i += 8) total = term(load(x + i), total);
  if (i < size) total = term(load_some(x + i, size - i), total);
  return sum(total);
}

void rms_norm(const float* x, const float* weight, float epsilon, float* y, int size) {
  float squares = reduce(x, size, [](Vec v, Vec total) { return fma(v, v, total); });
  Vec factor = all(1.0f / sqrtf(squares / float(size) + epsilon));
  int i = 0;
  if (!weight) return map(x, y, size_t(size), [=](Vec v) { return v * factor; });
  for (; i + 8 <= size; i += 8) store(y + i, load(x + i) * factor * load(weight + i));
  if (int rest = size - i; rest > 0)
    store_some(y + i, load_some(x + i, rest) * factor * load_some(weight + i, rest), rest);
}

void layer_norm(const float* x, const float* weight, const float* bias, float epsilon, float* y, int size) {
  float mean = reduce(x, size, [](Vec v, Vec total) { return total + v; }) / float(size);
  float squares = 0;
  {
    Vec total = all(0), center = all(mean);
    int i = 0;
    for (; i + 8 <= size; i += 8) {
      Vec d = load(x + i) - center;
      total = fma(d, d, total);
    }
    if (i < size) {
      float padded[8] = {};
      for (int j = i; j < size; j++) padded[j - i] = x[j] - mean;
      total = fma(load(padded), load(padded), total);
    }
    squares = sum(total);
  }
  float factor = 1.0f / sqrtf(squares / float(size) + epsilon);
  for (int i = 0; i < size; i++) {
    float scaled = (x[i] - mean) * factor;
    if (weight) scaled = scaled * weight[i];
    y[i] = bias ? scaled + bias[i] : scaled;
  }
}

void softmax(const float* x, float* y, int size) {
  float most = -__builtin_inff();
  for (int i = 0; i < size; i++) most = x[i] > most || x[i] != x[i] ? x[i] : most;
  Vec center = all(most == -__builtin_inff() ? 0.0f : most), total = all(0);
  int i = 0;
  for (; i + 8 <= size; i += 8) {
    Vec e = exp(load(x + i) - center);
    store(y + i, e);
    total += e;
  }
  if (int rest = size - i; rest > 0) {
    float padded[8];
    for (int j = 0; j < 8; j++) padded[j] = j < rest ? x[i + j] - center[0] : -__builtin_inff();
    Vec e = exp(load(padded));
    store_some(y + i, e, rest);
    total += e;
  }
  Vec factor = all(1.0f / sum(total));
  map(y, y, size_t(size), [=](Vec v) { return v * factor; });
}

float dot(const float* a, const float* b, int size) {
  Vec total = all(0);
  int i = 0;
  for (; i + 8 <= size; i += 8) total = fma(load(a + i), load(b + i), total);
  if (i < size) total = fma(load_some(a + i, size - i), load_some(b + i, size - i), total);
  return sum(total);
}

void rotate(const float* x, const float* cos, const float* sin, float* y, int size, int rotated, bool interleaved) {
  int half = rotated / 2;
  if (interleaved) {
    for (int i = 0; i < half; i++) {
      float u = x[2 * i], v = x[2 * i + 1];
      y[2 * i] = u * cos[i] - v * sin[i];
      y[2 * i + 1] = v * cos[i] + u * sin[i];
    }
  } else {
    for (int i = 0; i < half; i++) {
      float u = x[i], v = x[half + i];
      y[i] = u * cos[i] - v * sin[i];
      y[half + i] = v * cos[i] + u * sin[i];
    }
  }
  for (int i = rotated; i < size; i++) y[i] = x[i];
}

// The sums of the lanes of eight vectors, each in the same order whichever of the eight it is.
inline Vec sums(const Vec t[8]) {
#if defined(__AVX2__)
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

// The keys that a row sees: a run of neighbours, which most are, and others behind it.
struct Seen {
  int start = 0, run = 0, count = 0;
  const int32_t* others;
  int at(int i) const { return i < run ? start + i : others[i - run]; }
};

inline uint64_t eight_bytes(const uint8_t* p) {
  uint64_t bytes;
  std::memcpy(&bytes, p, 8);
  return bytes;
}

Seen look(const uint8_t* mask, int length, int32_t* others) {
  Seen seen;
  seen.others = others;
  int j = 0;
  while (j + 8 <= length && eight_bytes(mask + j) == 0) j += 8;
  while (j < length && !mask[j]) j++;
  seen.start = j;
  while (j + 8 <= length && eight_bytes(mask + j) == 0x0101010101010101u) j += 8;
  while (j < length && mask[j]) j++;
  seen.run = j - seen.start;
  int count = 0;
  while (j < length) {
    if (j + 8 <= length && eight_bytes(mask + j) == 0) {
      j += 8;
      continue;
    }
    if (mask[j]) others[count++] = j;
    j++;
  }
  seen.count = seen.run + count;
  return seen;
}

// Attention of a row goes over the keys it sees, in their order, eight at a time: what counts is a key's place among
// those that are seen, so neither masked rows of the cache nor the layout of a tree change a bit.
template <int kSize>
void attend(const AttentionCall& c) {
  const int size = kSize ? kSize : c.size, whole = size & ~7;
  float* scores = c.scratch;
  int32_t* others = reinterpret_cast<int32_t*>(c.scratch + c.length + 16);
  for (int r = 0; r < c.rows; r++) {
    const Seen seen = look(c.mask + r * c.mask_stride, c.length, others);
    const int count = seen.count;
    const float* q = c.query + r * c.query_stride;
    float* result = c.result + r * c.result_stride;
    Vec largest = all(-__builtin_inff());
    for (int i = 0; i < count; i += 8) {
      const float* k[8];
      for (int j = 0; j < 8; j++) k[j] = c.keys + size_t(seen.at(i + j < count ? i + j : i)) * size_t(size);
      Vec t[8];
      for (int j = 0; j < 8; j++) t[j] = all(0);
      for (int d = 0; d < whole; d += 8) {
        const Vec v = load(q + d);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) t[j] = fma(v, load(k[j] + d), t[j]);
      }
      if (const int rest = size - whole; rest > 0) {
        const Vec v = load_some(q + whole, rest);
        for (int j = 0; j < 8; j++) t[j] = fma(v, load_some(k[j] + whole, rest), t[j]);
      }
      Vec score = sums(t) * all(c.scale);
      if (c.softcap > 0) score = tanh(score / all(c.softcap)) * all(c.softcap);
      if (count - i < 8)
        for (int j = count - i; j < 8; j++) score[j] = -__builtin_inff();
      store(scores + i, score);
      largest = select((Ints)(score > largest) | (Ints)(score != score), score, largest);
    }
    float most = c.sinks ? c.sinks[r] : -__builtin_inff();
    for (int j = 0; j < 8; j++) most = largest[j] > most || largest[j] != largest[j] ? largest[j] : most;
    Vec total = all(0);
    const Vec center = all(most);
    for (int i = 0; i < count; i += 8) {
      const Vec e = exp(load(scores + i) - center);
      store(scores + i, e);
      total += e;
    }
    float weight = sum(total);
    if (c.sinks) weight += exp(all(c.sinks[r] - most))[0];
    const Vec factor = all(count ? 1.0f / weight : 0.0f);
    int d = 0;
    for (; d + 64 <= c.value_size; d += 64) {
      Vec a[8];
      for (int j = 0; j < 8; j++) a[j] = all(0);
      for (int i = 0; i < count; i++) {
        const float* v = c.values + size_t(seen.at(i)) * size_t(c.value_size) + d;
        const Vec p = all(scores[i]);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) a[j] = fma(p, load(v + 8 * j), a[j]);
      }
      for (int j = 0; j < 8; j++) store(result + d + 8 * j, a[j] * factor);
    }
    for (; d < c.value_size; d += 8) {
      const int rest = c.value_size - d < 8 ? c.value_size - d : 8;
      Vec a = all(0);
      for (int i = 0; i < count; i++)
        a = fma(all(scores[i]), load_some(c.values + size_t(seen.at(i)) * size_t(c.value_size) + d, rest), a);
      store_some(result + d, a * factor, rest);
    }
  }
}

void attention(const AttentionCall& c) {
  switch (c.size) {
    case 64: return attend<64>(c);
    case 128: return attend<128>(c);
    default: return attend<0>(c);
  }
}

void quantize(const float* x, int depth, int block, int16_t* integers, float* scales, int32_t* sums) {
  for (int b = 0; b < depth / block; b++, x += block, integers += block) {
    Ints most = Ints{};
    for (int i = 0; i < block; i += 8) {
      Ints bits = (Ints)load(x + i) & 0x7fffffff;  // as integers, so that a NaN is the largest
      Ints larger = bits > most;
      most = (larger & bits) | (~larger & most);
    }
    int32_t top = 0;
    for (int i = 0; i < 8; i++) top = most[i] > top ? most[i] : top;
    float largest;
    std::memcpy(&largest, &top, 4);
    if (top >= 0x7f800000 || largest < 1e-30f) {
      std::memset(integers, 0, sizeof(int16_t) * size_t(block));
      scales[b] = top >= 0x7f800000 ? __builtin_nanf("") : 0.0f;
      sums[b] = 0;
      continue;
    }
    Vec factor = all(32767.0f / largest);
    Ints total = Ints{};
    for (int i = 0; i < block; i += 8) {
      Ints q = __builtin_convertvector(round_even(load(x + i) * factor), Ints);
      total += q;
      typedef int16_t Shorts __attribute__((vector_size(16)));
      Shorts s = __builtin_convertvector(q, Shorts);
      std::memcpy(integers + i, &s, sizeof s);
    }
    int32_t sum_of_block = 0;
    for (int i = 0; i < 8; i++) sum_of_block += total[i];
    scales[b] = largest / 32767.0f;
    sums[b] = sum_of_block;
  }
}

inline Vec load_half(const uint8_t* p) {
#if defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  uint16_t h[8];
  std::memcpy(h, p, sizeof h);
  Vec v;
  for (int i = 0; i < 8; i++) v[i] = half_to_float(h[i]);
  return v;
#endif
}

#if defined(__AVX2__)
// Products of pairs of 16-bit integers, added up in 32 bits.
inline Ints pairs(Ints a, Ints b, Ints total) {
#if defined(SPECEXPORT_VNNI)
  return (Ints)_mm256_dpwssd_epi32((__m256i)total, (__m256i)a, (__m256i)b);
#else
  return total + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}
inline Ints widen(const uint8_t* p) {
  return (Ints)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Ints repeat(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return (Ints)_mm256_set1_epi32(pair);
}
inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
#else
typedef int16_t Shorts16 __attribute__((vector_size(32)));
typedef int8_t Bytes16 __attribute__((vector_size(16)));
inline Ints pairs(Ints a, Ints b, Ints total) {
  Shorts16 u = (Shorts16)a, v = (Shorts16)b;
  Ints even = Ints{}, odd = Ints{};
  for (int i = 0; i < 8; i++) even[i] = int32_t(u[2 * i]) * v[2 * i];
  for (int i = 0; i < 8; i++) odd[i] = int32_t(u[2 * i + 1]) * v[2 * i + 1];
  return total + even + odd;
}
inline Ints widen(const uint8_t* p) {
  Bytes16 bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return (Ints)__builtin_convertvector(bytes, Shorts16);
}
inline Ints repeat(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return Ints{pair, pair, pair, pair, pair, pair, pair, pair};
}
inline void prefetch(const uint8_t* p) { __builtin_prefetch(p); }
#endif

constexpr int kAhead = 1024;  // bytes that are asked for before they are needed

template <WeightKind kKind, int kRows>
void multiply_integers(const PackedWeights& w, const uint8_t* tile, const Activations& x, int row, float* y,
                       ptrdiff_t stride) {
  const int blocks = w.depth / w.block;
  const bool half = w.half_scales, zeros = w.zero_points;
  Vec total[kRows][2];
  for (int m = 0; m < kRows; m++) total[m][0] = total[m][1] = all(0);
  const int16_t* q = x.integers + size_t(row) * size_t(x.depth);
  const float* scales = x.scales + size_t(row) * size_t(blocks);
  const int32_t* sums = x.sums + size_t(row) * size_t(blocks);
  for (int b = 0; b < blocks; b++) {
    const Vec s0 = half ? load_half(tile) : load(reinterpret_cast<const float*>(tile));
    const Vec s1 = half ? load_half(tile + 16) : load(reinterpret_cast<const float*>(tile + 32));
    tile += half ? 2 * kTile : 4 * kTile;
    Ints z0 = Ints{} + (kKind == WeightKind::kInt4 ? 8 : 0), z1 = z0;
    if (zeros) {
      typedef int8_t Bytes8 __attribute__((vector_size(8)));
      Bytes8 bytes;
      std::memcpy(&bytes, tile, 8);
      z0 = __builtin_convertvector(bytes, Ints);
      std::memcpy(&bytes, tile + 8, 8);
      z1 = __builtin_convertvector(bytes, Ints);
      tile += kTile;
    }
    Ints t[kRows][2];
    for (int m = 0; m < kRows; m++) t[m][0] = t[m][1] = Ints{};
    if (kKind == WeightKind::kInt8) {
      for (int k = 0; k < w.block; k += 2, tile += 2 * kTile) {
        if (k % 4 == 0) prefetch(tile + kAhead);
        const Ints w0 = widen(tile), w1 = widen(tile + kTile);
#pragma GCC unroll 8
        for (int m = 0; m < kRows; m++) {
          const Ints a = repeat(q + m * x.depth + k);
          t[m][0] = pairs(w0, a, t[m][0]);
          t[m][1] = pairs(w1, a, t[m][1]);
        }
      }
    } else {
      const Ints low = Ints{} + 0x000f000f;
      for (int k = 0; k < w.block; k += 8, tile += 4 * kTile) {
        prefetch(tile + kAhead);
        Ints v0, v1;
        std::memcpy(&v0, tile, 32);
        std::memcpy(&v1, tile + 32, 32);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
          const Ints w0 = v0 & low, w1 = v1 & low;
          // As 32-bit numbers: what crosses over from the upper half is masked away.
          v0 = (Ints)((Ints)v0 >> 4);
          v1 = (Ints)((Ints)v1 >> 4);
#pragma GCC unroll 8
          for (int m = 0; m < kRows; m++) {
            const Ints a = repeat(q + m * x.depth + k + 2 * i);
            t[m][0] = pairs(w0, a, t[m][0]);
            t[m][1] = pairs(w1, a, t[m][1]);
          }
        }
      }
    }
    for (int m = 0; m < kRows; m++) {
      Ints t0 = t[m][0], t1 = t[m][1];
      if (zeros || kKind == WeightKind::kInt4) {
        const int32_t offset = sums[m * blocks + b];
        t0 -= z0 * offset;
        t1 -= z1 * offset;
      }
      const Vec s = all(scales[m * blocks + b]);
      total[m][0] = fma(to_floats(t0), s0 * s, total[m][0]);
      total[m][1] = fma(to_floats(t1), s1 * s, total[m][1]);
    }
    q += w.block;
  }
  for (int m = 0; m < kRows; m++) {
    store(y + m * stride, total[m][0]);
    store(y + m * stride + 8, total[m][1]);
  }
}

template <WeightKind kKind, int kRows>
void multiply_floats(const PackedWeights& w, const uint8_t* tile, const Activations& x, int row, float* y,
                     ptrdiff_t stride) {
  Vec total[kRows][2];
  for (int m = 0; m < kRows; m++) total[m][0] = total[m][1] = all(0);
  const float* a = x.values + row * x.stride;
  constexpr int kStep = kKind == WeightKind::kFloat ? 4 * kTile : 2 * kTile;
  for (int k = 0; k < w.depth; k++, tile += kStep) {
    if (kKind == WeightKind::kFloat || k % 2 == 0) prefetch(tile + kAhead);
    Vec w0, w1;
    if (kKind == WeightKind::kFloat) {
      w0 = load(reinterpret_cast<const float*>(tile));
      w1 = load(reinterpret_cast<const float*>(tile) + 8);
    } else if (kKind == WeightKind::kBfloat16) {
      Ints both;
      std::memcpy(&both, tile, sizeof both);
      w0 = (Vec)(both << 16);
      w1 = (Vec)(both & int32_t(0xffff0000));
    } else {
      w0 = load_half(tile);
      w1 = load_half(tile + 16);
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; m++) {
      const Vec v = all(a[m * x.stride + k]);
      total[m][0] = fma(w0, v, total[m][0]);
      total[m][1] = fma(w1, v, total[m][1]);
    }
  }
  for (int m = 0; m < kRows; m++) {
    store(y + m * stride, total[m][0]);
    store(y + m * stride + 8, total[m][1]);
  }
}

template <WeightKind kKind, int kRows>
inline void multiply(const PackedWeights& w, const uint8_t* tile, const Activations& x, int row, float* y,
                     ptrdiff_t stride) {
  if constexpr (kKind == WeightKind::kInt8 || kKind == WeightKind::kInt4)
    multiply_integers<kKind, kRows>(w, tile, x, row, y, stride);
  else
    multiply_floats<kKind, kRows>(w, tile, x, row, y, stride);
}

constexpr int kMostRows = 5;  // at once: two sums and a broadcast for each must stay in sixteen registers

template <WeightKind kKind>
void product_of(const PackedWeights& w, const Activations& x, int first, int last, float* y, ptrdiff_t stride) {
  float whole[kMostRows * kTile];
  for (int t = first; t < last; t++) {
    const uint8_t* tile = w.data + size_t(t) * w.tile_bytes();
    const int columns = w.columns - t * kTile < kTile ? w.columns - t * kTile : kTile;
    for (int row = 0; row < x.rows;) {
      const int left = x.rows - row;
      // Rows are divided evenly: seven as four and three.
      const int passes = (left + kMostRows - 1) / kMostRows, rows = (left + passes - 1) / passes;
      float* to = columns < kTile ? whole : y + row * stride + t * kTile;
      const ptrdiff_t apart = columns < kTile ? kTile : stride;
      switch (rows) {
        case 1: multiply<kKind, 1>(w, tile, x, row, to, apart); break;
        case 2: multiply<kKind, 2>(w, tile, x, row, to, apart); break;
        case 3: multiply<kKind, 3>(w, tile, x, row, to, apart); break;
        case 4: multiply<kKind, 4>(w, tile, x, row, to, apart); break;
        default: multiply<kKind, 5>(w, tile, x, row, to, apart); break;
      }
      if (columns < kTile)
        for (int m = 0; m < rows; m++)
          std::memcpy(y + (row + m) * stride + t * kTile, whole + m * kTile, sizeof(float) * size_t(columns));
      row += rows;
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

extern const Kernels SPECEXPORT_TABLE;
const Kernels SPECEXPORT_TABLE = {SPECEXPORT_ISA_NAME, quantize, product, attention, unary,  binary,
                                  rms_norm,            layer_norm, softmax, rotate,  dot};

}  // namespace specexport
