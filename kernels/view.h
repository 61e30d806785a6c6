// Strided tensors, and the memory of a program's steps.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "graph.h"

namespace specexport {

constexpr int kMostDims = 8;

inline size_t element_size(Type type) {
  switch (type) {
    case Type::kFloat: case Type::kInt32: return 4;
    case Type::kInt64: case Type::kDouble: return 8;
    case Type::kFloat16: case Type::kBfloat16: return 2;
    default: return 1;
  }
}

struct View {
  Type type = Type::kNone;
  int rank = 0;
  int64_t dims[kMostDims] = {};
  int64_t strides[kMostDims] = {};  // in elements
  char* data = nullptr;

  template <typename T>
  T* as() const { return reinterpret_cast<T*>(data); }
  float* floats() const { return as<float>(); }
  int64_t count() const {
    int64_t n = 1;
    for (int i = 0; i < rank; i++) n *= dims[i];
    return n;
  }
  int64_t last() const { return rank ? dims[rank - 1] : 1; }
  std::vector<int64_t> shape() const { return std::vector<int64_t>(dims, dims + rank); }
  bool contiguous() const {
    int64_t expected = 1;
    for (int i = rank - 1; i >= 0; i--) {
      if (dims[i] != 1 && strides[i] != expected) return false;
      expected *= dims[i];
    }
    return true;
  }
  void set(const std::vector<int64_t>& shape) {
    if (shape.size() > size_t(kMostDims)) throw std::runtime_error("a tensor has more than 8 dimensions");
    rank = int(shape.size());
    int64_t stride = 1;
    for (int i = rank - 1; i >= 0; i--) {
      dims[i] = shape[size_t(i)];
      strides[i] = stride;
      stride *= dims[i];
    }
  }
  // The elements in rows of the last dimension: row r begins at offset(r).
  int64_t rows() const { return last() ? count() / last() : 0; }
  int64_t row_offset(int64_t row) const {
    int64_t offset = 0;
    for (int i = rank - 2; i >= 0; i--) {
      offset += row % dims[i] * strides[i];
      row /= dims[i];
    }
    return offset;
  }
  bool dense_rows() const { return rank == 0 || last() == 1 || strides[rank - 1] == 1; }
  // Whether rows are evenly spaced, and the distance.
  bool even_rows(int64_t* stride) const {
    int64_t expected = 0;
    bool first = true;
    *stride = last();
    for (int i = rank - 2; i >= 0; i--) {
      if (dims[i] == 1) continue;
      if (first) {
        *stride = strides[i];
        first = false;
      } else if (strides[i] != expected) {
        return false;
      }
      expected = strides[i] * dims[i];
    }
    return true;
  }
};

// A view of the same elements in another shape, if strides can express it.
inline bool reshape_view(const View& from, const std::vector<int64_t>& shape, View* to) {
  *to = from;
  to->set(shape);
  if (from.contiguous()) return true;
  // Dimensions of size 1 are dropped; the others are matched in groups of equal size.
  std::vector<int64_t> dims, strides;
  for (int i = 0; i < from.rank; i++)
    if (from.dims[i] != 1) dims.push_back(from.dims[i]), strides.push_back(from.strides[i]);
  size_t i = 0, j = 0;
  while (i < dims.size() && j < shape.size()) {
    size_t i_end = i + 1, j_end = j + 1;
    int64_t left = dims[i], right = shape[j];
    while (left != right) {
      if (left < right) {
        if (i_end == dims.size()) return false;
        left *= dims[i_end++];
      } else {
        if (j_end == shape.size()) return false;
        right *= shape[j_end++];
      }
    }
    for (size_t k = i; k + 1 < i_end; k++)
      if (strides[k] != strides[k + 1] * dims[k + 1]) return false;
    int64_t stride = strides[i_end - 1];
    for (size_t k = j_end; k-- > j;) {
      to->strides[k] = stride;
      stride *= shape[k];
    }
    i = i_end;
    j = j_end;
  }
  return true;
}

// Reusable blocks of memory, each as large as its first user requested, rounded up.
class Arena {
 public:
  ~Arena() {
    for (Block& block : blocks_) std::free(block.data);
  }
  char* take(size_t bytes) {
    bytes = (bytes + 255) / 256 * 256 + 256;
    Block* best = nullptr;
    for (Block& block : blocks_)
      if (block.free && block.size >= bytes && (!best || block.size < best->size)) best = &block;
    if (!best || best->size > 4 * bytes + (1 << 16)) {
      void* data = nullptr;
      if (posix_memalign(&data, 64, bytes)) throw std::bad_alloc();
      blocks_.push_back({static_cast<char*>(data), bytes, true});
      best = &blocks_.back();
    }
    best->free = false;
    return best->data;
  }
  void give(char* data) {
    for (Block& block : blocks_)
      if (block.data == data) block.free = true;
  }

 private:
  struct Block {
    char* data;
    size_t size;
    bool free;
  };
  std::vector<Block> blocks_;
};

}  // namespace specexport
