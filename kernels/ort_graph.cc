#include "ort_graph.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <set>
#include <unordered_map>

namespace specexport {
namespace {

// Bits of an element; 0 where the type is not known here.
size_t element_bits(Type type) {
  switch (type) {
    case Type::kUint4:
    case Type::kInt4:
      return 4;
    case Type::kUint8:
    case Type::kInt8:
    case Type::kBool:
      return 8;
    case Type::kFloat16:
    case Type::kBfloat16:
      return 16;
    case Type::kFloat:
    case Type::kInt32:
      return 32;
    case Type::kDouble:
    case Type::kInt64:
      return 64;
    case Type::kNone:
      return 0;
  }
  return 0;
}

// The bytes of a tensor whose type and shape are known.
size_t tensor_bytes(const Value& value) {
  size_t bits = element_bits(value.type);
  if (bits == 0 || !value.ranked) return SIZE_MAX;
  size_t count = 1;
  for (int64_t size : value.dims) {
    if (size < 0 || (size > 0 && count > (SIZE_MAX >> 7) / static_cast<size_t>(size))) return SIZE_MAX;
    count *= static_cast<size_t>(size);
  }
  return (count * bits + 7) / 8;
}

// A list that ONNX Runtime counts, then fills.
template <typename T, typename Owner>
std::vector<T> list(const Ort& ort, const Owner* owner, OrtStatus* (*count)(const Owner*, size_t*),
                    OrtStatus* (*fill)(const Owner*, T*, size_t)) {
  size_t size = 0;
  ort.check(count(owner, &size));
  std::vector<T> items(size);
  if (size != 0) ort.check(fill(owner, items.data(), size));
  return items;
}

template <typename Owner>
std::string text(const Ort& ort, const Owner* owner, OrtStatus* (*get)(const Owner*, const char**)) {
  const char* value = nullptr;
  ort.check(get(owner, &value));
  return value == nullptr ? "" : value;
}

class Reader {
 public:
  Reader(const Ort& ort, const OrtGraph* graph, Constants& constants, size_t largest)
      : ort_(ort), graph_(graph), constants_(constants), largest_(largest) {}

  OrtGraphReading read(const OrtNode* fused) {
    auto& graph = reading_.graph;
    if (fused == nullptr) {
      add(graph.inputs, list(ort_, graph_, ort_.graph_input_count, ort_.graph_inputs));
    } else {
      add(graph.inputs, list(ort_, fused, ort_.node_input_count, ort_.node_inputs));
    }
    reading_.nodes = list(ort_, graph_, ort_.graph_node_count, ort_.graph_nodes);
    for (const OrtNode* node : reading_.nodes) graph.nodes.push_back(read_node(node));
    if (fused == nullptr) {
      add(graph.outputs, list(ort_, graph_, ort_.graph_output_count, ort_.graph_outputs));
      add_outside();
    } else {
      add(graph.outputs, list(ort_, fused, ort_.node_output_count, ort_.node_outputs));
    }
    return std::move(reading_);
  }

 private:
  void add(std::vector<int>& indices, const std::vector<const OrtValueInfo*>& infos) {
    for (const OrtValueInfo* info : infos) {
      int index = value(info);
      if (&indices != &reading_.graph.inputs || !reading_.graph.values[index].constant) indices.push_back(index);
    }
  }

  // Values of an outer graph are inputs too.
  void add_outside() {
    auto& graph = reading_.graph;
    std::set<int> known(graph.inputs.begin(), graph.inputs.end());
    for (const Node& node : graph.nodes) known.insert(node.outputs.begin(), node.outputs.end());
    for (size_t i = 0; i < graph.values.size(); ++i) {
      if (!graph.values[i].constant && known.insert(static_cast<int>(i)).second) graph.inputs.push_back(static_cast<int>(i));
    }
  }

  // The index of a value, which is read when it is met first; -1 for one that is left out.
  int value(const OrtValueInfo* info) {
    if (info == nullptr) return -1;
    std::string name = text(ort_, info, ort_.value_name);
    if (name.empty()) return -1;
    auto [entry, added] = indices_.try_emplace(name, static_cast<int>(reading_.graph.values.size()));
    if (!added) return entry->second;

    Value value;
    value.name = name;
    const OrtTypeInfo* type = nullptr;
    ort_.check(ort_.value_type(info, &type));
    if (type != nullptr) read_type(type, value);
    ort_.check(ort_.value_is_constant(info, &value.constant));
    if (value.constant) {
      value.bytes = tensor_bytes(value);
      if (value.bytes == SIZE_MAX) {
        value.bytes = 0;  // of a type that is not known here
      } else if (value.bytes <= largest_) {
        constants_.load(graph_, info, value);
      }
    }
    reading_.graph.values.push_back(std::move(value));
    return entry->second;
  }

  void read_type(const OrtTypeInfo* info, Value& value) {
    int kind = 0;
    ort_.check(ort_.type_kind(info, &kind));
    if (kind != kTensor) return;
    const OrtTensorTypeAndShapeInfo* tensor = nullptr;
    ort_.check(ort_.type_as_tensor(info, &tensor));
    if (tensor == nullptr) return;
    int element = 0;
    ort_.check(ort_.tensor_element(tensor, &element));
    if (element_bits(static_cast<Type>(element)) != 0) value.type = static_cast<Type>(element);
    if (!ort_.tensor_is_ranked(tensor)) return;
    value.ranked = true;
    value.dims = list(ort_, tensor, ort_.tensor_rank, ort_.tensor_dims);
    for (int64_t& size : value.dims) size = size < 0 ? -1 : size;
  }

  Node read_node(const OrtNode* info) {
    Node node;
    node.name = text(ort_, info, ort_.node_name);
    node.type = text(ort_, info, ort_.node_type);
    node.domain = text(ort_, info, ort_.node_domain);
    ort_.check(ort_.node_since(info, &node.since));
    for (const OrtValueInfo* input : list(ort_, info, ort_.node_input_count, ort_.node_inputs)) {
      node.inputs.push_back(value(input));
    }
    for (const OrtValueInfo* output : list(ort_, info, ort_.node_output_count, ort_.node_outputs)) {
      node.outputs.push_back(value(output));
    }
    size_t subgraphs = 0;
    ort_.check(ort_.node_subgraph_count(info, &subgraphs));
    node.has_subgraph = subgraphs != 0;
    if (node.has_subgraph) {
      for (const OrtValueInfo* input : list(ort_, info, ort_.node_implicit_input_count, ort_.node_implicit_inputs)) {
        node.inputs.push_back(value(input));
      }
    }
    for (const OrtOpAttr* attribute : list(ort_, info, ort_.node_attribute_count, ort_.node_attributes)) {
      if (attribute != nullptr) read_attribute(attribute, node.attributes);
    }
    return node;
  }

  void read_attribute(const OrtOpAttr* info, std::map<std::string, Attribute>& attributes) {
    int type = 0;
    ort_.check(ort_.attribute_type(info, &type));
    Attribute value;
    switch (static_cast<Kind>(type)) {
      case Kind::kInteger:
        value.integer = contents<int64_t>(info, type).at(0);
        break;
      case Kind::kIntegers:
        value.integers = contents<int64_t>(info, type);
        break;
      case Kind::kNumber:
        value.number = contents<float>(info, type).at(0);
        break;
      case Kind::kNumbers:
        value.numbers = contents<float>(info, type);
        break;
      case Kind::kText: {
        std::vector<char> letters = contents<char>(info, type);
        value.text.assign(letters.begin(), letters.end());
        value.text.resize(std::strlen(value.text.c_str()));  // whether the closing zero is counted differs between versions
        break;
      }
      default:
        return;  // tensors are constants of the graph by now, and no operator that is run here has other kinds
    }
    attributes[text(ort_, info, ort_.attribute_name)] = std::move(value);
  }

  template <typename T>
  std::vector<T> contents(const OrtOpAttr* info, int type) {
    std::vector<T> values(64);
    size_t bytes = 0;
    OrtStatus* status = ort_.read_attribute(info, type, values.data(), values.size() * sizeof(T), &bytes);
    if (status != nullptr && bytes > values.size() * sizeof(T)) {
      ort_.release_status(status);
      values.resize(bytes / sizeof(T));
      status = ort_.read_attribute(info, type, values.data(), bytes, &bytes);
    }
    ort_.check(status);
    values.resize(bytes / sizeof(T));
    return values;
  }

  const Ort& ort_;
  const OrtGraph* graph_;
  Constants& constants_;
  size_t largest_;
  OrtGraphReading reading_;
  std::unordered_map<std::string, int> indices_;
};

}  // namespace

void Constants::load(const OrtGraph* graph, const OrtValueInfo* info, Value& value) {
  if (load_external(graph, info, value)) return;
  const OrtValue* tensor = nullptr;
  ort_.check(ort_.value_initializer(info, &tensor));
  if (tensor == nullptr) throw std::runtime_error("constant " + value.name + " has no data; build the bundle again");
  const void* data = nullptr;
  size_t bytes = 0;
  ort_.check(ort_.tensor_data(tensor, &data));
  ort_.check(ort_.tensor_bytes(tensor, &bytes));
  if (bytes != value.bytes) {
    throw std::runtime_error("constant " + value.name + " has " + std::to_string(bytes) + " bytes; expected " +
                             std::to_string(value.bytes) + "; build the bundle again");
  }
  const char* first = static_cast<const char*>(data);
  copies_.emplace_back(first, first + bytes);
  copies_.back().reserve(1);  // an empty tensor's data is there too
  value.data = copies_.back().data();
}

bool Constants::load_external(const OrtGraph* graph, const OrtValueInfo* info, Value& value) {
  OrtExternalInitializerInfo* found = nullptr;
  ort_.check(ort_.value_external(info, &found));
  if (found == nullptr) return false;
  std::unique_ptr<OrtExternalInitializerInfo, void (*)(OrtExternalInitializerInfo*)> external(found, ort_.release_external);

  std::string model = text(ort_, graph, ort_.graph_model_path);
  size_t slash = model.rfind('/');
  if (model.empty()) return false;  // opened from memory
  std::string path = model.substr(0, slash == std::string::npos ? 0 : slash + 1) + ort_.external_path(external.get());
  auto file = files_.try_emplace(path, path).first;
  int64_t offset = ort_.external_offset(external.get());
  size_t bytes = ort_.external_bytes(external.get()), size = file->second.size();
  if (bytes != value.bytes || offset < 0 || static_cast<uint64_t>(offset) > size || bytes > size - static_cast<size_t>(offset)) {
    throw std::runtime_error(path + ": " + std::to_string(size) + " bytes, but " + value.name + " takes " +
                             std::to_string(value.bytes) + " and is said to be " + std::to_string(bytes) + " from byte " +
                             std::to_string(offset) + " on; build the bundle again");
  }
  value.data = file->second.data() + offset;
  return true;
}

void Constants::release_pages() const {
  for (const auto& file : files_) file.second.release_pages();
}

OrtGraphReading read_graph(const Ort& ort, const OrtGraph* graph, const OrtNode* fused, Constants& constants, size_t largest) {
  return Reader(ort, graph, constants, largest).read(fused);
}

}  // namespace specexport
