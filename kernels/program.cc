// Placeholder until the interpreter lands: claims nothing.
#include "program.h"

#include <stdexcept>

namespace specexport {
std::vector<std::vector<size_t>> claim(const Graph&) { return {}; }
std::unique_ptr<Program> compile(Graph, const Store&) { throw std::runtime_error("nothing is claimed"); }
const char* instruction_set() { return "portable"; }
}  // namespace specexport
