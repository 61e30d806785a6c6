// Chooses the kernels of the processor this runs on.
#include "kernels.h"

#include <cstdlib>
#include <cstring>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace specexport {

extern const Kernels kPortableKernels;
// Null where a build leaves them out.
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels __attribute__((weak));
extern const Kernels kAvxVnniKernels __attribute__((weak));
extern const Kernels kAvx512Kernels __attribute__((weak));
#elif defined(__aarch64__)
extern const Kernels kNeonKernels __attribute__((weak));
extern const Kernels kI8mmKernels __attribute__((weak));
#endif

namespace {

struct Choice {
  const Kernels* kernels;
  bool (*has)();
  bool runs() const { return kernels && has(); }
};

#if defined(__x86_64__)
// The compiler's checks ask the operating system too: whether it saves the registers.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx_vnni() { return has_avx2() && __builtin_cpu_supports("avxvnni"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}
#elif defined(__aarch64__) && defined(__linux__)
bool has_dotprod() {  // and arithmetic of 16-bit floats: HWCAP_ASIMDDP, HWCAP_ASIMDHP
  constexpr unsigned long kBits = 1ul << 20 | 1ul << 10;
  return (getauxval(AT_HWCAP) & kBits) == kBits;
}
bool has_i8mm() { return has_dotprod() && (getauxval(AT_HWCAP2) & 1ul << 13); }  // HWCAP2_I8MM
#elif defined(__aarch64__) && defined(__APPLE__)
bool has_feature(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return !sysctlbyname(name, &value, &size, nullptr, 0) && value;
}
bool has_dotprod() { return has_feature("hw.optional.arm.FEAT_DotProd") && has_feature("hw.optional.arm.FEAT_FP16"); }
bool has_i8mm() { return has_dotprod() && has_feature("hw.optional.arm.FEAT_I8MM"); }
#elif defined(__aarch64__)
bool has_dotprod() { return false; }
bool has_i8mm() { return false; }
#endif

const Choice kChoices[] = {
#if defined(__x86_64__)
    {&kAvx512Kernels, has_avx512},
    {&kAvxVnniKernels, has_avx_vnni},
    {&kAvx2Kernels, has_avx2},
#elif defined(__aarch64__)
    {&kI8mmKernels, has_i8mm},
    {&kNeonKernels, has_dotprod},
#endif
    {&kPortableKernels, [] { return true; }},
};

}  // namespace

const Kernels* kernels_of(const char* name) {
  for (const Choice& choice : kChoices)
    if (choice.runs() && !std::strcmp(choice.kernels->name, name)) return choice.kernels;
  return nullptr;
}

const char* const* instruction_sets() {
  struct Names {
    const char* names[sizeof kChoices / sizeof kChoices[0] + 1] = {};
    Names() {
      int count = 0;
      for (const Choice& choice : kChoices)
        if (choice.runs()) names[count++] = choice.kernels->name;
    }
  };
  static const Names list;
  return list.names;
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
