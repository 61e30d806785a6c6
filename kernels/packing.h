// Weights brought into the order in which products read them.
#pragma once

#include <memory>
#include <string>

#include "graph.h"
#include "kernels.h"

namespace specexport {

// A matrix [depth, columns] as a graph holds it: integers with the scales, and perhaps zero points, of blocks along the
// depth, or floating point.
struct Matrix {
  const Value* weights = nullptr;
  const Value* scales = nullptr;  // [depth / block, columns]
  const Value* zeros = nullptr;
  int block = 0;
  bool transposed = false;        // all of them are the other way round: an embedding that is also the head

  int64_t depth() const { return weights->dims[transposed ? 1 : 0]; }
  int64_t columns() const { return weights->dims[transposed ? 0 : 1]; }
};

// Whether products can read it; says why not otherwise.
bool can_pack(const Matrix& matrix, std::string* reason = nullptr);

// Whether fp16 holds all of its scales exactly; fp32 ones may be read to find out.
bool has_half_scales(const Matrix& matrix);

// How it will be packed, for this processor's products or those of another layout; `data` is null.
PackedWeights packed_form(const Matrix& matrix, bool half_scales, Layout layout = kernels().layout);

// Writes form.bytes() bytes at `to`, on `threads` threads.
void pack(const Matrix& matrix, const PackedWeights& form, uint8_t* to, int threads);

}  // namespace specexport
