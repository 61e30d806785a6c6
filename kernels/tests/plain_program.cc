// A program for the tests of the plugin: it claims the nodes whose names begin with "ours", those whose names are the
// same up to a slash in one group, and computes them in the plainest way.

#include <cstring>
#include <map>
#include <stdexcept>

#include "../program.h"

namespace specexport {
namespace {

struct Array {
  std::vector<int64_t> dims;
  std::vector<float> numbers;
};

size_t count_of(const std::vector<int64_t>& dims) {
  size_t count = 1;
  for (int64_t size : dims) count *= static_cast<size_t>(size);
  return count;
}

float number(Type type, const void* data, size_t index) {
  switch (type) {
    case Type::kFloat:
      return static_cast<const float*>(data)[index];
    case Type::kInt8:
      return static_cast<const int8_t*>(data)[index];
    case Type::kInt4: {
      uint8_t pair = static_cast<const uint8_t*>(data)[index / 2];
      int value = index % 2 == 0 ? pair & 15 : pair >> 4;
      return static_cast<float>(value >= 8 ? value - 16 : value);
    }
    default:
      throw std::runtime_error("the plain program takes no elements of type " + std::to_string(static_cast<int>(type)));
  }
}

Array array(Type type, const std::vector<int64_t>& dims, const void* data) {
  Array result{dims, std::vector<float>(count_of(dims))};
  for (size_t i = 0; i < result.numbers.size(); ++i) result.numbers[i] = number(type, data, i);
  return result;
}

class PlainProgram : public Program {
 public:
  explicit PlainProgram(Graph graph) : graph_(std::move(graph)) {}

  void run(Run& run) override {
    std::map<int, Array> arrays;
    for (size_t i = 0; i < run.inputs.size(); ++i) {
      const Tensor& tensor = run.inputs[i];
      arrays[graph_.inputs[i]] = array(tensor.type, tensor.dims, tensor.data);
    }
    for (size_t i = 0; i < graph_.values.size(); ++i) {
      const Value& value = graph_.values[i];
      if (value.constant) arrays[static_cast<int>(i)] = array(value.type, value.dims, value.data);
    }
    for (const Node& node : graph_.nodes) arrays[node.outputs[0]] = compute(node, arrays, run);
    for (size_t i = 0; i < graph_.outputs.size(); ++i) {
      const Array& result = arrays.at(graph_.outputs[i]);
      std::memcpy(run.output(i, result.dims), result.numbers.data(), result.numbers.size() * sizeof(float));
    }
  }

 private:
  static Array compute(const Node& node, const std::map<int, Array>& arrays, Run& run) {
    const Array &a = arrays.at(node.inputs[0]), &b = arrays.at(node.inputs[1]);
    if (node.type == "DequantizeLinear") return dequantized(node, a, b);
    if (node.type == "MatMul") return product(a, b, run);
    Array result = count_of(a.dims) < count_of(b.dims) ? b : a;
    for (size_t i = 0; i < result.numbers.size(); ++i) {
      float x = a.numbers[i % a.numbers.size()], y = b.numbers[i % b.numbers.size()];
      if (node.type != "Add" && node.type != "Mul") throw std::runtime_error("the plain program has no " + node.type);
      result.numbers[i] = node.type == "Add" ? x + y : x * y;
    }
    return result;
  }

  static Array dequantized(const Node& node, const Array& weights, const Array& scales) {
    Array result = weights;
    size_t columns = static_cast<size_t>(weights.dims[1]), block = static_cast<size_t>(node.integer("block_size", 0));
    if (node.integer("axis", 1) != 0 || block == 0) throw std::runtime_error("expected blocks along axis 0");
    for (size_t i = 0; i < result.numbers.size(); ++i) {
      result.numbers[i] *= scales.numbers[i / columns / block * columns + i % columns];
    }
    return result;
  }

  // Columns are shared out among the threads.
  static Array product(const Array& a, const Array& b, Run& run) {
    size_t shared = static_cast<size_t>(b.dims[0]), columns = static_cast<size_t>(b.dims[1]);
    Array result{a.dims, {}};
    result.dims.back() = b.dims[1];
    result.numbers.resize(count_of(result.dims));
    struct Task {
      const Array &a, &b;
      Array& result;
      size_t shared, columns, parts;
    } task{a, b, result, shared, columns, static_cast<size_t>(run.threads)};
    run.parallel(
        [](void* context, size_t part) {
          const Task& task = *static_cast<Task*>(context);
          for (size_t i = 0; i < task.result.numbers.size(); ++i) {
            size_t column = i % task.columns;
            if (column % task.parts != part) continue;
            for (size_t k = 0; k < task.shared; ++k) {
              float x = task.a.numbers[i / task.columns * task.shared + k];
              task.result.numbers[i] += x * task.b.numbers[k * task.columns + column];
            }
          }
        },
        &task, task.parts);
    return result;
  }

  Graph graph_;
};

}  // namespace

std::vector<std::vector<size_t>> claim(const Graph& graph) {
  std::map<std::string, std::vector<size_t>> groups;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    if (node.name == "ours, large constants unread") {
      for (int input : node.inputs) {
        const Value& value = graph.values[input];
        if (value.constant && (value.data == nullptr) != (value.bytes > 1024)) throw std::runtime_error(value.name + " was read");
      }
    }
    if (node.name.rfind("ours", 0) == 0) groups[node.name.substr(0, node.name.find('/'))].push_back(i);
  }
  std::vector<std::vector<size_t>> result;
  for (auto& group : groups) result.push_back(group.second);
  return result;
}

std::unique_ptr<Program> compile(Graph graph, const Store& store) {
  if (store.folder == "refuse") throw std::runtime_error("refused with key " + store.key);
  return std::make_unique<PlainProgram>(std::move(graph));
}

const char* instruction_set() { return "plain"; }

}  // namespace specexport
