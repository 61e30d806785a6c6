// The steps of a program: one for each operator, or for a few fused operators.
#pragma once

#include <memory>
#include <vector>

#include "graph.h"
#include "kernels.h"
#include "program.h"
#include "team.h"
#include "view.h"

namespace specexport {

// The state of a program's run.
struct Frame {
  const Kernels& kernels;
  Team& team;
  Arena& arena;
  Run& run;
  std::vector<View>& views;              // by value; those of constants are there before the run
  std::vector<char*>& buffers;           // by value: arena memory owned by it
  const std::vector<int>& output_index;  // by value: index of the program's output, or -1

  const View& operator[](int value) const { return views[size_t(value)]; }

  // A contiguous tensor for a value, in the program's output buffer if it is an output.
  View& create(int value, Type type, const std::vector<int64_t>& dims);
  // Makes a value a view of another's memory; copies if it is an output of the program.
  void alias(int value, const View& view);
  // The same elements, contiguous; may live in memory that is freed at the end of the step.
  View packed(const View& view);
  // Copies elements to a tensor of the same shape, whose last dimension is dense.
  void copy(const View& from, const View& to);
  char* scratch(size_t bytes);
  void free_scratch();

  std::vector<char*> scratch_memory = {};  // of the current step
};

class Step {
 public:
  virtual ~Step() = default;
  virtual void run(Frame& frame) const = 0;
  // The packed weights that it reads, if any.
  virtual const PackedWeights* weights() const { return nullptr; }

  std::vector<int> inputs, outputs;  // values; -1 for none
  std::vector<int> last_uses;        // values whose memory is free after it
  std::string name;                  // of the node, for errors
  Ahead ahead;                       // the weights that it or the next step with any reads
  bool looks = false;                // whether its outputs may be views of its first input
};

// Whether there is a step for a node. The types of its inputs must be known.
bool has_step(const Graph& graph, const Node& node);
// The step for a node other than a product with constant weights. Throws std::runtime_error.
std::unique_ptr<Step> make_step(const Graph& graph, const Node& node);

// A product with packed weights; `addend` is a value to add to it, or -1. `offsets`, a matrix [depth / block, columns] of
// floats or null, are added to all weights of a block.
std::unique_ptr<Step> make_product(const PackedWeights& weights, const PackedWeights* offsets, int x, int y, int addend);
// Attention over keys and values of a cache and later ones. `inputs` are the queries [B,Hkv,G*T,D], the cache's keys and
// values, the mask [B,1,T,S+R] of the rows that each token sees, and the later keys and values [B,Hkv,R,D].
std::unique_ptr<Step> make_attention(float scale, float softcap, std::vector<int> inputs, int y);
// function(a) * b.
std::unique_ptr<Step> make_gate(Unary function, int a, int b, int y);
std::unique_ptr<Step> make_unary(Unary function, int x, int y);
// Rows of a table, along its first dimension; those of 16-bit floats as fp32.
std::unique_ptr<Step> make_gather(int table, int indices, int y);

}  // namespace specexport
