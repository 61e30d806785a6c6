// 16-bit floating point, one number at a time.
#pragma once

#include <cstdint>
#include <cstring>

namespace specexport {
namespace {  // compiled for several processors

inline float bfloat_to_float(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float f;
  std::memcpy(&f, &wide, 4);
  return f;
}

inline float half_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 0x1f, mantissa = h & 0x3ff, bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | mantissa << 13;
  } else if (exponent) {
    bits = sign | (exponent + 112) << 23 | mantissa << 13;
  } else {
    float value = float(mantissa) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Whether fp16 represents a number exactly, and if so its bits.
inline bool float_to_half(float f, uint16_t* half) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size >= 0x38800000) {  // 2^-14, the least that is not subnormal
    *half = uint16_t(sign | (size - 0x38000000) >> 13);
    return !(size & 0x1fff) && size < 0x47800000;
  }
  const float steps = f < 0 ? -f * 16777216.0f : f * 16777216.0f;
  *half = uint16_t(sign | uint32_t(steps));
  return steps == float(uint32_t(steps));
}

}  // namespace
}  // namespace specexport
