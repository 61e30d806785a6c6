// The kernels of AVX-512, with products of several rows that use the tile registers of AMX, bit for bit the same.
//
// An integer of 16 bits is a multiple of 256 and a byte. The registers multiply both by the weights of a block, and their
// sums, which are exact, are put together to the sum that VNNI's instructions find.
#include <algorithm>

#include "products.h"

namespace specexport {

extern const Kernels kAvx512Kernels;

namespace {

constexpr int kSpan = 256;      // depth of the weights that are converted for all rows at once, and the longest block
constexpr int kMostRows = 320;  // for whose sums there is room
constexpr int kGroup = 16;      // rows of a register

// How activations are laid out for the registers: groups of rows, whose blocks each are the scales of the rows, and for
// every step along the depth a register of the multiples of 256 and one of the bytes. Spans of blocks of all groups follow
// each other.
//
// Numbers are bytes, with two sums; or bfloat16 for many rows and weights of four bits in blocks of at most 32: there the
// sums stay below 2^24, so that both parts have one. Taking a sum out of a register takes longer than a product.
struct Panels {
  bool floats;
  int size;         // bytes of a number
  int step, steps;  // numbers of a row in a register, steps of a block
  int row_bytes;
  int blocks, groups, span;
  size_t block_bytes;

  Panels(const PackedWeights& w, int rows)
      : floats(w.kind == WeightKind::kInt4 && w.block <= 32 && rows > kGroup), size(floats ? 2 : 1),
        step(largest_step(w.block, 64 / size)), steps(w.block / step), row_bytes(step * size), blocks(w.depth / w.block),
        groups((rows + kGroup - 1) / kGroup), span(groups == 1 ? blocks : kSpan / w.block),
        block_bytes(size_t(kGroup) * size_t(4 + 2 * steps * row_bytes)) {}
  size_t bytes() const { return size_t(blocks) * size_t(groups) * block_bytes; }
  size_t offset(int group, int block) const {
    const int before = block / span * span;
    return size_t(before * groups + group * std::min(span, blocks - before) + block - before) * block_bytes;
  }

 private:
  static int largest_step(int block, int most) { return block % most == 0 ? most : block % 32 == 0 ? 32 : 16; }
};

size_t panel_bytes(const PackedWeights& w, int rows) {
  const bool four = w.kind == WeightKind::kInt4;
  // Fewer rows are as fast without.
  const int least = w.block % 32 ? kGroup + 1 : w.block == 32 ? 11 : 7;
  if (!(four || (w.kind == WeightKind::kInt8 && !w.zero_points)) || rows < least || rows > kMostRows || w.block % 16 ||
      w.block > kSpan)
    return 0;
  return Panels(w, rows).bytes();
}

// The upper halves of numbers that bfloat16 holds.
inline Ints upper_halves(Ints numbers) { return (Ints)((Unsigned)(Ints)to_floats(numbers) >> 16); }

void to_panels(const PackedWeights& w, const Activations& x, int first, int last, uint8_t* panels) {
  const Panels form(w, x.rows);
  const bool in_turns = w.kind == WeightKind::kInt4 && !form.floats;
  typedef int16_t Sixteen __attribute__((vector_size(32)));
  typedef int8_t Narrow __attribute__((vector_size(16)));
  auto store_as = [](uint8_t* to, auto type, Ints numbers) {
    const auto narrow = __builtin_convertvector(numbers, decltype(type));
    std::memcpy(to, &narrow, sizeof narrow);
  };
  // A few blocks of all rows at a time, so that each line of memory is written at once.
  constexpr int kMost = 2;
  int16_t integers[kMost * kSpan];
  float scales[kMost];
  int32_t sums[kMost];
  for (int from = first; from < last; from += kMost)
    for (int row = 0; row < x.rows; row++) {
      const int count = std::min(kMost, last - from), m = row % kGroup;
      quantize(x.values + row * x.stride + from * w.block, count * w.block, w.block, integers, scales, sums);
      const int16_t* in = integers;
      for (int b = 0; b < count; b++) {
        uint8_t* const out = panels + form.offset(row / kGroup, from + b);
        std::memcpy(out + 4 * m, scales + b, 4);
        uint8_t* numbers = out + 4 * kGroup + m * form.row_bytes;
        for (int s = 0; s < form.steps; s++, numbers += 2 * kGroup * form.row_bytes)
          for (int k = 0; k < form.step; k += 16, in += 16) {
            Sixteen sixteen;
            std::memcpy(&sixteen, in, sizeof sixteen);
            Ints wide = __builtin_convertvector(sixteen, Ints);
            if (in_turns)  // as weights of four bits become bytes
              wide = __builtin_shufflevector(wide, wide, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
            const Ints bytes = wide & all(255);
            uint8_t *const upper = numbers + form.size * k, *const lower = upper + kGroup * form.row_bytes;
            if (form.floats) {
              store_as(upper, Sixteen(), upper_halves(wide - bytes));
              store_as(lower, Sixteen(), upper_halves(bytes));
            } else {
              store_as(upper, Narrow(), wide >> 8);
              store_as(lower, Narrow(), bytes);
            }
          }
      }
    }
}

#ifndef SPECEXPORT_EMULATED
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
inline void load_config(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
#define TILE_RELEASE() asm volatile("tilerelease" ::)
#define TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::)
#define TILE_LOAD(tile, from, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(ptrdiff_t(stride)) : "memory")
#define TILE_STORE(tile, to) asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(ptrdiff_t(64)) : "memory")
#define TILE_MULTIPLY_BFLOATS(sums, x, w) asm volatile("tdpbf16ps %%tmm" #w ", %%tmm" #x ", %%tmm" #sums ::)
#define TILE_MULTIPLY_UPPER(sums, x, w) asm volatile("tdpbssd %%tmm" #w ", %%tmm" #x ", %%tmm" #sums ::)
#define TILE_MULTIPLY_LOWER(sums, x, w) asm volatile("tdpbusd %%tmm" #w ", %%tmm" #x ", %%tmm" #sums ::)
#endif

// Registers 0 to 3 are sums, 4 and 5 activations, 6 weights.
inline void configure_tiles(const Panels& form, int rows) {
  TileConfig config;
  for (int i = 0; i < 7; i++) {
    config.rows[i] = uint8_t(i < 6 ? std::min(rows, kGroup) : form.row_bytes / 4);
    config.row_bytes[i] = uint16_t(i == 4 || i == 5 ? form.row_bytes : 64);
  }
  load_config(config);
}

// The bits of a small integer in bfloat16.
constexpr uint16_t bfloat_of(int number) {
  int size = number < 0 ? -number : number, exponent = 127 + 7;
  for (; size && size < 128; size *= 2) exponent--;
  return uint16_t(size ? (number < 0 ? 0x8000 : 0) | exponent << 7 | (size & 127) : 0);
}
struct alignas(64) Table {
  uint16_t items[32];
};
template <typename Function>
constexpr Table table_of(Function function) {
  Table table = {};
  for (int i = 0; i < 32; i++) table.items[i] = uint16_t(function(i));
  return table;
}
// Numbers by four bits (a fifth is ignored), or by the last five bits of their difference from a zero point; and where
// items of two lists of sixteen go that are merged in turns.
constexpr Table kNumbers = table_of([](int i) { return bfloat_of(i % 16 - 8); });
constexpr Table kDifferences = table_of([](int i) { return bfloat_of(i < 16 ? i : i - 32); });
constexpr Table kInFours = table_of([](int i) { return i % 2 * 16 + i / 2; });
inline Shorts vector_of(const Table& table) {
  return (Shorts)integers_at(reinterpret_cast<const uint8_t*>(table.items));
}

// Asks for weights, as fetch() does, whose calls GCC would leave out here: it takes them for ones without effect.
inline void fetch_ahead(const uint8_t* tile) {
  asm volatile("prefetcht1 %0\n\tprefetcht0 %1" ::"m"(tile[kFar]), "m"(tile[kNear]));
}

typedef int8_t Bytes __attribute__((vector_size(64)));

// Multiplies panels by tiles of weights. While the registers are at a block, the sums of the one before leave them, those of
// the one before that are scaled and added, and weights of a later block are converted: none of these waits for another.
//
// kBlock: the length of blocks, or 0 for others.
template <WeightKind kKind, bool kFloats, int kBlock>
class Multiplier {
 public:
  Multiplier(const PackedWeights& w, const Activations& x)
      : w_(w), x_(x), form_(w, x.rows), block_(w.block), half_scales_(w.half_scales), zero_points_(w.zero_points),
        block_bytes_(w.block_bytes()), mask_(form_.groups == 1 ? kSlots - 1 : ~0) {}

  void product(int first, int last, float* y, ptrdiff_t stride) {
    // Of a single group, a few blocks are converted ahead. Other groups find a span of them, of two tiles: so the panels
    // are in the nearest cache for the second.
    const int together = form_.groups == 1 ? 1 : kTogether;
    const size_t tile_bytes = w_.tile_bytes();
    for (int t = first; t < last; t += together) {
      const int tiles = std::min(together, last - t);
      for (int from = 0; from < form_.blocks; from += form_.span)
        for (int g = 0; g < form_.groups; g++)
          for (int i = 0; i < tiles; i++) {
            const uint8_t* const tile = w_.data + size_t(t + i) * tile_bytes;
            float* const to = y + g * kGroup * stride + (t + i) * kTile;
            if (g == 0) multiply<true>(tile, converted_[i], g, from, totals_[g][i], to, stride);
            else multiply<false>(tile, converted_[i], g, from, totals_[g][i], to, stride);
          }
    }
  }

 private:
  static constexpr int kSize = kFloats ? 2 : 1;
  static constexpr int kSlots = 8, kSums = 4, kTogether = 2;
  static constexpr int kAhead = 4, kLag = 2;  // blocks from a conversion to the product, and from that to the addition

  SPECEXPORT_INLINE int block() const { return kBlock ? kBlock : block_; }
  SPECEXPORT_INLINE int steps() const { return kBlock == 32 ? 1 : form_.steps; }

  // A group and the blocks of a span of a tile, which are converted first or, for later groups, were before.
  template <bool kConvert>
  void multiply(const uint8_t* tile, uint8_t* converted, int g, int from, float* totals, float* y, ptrdiff_t stride) {
    const int count = std::min(form_.span, form_.blocks - from), rows = std::min(kGroup, x_.rows - g * kGroup), mask = mask_;
    const size_t panel_bytes = form_.block_bytes, tile_bytes = block_bytes_;
    const uint8_t* panel = x_.panels + form_.offset(g, from);
    tile += size_t(from) * tile_bytes;
    Vec total[kGroup];
#pragma GCC unroll 16
    for (int m = 0; m < kGroup; m++) total[m] = from ? load(totals + m * kTile) : all(0.0f);
    auto slot = [&](int b) __attribute__((always_inline)) { return converted + (b & mask) * block() * kSize * kTile; };
    if (kConvert)
      for (int b = 0; b < std::min(kAhead, count); b++) convert(slot(b), tile + size_t(b) * tile_bytes);
    auto advance = [&](int b, auto odd) __attribute__((always_inline)) {
      begin<odd.value>(panel, slot(b));
      if (b) take<!odd.value>(b - 1);
      if (kConvert && b + kAhead < count) convert(slot(b + kAhead), tile + kAhead * tile_bytes);
      if (b >= kLag) add(b - kLag, tile - kLag * tile_bytes, panel - kLag * panel_bytes, rows, total);
      panel += panel_bytes;
      tile += tile_bytes;
    };
    int b = 0;
    for (; b + 1 < count; b += 2) {
      advance(b, std::false_type());
      advance(b + 1, std::true_type());
    }
    if (b < count) advance(b, std::false_type());
    if (count % 2) take<false>(count - 1);
    else take<true>(count - 1);
    for (b = std::min(kLag, count); b > 0; b--)
      add(count - b, tile - size_t(b) * tile_bytes, panel - size_t(b) * panel_bytes, rows, total);
    const bool last = from + count == form_.blocks;
#pragma GCC unroll 16
    for (int m = 0; m < kGroup; m++) {
      if (m == rows) break;
      store(last ? y + m * stride : totals + m * kTile, total[m]);
    }
  }

  // Begins the products of a block. Even and odd blocks have registers of their own.
  template <bool kOdd>
  SPECEXPORT_INLINE void begin(const uint8_t* panel, const uint8_t* weights) {
    const uint8_t* x = panel + 4 * kGroup;
    const int row_bytes = kBlock == 32 ? 32 * kSize : form_.row_bytes;
#define BEGIN(first, second)                                                                         \
  TILE_ZERO(first);                                                                                  \
  if (!kFloats) TILE_ZERO(second);                                                                   \
  for (int s = 0; s < steps(); s++, x += 2 * kGroup * row_bytes, weights += row_bytes * kTile) {     \
    TILE_LOAD(6, weights, 64);                                                                       \
    TILE_LOAD(4, x, row_bytes);                                                                      \
    TILE_LOAD(5, x + kGroup * row_bytes, row_bytes);                                                 \
    if (kFloats) {                                                                                   \
      TILE_MULTIPLY_BFLOATS(first, 4, 6);                                                            \
      TILE_MULTIPLY_BFLOATS(first, 5, 6);                                                            \
    } else {                                                                                         \
      TILE_MULTIPLY_UPPER(first, 4, 6);                                                              \
      TILE_MULTIPLY_LOWER(second, 5, 6);                                                             \
    }                                                                                                \
  }
    if constexpr (kOdd) {
      BEGIN(2, 3)
    } else {
      BEGIN(0, 1)
    }
#undef BEGIN
  }

  // Takes the sums of a block out of the registers.
  template <bool kOdd>
  SPECEXPORT_INLINE void take(int b) {
    float(*const to)[kGroup * kTile] = sums_[b % kSums];
    if constexpr (kOdd) {
      TILE_STORE(2, to[0]);
      if (!kFloats) TILE_STORE(3, to[1]);
    } else {
      TILE_STORE(0, to[0]);
      if (!kFloats) TILE_STORE(1, to[1]);
    }
  }

  // Rows that are not there are left out: their numbers are undefined, and may be of the kind that is slow to multiply.
  SPECEXPORT_INLINE void add(int b, const uint8_t* tile, const uint8_t* panel, int rows, Vec (&total)[kGroup]) {
    const float* const row_scales = reinterpret_cast<const float*>(panel);
    const float(*const sums)[kGroup * kTile] = sums_[b % kSums];
    const Vec scale = half_scales_ ? load_half(tile) : load(tile);
#pragma GCC unroll 16
    for (int m = 0; m < kGroup; m++) {
      if (m == rows) break;
      Vec sum = load(sums[0] + m * kTile);
      if (!kFloats) sum = to_floats((Ints)(((Unsigned)sum << 8) + (Unsigned)load(sums[1] + m * kTile)));
      total[m] = fma(sum, scale * all(row_scales[m]), total[m]);
    }
  }

  // Puts the weights of a block in the order of registers: four bytes of adjacent rows of each column in turn, which are
  // bytes of eight bits or two numbers of bfloat16.
  SPECEXPORT_INLINE void convert(uint8_t* out, const uint8_t* tile) const {
    tile += kTile * (half_scales_ ? 2 : 4);
    Ints zeros = all(8);
    if (zero_points_) {
      zeros = bytes_at(tile);
      tile += kTile;
    }
    const Bytes bytes = (Bytes)((Unsigned)(zeros & all(255)) * (Unsigned)all(0x01010101));  // each four times
    for (int k = 0; k < block(); k += kKind == WeightKind::kInt4 ? 8 : 4, tile += 64) {
      fetch_ahead(tile);
      const Ints rows = integers_at(tile);
      if constexpr (kKind == WeightKind::kInt8) {
        out = put(out, permute(vector_of(kInFours), (Shorts)rows));
      } else if constexpr (!kFloats) {
        const Ints low = all(0x0f0f0f0f);
        out = put(out, (Ints)((Bytes)(rows & low) - bytes));
        out = put(out, (Ints)((Bytes)((Ints)((Unsigned)rows >> 4) & low) - bytes));
      } else {
        const Shorts low = (Shorts)all(0x000f000f), twice = (Shorts)((zeros & all(0xffff)) | zeros << 16);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
          const Shorts four = (Shorts)((Unsigned)rows >> 4 * i);  // of a number, its last five bits count
          out = put(out, zero_points_ ? permute((four & low) - twice, vector_of(kDifferences)) : permute(four, vector_of(kNumbers)));
        }
      }
    }
  }
  static SPECEXPORT_INLINE uint8_t* put(uint8_t* out, Ints numbers) {
    std::memcpy(out, &numbers, sizeof numbers);
    return out + sizeof numbers;
  }

  const PackedWeights& w_;
  const Activations& x_;
  const Panels form_;
  const int block_;
  const bool half_scales_, zero_points_;
  const size_t block_bytes_;
  const int mask_;  // of a block's slot
  alignas(64) uint8_t converted_[kTogether][kSlots * kSpan * kTile * kSize];  // of the next blocks, or of a span
  alignas(64) float totals_[kMostRows / kGroup][kTogether][kGroup * kTile];
  alignas(64) float sums_[kSums][2][kGroup * kTile];
};

template <WeightKind kKind, bool kFloats>
void multiply_panels(const PackedWeights& w, const Activations& x, int first, int last, float* y, ptrdiff_t stride) {
  if (w.block == 32) Multiplier<kKind, kFloats, 32>(w, x).product(first, last, y, stride);
  else Multiplier<kKind, kFloats, 0>(w, x).product(first, last, y, stride);
}

// The product of few rows, or with panels. The last tile's missing columns have no room in y.
void product_with_panels(const PackedWeights& w, const Activations& x, int first, int last, float* y, ptrdiff_t stride) {
  const int full = x.panels ? std::max(first, std::min(last, w.columns / kTile)) : first;
  if (first < full) {
    const Panels form(w, x.rows);
    configure_tiles(form, x.rows);
    if (w.kind == WeightKind::kInt8) multiply_panels<WeightKind::kInt8, false>(w, x, first, full, y, stride);
    else if (form.floats) multiply_panels<WeightKind::kInt4, true>(w, x, first, full, y, stride);
    else multiply_panels<WeightKind::kInt4, false>(w, x, first, full, y, stride);
    TILE_RELEASE();
  }
  if (full < last) kAvx512Kernels.product(w, x, full, last, y, stride);
}

Kernels with_tile_registers(Kernels kernels) {
  kernels.name = "avx512-amx";
  kernels.product = product_with_panels;
  kernels.panel_bytes = panel_bytes;
  kernels.to_panels = to_panels;
  return kernels;
}

}  // namespace

extern const Kernels kAmxKernels;
const Kernels kAmxKernels = with_tile_registers(kAvx512Kernels);

}  // namespace specexport
