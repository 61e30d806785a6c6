// Scales and offsets of quantized weights that a graph computes from constants: worked out once, before weights are packed.
#pragma once

#include <deque>
#include <vector>

#include "graph.h"

namespace specexport {

// By node: whether it makes a scale of a DequantizeLinear, or a matrix of a product, out of constants alone: a Cast to
// float, a Mul, a Reshape or a Transpose. `banned` nodes do not. Matrices that products read as they are stored, and what
// only casts or transposes them, are left out.
std::vector<bool> constant_nodes(const Graph& graph, const std::vector<bool>& banned);

// Computes values that such nodes make, and what they are made of; the numbers lie in `memory`.
void evaluate(Graph& graph, const std::vector<int>& values, std::deque<std::vector<float>>& memory);

}  // namespace specexport
