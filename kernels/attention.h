// Attention of one sequence over its cache. Included by kernels_impl.h alone.
#pragma once

#include "vectors.h"

namespace specexport {
namespace {

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

}  // namespace
}  // namespace specexport
