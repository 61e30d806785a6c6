// Conversion of ONNX Runtime's graphs to this library's representation.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <vector>

#include "graph.h"
#include "mapped_file.h"
#include "ort_abi.h"

namespace specexport {

// The data of constants, valid as long as this object: weights in the bundle's files are mapped, other constants copied.
class Constants {
 public:
  explicit Constants(const Ort& ort) : ort_(ort) {}

  // Points a value to its data. Throws std::runtime_error if a file is shorter than the graph says.
  void load(const OrtGraph* graph, const OrtValueInfo* info, Value& value);

  // Releases the pages of mapped files to the system.
  void release_pages() const;

 private:
  bool load_external(const OrtGraph* graph, const OrtValueInfo* info, Value& value);

  const Ort& ort_;
  std::map<std::string, MappedFile> files_;
  std::deque<std::vector<char>> copies_;
};

struct OrtGraphReading {
  Graph graph;
  std::vector<const OrtNode*> nodes;  // in the order of graph.nodes
};

// Reads a graph. Inputs of a node with subgraphs include the outer values that these read.
//
// fused: the node that represents the graph, if it is a group; its inputs and outputs are the graph's, in order.
// largest: bytes of the largest constants whose data is loaded.
OrtGraphReading read_graph(const Ort& ort, const OrtGraph* graph, const OrtNode* fused, Constants& constants, size_t largest);

}  // namespace specexport
