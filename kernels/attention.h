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
// The first place in [from, to) of a mask that is not hidden, or `to`. Most of a long cache is hidden.
inline int skip_hidden(const uint8_t* mask, int from, int to) {
  auto hidden = [&](int j) {
    uint64_t any = 0;
    for (int i = 0; i < 64; i += 8) any |= eight_bytes(mask + j + i);
    return any == 0;
  };
  while (from + 64 <= to && hidden(from)) from += 64;
  while (from + 8 <= to && eight_bytes(mask + from) == 0) from += 8;
  while (from < to && !mask[from]) from++;
  return from;
}

// The run ends before key `first`, which lies elsewhere.
Seen look(const uint8_t* mask, int first, int length, int32_t* others) {
  Seen seen;
  seen.others = others;
  int j = seen.start = skip_hidden(mask, 0, first);
  while (j + 8 <= first && eight_bytes(mask + j) == 0x0101010101010101u) j += 8;
  while (j < first && mask[j]) j++;
  seen.run = j - seen.start;
  int count = 0;
  while ((j = skip_hidden(mask, j, length)) < length) others[count++] = j++;
  seen.count = seen.run + count;
  return seen;
}

// Where a key or its value is.
inline const float* place(const float* numbers, const float* later, const AttentionCall& c, int at, int size) {
  return at < c.first ? numbers + size_t(at) * size_t(size) : later + size_t(at - c.first) * size_t(size);
}

constexpr int kKeysAtOnce = 64;  // processed for all rows while they are in the first-level cache

// A row that is being computed.
struct Attending {
  const AttentionRow* row;
  Seen seen;
  float* scores;
  Vec largest;
};

// Scores of a row's keys in a range that starts at a multiple of the lanes, and the largest so far.
template <int kSize>
void score(const AttentionCall& c, Attending& row, int from) {
  const int size = kSize ? kSize : c.size, whole = size / kLanes * kLanes;
  const Seen& seen = row.seen;
  const float* const q = row.row->query;
  const int end = seen.count < from + kKeysAtOnce ? seen.count : from + kKeysAtOnce;
  for (int i = from; i < end; i += kLanes) {
    const float* k[kLanes];
    if (i + kLanes <= seen.run) {
      for (int j = 0; j < kLanes; j++) k[j] = c.keys + size_t(seen.start + i + j) * size_t(size);
    } else {
      for (int j = 0; j < kLanes; j++) k[j] = place(c.keys, c.later_keys, c, seen.at(i + j < end ? i + j : i), size);
    }
    Vec t[kLanes];
    for (int j = 0; j < kLanes; j++) t[j] = all(0.0f);
    for (int d = 0; d < whole; d += kLanes) {
      const Vec v = load(q + d);
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; j++) t[j] = fma(v, load(k[j] + d), t[j]);
    }
    if (const int rest = size - whole; rest > 0) {
      const Vec v = load_some(q + whole, rest);
      for (int j = 0; j < kLanes; j++) t[j] = fma(v, load_some(k[j] + whole, rest), t[j]);
    }
    Vec score = sums(t) * all(c.scale);
    if (c.softcap > 0) score = tanh(score / all(c.softcap)) * all(c.softcap);
    if (end - i < kLanes)
      for (int j = end - i; j < kLanes; j++) score[j] = -__builtin_inff();
    store(row.scores + i, score);
    row.largest = select((Ints)(score > row.largest) | (Ints)(score != score), score, row.largest);
  }
}

// Replaces scores by the exponentials of their differences from the largest; returns the reciprocal of their sum.
float weigh(const Attending& r) {
  const float* sink = r.row->sink;
  float most = sink ? *sink : -__builtin_inff();
  for (int j = 0; j < kLanes; j++) most = r.largest[j] > most || r.largest[j] != r.largest[j] ? r.largest[j] : most;
  Vec total = all(0.0f);
  const Vec center = all(most);
  for (int i = 0; i < r.seen.count; i += kLanes) {
    const Vec e = exp(load(r.scores + i) - center);
    store(r.scores + i, e);
    total += e;
  }
  float weight = sum(total);
  if (sink) weight += exp(all(*sink - most))[0];
  return r.seen.count ? 1.0f / weight : 0.0f;
}

// Asks for the keys or values that are processed after those from rank `from` on: processors do not look beyond a page by
// themselves.
void fetch_next(const float* numbers, int size, const Seen& seen, int from) {
  const int begin = from + kKeysAtOnce, end = seen.run < begin + kKeysAtOnce ? seen.run : begin + kKeysAtOnce;
  if (begin >= end) return;
  const auto* p = reinterpret_cast<const uint8_t*>(numbers + size_t(seen.start + begin) * size_t(size));
  const auto* const stop = reinterpret_cast<const uint8_t*>(numbers + size_t(seen.start + end) * size_t(size));
  for (; p < stop; p += 64) __builtin_prefetch(p, 0, 3);
}

// Rows whose values are added at once: their sums fit into registers, and hide the latency of additions.
constexpr int kRowsAdding = kLanes == 16 ? 4 : 1;

// Adds the values of a range of rows' keys to the sums in their results, of a number of columns.
template <int kColumns, int kRows>
void add_values(const AttentionCall& c, const Attending* rows, int from, int column) {
  constexpr int kCount = kColumns / kLanes;
  const size_t size = size_t(c.value_size);
  int shared = from + kKeysAtOnce, ends[kRows];  // keys of all rows
  Vec a[kRows][kCount];
  for (int r = 0; r < kRows; r++) {
    const Seen& seen = rows[r].seen;
    ends[r] = seen.count < from + kKeysAtOnce ? seen.count : from + kKeysAtOnce;
    const int run = seen.start != rows[0].seen.start ? from : ends[r] < seen.run ? ends[r] : seen.run;
    if (run < shared) shared = run;
    for (int j = 0; j < kCount; j++) a[r][j] = from ? load(rows[r].row->result + column + kLanes * j) : all(0.0f);
  }
  const float* v = c.values + size_t(rows[0].seen.start + from) * size + column;
  int i = from;
  for (; i < shared; i++, v += size) {
    Vec p[kRows];
    for (int r = 0; r < kRows; r++) p[r] = all(rows[r].scores[i]);
#pragma GCC unroll 8
    for (int j = 0; j < kCount; j++) {
      const Vec value = load(v + kLanes * j);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) a[r][j] = fma(p[r], value, a[r][j]);
    }
  }
  for (int r = 0; r < kRows; r++) {
    for (int k = i; k < ends[r]; k++) {
      const float* other = place(c.values, c.later_values, c, rows[r].seen.at(k), c.value_size) + column;
      const Vec p = all(rows[r].scores[k]);
      for (int j = 0; j < kCount; j++) a[r][j] = fma(p, load(other + kLanes * j), a[r][j]);
    }
    for (int j = 0; j < kCount; j++) store(rows[r].row->result + column + kLanes * j, a[r][j]);
  }
}

// The columns after the last whole vector.
void add_rest(const AttentionCall& c, const Attending& r, int from, int column) {
  const int rest = c.value_size - column, end = r.seen.count < from + kKeysAtOnce ? r.seen.count : from + kKeysAtOnce;
  float* const result = r.row->result + column;
  Vec a = from ? load_some(result, rest) : all(0.0f);
  for (int i = from; i < end; i++)
    a = fma(all(r.scores[i]), load_some(place(c.values, c.later_values, c, r.seen.at(i), c.value_size) + column, rest), a);
  store_some(result, a, rest);
}

template <int kRows = kRowsAdding>
void add_columns(const AttentionCall& c, const Attending* rows, int count, int from) {
  if constexpr (kRows > 1) {
    if (count < kRows) return add_columns<kRows - 1>(c, rows, count, from);
  }
  int d = 0;
  for (; d + 64 <= c.value_size; d += 64) add_values<64, kRows>(c, rows, from, d);
  for (; d + 32 <= c.value_size; d += 32) add_values<32, kRows>(c, rows, from, d);
  for (; d + kLanes <= c.value_size; d += kLanes) add_values<kLanes, kRows>(c, rows, from, d);
  if (d < c.value_size)
    for (int r = 0; r < kRows; r++) add_rest(c, rows[r], from, d);
}

// A row's attention sums over the keys it sees, in their order, one a lane. Only a key's rank among those seen matters,
// so neither masked rows of the cache nor the layout of a tree change a bit. Rows process the same few keys in turn, so
// that these are read from memory once.
template <int kSize>
void attend(const AttentionCall& c) {
  for (int first = 0; first < c.count; first += kRowsAttending) {
    const int count = c.count - first < kRowsAttending ? c.count - first : kRowsAttending;
    Attending rows[kRowsAttending];
    int longest = 1;  // so that rows that see nothing get a result too
    for (int r = 0; r < count; r++) {
      Attending& row = rows[r];
      row.row = c.rows + first + r;
      row.scores = c.scratch + size_t(r) * attention_scratch(c.length);
      row.largest = all(-__builtin_inff());
      if (r && row.row->mask == rows[r - 1].row->mask) row.seen = rows[r - 1].seen;
      else row.seen = look(row.row->mask, c.first, c.length, reinterpret_cast<int32_t*>(row.scores + c.length + 16));
      if (row.seen.count > longest) longest = row.seen.count;
    }
    const Seen& last = rows[count - 1].seen;
    for (int from = 0; from < longest; from += kKeysAtOnce) {
      fetch_next(c.keys, c.size, last, from);
      for (int r = 0; r < count; r++) score<kSize>(c, rows[r], from);
    }
    float factors[kRowsAttending];
    for (int r = 0; r < count; r++) factors[r] = weigh(rows[r]);
    for (int from = 0; from < longest; from += kKeysAtOnce) {
      fetch_next(c.values, c.value_size, last, from);
      auto adds = [&](int r) { return r < count && (!from || from < rows[r].seen.count); };
      for (int r = 0; r < count;) {
        int together = 0;
        while (together < kRowsAdding && adds(r + together)) together++;
        if (together) add_columns(c, rows + r, together, from);
        r += together ? together : 1;
      }
    }
    for (int r = 0; r < count; r++) {
      float* result = rows[r].row->result;
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
