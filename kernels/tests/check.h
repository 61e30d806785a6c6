// What the tests of the kernels share: random numbers, comparison of bits, and the count of what is wrong.
#pragma once

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "../kernels.h"

namespace specexport::tests {

struct Random {
  explicit Random(uint64_t seed) : seed(seed), engine(seed) {}
  // An integer of [least, most].
  int integer(int least, int most) { return std::uniform_int_distribution<int>(least, most)(engine); }
  bool chance(double probability) { return std::uniform_real_distribution<double>(0, 1)(engine) < probability; }
  float normal() { return std::normal_distribution<float>(0, 1)(engine); }
  std::vector<float> normals(size_t count, float scale = 1) {
    std::vector<float> list(count);
    for (float& x : list) x = normal() * scale;
    return list;
  }
  template <typename T>
  T any_of(std::initializer_list<T> list) { return list.begin()[integer(0, int(list.size()) - 1)]; }

  const uint64_t seed;
  std::mt19937_64 engine;
};

inline int failures = 0;

// Reports what differs, at most twenty times.
__attribute__((format(printf, 2, 3))) inline bool expect(bool right, const char* format, ...) {
  if (right || ++failures > 20) return right;
  va_list arguments;
  va_start(arguments, format);
  std::fputs("FAILED ", stdout);
  std::vprintf(format, arguments);
  std::fputs("\n", stdout);
  va_end(arguments);
  return false;
}

inline bool same_bits(const float* a, const float* b, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;  // of which there are many
    if (std::memcmp(a + i, b + i, sizeof(float))) return false;
  }
  return true;
}

// Whether a number is within a bound of what it should be; both may be the same infinity, or NaN.
inline bool is_near(float x, double expected, double bound) {
  if (std::isnan(expected)) return std::isnan(x);
  if (std::isinf(expected)) return double(x) == expected;
  return std::fabs(double(x) - expected) <= bound;
}

constexpr double kUnit = 1.0 / (1 << 24);  // the largest relative error of a rounding to fp32

void test_products(const Kernels& kernels, Random& random);
void test_attention(const Kernels& kernels, Random& random);
void test_elementwise(const Kernels& kernels, Random& random);
void test_team(Random& random);

}  // namespace specexport::tests
