// What the nodes of a graph are part of: weights behind their quantization, and groups of nodes that one step computes.
#pragma once

#include <map>
#include <vector>

#include "graph.h"
#include "packing.h"

namespace specexport {

// Who makes and who reads each value of a graph.
struct Uses {
  explicit Uses(const Graph& graph)
      : producer(graph.values.size(), -1), readers(graph.values.size()), is_output(graph.values.size(), false) {
    for (size_t n = 0; n < graph.nodes.size(); n++) {
      for (int value : graph.nodes[n].outputs)
        if (value >= 0) producer[size_t(value)] = int(n);
      for (int value : graph.nodes[n].inputs)
        if (value >= 0) readers[size_t(value)].push_back(int(n));
    }
    for (int value : graph.outputs) is_output[size_t(value)] = true;
  }
  // The only node that reads what a node makes; -1 if there are others, or the graph returns it.
  int only_reader(const Node& node) const {
    if (node.outputs.size() != 1 || is_output[size_t(node.outputs[0])]) return -1;
    const std::vector<int>& list = readers[size_t(node.outputs[0])];
    return list.size() == 1 ? list[0] : -1;
  }

  std::vector<int> producer;
  std::vector<std::vector<int>> readers;
  std::vector<bool> is_output;
};

// Where the constant weights of a product come from: a constant, and the nodes between it and the product, which undo
// its quantization, restore its type, or transpose it. They are never run: products read what is stored.
struct Source {
  Matrix matrix;               // weights is null where it is not one that products read
  std::vector<size_t> through; // nodes
};

Source source_of(const Graph& graph, const Uses& uses, int value);
// Of a product with constant weights; else none.
Source product_source(const Graph& graph, const Uses& uses, const Node& node);
// The constant that a matrix of integers comes from, and the Transpose between them, if there is one; -1 for another's.
int integers_of(const Graph& graph, const Uses& uses, int value, int* transpose);
// The table of a Gather whose rows are stored in 16 bits and read as floats; -1 where it is not one.
int wide_gather_table(const Graph& graph, const Uses& uses, const Node& node);

// Weights q * scale + offset: besides the product with q, their graph multiplies the sums of its input's blocks by the
// offsets, and adds both. Returns for products with q the other product; one step does all of it, so that the other nodes
// are `done`, except sums that something else reads too.
std::map<int, int> find_offsets(const Graph& graph, const Uses& uses, std::vector<bool>& done);

// A draft's attention over its cache and the rows of earlier passes, with one softmax over both parts: a step looks only at
// the rows that a token sees, where products go over the whole cache.
struct AttentionInParts {
  float scale, softcap;
  std::vector<int> inputs;  // of make_attention()
};
// By the node of the total; the other nodes that nothing else reads are `done`.
std::map<int, AttentionInParts> find_attention(const Graph& graph, const Uses& uses, std::vector<bool>& done);

}  // namespace specexport
