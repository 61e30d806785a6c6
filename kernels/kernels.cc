// Chooses the kernels of the processor this runs on.
#include "kernels.h"

#include <cstdlib>
#include <cstring>

namespace specexport {

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
#endif

namespace {

struct Choice {
  const Kernels* kernels;
  bool (*runs)();
};

const Choice kChoices[] = {
#if defined(__x86_64__)
    {&kAvx2Kernels,
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }},
#endif
    {&kPortableKernels, [] { return true; }},
};

}  // namespace

const Kernels* kernels_of(const char* name) {
  for (const Choice& choice : kChoices)
    if (!std::strcmp(choice.kernels->name, name) && choice.runs()) return choice.kernels;
  return nullptr;
}

const char* const* instruction_sets() {
  static const char* names[sizeof kChoices / sizeof kChoices[0] + 1] = {};
  if (!names[0]) {
    int count = 0;
    for (const Choice& choice : kChoices)
      if (choice.runs()) names[count++] = choice.kernels->name;
  }
  return names;
}

const Kernels& kernels() {
  static const Kernels* const chosen = [] {
    const char* asked = std::getenv("SPECEXPORT_ISA");
    const Kernels* named = asked ? kernels_of(asked) : nullptr;
    return named ? named : kernels_of(instruction_sets()[0]);
  }();
  return *chosen;
}

}  // namespace specexport
