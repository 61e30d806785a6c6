// Chooses the kernels of the processor this runs on.
#include "kernels.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "packing.h"

#if defined(__x86_64__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
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
extern const Kernels kAmxKernels __attribute__((weak));
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
// Not __builtin_cpu_supports: of a library that zig links, it reads a variable that nothing sets.
struct Cpuid {
  unsigned a = 0, b = 0, c = 0, d = 0;
  explicit Cpuid(unsigned leaf, unsigned part = 0) { __get_cpuid_count(leaf, part, &a, &b, &c, &d); }
};
constexpr bool has_bits(unsigned word, std::initializer_list<int> bits) {
  for (int bit : bits)
    if (!(word >> bit & 1)) return false;
  return true;
}
// Whether the operating system saves the registers of these bits of XCR0.
bool saves(std::initializer_list<int> registers) {
  if (!has_bits(Cpuid(1).c, {27})) return false;  // OSXSAVE
  unsigned low, high;
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return has_bits(low, registers);
}
bool has_avx2() {  // and FMA, F16C
  return saves({1, 2}) && has_bits(Cpuid(1).c, {12, 28, 29}) && has_bits(Cpuid(7).b, {5});
}
#ifdef SPECEXPORT_EMULATED
bool has_avx_vnni() { return has_avx2(); }
bool has_avx512() { return has_avx2(); }
bool has_amx() { return has_avx2(); }
#else
bool has_avx_vnni() { return has_avx2() && has_bits(Cpuid(7, 1).a, {4}); }
bool has_avx512() {  // F, DQ, BW, VL, VNNI
#ifdef __APPLE__
  const bool saved = true;  // from their first use on
#else
  const bool saved = saves({5, 6, 7});
#endif
  const Cpuid has(7);
  return has_avx2() && saved && has_bits(has.b, {16, 17, 30, 31}) && has_bits(has.c, {11});
}
// bfloat16, tiles, int8. Linux lets a process use the tile registers when it asks to: ARCH_REQ_XCOMP_PERM for
// XFEATURE_XTILEDATA.
bool has_amx() {
#ifdef __linux__
  return has_avx512() && has_bits(Cpuid(7).d, {22, 24, 25}) && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}
#endif
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
    {&kAmxKernels, has_amx},
    {&kAvx512Kernels, has_avx512},
    {&kAvxVnniKernels, has_avx_vnni},
    {&kAvx2Kernels, has_avx2},
#elif defined(__aarch64__)
    {&kI8mmKernels, has_i8mm},
    {&kNeonKernels, has_dotprod},
#endif
    {&kPortableKernels, [] { return true; }},
};

// What a small product is with some kernels: rows by rows, so that every way through them is taken.
std::vector<float> products_with(const Kernels& kernels, Type type) {
  constexpr int kDepth = 64, kColumns = 2 * kTile, kRows = 24, kBlock = 32, kBlocks = kDepth / kBlock;
  std::vector<float> numbers(kDepth * kColumns), scales(kBlocks * kColumns), x(kRows * kDepth), results;
  uint32_t random = 1;
  auto draw = [&] { return float((random = random * 1664525u + 1013904223u) >> 8) / float(1 << 23) - 1.0f; };
  for (float& value : numbers) value = draw();
  for (float& value : scales) value = draw();
  for (float& value : x) value = draw();
  Value weights, scale;
  weights.type = type;
  weights.dims = {kDepth, kColumns};
  weights.data = numbers.data();  // of integers its bytes, which are as good as any
  weights.bytes = numbers.size() * sizeof(float);
  weights.constant = weights.ranked = true;
  scale = weights;
  scale.type = Type::kFloat;
  scale.dims = {kBlocks, kColumns};
  scale.data = scales.data();
  scale.bytes = scales.size() * sizeof(float);
  Matrix matrix;
  matrix.weights = &weights;
  if (type != Type::kFloat) {
    matrix.scales = &scale;
    matrix.block = kBlock;
  }
  PackedWeights packed = packed_form(matrix, has_half_scales(matrix), kernels.layout);
  std::vector<uint8_t> bytes(packed.bytes() + 4096);  // products ask for what comes behind, too
  pack(matrix, packed, bytes.data(), 1);
  packed.data = bytes.data();
  std::vector<int16_t> integers(kRows * kDepth);
  std::vector<float> row_scales(kRows * kBlocks);
  std::vector<int32_t> sums(kRows * kBlocks);
  std::vector<uint8_t> panels;
  for (int rows = 1; rows <= kRows; rows++) {
    panels.resize(kernels.panel_bytes ? kernels.panel_bytes(packed, rows) : 0);
    Activations a = {};
    a.rows = rows;
    a.depth = kDepth;
    a.block = kBlock;
    a.values = x.data();
    a.stride = kDepth;
    a.integers = integers.data();
    a.scales = row_scales.data();
    a.sums = sums.data();
    for (int r = 0; r < rows; r++)
      kernels.quantize(x.data() + r * kDepth, kDepth, kBlock, integers.data() + r * kDepth,
                       row_scales.data() + r * kBlocks, sums.data() + r * kBlocks);
    if (!panels.empty()) {
      kernels.to_panels(packed, a, 0, kBlocks, panels.data());
      a.panels = panels.data();
    }
    const size_t at = results.size();
    results.resize(at + size_t(rows * kColumns));
    kernels.product(packed, a, 0, packed.tiles(), results.data() + at, kColumns);
  }
  return results;
}

// Whether kernels compute what the portable ones do. Some instruction sets are rare, and a processor, or an emulator, may
// be at fault: such a set is passed over.
bool agrees(const Kernels& kernels) {
  for (Type type : {Type::kInt8, Type::kInt4, Type::kFloat}) {
    const std::vector<float> ours = products_with(kernels, type), theirs = products_with(kPortableKernels, type);
    for (size_t i = 0; i < ours.size(); i++) {
      const float bound = 0.5f + 1e-3f * std::fabs(theirs[i]);
      if (!(std::fabs(ours[i] - theirs[i]) <= bound)) return false;
    }
  }
  return true;
}

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
    if (named) return named;
    for (const Choice& choice : kChoices)
      if (choice.runs() && (choice.kernels == &kPortableKernels || agrees(*choice.kernels))) return choice.kernels;
    return &kPortableKernels;
  }();
  return *chosen;
}

}  // namespace specexport
