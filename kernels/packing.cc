#include "packing.h"

#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "half.h"

namespace specexport {
namespace {

bool is_integer(Type type) {
  return type == Type::kInt8 || type == Type::kUint8 || type == Type::kInt4 || type == Type::kUint4;
}
bool has_four_bits(Type type) { return type == Type::kInt4 || type == Type::kUint4; }

// The integer at an index of a constant.
int integer_at(const Value& value, size_t index) {
  const uint8_t* bytes = static_cast<const uint8_t*>(value.data);
  switch (value.type) {
    case Type::kInt8: return static_cast<const int8_t*>(value.data)[index];
    case Type::kUint8: return bytes[index];
    case Type::kUint4: return (bytes[index / 2] >> (index % 2 * 4)) & 15;
    default: {
      const int four = (bytes[index / 2] >> (index % 2 * 4)) & 15;
      return four < 8 ? four : four - 16;
    }
  }
}

// What is subtracted from integers of a type so that they are stored as int8, or as unsigned four bits.
int shift_of(Type type) { return type == Type::kUint8 ? 128 : type == Type::kInt4 ? -8 : 0; }

// Write the integers of a block, a row of the tile after another, in the order of a layout.
uint8_t* write_eight_bits(const int8_t* rows, const PackedWeights& form, uint8_t* out) {
  const int group = form.layout == Layout::kPairs ? 2 : form.layout == Layout::kFours ? 4 : 8;
  for (int k = 0; k < form.block; k += group)
    for (int c = 0; c < kTile; c++)
      for (int j = 0; j < group; j++) *out++ = uint8_t(rows[(k + j) * kTile + c]);
  return out;
}

uint8_t* write_four_bits(const int8_t* rows, const PackedWeights& form, uint8_t* out) {
  for (const int8_t* row = rows; row < rows + form.block * kTile; row += 8 * kTile) {
    auto both = [&](int k, int c, int upper_k, int upper_c) {
      *out++ = uint8_t(row[k * kTile + c] | row[upper_k * kTile + upper_c] << 4);
    };
    for (int c = 0; c < kTile; c++) {
      switch (form.layout) {
        case Layout::kPairs:
          for (int j = 0; j < 2; j++) both(j, c, j + 2, c), both(j + 4, c, j + 6, c);
          break;
        case Layout::kFours:
          for (int j = 0; j < 4; j++) both(j, c, j + 4, c);
          break;
        case Layout::kEights:
          if (c % 4 < 2)
            for (int j = 0; j < 8; j++) both(j, c, j, c + 2);
          break;
      }
    }
  }
  return out;
}

void pack_quantized(const Matrix& m, const PackedWeights& form, uint8_t* to, int first, int last) {
  const size_t columns = size_t(form.columns), depth = size_t(form.depth), blocks = depth / size_t(form.block);
  const int shift = shift_of(m.weights->type), scale_bytes = form.half_scales ? 2 : 4;
  const bool four = form.kind == WeightKind::kInt4, narrowed = form.half_scales && m.scales->type == Type::kFloat;
  const uint8_t* scales = static_cast<const uint8_t*>(m.scales->data);
  const uint8_t* raw = static_cast<const uint8_t*>(m.weights->data);
  uint8_t* out = to + size_t(first) * form.tile_bytes();
  std::vector<int8_t> rows(size_t(form.block) * kTile);
  for (int t = first; t < last; t++) {
    const int column = t * kTile, count = form.columns - column < kTile ? form.columns - column : kTile;
    for (int b = 0; b < form.depth / form.block; b++) {
      std::memset(out, 0, size_t(kTile * scale_bytes));
      // Where the scale, and the zero point, of a column's block is.
      auto block_at = [&](int c) {
        return m.transposed ? size_t(column + c) * blocks + size_t(b) : size_t(b) * columns + size_t(column + c);
      };
      for (int c = 0; c < count; c++) {
        if (narrowed) float_to_half(reinterpret_cast<const float*>(scales)[block_at(c)], reinterpret_cast<uint16_t*>(out) + c);
        else std::memcpy(out + c * scale_bytes, scales + block_at(c) * size_t(scale_bytes), size_t(scale_bytes));
      }
      out += kTile * scale_bytes;
      if (form.zero_points) {
        for (int c = 0; c < kTile; c++) {
          int zero = 0;
          if (c < count && m.zeros) zero = integer_at(*m.zeros, block_at(c));
          out[c] = uint8_t(int8_t(zero - shift));
        }
        out += kTile;
      }
      for (int k = 0; k < form.block; k++) {
        const size_t at = (size_t(b) * size_t(form.block) + size_t(k)) * columns + size_t(column);
        int8_t* row = rows.data() + size_t(k) * kTile;
        if (m.transposed) {
          const size_t row_at = size_t(b) * size_t(form.block) + size_t(k);
          for (int c = 0; c < kTile; c++)
            row[c] = c < count ? int8_t(integer_at(*m.weights, size_t(column + c) * depth + row_at) - shift) : 0;
        } else if (!four && shift == 0) {
          std::memset(row, 0, kTile);
          std::memcpy(row, raw + at, size_t(count));
        } else if (four && count == kTile && at % 2 == 0) {
          for (int c = 0; c < kTile; c += 2) {
            const uint8_t byte = raw[(at + size_t(c)) / 2] ^ (m.weights->type == Type::kInt4 ? 0x88 : 0);
            row[c] = byte & 15;
            row[c + 1] = int8_t(byte >> 4);
          }
        } else {
          for (int c = 0; c < kTile; c++)
            row[c] = c < count ? int8_t(integer_at(*m.weights, at + size_t(c)) - shift) : 0;
        }
      }
      out = four ? write_four_bits(rows.data(), form, out) : write_eight_bits(rows.data(), form, out);
    }
  }
}

void pack_floats(const Matrix& m, const PackedWeights& form, uint8_t* to, int first, int last) {
  const size_t bytes = form.kind == WeightKind::kFloat ? 4 : 2, row_bytes = size_t(form.columns) * bytes;
  const uint8_t* from = static_cast<const uint8_t*>(m.weights->data);
  uint8_t* out = to + size_t(first) * form.tile_bytes();
  uint8_t row[kTile * 4];
  for (int t = first; t < last; t++) {
    const int column = t * kTile, count = form.columns - column < kTile ? form.columns - column : kTile;
    for (int k = 0; k < form.depth; k++, out += kTile * bytes) {
      std::memset(row, 0, sizeof row);
      if (m.transposed) {
        for (int c = 0; c < count; c++)
          std::memcpy(row + size_t(c) * bytes, from + (size_t(column + c) * size_t(form.depth) + size_t(k)) * bytes, bytes);
      } else {
        std::memcpy(row, from + size_t(k) * row_bytes + size_t(column) * bytes, size_t(count) * bytes);
      }
      if (form.kind == WeightKind::kBfloat16) {
        for (int c = 0; c < 8; c++) {
          std::memcpy(out + 4 * c, row + 2 * c, 2);
          std::memcpy(out + 4 * c + 2, row + 2 * (c + 8), 2);
        }
      } else {
        std::memcpy(out, row, kTile * bytes);
      }
    }
  }
}

}  // namespace

bool can_pack(const Matrix& m, std::string* reason) {
  auto refuse = [&](const char* why) {
    if (reason) *reason = why;
    return false;
  };
  const Value& w = *m.weights;
  if (!w.constant || w.dims.size() != 2) return refuse("the weights are not a constant matrix");
  if (w.dims[0] < 1 || w.dims[1] < 1 || w.dims[0] > 1 << 24 || w.dims[1] > 1 << 24) return refuse("its size");
  if (!m.scales) {
    const bool floats = w.type == Type::kFloat || w.type == Type::kFloat16 || w.type == Type::kBfloat16;
    return floats || refuse("the type of its weights");
  }
  if (!is_integer(w.type)) return refuse("the type of its weights");
  if (m.block < 16 || m.block > 128 || m.block % 16 || m.depth() % m.block) return refuse("the size of its blocks");
  std::vector<int64_t> blocks = {m.depth() / m.block, m.columns()};
  if (m.transposed) std::swap(blocks[0], blocks[1]);
  if (!m.scales->constant || m.scales->dims != blocks) return refuse("the shape of its scales");
  if (m.scales->type != Type::kFloat && m.scales->type != Type::kFloat16) return refuse("the type of its scales");
  if (m.zeros && (!m.zeros->constant || m.zeros->dims != blocks || m.zeros->type != w.type))
    return refuse("its zero points");
  return true;
}

bool has_half_scales(const Matrix& m) {
  if (!m.scales || m.scales->type == Type::kFloat16) return m.scales;
  const float* scales = static_cast<const float*>(m.scales->data);
  uint16_t half;
  for (int64_t i = 0, count = m.columns() * m.depth() / m.block; i < count; i++)
    if (!float_to_half(scales[i], &half)) return false;
  return true;
}

PackedWeights packed_form(const Matrix& m, bool half_scales, Layout layout) {
  PackedWeights form = {};
  form.layout = layout;
  const Type type = m.weights->type;
  form.depth = int(m.depth());
  form.columns = int(m.columns());
  form.block = m.scales ? m.block : 0;
  form.half_scales = half_scales;
  // Products take eight from symmetric four bits, and nothing from symmetric eight; all else is said by zero points.
  form.zero_points = m.zeros || type == Type::kUint8 || type == Type::kUint4;
  form.kind = has_four_bits(type) ? WeightKind::kInt4
              : m.scales          ? WeightKind::kInt8
              : type == Type::kFloat16 ? WeightKind::kFloat16
              : type == Type::kBfloat16 ? WeightKind::kBfloat16
                                        : WeightKind::kFloat;
  return form;
}

void pack(const Matrix& matrix, const PackedWeights& form, uint8_t* to, int threads) {
  const int tiles = form.tiles();
  auto part = [&](int first, int last) {
    form.quantized() ? pack_quantized(matrix, form, to, first, last) : pack_floats(matrix, form, to, first, last);
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; i++) others.emplace_back(part, tiles * i / threads, tiles * (i + 1) / threads);
  part(0, tiles / threads);
  for (std::thread& thread : others) thread.join();
}

}  // namespace specexport
