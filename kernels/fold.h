// Constant folding of the scales and offsets of quantized weights, once, before weights are packed.
#pragma once

#include <deque>
#include <vector>

#include "graph.h"

namespace specexport {

// For each node, whether it computes a scale of a DequantizeLinear, or a matrix of a product, from constants only, by a
// Cast to float, a Mul, a Reshape or a Transpose. `banned` nodes do not. Matrices that products read directly, and casts
// or transpositions of them, are excluded.
std::vector<bool> constant_nodes(const Graph& graph, const std::vector<bool>& banned);

// Computes the values of such nodes and of their inputs; the results are stored in `memory`.
void evaluate(Graph& graph, const std::vector<int>& values, std::deque<std::vector<float>>& memory);

}  // namespace specexport
