// A group of nodes that this library runs, compiled into a list of steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "graph.h"

namespace specexport {

// A tensor that comes from outside, or goes there; contiguous.
struct Tensor {
  Type type = Type::kNone;
  std::vector<int64_t> dims;
  void* data = nullptr;
};

// What a run is lent: its inputs, memory for its outputs, threads.
struct Run {
  std::vector<Tensor> inputs;                                                    // in the order of Graph::inputs
  std::function<void*(size_t output, const std::vector<int64_t>& dims)> output;  // allocates an output, in the order of Graph::outputs
  // Calls work(0) .. work(count - 1), perhaps at once; count is at most the number of threads.
  std::function<void(void (*work)(void* context, size_t index), void* context, size_t count)> parallel;
  int threads = 1;
};

// Where packed weights are kept. An empty folder keeps them in memory alone.
struct Store {
  std::string folder;  // of this machine's cache; made if it is not there
  std::string key;     // names what was packed: the bundle's files
};

// Groups of nodes (indices into graph.nodes) that are to be fused, each free of paths that leave it and come back.
std::vector<std::vector<size_t>> claim(const Graph& graph);

class Program {
 public:
  virtual ~Program() = default;
  // Throws std::runtime_error with one line that says what is wrong.
  virtual void run(Run& run) = 0;
};

// Compiles a group that claim() chose, given as a graph of its own. Constants' data must be there.
// Throws std::runtime_error.
std::unique_ptr<Program> compile(Graph graph, const Store& store);

// The instruction set that products run on: "portable", "avx2", "avx512-vnni", "neon-dotprod", …
const char* instruction_set();

}  // namespace specexport
