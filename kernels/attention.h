// Attention of one sequence over its cache. Included by kernels_impl.h alone.
#pragma once

#include "vectors.h"

namespace specexport {
namespace {

// The keys that a row sees: usually mostly one contiguous run, and single ones after it.
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

constexpr int kKeysAtOnce = 64;  // processed for all rows while they are in the first-level cache

// Scores of a row's keys in a range that starts at a multiple of eight; returns the largest so far.
template <int kSize>
Vec score(const AttentionCall& c, const float* q, const Seen& seen, int from, int end, float* scores, Vec largest) {
  const int size = kSize ? kSize : c.size, whole = size & ~7;
  for (int i = from; i < end; i += 8) {
    const float* k[8];
    if (i + 8 <= seen.run) {
      for (int j = 0; j < 8; j++) k[j] = c.keys + size_t(seen.start + i + j) * size_t(size);
    } else {
      for (int j = 0; j < 8; j++) k[j] = c.keys + size_t(seen.at(i + j < end ? i + j : i)) * size_t(size);
    }
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
    if (end - i < 8)
      for (int j = end - i; j < 8; j++) score[j] = -__builtin_inff();
    store(scores + i, score);
    largest = select((Ints)(score > largest) | (Ints)(score != score), score, largest);
  }
  return largest;
}

// Replaces scores by the exponentials of their differences from the largest; returns the reciprocal of their sum.
float weigh(const AttentionCall& c, int row, int count, float* scores, Vec largest) {
  float most = c.sinks ? c.sinks[row] : -__builtin_inff();
  for (int j = 0; j < 8; j++) most = largest[j] > most || largest[j] != largest[j] ? largest[j] : most;
  Vec total = all(0);
  const Vec center = all(most);
  for (int i = 0; i < count; i += 8) {
    const Vec e = exp(load(scores + i) - center);
    store(scores + i, e);
    total += e;
  }
  float weight = sum(total);
  if (c.sinks) weight += exp(all(c.sinks[row] - most))[0];
  return count ? 1.0f / weight : 0.0f;
}

// Adds the values of a range of a row's keys to the sums in `result`: kVectors of eight columns.
template <int kVectors>
void add_values(const AttentionCall& c, const Seen& seen, int from, int end, const float* scores, int column, float* result) {
  Vec a[kVectors];
  for (int j = 0; j < kVectors; j++) a[j] = from ? load(result + 8 * j) : all(0);
  const size_t size = size_t(c.value_size);
  auto add = [&](int i, const float* v) __attribute__((always_inline)) {
    const Vec p = all(scores[i]);
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; j++) a[j] = fma(p, load(v + 8 * j), a[j]);
  };
  const float* v = c.values + size_t(seen.start + from) * size + column;
  int i = from;
  for (const int run = end < seen.run ? end : seen.run; i < run; i++, v += size) add(i, v);
  for (; i < end; i++) add(i, c.values + size_t(seen.at(i)) * size + column);
  for (int j = 0; j < kVectors; j++) store(result + 8 * j, a[j]);
}

// The columns after the last whole vector.
void add_rest(const AttentionCall& c, const Seen& seen, int from, int end, const float* scores, int column, float* result) {
  const int rest = c.value_size - column;
  Vec a = from ? load_some(result, rest) : all(0);
  for (int i = from; i < end; i++)
    a = fma(all(scores[i]), load_some(c.values + size_t(seen.at(i)) * size_t(c.value_size) + column, rest), a);
  store_some(result, a, rest);
}

// A row's attention sums over the keys it sees, in their order, eight at a time. Only a key's rank among those seen
// matters, so neither masked rows of the cache nor the layout of a tree change a bit. Rows process the same few keys in
// turn, so that these are read from memory once.
template <int kSize>
void attend(const AttentionCall& c) {
  for (int first = 0; first < c.rows; first += kRowsAttending) {
    const int rows = c.rows - first < kRowsAttending ? c.rows - first : kRowsAttending;
    Seen seen[kRowsAttending];
    Vec largest[kRowsAttending];
    float* scores[kRowsAttending];
    int longest = 1;  // so that rows that see nothing get a result too
    for (int r = 0; r < rows; r++) {
      scores[r] = c.scratch + size_t(r) * attention_scratch(c.length);
      seen[r] = look(c.mask + (first + r) * c.mask_stride, c.length, reinterpret_cast<int32_t*>(scores[r] + c.length + 16));
      largest[r] = all(-__builtin_inff());
      if (seen[r].count > longest) longest = seen[r].count;
    }
    for (int from = 0; from < longest; from += kKeysAtOnce)
      for (int r = 0; r < rows; r++) {
        const int end = seen[r].count < from + kKeysAtOnce ? seen[r].count : from + kKeysAtOnce;
        largest[r] = score<kSize>(c, c.query + (first + r) * c.query_stride, seen[r], from, end, scores[r], largest[r]);
      }
    float factors[kRowsAttending];
    for (int r = 0; r < rows; r++) factors[r] = weigh(c, first + r, seen[r].count, scores[r], largest[r]);
    for (int from = 0; from < longest; from += kKeysAtOnce)
      for (int r = 0; r < rows; r++) {
        if (from && from >= seen[r].count) continue;
        const int end = seen[r].count < from + kKeysAtOnce ? seen[r].count : from + kKeysAtOnce;
        float* result = c.result + (first + r) * c.result_stride;
        int d = 0;
        for (; d + 64 <= c.value_size; d += 64) add_values<8>(c, seen[r], from, end, scores[r], d, result + d);
        for (; d + 32 <= c.value_size; d += 32) add_values<4>(c, seen[r], from, end, scores[r], d, result + d);
        for (; d + 8 <= c.value_size; d += 8) add_values<1>(c, seen[r], from, end, scores[r], d, result + d);
        if (d < c.value_size) add_rest(c, seen[r], from, end, scores[r], d, result + d);
      }
    for (int r = 0; r < rows; r++) {
      float* result = c.result + (first + r) * c.result_stride;
      for (int d = 0; d < c.value_size; d++) result[d] *= factors[r];
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
