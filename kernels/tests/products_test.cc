// Products: packed from what a graph holds, and compared with sums in double precision.
#include <algorithm>

#include "../packing.h"
#include "check.h"

namespace specexport::tests {
namespace {

uint16_t to_half(float x) {  // of a number that fp16 has, but for rounding
  int exponent;
  const float fraction = std::frexp(std::fabs(x), &exponent);
  if (x == 0 || exponent < -13) return 0;
  const int mantissa = int(fraction * 2048);
  return uint16_t((x < 0 ? 0x8000 : 0) | (exponent + 14) << 10 | (mantissa & 0x3ff));
}
float from_half(uint16_t h) {
  const int exponent = h >> 10 & 31;
  const float x = std::ldexp(float((h & 0x3ff) | (exponent ? 0x400 : 0)), (exponent ? exponent : 1) - 25);
  return h & 0x8000 ? -x : x;
}

struct Case {
  Value weights, scales, zeros;
  std::vector<uint8_t> weight_data, scale_data, zero_data, packed_data;
  std::vector<double> numbers;  // [depth, columns], what the weights stand for
  PackedWeights packed;
  char text[160];
};

// Numbers of a type in the bytes of a constant; four bits two a byte.
void put(std::vector<uint8_t>& bytes, Type type, const std::vector<int>& integers) {
  const bool four = type == Type::kInt4 || type == Type::kUint4;
  bytes.assign(four ? (integers.size() + 1) / 2 : integers.size(), 0);
  for (size_t i = 0; i < integers.size(); i++) {
    if (four) bytes[i / 2] = uint8_t(bytes[i / 2] | (integers[i] & 15) << (i % 2 * 4));
    else bytes[i] = uint8_t(integers[i]);
  }
}

void set(Value& value, Type type, std::vector<int64_t> dims, const std::vector<uint8_t>& bytes) {
  value.type = type;
  value.ranked = value.constant = true;
  value.dims = std::move(dims);
  value.data = bytes.data();
  value.bytes = bytes.size();
}

void make(Case& c, const Kernels& kernels, Random& random, Type type) {
  const bool quantized = type != Type::kFloat && type != Type::kFloat16 && type != Type::kBfloat16;
  const int block = random.any_of({16, 32, 64, 128, 48}), columns = random.any_of({1, 7, 16, 17, 33, 64, 81, 130, 160});
  const int depth = quantized ? block * random.integer(1, 5) : random.integer(1, random.chance(0.3) ? 800 : 200);
  const size_t count = size_t(depth) * size_t(columns), blocks = quantized ? size_t(depth / block) : 0;
  const bool zero_points = quantized && random.chance(0.5), half = quantized && random.chance(0.5);
  const bool narrow = half && random.chance(0.5);  // of fp16, as the graph says; else fp32 that fp16 holds
  const bool transposed = random.chance(0.3);
  std::snprintf(c.text, sizeof c.text, "%s seed %llu type %d depth %d columns %d block %d%s%s%s", kernels.name,
                static_cast<unsigned long long>(random.seed), int(type), depth, columns, block,
                zero_points ? " zero points" : "", half ? " half" : "", transposed ? " transposed" : "");
  // What stands at a row and a column of `rows` rows, in the order of the graph's constant.
  auto turned = [&](auto values, size_t rows) {
    const auto straight = values;
    if (transposed)
      for (size_t i = 0; i < values.size(); i++) values[i % size_t(columns) * rows + i / size_t(columns)] = straight[i];
    return values;
  };
  auto dims = [&](int64_t rows) {
    return transposed ? std::vector<int64_t>{columns, rows} : std::vector<int64_t>{rows, columns};
  };
  c.numbers.resize(count);
  Matrix matrix;
  if (quantized) {
    const bool is_signed = type == Type::kInt8 || type == Type::kInt4, four = type == Type::kInt4 || type == Type::kUint4;
    const int most = four ? (is_signed ? 7 : 15) : (is_signed ? 127 : 255), least = is_signed ? -most - 1 : 0;
    std::vector<int> integers(count), zeros(blocks * size_t(columns), 0);
    for (int& x : integers) x = random.chance(0.1) ? (random.chance(0.5) ? least : most) : random.integer(least, most);
    if (zero_points)
      for (int& x : zeros) x = random.integer(least, most);
    std::vector<float> scales(blocks * size_t(columns));
    // Below 2^-14 fp16 has fewer bits.
    for (float& scale : scales) scale = (0.001f + 0.01f * std::fabs(random.normal())) * (random.chance(0.3) ? 0.01f : 1);
    if (half)
      for (float& scale : scales) scale = scale < 6e-5f ? std::rint(scale * 16777216) / 16777216 : from_half(to_half(scale));
    for (int k = 0; k < depth; k++)
      for (int n = 0; n < columns; n++) {
        const size_t at = size_t(k) * size_t(columns) + size_t(n), b = size_t(k / block) * size_t(columns) + size_t(n);
        c.numbers[at] = double(integers[at] - zeros[b]) * double(scales[b]);
      }
    put(c.weight_data, type, turned(integers, size_t(depth)));
    put(c.zero_data, type, turned(zeros, blocks));
    const std::vector<float> in_order = turned(scales, blocks);
    c.scale_data.resize(scales.size() * (narrow ? 2 : 4));
    for (size_t i = 0; i < scales.size(); i++) {
      const uint16_t bits = in_order[i] < 6.1e-5f ? uint16_t(in_order[i] * 16777216) : to_half(in_order[i]);
      if (narrow) std::memcpy(&c.scale_data[2 * i], &bits, 2);
      else std::memcpy(&c.scale_data[4 * i], &in_order[i], 4);
    }
    set(c.scales, narrow ? Type::kFloat16 : Type::kFloat, dims(int64_t(blocks)), c.scale_data);
    set(c.zeros, type, dims(int64_t(blocks)), c.zero_data);
    matrix.scales = &c.scales;
    matrix.zeros = zero_points ? &c.zeros : nullptr;
    matrix.block = block;
  } else {
    std::vector<uint32_t> bits(count);  // of a number in its type
    for (size_t i = 0; i < count; i++) {
      float x = random.normal();
      std::memcpy(&bits[i], &x, 4);
      if (type == Type::kBfloat16) {
        bits[i] &= 0xffff0000;
        std::memcpy(&x, &bits[i], 4);
        bits[i] >>= 16;
      } else if (type == Type::kFloat16) {
        bits[i] = to_half(x);
        x = from_half(uint16_t(bits[i]));
      }
      c.numbers[i] = double(x);
    }
    const size_t bytes = type == Type::kFloat ? 4 : 2;
    c.weight_data.resize(count * bytes);
    const std::vector<uint32_t> in_order = turned(bits, size_t(depth));
    for (size_t i = 0; i < count; i++) std::memcpy(&c.weight_data[bytes * i], &in_order[i], bytes);
  }
  set(c.weights, type, dims(depth), c.weight_data);
  matrix.weights = &c.weights;
  matrix.transposed = transposed;
  std::string reason;
  expect(can_pack(matrix, &reason), "%s: cannot be packed: %s", c.text, reason.c_str());
  expect(has_half_scales(matrix) == half, "%s: fp16 holds its scales: %d", c.text, !half);
  c.packed = packed_form(matrix, half, kernels.layout);
  c.packed_data.assign(c.packed.bytes(), 0xa5);
  pack(matrix, c.packed, c.packed_data.data(), random.integer(1, 3));
  c.packed.data = c.packed_data.data();
}

constexpr float kUntouched = 12345.0f;

// The product of `rows` rows in one call, or with the tiles divided at random places; checks that nothing else is written.
// It is added to `base`, [rows, columns], unless that is null.
std::vector<float> multiply(const Case& c, const Kernels& kernels, Random& random, const float* x, int rows,
                            ptrdiff_t stride, bool divide, const float* base = nullptr) {
  const PackedWeights& w = c.packed;
  const int blocks = w.quantized() ? w.depth / w.block : 0;
  std::vector<int16_t> integers(size_t(rows) * size_t(w.depth));
  std::vector<float> scales(size_t(rows * blocks));
  std::vector<int32_t> sums(size_t(rows * blocks));
  std::vector<uint8_t> panels(blocks && kernels.panel_bytes ? kernels.panel_bytes(w, rows) : 0, 0xa5);
  for (int r = 0; blocks && r < rows; r++) {
    // The blocks of a row may be divided too.
    const int first = divide ? random.integer(0, blocks) : blocks;
    const size_t at = size_t(r * blocks), begin = size_t(r) * size_t(w.depth);
    kernels.quantize(x + r * stride, first * w.block, w.block, &integers[begin], &scales[at], &sums[at]);
    if (first < blocks) {
      const size_t skipped = size_t(first * w.block);
      kernels.quantize(x + r * stride + skipped, w.depth - int(skipped), w.block, &integers[begin + skipped],
                       &scales[at + size_t(first)], &sums[at + size_t(first)]);
    }
  }
  Activations a = {rows, w.depth, w.block, x, stride, integers.data(), scales.data(), sums.data(), nullptr};
  if (!panels.empty()) {
    const int first = divide ? random.integer(0, blocks) : blocks;
    kernels.to_panels(w, a, first, blocks, panels.data());
    kernels.to_panels(w, a, 0, first, panels.data());
    a.panels = panels.data();
  }
  const int apart = w.columns + random.integer(0, 3);
  std::vector<float> y(size_t(rows) * size_t(apart) + 1, kUntouched);
  a.adds = base != nullptr;
  for (int r = 0; base && r < rows; r++) std::copy_n(base + r * w.columns, w.columns, y.begin() + r * apart);
  for (int from = 0; from < w.tiles();) {
    const int to = divide ? random.integer(from + 1, w.tiles()) : w.tiles();
    kernels.product(w, a, from, to, y.data(), apart);
    from = to;
  }
  std::vector<float> dense;
  for (int r = 0; r < rows; r++) {
    const auto row = y.begin() + r * apart;
    dense.insert(dense.end(), row, row + w.columns);
    for (int n = w.columns; n < apart; n++) expect(row[n] == kUntouched, "%s: writes beside its columns", c.text);
  }
  expect(y.back() == kUntouched, "%s: writes behind its rows", c.text);
  return dense;
}

// The bound: half a step of the activations' integers times the sum of the weights, for every block, and the roundings
// of a sum of fp32 numbers in order.
void compare(const Case& c, const float* x, const float* base, const float* y) {
  const PackedWeights& w = c.packed;
  for (int n = 0; n < w.columns; n++) {
    double expected = base ? double(base[n]) : 0, bound = 0, sum = std::fabs(expected), largest = 0, block_sum = 0;
    for (int k = 0; k < w.depth; k++) {
      const double weight = c.numbers[size_t(k) * size_t(w.columns) + size_t(n)];
      expected += double(x[k]) * weight;
      sum += std::fabs(double(x[k]) * weight);
      largest = std::fmax(largest, std::fabs(double(x[k])));
      block_sum += std::fabs(weight);
      if (w.quantized() && (k + 1) % w.block == 0) {
        bound += largest / 32639 * 0.502 * block_sum + 4 * kUnit * largest * block_sum;
        largest = block_sum = 0;
      }
    }
    bound += ((w.quantized() ? w.depth / w.block : w.depth) + 4) * kUnit * (sum + bound) + 1e-30;
    expect(is_near(y[n], expected, bound), "%s: column %d is %.9g, expected %.9g within %.3g", c.text, n, double(y[n]),
           expected, bound);
  }
}

}  // namespace

void test_products(const Kernels& kernels, Random& random) {
  for (Type type : {Type::kInt8, Type::kUint8, Type::kInt4, Type::kUint4, Type::kBfloat16, Type::kFloat16, Type::kFloat}) {
    Case c;
    make(c, kernels, random, type);
    const int depth = c.packed.depth, columns = c.packed.columns, rows = random.integer(1, 40);
    const ptrdiff_t stride = depth + random.integer(0, 5);
    std::vector<float> x = random.normals(size_t(rows * stride), random.any_of({1e-3f, 1.0f, 300.0f}));
    for (int i = 0; i < 3; i++) x[size_t(random.integer(0, int(x.size()) - 1))] *= 1000;  // massive activations
    if (random.chance(0.3)) std::fill(x.begin(), x.begin() + depth, 0.0f);
    const std::vector<float> addends = random.normals(size_t(rows * columns));
    const bool adds = (type == Type::kFloat16 || type == Type::kFloat) && random.chance(0.5);
    auto base = [&](int row) { return adds ? &addends[size_t(row * columns)] : nullptr; };
    const std::vector<float> all = multiply(c, kernels, random, x.data(), rows, stride, false, base(0));
    for (int r = 0; r < rows; r++) {
      const float* const expected = &all[size_t(r * columns)];
      compare(c, &x[size_t(r * stride)], base(r), expected);
      const std::vector<float> alone = multiply(c, kernels, random, &x[size_t(r * stride)], 1, stride, false, base(r));
      expect(same_bits(alone.data(), expected, size_t(columns)), "%s: row %d of %d differs from the row alone", c.text, r, rows);
    }
    for (int i = 0; i < 6; i++) {  // some of the rows, with the work divided
      const int first = random.integer(0, rows - 1), count = random.integer(1, rows - first);
      const std::vector<float> some = multiply(c, kernels, random, &x[size_t(first * stride)], count, stride, true, base(first));
      expect(same_bits(some.data(), &all[size_t(first * columns)], some.size()), "%s: rows %d to %d of %d differ",
             c.text, first, first + count, rows);
    }
    const int bad = random.integer(0, rows - 1);
    const float what = random.any_of({NAN, INFINITY, -INFINITY});
    x[size_t(bad * stride + random.integer(0, depth - 1))] = what;
    const std::vector<float> with_bad = multiply(c, kernels, random, x.data(), rows, stride, true, base(0));
    for (int r = 0; r < rows; r++) {
      const float* const row = &with_bad[size_t(r * columns)];
      if (r != bad) {
        expect(same_bits(row, &all[size_t(r * columns)], size_t(columns)), "%s: row %d changes with NaN in row %d", c.text, r, bad);
      } else {
        for (int n = 0; n < columns; n++) expect(!std::isfinite(row[n]), "%s: a row with %g has the result %g", c.text, double(what), double(row[n]));
      }
    }
  }
}

}  // namespace specexport::tests
