// Packing of weights into the order in which products read them.
#pragma once

#include <memory>
#include <string>

#include "graph.h"
#include "kernels.h"

namespace specexport {

// A matrix [depth, columns] of a graph: integers with scales, and optionally zero points, of blocks along the depth, or
// floating-point numbers.
struct Matrix {
  const Value* weights = nullptr;
  const Value* scales = nullptr;  // [depth / block, columns]
  const Value* zeros = nullptr;
  int block = 0;
  bool transposed = false;        // all of them are transposed: an embedding that is also the head

  int64_t depth() const { return weights->dims[transposed ? 1 : 0]; }
  int64_t columns() const { return weights->dims[transposed ? 0 : 1]; }
};

// Whether products can read it; otherwise gives the reason.
bool can_pack(const Matrix& matrix, std::string* reason = nullptr);

// Whether fp16 represents all of its scales exactly; may read fp32 scales.
bool has_half_scales(const Matrix& matrix);

// Its packed form, for this processor's products or another layout; `data` is null.
PackedWeights packed_form(const Matrix& matrix, bool half_scales, Layout layout = kernels().layout);

// Writes form.bytes() bytes to `to` with `threads` threads.
void pack(const Matrix& matrix, const PackedWeights& form, uint8_t* to, int threads);

}  // namespace specexport
