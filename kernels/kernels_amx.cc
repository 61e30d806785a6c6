// The kernels of AVX-512, with products of many rows that use the tile registers of AMX, bit for bit the same.
//
// An integer of 16 bits is a multiple of 256 and a byte. For weights of eight bits, the registers multiply the bytes of
// activations by those of weights, and add up 32-bit integers. For weights of four bits, which are quickly looked up in a
// table of bfloat16 numbers, they multiply those and add in fp32: bfloat16 holds both parts of an activation, and a weight
// less its zero point, exactly, and so is every sum below 2^24, in whatever order. Either way the sum of a block is the
// one that VNNI's instructions find.
#include <algorithm>

#include "products.h"

namespace specexport {

extern const Kernels kAvx512Kernels;

namespace {

constexpr int kGroup = 16;              // rows of activations in a register
constexpr int kRegister = kGroup * 64;  // bytes
constexpr int kSpan = 256;              // depth of the weights that are converted at once, and the longest block
constexpr int kSpanBytes = kSpan * kTile * 2;
constexpr int kMostGroups = 20;         // for whose sums there is room

// How integers of activations are laid out for the registers. A group of rows is a list of blocks: the scale of each
// row, and for every step along the depth a register of multiples of 256 and one of bytes.
struct Panels {
  int size;         // bytes of a number
  int step, steps;  // numbers of a row in a register, registers of a block
  size_t block_bytes, group_bytes;
  explicit Panels(const PackedWeights& w)
      : size(w.kind == WeightKind::kInt4 ? 2 : 1), step(largest_step(w.block, 64 / size)), steps(w.block / step),
        block_bytes(kGroup * 4 + size_t(steps) * 2 * kRegister), group_bytes(size_t(w.depth / w.block) * block_bytes) {}

 private:
  static int largest_step(int block, int most) { return block % most == 0 ? most : block % 32 == 0 ? 32 : 16; }
};

size_t panel_bytes(const PackedWeights& w, int rows) {
  const bool four = w.kind == WeightKind::kInt4, fits = four || (w.kind == WeightKind::kInt8 && !w.zero_points);
  // Fewer rows are as fast without, as are those that fill half a register.
  const int least = rows % kGroup == 0 && (four || w.block >= 64) ? 16 : 24;
  const int groups = (rows + kGroup - 1) / kGroup;
  if (!fits || rows < least || groups > kMostGroups || w.block % 16 || w.block > kSpan) return 0;
  return size_t(groups) * Panels(w).group_bytes;
}

// The upper halves of numbers that bfloat16 holds.
inline Ints upper_halves(Ints numbers) { return (Ints)((Unsigned)(Ints)to_floats(numbers) >> 16); }

void to_panels(const PackedWeights& w, const int16_t* integers, const float* scales, int row, int first, int last,
               uint8_t* panels) {
  const Panels form(w);
  uint8_t* out = panels + size_t(row / kGroup) * form.group_bytes + size_t(first) * form.block_bytes;
  const int m = row % kGroup;
  typedef int16_t Sixteen __attribute__((vector_size(32)));
  typedef int8_t Bytes __attribute__((vector_size(16)));
  auto store_as = [](uint8_t* to, auto type, Ints numbers) {
    const auto narrow = __builtin_convertvector(numbers, decltype(type));
    std::memcpy(to, &narrow, sizeof narrow);
  };
  for (int b = first; b < last; b++, out += form.block_bytes) {
    std::memcpy(out + 4 * m, scales++, 4);
    uint8_t* numbers = out + kGroup * 4 + m * 64;
    for (int s = 0; s < form.steps; s++, numbers += 2 * kRegister)
      for (int k = 0; k < form.step; k += 16, integers += 16) {
        Sixteen narrow;
        std::memcpy(&narrow, integers, sizeof narrow);
        const Ints wide = __builtin_convertvector(narrow, Ints), bytes = wide & all(255);
        uint8_t *const upper = numbers + form.size * k, *const lower = upper + kRegister;
        if (form.size == 1) {
          store_as(upper, Bytes(), wide >> 8);
          store_as(lower, Bytes(), bytes);
        } else {
          store_as(upper, Sixteen(), upper_halves(wide - bytes));
          store_as(lower, Sixteen(), upper_halves(bytes));
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
#define TILE_LOAD(tile, from) asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(ptrdiff_t(64)) : "memory")
#define TILE_STORE(tile, to) asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(ptrdiff_t(64)) : "memory")
#define TILE_MULTIPLY_BFLOATS(sums, x, w) asm volatile("tdpbf16ps %%tmm" #w ", %%tmm" #x ", %%tmm" #sums ::)
#define TILE_MULTIPLY_UPPER(sums, x, w) asm volatile("tdpbssd %%tmm" #w ", %%tmm" #x ", %%tmm" #sums ::)
#define TILE_MULTIPLY_LOWER(sums, x, w) asm volatile("tdpbusd %%tmm" #w ", %%tmm" #x ", %%tmm" #sums ::)
#endif

// Registers 0 to 3 are sums, 4 and 5 activations, 6 and 7 weights.
inline void configure_tiles(const Panels& form) {
  TileConfig config;
  for (int i = 0; i < 8; i++) {
    config.rows[i] = uint8_t(i < 6 ? kGroup : form.step * form.size / 4);
    config.row_bytes[i] = uint16_t(i == 4 || i == 5 ? form.step * form.size : 64);
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

// Puts the weights of blocks of a tile in the order of registers: four bytes of adjacent rows of each column in turn, which
// are bytes of eight bits or two numbers of bfloat16. Returns where the next blocks begin.
template <WeightKind kKind>
const uint8_t* to_registers(const PackedWeights& w, const uint8_t* tile, int blocks, uint8_t* out, float* scales) {
  const int scale_bytes = w.half_scales ? 2 : 4, block = w.block;
  const bool zero_points = w.zero_points;
  const Shorts numbers = vector_of(zero_points ? kDifferences : kNumbers), in_fours = vector_of(kInFours);
  const Ints low = all(0x000f000f);
  for (int b = 0; b < blocks; b++, scales += kTile) {
    store(scales, w.half_scales ? load_half(tile) : load(tile));
    tile += kTile * scale_bytes;
    Shorts zeros = Shorts{};  // each twice
    if (zero_points) {
      const Ints points = bytes_at(tile);
      zeros = (Shorts)((points & all(0xffff)) | points << 16);
      tile += kTile;
    }
    for (int k = 0; k < block; k += 8) {
      if (kKind == WeightKind::kInt4) {
        const Ints rows = integers_at(tile);
        tile += 64;
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++, out += 64) {
          Shorts four = (Shorts)((Unsigned)rows >> 4 * i);  // of a number, its last five bits count
          if (zero_points) four = (four & (Shorts)low) - zeros;
          const Ints halves = permute(four, numbers);
          std::memcpy(out, &halves, sizeof halves);
        }
      } else {
        for (int i = 0; i < 2; i++, out += 64, tile += 64) {
          const Ints fours = permute(in_fours, (Shorts)integers_at(tile));
          std::memcpy(out, &fours, sizeof fours);
        }
      }
    }
  }
  return tile;
}

// A block of two tiles (or one), and a group of rows to multiply it by.
struct Unit {
  const uint8_t *panel, *weights;  // the second tile's kSpanBytes later
  const float* scales;             // the second tile's kSpan later
  float* totals;                   // [tiles, kGroup, kTile]
  int rows;                        // of the group; the numbers of others are undefined
};

// Multiplies units one by one. While the registers are at one of them, the sums of the one before are scaled and added.
// kJoint: the multiples of 256 and the bytes share a sum, which stays below 2^24 in blocks of four bits up to 32.
template <WeightKind kKind, bool kJoint, int kTiles>
class Multiplier {
 public:
  explicit Multiplier(const Panels& form) : form_(form) {}

  SPECEXPORT_INLINE void multiply(const Unit unit) {
    const uint8_t *x = unit.panel + kGroup * 4, *weights = unit.weights;
    TILE_ZERO(0);
    TILE_ZERO(1);
    if (!kJoint) {
      TILE_ZERO(2);
      TILE_ZERO(3);
    }
    for (int s = 0; s < form_.steps; s++, x += 2 * kRegister, weights += form_.step * form_.size * kTile) {
      TILE_LOAD(6, weights);
      TILE_LOAD(4, x);
      if (kTiles > 1) TILE_LOAD(7, weights + kSpanBytes);
      TILE_LOAD(5, x + kRegister);
      if (kKind == WeightKind::kInt8) {
        TILE_MULTIPLY_UPPER(0, 4, 6);
        if (kTiles > 1) TILE_MULTIPLY_UPPER(1, 4, 7);
        TILE_MULTIPLY_LOWER(2, 5, 6);
        if (kTiles > 1) TILE_MULTIPLY_LOWER(3, 5, 7);
        continue;
      }
      TILE_MULTIPLY_BFLOATS(0, 4, 6);
      if (kTiles > 1) TILE_MULTIPLY_BFLOATS(1, 4, 7);
      if (kJoint) {
        TILE_MULTIPLY_BFLOATS(0, 5, 6);
        if (kTiles > 1) TILE_MULTIPLY_BFLOATS(1, 5, 7);
      } else {
        TILE_MULTIPLY_BFLOATS(2, 5, 6);
        if (kTiles > 1) TILE_MULTIPLY_BFLOATS(3, 5, 7);
      }
    }
    if (count_) add(before_, sums_[~count_ & 1]);
    float(*const to)[2][kGroup][kTile] = sums_[count_++ & 1];
    TILE_STORE(0, to[0][0]);
    if (!kJoint) TILE_STORE(2, to[0][1]);
    if (kTiles > 1) TILE_STORE(1, to[1][0]);
    if (kTiles > 1 && !kJoint) TILE_STORE(3, to[1][1]);
    before_ = unit;
  }

  void finish() {
    if (count_) add(before_, sums_[~count_ & 1]);
    count_ = 0;
  }

 private:
  static SPECEXPORT_INLINE void add(const Unit unit, const float (*sums)[2][kGroup][kTile]) {
    const float* const row_scales = reinterpret_cast<const float*>(unit.panel);
    float* const totals = unit.totals;
    Vec scales[kTiles];
    for (int t = 0; t < kTiles; t++) scales[t] = load(unit.scales + t * kSpan);
#pragma GCC unroll 16
    for (int m = 0; m < kGroup; m++) {
      if (m == unit.rows) break;
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; t++) {
        Vec sum = load(sums[t][0][m]);
        if (kKind == WeightKind::kInt8) sum = to_floats(((Ints)sum << 8) + (Ints)load(sums[t][1][m]));
        else if (!kJoint) sum += load(sums[t][1][m]);
        float* const total = totals + (t * kGroup + m) * kTile;
        store(total, fma(sum, scales[t] * all(row_scales[m]), load(total)));
      }
    }
  }

  const Panels& form_;
  alignas(64) float sums_[2][2][2][kGroup][kTile];  // of a unit: a tile's multiples of 256 (or all), and bytes
  Unit before_ = {};
  int count_ = 0;
};

template <WeightKind kKind, bool kJoint, int kTiles>
void product_of_panels(const PackedWeights& w, const Activations& x, int first, int last, float* y, ptrdiff_t stride) {
  const Panels form(w);
  const size_t block_bytes = w.block_bytes();
  const int blocks = w.depth / w.block, block = w.block, most = kSpan / block, groups = (x.rows + kGroup - 1) / kGroup;
  alignas(64) uint8_t weights[kTiles][kSpanBytes];
  alignas(64) float scales[kTiles][kSpan], totals[kMostGroups][kTiles][kGroup * kTile];
  Multiplier<kKind, kJoint, kTiles> multiplier(form);
  for (int t = first; t < last; t += kTiles) {
    const uint8_t* tiles[kTiles];
    for (int i = 0; i < kTiles; i++) tiles[i] = w.data + size_t(t + i) * w.tile_bytes();
    std::memset(totals, 0, sizeof totals[0] * size_t(groups));
    for (int from = 0; from < blocks; from += most) {
      const int count = std::min(most, blocks - from);
      for (int i = 0; i < kTiles; i++) tiles[i] = to_registers<kKind>(w, tiles[i], count, weights[i], scales[i]);
      // Where the weights are that come next, which are fetched while these are multiplied.
      const size_t skipped = from + count < blocks ? 0 : (kTiles - 1) * w.tile_bytes();
      for (int g = 0; g < groups; g++) {
        const uint8_t* panel = x.panels + size_t(g) * form.group_bytes + size_t(from) * form.block_bytes;
        for (int b = 0; b < count; b++, panel += form.block_bytes) {
          for (size_t line = 0; g == 0 && line < block_bytes; line += 64)
            for (int i = 0; i < kTiles; i++) fetch<true>(tiles[i] + skipped + size_t(b) * block_bytes + line);
          multiplier.multiply({panel, weights[0] + b * block * form.size * kTile, scales[0] + b * kTile, totals[g][0], std::min(kGroup, x.rows - g * kGroup)});
        }
      }
      multiplier.finish();
    }
    for (int row = 0; row < x.rows; row++)
      for (int i = 0; i < kTiles; i++)
        store(y + row * stride + (t + i) * kTile, load(totals[row / kGroup][i] + row % kGroup * kTile));
  }
}

// The product of few rows, or with the panels of many. The last tile's missing columns have no room in y.
void product_of_many(const PackedWeights& w, const Activations& x, int first, int last, float* y, ptrdiff_t stride) {
  const int full = x.panels ? std::max(first, std::min(last, w.columns / kTile)) : first, even = full - (full - first) % 2;
  if (first < full) {
    configure_tiles(Panels(w));
    auto multiply = [&](auto kind, auto joint) {
      product_of_panels<kind.value, joint.value, 2>(w, x, first, even, y, stride);
      product_of_panels<kind.value, joint.value, 1>(w, x, even, full, y, stride);
    };
    constexpr std::integral_constant<WeightKind, WeightKind::kInt8> kEight;
    constexpr std::integral_constant<WeightKind, WeightKind::kInt4> kFour;
    if (w.kind == WeightKind::kInt8) multiply(kEight, std::false_type());
    else if (w.block > 32) multiply(kFour, std::false_type());
    else multiply(kFour, std::true_type());
    TILE_RELEASE();
  }
  if (full < last) kAvx512Kernels.product(w, x, full, last, y, stride);
}

Kernels with_tile_registers(Kernels kernels) {
  kernels.name = "avx512-amx";
  kernels.product = product_of_many;
  kernels.panel_bytes = panel_bytes;
  kernels.to_panels = to_panels;
  return kernels;
}

}  // namespace

extern const Kernels kAmxKernels;
const Kernels kAmxKernels = with_tile_registers(kAvx512Kernels);

}  // namespace specexport
