// The numeric kernels, chosen once for the processor they run on.
//
// One contract holds for all of them: the bits of a row of the result depend on that row's inputs alone, never on how
// many rows there are, which of them it is, how many threads run, or how a tree of tokens is laid out.
#pragma once

#include <cstddef>
#include <cstdint>

// Functions of this file that kernels call are always inlined: a linker keeps a single copy of an inline function, which
// could be compiled for another processor.
#define SPECEXPORT_INLINE __attribute__((always_inline)) inline

namespace specexport {

// Number of adjacent columns of a weight matrix in its packed form.
constexpr int kTile = 16;

enum class WeightKind : uint32_t { kInt8 = 1, kInt4 = 2, kBfloat16 = 3, kFloat16 = 4, kFloat = 5 };

// The order of a block's integers: those that an instruction set multiplies at once are adjacent.
//   kPairs   int8: pairs of consecutive rows, of each column in turn. int4, unsigned: 64 bytes for eight rows; the 16-bit
//            number of a column and an odd or even row holds rows 0, 2, 4, 6 from its lowest bits on.
//   kFours   int8: four consecutive rows, of each column in turn. int4: 64 bytes for eight rows; a byte of the first four
//            rows in that order, with the row four after it in its upper half.
//   kEights  int8: eight consecutive rows, of each column in turn. int4: 64 bytes for eight rows; 16 bytes hold columns
//            4j and 4j + 1 in that order, with columns 4j + 2 and 4j + 3 in the upper halves.
enum class Layout : uint32_t { kPairs = 0, kFours = 1, kEights = 2 };

// A matrix [depth, columns] in the order in which products read it: tiles of kTile columns, each one stream of bytes. A
// quantized tile consists, block by block along the depth, of kTile scales (fp32 or fp16), kTile zero points (int8) if
// there are any, and the integers. Other kinds store the tile row by row; in bf16, columns c and c + 8 alternate.
// Missing columns of the last tile are zero.
struct PackedWeights {
  WeightKind kind;
  int depth, columns, block;  // block: rows that share a scale; 0 for kinds without scales
  bool zero_points, half_scales;
  const uint8_t* data;
  Layout layout = Layout::kPairs;  // of integers

  SPECEXPORT_INLINE int tiles() const { return (columns + kTile - 1) / kTile; }
  SPECEXPORT_INLINE bool quantized() const { return kind == WeightKind::kInt8 || kind == WeightKind::kInt4; }
  SPECEXPORT_INLINE size_t block_bytes() const {
    return kTile * ((half_scales ? 2u : 4u) + (zero_points ? 1u : 0u)) +
           size_t(block) * kTile / (kind == WeightKind::kInt4 ? 2 : 1);
  }
  SPECEXPORT_INLINE size_t tile_bytes() const {
    if (quantized()) return size_t(depth / block) * block_bytes();
    return size_t(depth) * kTile * (kind == WeightKind::kFloat ? 4 : 2);
  }
  SPECEXPORT_INLINE size_t bytes() const { return size_t(tiles()) * tile_bytes(); }
};

// Rows to multiply by weights. For quantized weights they are integers of at most 16 bits with a scale per block, in the
// order written by quantize() of the same kernels. Products with panels need those only for columns that do not fill a tile.
struct Activations {
  int rows, depth, block;
  const float* values;       // [rows, depth], rows `stride` apart
  ptrdiff_t stride;
  const int16_t* integers;   // [rows, depth]
  const float* scales;       // [rows, depth / block]
  const int32_t* sums;       // [rows, depth / block], of the integers of a block, as quantize() of the same kernels has them
  const uint8_t* panels;     // what to_panels() of the same kernels wrote, or null
  bool adds = false;         // whether products are added to what y holds; only of fp16 and fp32 weights
};

// Rows of a matrix of floats that are multiplied at once. From the second span on, products add to the sums in y.
struct Span {
  int from, to;
};

constexpr int kRowsAttending = 8;  // at once, each with its own scratch memory
SPECEXPORT_INLINE size_t attention_scratch(int length) { return size_t(length) * 2 + 64; }
SPECEXPORT_INLINE size_t attention_scratch(int length, int64_t rows) {
  return attention_scratch(length) * size_t(rows < kRowsAttending ? rows : kRowsAttending);
}

struct AttentionRow {
  const float* query;   // [size]
  const uint8_t* mask;  // [length], nonzero where a key is seen
  float* result;        // [value_size]
  const float* sink;    // an additional score, or null
};

// The attention of rows that share keys and values: a token's heads of a group, and those of other tokens. Those from
// `first` on, which is `length` if there are none, lie elsewhere in memory.
struct AttentionCall {
  const AttentionRow* rows;
  const float* keys;          // [first, size]
  const float* values;        // [first, value_size]
  const float* later_keys;    // [length - first, size]
  const float* later_values;  // [length - first, value_size]
  int count, first, length, size, value_size;  // count: of rows
  float scale, softcap;
  float* scratch;       // attention_scratch(length, count) floats
};

enum class Unary { kSigmoid, kTanh, kExp, kErf, kSqrt, kReciprocal, kCos, kSin, kNegate, kAbs, kRelu, kSoftplus, kLog,
                   kSilu, kGelu, kGeluTanh, kFloor };
enum class Binary { kAdd, kSubtract, kMultiply, kDivide, kMaximum, kMinimum, kPower };

struct Kernels {
  const char* name;
  Layout layout;  // of the weights that its products read
  // Rounds `depth` numbers to 16 bits with a scale per block. A block with a NaN or an infinity gets NaN as its scale.
  void (*quantize)(const float* x, int depth, int block, int16_t* integers, float* scales, int32_t* sums);
  // Columns [first * kTile, last * kTile) of the product, into y[rows, columns], rows `stride` apart.
  void (*product)(const PackedWeights& weights, const Activations& x, int first, int last, float* y, ptrdiff_t stride);
  void (*attention)(const AttentionCall& call);
  void (*unary)(Unary function, const float* x, float* y, size_t count);
  // Strides of 0 repeat one number; others must be 1.
  void (*binary)(Binary function, const float* a, int a_stride, const float* b, int b_stride, float* y, size_t count);
  void (*rms_norm)(const float* x, const float* weight, float epsilon, float* y, int size);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float epsilon, float* y, int size);
  void (*softmax)(const float* x, float* y, int size);
  // y = x[0 .. half) * cos - x[half ..) * sin, and so on; `interleaved` pairs neighbours instead.
  void (*rotate)(const float* x, const float* cos, const float* sin, float* y, int size, int rotated, bool interleaved);
  // y[columns] = x[depth] times a matrix whose elements lie so many floats apart; one of the steps is 1. What is
  // multiplied by a zero of x adds nothing unless the first step is 1.
  void (*multiply)(const float* x, const float* w, ptrdiff_t step_depth, ptrdiff_t step_column, int depth, int columns, float* y);
  // Null without AMX, whose registers multiply several rows: the bytes that they read instead of integers (0 where they
  // are not used), and what rounds blocks [first, last) of all rows and writes them there.
  size_t (*panel_bytes)(const PackedWeights& weights, int rows);
  void (*to_panels)(const PackedWeights& weights, const Activations& x, int first, int last, uint8_t* panels);
};

// The kernels for this processor. For tests, the environment variable SPECEXPORT_ISA selects others; an unknown or
// unsupported name is ignored.
const Kernels& kernels();
// The kernels of an instruction set, or null if this build or this processor lacks it.
const Kernels* kernels_of(const char* name);
// All kernels that run here, best first, terminated by null.
const char* const* instruction_sets();

}  // namespace specexport
