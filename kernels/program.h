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

// A contiguous input or output tensor.
struct Tensor {
  Type type = Type::kNone;
  std::vector<int64_t> dims;
  void* data = nullptr;
};

// The resources of a run: its inputs, memory for its outputs, threads.
struct Run {
  std::vector<Tensor> inputs;                                                    // in the order of Graph::inputs
  std::function<void*(size_t output, const std::vector<int64_t>& dims)> output;  // allocates an output, in the order of Graph::outputs
  // Calls work(0) .. work(count - 1), possibly concurrently; count is at most the number of threads.
  std::function<void(void (*work)(void* context, size_t index), void* context, size_t count)> parallel;
  int threads = 1;
};

// The location of packed weights. With an empty folder they are only in memory.
struct Store {
  std::string folder;  // of this machine's cache; created if missing
  std::string key;     // identifies the packed bundle's files
};

// Groups of nodes (indices into graph.nodes) to fuse; no path leaves a group and returns.
std::vector<std::vector<size_t>> claim(const Graph& graph);

class Program {
 public:
  virtual ~Program() = default;
  // Throws std::runtime_error with a one-line message.
  virtual void run(Run& run) = 0;
};

// Compiles a group chosen by claim(), as a separate graph. The data of constants must be loaded.
// Throws std::runtime_error.
std::unique_ptr<Program> compile(Graph graph, const Store& store);

// The instruction set that products run on: "portable", "avx2", "avx512-vnni", "neon-dotprod", …
const char* instruction_set();

}  // namespace specexport
