#include "patterns.h"

#include <algorithm>

namespace specexport {
namespace {

bool swaps_two(const Node& node) {
  auto perm = node.attributes.find("perm");
  return perm == node.attributes.end() || perm->second.integers == std::vector<int64_t>{1, 0};
}

// Follows values back to the nodes that make them.
struct Search {
  const Graph& graph;
  const Uses& uses;
  std::vector<int> nodes = {};  // that were found

  // The node of a type that makes a value; null if it is another's.
  const Node* from(int value, const char* type) {
    const int producer = uses.producer[size_t(value)];
    if (producer < 0 || graph.nodes[size_t(producer)].type != type) return nullptr;
    nodes.push_back(producer);
    return &graph.nodes[size_t(producer)];
  }
  // A constant that is a single float; null for any other value.
  const float* number(int value) const {
    const Value& v = graph.values[size_t(value)];
    return v.type == Type::kFloat && v.data && v.bytes == sizeof(float) ? static_cast<const float*>(v.data) : nullptr;
  }
};

// Leaves out those of the nodes whose results only nodes that are done read.
void skip_unread(const Graph& graph, const Uses& uses, std::vector<int> nodes, std::vector<bool>& done) {
  std::sort(nodes.rbegin(), nodes.rend());  // readers first
  for (int n : nodes) {
    const std::vector<int>& values = graph.nodes[size_t(n)].outputs;
    const bool unread = std::all_of(values.begin(), values.end(), [&](int value) {
      const std::vector<int>& readers = uses.readers[size_t(value)];
      return !uses.is_output[size_t(value)] &&
             std::all_of(readers.begin(), readers.end(), [&](int reader) { return bool(done[size_t(reader)]); });
    });
    if (unread) done[size_t(n)] = true;
  }
}

// Whether a value is the sums of `x` over blocks along its last dimension, [.., depth / block]: a product of its blocks and
// ones between two shapes.
bool sums_blocks(Search& search, int value, int x, int block) {
  const Node* shaped = search.from(value, "Reshape");
  const Node* sums = shaped ? search.from(shaped->inputs[0], "MatMul") : nullptr;
  const Node* blocks = sums ? search.from(sums->inputs[0], "Reshape") : nullptr;
  if (!blocks || blocks->inputs[0] != x) return false;
  const Value& ones = search.graph.values[size_t(sums->inputs[1])];
  if (ones.type != Type::kFloat || !ones.data || ones.dims != std::vector<int64_t>{block, 1}) return false;
  const float* numbers = static_cast<const float*>(ones.data);
  return std::all_of(numbers, numbers + block, [](float number) { return number == 1; });
}

// query @ keys.T * scale; keys is -1 for anything else.
struct Scores {
  int query = -1, keys = -1;
  float scale = 0;
};
Scores scaled_product(Search& search, int value) {
  const Node* scaled = search.from(value, "Mul");
  const Node* product = scaled ? search.from(scaled->inputs[0], "MatMul") : nullptr;
  const Node* turned = product ? search.from(product->inputs[1], "Transpose") : nullptr;
  if (!turned) return {};
  const float* factor = search.number(scaled->inputs[1]);
  const auto perm = turned->attributes.find("perm");
  if (!factor || perm == turned->attributes.end() || perm->second.integers != std::vector<int64_t>{0, 1, 3, 2}) return {};
  return {product->inputs[0], turned->inputs[0], *factor};
}

// The scores from which a value is softcap * tanh(scores / softcap), or the value itself.
int uncapped(Search& search, int value, float* softcap) {
  const Node* product = search.from(value, "Mul");
  if (!product) return value;
  const size_t tanh = search.number(product->inputs[0]) ? 1 : 0;
  const float* cap = search.number(product->inputs[1 - tanh]);
  const Node* bounded = cap ? search.from(product->inputs[tanh], "Tanh") : nullptr;
  const Node* divided = bounded ? search.from(bounded->inputs[0], "Div") : nullptr;
  const float* divisor = divided ? search.number(divided->inputs[1]) : nullptr;
  if (!divisor || *divisor != *cap || *cap <= 0) return value;
  *softcap = *cap;
  return divided->inputs[0];
}

// The mask of a bias that is 0 where a row is seen and as low as numbers get where not, perhaps repeated for each head of a
// group; -1 for another bias.
int mask_of_bias(Search& search, int bias) {
  if (const Node* repeated = search.from(bias, "Concat")) {
    const std::vector<int>& inputs = repeated->inputs;
    if (repeated->integer("axis", 0) != 2 || std::any_of(inputs.begin(), inputs.end(), [&](int i) { return i != inputs[0]; }))
      return -1;
    bias = inputs[0];
  }
  const Node* chosen = search.from(bias, "Where");
  if (!chosen) return -1;
  const float *seen = search.number(chosen->inputs[1]), *hidden = search.number(chosen->inputs[2]);
  return seen && hidden && *seen == 0 && *hidden < -1e37f ? chosen->inputs[0] : -1;
}

// The scales by which a DequantizeLinear multiplies constant integers; false if they are not those of a matrix.
bool read_scales(const Graph& graph, const Uses& uses, const Node& node, Matrix* matrix) {
  int transpose, scales = node.inputs[1];
  if (integers_of(graph, uses, node.inputs[0], &transpose) < 0 || !graph.values[size_t(scales)].constant) return false;
  if (node.integer("axis", 1) != (matrix->transposed ? 1 : 0)) return false;  // blocks must go along the depth
  if (node.inputs.size() > 2 && node.inputs[2] >= 0) matrix->zeros = &graph.values[size_t(node.inputs[2])];
  if (transpose >= 0) {  // of the scales as well
    const int producer = uses.producer[size_t(scales)];
    if (matrix->zeros || producer < 0 || graph.nodes[size_t(producer)].type != "Transpose") return false;
    scales = graph.nodes[size_t(producer)].inputs[0];
  }
  matrix->scales = &graph.values[size_t(scales)];
  matrix->block = int(node.integer("block_size", 0));
  return true;
}

}  // namespace

int integers_of(const Graph& graph, const Uses& uses, int value, int* transpose) {
  *transpose = -1;
  if (graph.values[size_t(value)].constant) return value;
  const int producer = uses.producer[size_t(value)];
  if (producer < 0) return -1;
  const Node& node = graph.nodes[size_t(producer)];
  if (node.type != "Transpose" || !swaps_two(node) || !graph.values[size_t(node.inputs[0])].constant) return -1;
  *transpose = producer;
  return node.inputs[0];
}

Source source_of(const Graph& graph, const Uses& uses, int value) {
  Source source;
  Matrix matrix;
  for (;;) {
    const Value& v = graph.values[size_t(value)];
    if (v.constant) {
      matrix.weights = &v;
      if (can_pack(matrix)) source.matrix = matrix;
      return source;
    }
    const int producer = uses.producer[size_t(value)];
    if (producer < 0) return source;
    const Node& node = graph.nodes[size_t(producer)];
    if (node.type == "Transpose" && swaps_two(node) && v.ranked && v.dims.size() == 2) {
      matrix.transposed = !matrix.transposed;
    } else if (node.type == "Cast" && v.type == Type::kFloat && !matrix.scales) {
      const Type from = graph.values[size_t(node.inputs[0])].type;
      if (from != Type::kBfloat16 && from != Type::kFloat16) return source;
    } else if (node.type == "DequantizeLinear" && v.type == Type::kFloat && !matrix.scales) {
      if (!read_scales(graph, uses, node, &matrix)) return source;
    } else {
      return source;
    }
    source.through.push_back(size_t(producer));
    value = node.inputs[0];
  }
}

Source product_source(const Graph& graph, const Uses& uses, const Node& node) {
  if (node.type != "MatMul" || node.inputs.size() != 2) return {};
  const Value& x = graph.values[size_t(node.inputs[0])];
  if (x.type != Type::kFloat || !x.ranked || x.dims.empty()) return {};
  Source source = source_of(graph, uses, node.inputs[1]);
  const Value* weights = source.matrix.weights;
  if (weights && !source.matrix.scales && weights->type != Type::kFloat && source.through.empty()) return {};
  return source;
}

int wide_gather_table(const Graph& graph, const Uses& uses, const Node& node) {
  if (node.type != "Gather" || node.integer("axis", 0) != 0) return -1;
  const Type index = graph.values[size_t(node.inputs[1])].type;
  const int producer = uses.producer[size_t(node.inputs[0])];
  if (producer < 0 || (index != Type::kInt64 && index != Type::kInt32)) return -1;
  const Node& cast = graph.nodes[size_t(producer)];
  if (cast.type != "Cast" || cast.integer("to", 0) != int64_t(Type::kFloat)) return -1;
  const Value& table = graph.values[size_t(cast.inputs[0])];
  const bool short_floats = table.type == Type::kBfloat16 || table.type == Type::kFloat16;
  return table.constant && short_floats ? cast.inputs[0] : -1;
}

std::map<int, int> find_offsets(const Graph& graph, const Uses& uses, std::vector<bool>& done) {
  std::map<int, int> found;
  Search sums{graph, uses};
  for (size_t n = 0; n < graph.nodes.size(); n++) {
    const Node& node = graph.nodes[n];
    const Matrix matrix = product_source(graph, uses, node).matrix;
    const int total = uses.only_reader(node);
    if (!matrix.scales || total < 0 || graph.nodes[size_t(total)].type != "Add") continue;
    const std::vector<int>& added = graph.nodes[size_t(total)].inputs;
    const int other = uses.producer[size_t(added[added[0] == node.outputs[0] ? 1 : 0])];
    if (other < 0 || uses.only_reader(graph.nodes[size_t(other)]) != total) continue;
    const Node& product = graph.nodes[size_t(other)];
    const Matrix offsets = product_source(graph, uses, product).matrix;
    if (!offsets.weights || offsets.scales || offsets.weights->type == Type::kBfloat16 ||
        offsets.depth() * matrix.block != matrix.depth() || offsets.columns() != matrix.columns() ||
        !sums_blocks(sums, product.inputs[0], node.inputs[0], matrix.block))
      continue;
    found[int(n)] = other;
    done[size_t(other)] = done[size_t(total)] = true;
  }
  skip_unread(graph, uses, sums.nodes, done);
  return found;
}

std::map<int, AttentionInParts> find_attention(const Graph& graph, const Uses& uses, std::vector<bool>& done) {
  std::map<int, AttentionInParts> found;
  for (size_t n = 0; n < graph.nodes.size(); n++) {
    const Node& total = graph.nodes[n];
    if (total.type != "Add" || done[n]) continue;
    Search search{graph, uses};
    const Node* of_cache = search.from(total.inputs[0], "MatMul");
    const Node* of_later = of_cache ? search.from(total.inputs[1], "MatMul") : nullptr;
    const Node* split = of_later ? search.from(of_cache->inputs[0], "Split") : nullptr;
    if (!split || split->outputs.size() != 2 || of_later->inputs[0] != split->outputs[1]) continue;
    const Node* softmax = search.from(split->inputs[0], "Softmax");
    const Node* biased = softmax ? search.from(softmax->inputs[0], "Add") : nullptr;
    float softcap = 0;
    const Node* scores = biased ? search.from(uncapped(search, biased->inputs[0], &softcap), "Concat") : nullptr;
    if (!scores || scores->inputs.size() != 2) continue;
    auto along_rows = [](const Node* node) { return node->integer("axis", -1) == -1 || node->integer("axis", -1) == 3; };
    if (!along_rows(scores) || !along_rows(softmax) || !along_rows(split)) continue;
    const Scores cached = scaled_product(search, scores->inputs[0]), later = scaled_product(search, scores->inputs[1]);
    if (cached.keys < 0 || later.keys < 0 || cached.query != later.query || cached.scale != later.scale) continue;
    const int mask = mask_of_bias(search, biased->inputs[1]);
    if (mask < 0) continue;
    found[int(n)] = {cached.scale, softcap,
                     {cached.query, cached.keys, of_cache->inputs[1], mask, later.keys, of_later->inputs[1]}};
    done[n] = true;  // for its inputs
    skip_unread(graph, uses, search.nodes, done);
    done[n] = false;
  }
  return found;
}

}  // namespace specexport
