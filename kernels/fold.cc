#include "fold.h"

#include <stdexcept>

#include "half.h"

namespace specexport {
namespace {

std::vector<int> producers(const Graph& graph) {
  std::vector<int> found(graph.values.size(), -1);
  for (size_t n = 0; n < graph.nodes.size(); n++)
    for (int value : graph.nodes[n].outputs)
      if (value >= 0) found[size_t(value)] = int(n);
  return found;
}

bool has_sizes(const Value& value) {
  for (int64_t size : value.dims)
    if (size < 1) return false;
  return value.ranked;
}

bool is_number(Type type) {
  return type == Type::kFloat || type == Type::kFloat16 || type == Type::kInt8 || type == Type::kUint8;
}

// Whether evaluate() can compute what a node makes of constants.
bool computable(const Graph& graph, const Node& node) {
  if (node.outputs.size() != 1 || !(node.domain.empty() || node.domain == "ai.onnx")) return false;
  const Value &x = graph.values[size_t(node.inputs[0])], &y = graph.values[size_t(node.outputs[0])];
  if (!has_sizes(x) || !has_sizes(y) || y.type != Type::kFloat) return false;
  if (node.type == "Cast") return is_number(x.type);
  if (x.type != Type::kFloat) return false;
  if (node.type == "Reshape") return true;
  if (node.type == "Transpose") {
    auto perm = node.attributes.find("perm");
    return x.dims.size() == 2 && (perm == node.attributes.end() || perm->second.integers == std::vector<int64_t>{1, 0});
  }
  // [S,G,N] times what is the same along G, or along N.
  const Value& by = graph.values[size_t(node.inputs.back())];
  if (node.type != "Mul" || !has_sizes(by) || by.type != Type::kFloat || y.dims != x.dims || x.dims.size() != 3) return false;
  for (size_t i = 0; i < 3; i++)
    if (by.dims.size() != 3 || (by.dims[i] != x.dims[i] && by.dims[i] != 1)) return false;
  return true;
}

// Whether a value is made of constants by nodes that evaluate() can compute; notes these nodes.
bool made_of_constants(const Graph& graph, const std::vector<int>& producer, const std::vector<bool>& banned, int value,
                       std::vector<size_t>& nodes, int depth) {
  if (value < 0) return false;
  if (graph.values[size_t(value)].constant) return true;
  const int n = producer[size_t(value)];
  if (n < 0 || banned[size_t(n)] || depth > 8 || !computable(graph, graph.nodes[size_t(n)])) return false;
  nodes.push_back(size_t(n));
  for (int input : graph.nodes[size_t(n)].inputs)
    if (!made_of_constants(graph, producer, banned, input, nodes, depth + 1)) return false;
  return true;
}

}  // namespace

std::vector<bool> constant_nodes(const Graph& graph, const std::vector<bool>& banned) {
  const std::vector<int> producer = producers(graph);
  std::vector<bool> found(graph.nodes.size(), false);
  for (const Node& node : graph.nodes) {
    const bool scale = node.type == "DequantizeLinear" && node.inputs.size() > 1;
    if (!scale && (node.type != "MatMul" || node.inputs.size() != 2)) continue;
    std::vector<size_t> nodes;
    if (!made_of_constants(graph, producer, banned, node.inputs[1], nodes, 0)) continue;
    bool products = false;
    for (size_t n : nodes) products = products || graph.nodes[n].type == "Mul";
    if (scale || products)
      for (size_t n : nodes) found[n] = true;
  }
  return found;
}

namespace {

void evaluate(Graph& graph, const std::vector<int>& producer, int value, std::deque<std::vector<float>>& memory) {
  Value& y = graph.values[size_t(value)];
  if (y.data) return;
  const int n = producer[size_t(value)];
  if (n < 0) throw std::runtime_error("constant " + y.name + " has no data; build the bundle again");
  const Node& node = graph.nodes[size_t(n)];
  for (int input : node.inputs) evaluate(graph, producer, input, memory);
  const Value& x = graph.values[size_t(node.inputs[0])];
  size_t count = 1;
  for (int64_t size : y.dims) count *= size_t(size);
  size_t given = 1;
  for (int64_t size : x.dims) given *= size_t(size);
  if (given != count) throw std::runtime_error("constant " + y.name + " has another size; build the bundle again");
  memory.emplace_back(count);
  float* to = memory.back().data();
  if (node.type == "Cast") {
    for (size_t i = 0; i < count; i++) {
      switch (x.type) {
        case Type::kFloat: to[i] = static_cast<const float*>(x.data)[i]; break;
        case Type::kFloat16: to[i] = half_to_float(static_cast<const uint16_t*>(x.data)[i]); break;
        case Type::kInt8: to[i] = static_cast<const int8_t*>(x.data)[i]; break;
        default: to[i] = static_cast<const uint8_t*>(x.data)[i];
      }
    }
  } else {
    const float* from = static_cast<const float*>(x.data);
    if (node.type == "Transpose") {
      const size_t rows = size_t(x.dims[0]), columns = size_t(x.dims[1]);
      for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++) to[c * rows + r] = from[r * columns + c];
    } else if (node.type == "Mul") {
      const Value& by = graph.values[size_t(node.inputs[1])];
      const float* factor = static_cast<const float*>(by.data);
      const size_t middle = size_t(y.dims[1]), inner = size_t(y.dims[2]);
      size_t steps[3], step = 1;  // 0 where the factor is the same
      for (size_t i = 3; i-- > 0; step *= size_t(by.dims[i])) steps[i] = by.dims[i] == 1 ? 0 : step;
      for (size_t i = 0; i < size_t(y.dims[0]); i++)
        for (size_t j = 0; j < middle; j++)
          for (size_t k = 0; k < inner; k++, from++)
            *to++ = *from * factor[i * steps[0] + j * steps[1] + k * steps[2]];
    } else {
      for (size_t i = 0; i < count; i++) to[i] = from[i];
    }
  }
  y.data = memory.back().data();
  y.bytes = count * sizeof(float);
}

}  // namespace

void evaluate(Graph& graph, const std::vector<int>& values, std::deque<std::vector<float>>& memory) {
  const std::vector<int> producer = producers(graph);
  for (int value : values) evaluate(graph, producer, value, memory);
}

}  // namespace specexport
