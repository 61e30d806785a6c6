// Tests of the kernels of every instruction set that this processor has: `kernels_test ROUNDS [SEED]`. Each round takes
// random shapes and numbers; what fails is printed with its shape, and the exit status is 1.
#include <chrono>
#include <cstdlib>

#include "check.h"

using namespace specexport;
using namespace specexport::tests;

int main(int count, char** arguments) {
  const int rounds = count > 1 ? std::atoi(arguments[1]) : 20;
  const uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
  for (const char* const* name = instruction_sets(); *name; name++) {
    const Kernels& kernels = *kernels_of(*name);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < rounds; i++) {
      Random random(seed * 1000003 + uint64_t(i));
      test_products(kernels, random);
      test_attention(kernels, random);
      test_elementwise(kernels, random);
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("%s: %d rounds, %.1f s\n", *name, rounds, seconds);
  }
  Random random(seed);
  for (int i = 0; i < rounds; i++) test_team(random);
  if (failures) std::printf("%d failed\n", failures);
  return failures ? 1 : 0;
}
