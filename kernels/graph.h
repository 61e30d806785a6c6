// A graph as the execution provider sees it: nodes, values, constants. Independent of ONNX Runtime.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace specexport {

// Element types with ONNX's numbers (onnx.TensorProto.DataType).
enum class Type : int32_t {
  kNone = 0,
  kFloat = 1,
  kUint8 = 2,
  kInt8 = 3,
  kInt32 = 6,
  kInt64 = 7,
  kBool = 9,
  kFloat16 = 10,
  kDouble = 11,
  kBfloat16 = 16,
  kUint4 = 21,
  kInt4 = 22,
};

struct Value {
  std::string name;
  Type type = Type::kNone;
  bool ranked = false;             // whether dims is known
  std::vector<int64_t> dims;       // -1 where a dimension is free
  const void* data = nullptr;      // of a constant; int4 packed two a byte, the first in the low half
  size_t bytes = 0;                // of a constant's data
  bool constant = false;           // also true before its data is loaded
};

struct Attribute {
  int64_t integer = 0;
  float number = 0;
  std::string text;
  std::vector<int64_t> integers;
  std::vector<float> numbers;
};

struct Node {
  std::string name, type, domain;
  int since = 0;                   // opset of the operator's definition
  std::vector<int> inputs;         // indices of values; -1 for an omitted one
  std::vector<int> outputs;
  std::map<std::string, Attribute> attributes;
  bool has_subgraph = false;

  int64_t integer(const char* key, int64_t otherwise) const {
    auto it = attributes.find(key);
    return it == attributes.end() ? otherwise : it->second.integer;
  }
  float number(const char* key, float otherwise) const {
    auto it = attributes.find(key);
    return it == attributes.end() ? otherwise : it->second.number;
  }
};

struct Graph {
  std::vector<Value> values;
  std::vector<Node> nodes;         // in topological order
  std::vector<int> inputs;         // values from outside, except constants
  std::vector<int> outputs;
};

}  // namespace specexport
