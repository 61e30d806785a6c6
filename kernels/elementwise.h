// Functions of elements, norms and rotations. Included by kernels_impl.h alone.
#pragma once

#include "vectors.h"

namespace specexport {
namespace {

template <typename Function>
void map(const float* x, float* y, size_t count, Function function) {
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(y + i, function(load(x + i)));
  if (i < count) store_some(y + i, function(load_some(x + i, int(count - i))), int(count - i));
}

template <typename Function>
void map_scalars(const float* x, float* y, size_t count, Function function) {
  for (size_t i = 0; i < count; i++) y[i] = function(x[i]);
}

void unary(Unary function, const float* x, float* y, size_t count) {
  switch (function) {
    case Unary::kSigmoid: return map(x, y, count, [](Vec v) { return sigmoid(v); });
    case Unary::kSilu: return map(x, y, count, [](Vec v) { return v * sigmoid(v); });
    case Unary::kTanh: return map(x, y, count, [](Vec v) { return tanh(v); });
    case Unary::kExp: return map(x, y, count, [](Vec v) { return exp(v); });
    case Unary::kNegate: return map(x, y, count, [](Vec v) { return -v; });
    case Unary::kRelu: return map(x, y, count, [](Vec v) { return select((Ints)(v < all(0.0f)), all(0.0f), v); });
    case Unary::kAbs: return map(x, y, count, [](Vec v) { return (Vec)((Ints)v & 0x7fffffff); });
    case Unary::kReciprocal: return map(x, y, count, [](Vec v) { return all(1.0f) / v; });
    case Unary::kGeluTanh:
      return map(x, y, count, [](Vec v) {
        Vec inner = all(0.7978845608f) * fma(v * v * v, all(0.044715f), v);
        return all(0.5f) * v * (all(1.0f) + tanh(inner));
      });
    // The C library computes one number at a time, so the result does not depend on a number's position.
    case Unary::kGelu:
      return map_scalars(x, y, count, [](float v) { return 0.5f * v * (1.0f + erff(v * 0.70710678f)); });
    case Unary::kErf: return map_scalars(x, y, count, [](float v) { return erff(v); });
    case Unary::kSqrt: return map_scalars(x, y, count, [](float v) { return sqrtf(v); });
    case Unary::kCos: return map_scalars(x, y, count, [](float v) { return cosf(v); });
    case Unary::kSin: return map_scalars(x, y, count, [](float v) { return sinf(v); });
    case Unary::kLog: return map_scalars(x, y, count, [](float v) { return logf(v); });
    case Unary::kFloor: return map_scalars(x, y, count, [](float v) { return floorf(v); });
    case Unary::kSoftplus:
      return map_scalars(x, y, count, [](float v) { return v > 20 ? v : log1pf(expf(v)); });
  }
}

template <typename Function>
void zip(const float* a, int a_stride, const float* b, int b_stride, float* y, size_t count, Function function) {
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    store(y + i, function(a_stride ? load(a + i) : all(*a), b_stride ? load(b + i) : all(*b)));
  if (int rest = int(count - i); rest > 0)
    store_some(y + i, function(a_stride ? load_some(a + i, rest) : all(*a), b_stride ? load_some(b + i, rest) : all(*b)),
               rest);
}

void binary(Binary function, const float* a, int sa, const float* b, int sb, float* y, size_t count) {
  switch (function) {
    case Binary::kAdd: return zip(a, sa, b, sb, y, count, [](Vec u, Vec v) { return u + v; });
    case Binary::kSubtract: return zip(a, sa, b, sb, y, count, [](Vec u, Vec v) { return u - v; });
    case Binary::kMultiply: return zip(a, sa, b, sb, y, count, [](Vec u, Vec v) { return u * v; });
    case Binary::kDivide: return zip(a, sa, b, sb, y, count, [](Vec u, Vec v) { return u / v; });
    case Binary::kMaximum: return zip(a, sa, b, sb, y, count, [](Vec u, Vec v) { return vmax(u, v); });
    case Binary::kMinimum: return zip(a, sa, b, sb, y, count, [](Vec u, Vec v) { return vmin(u, v); });
    case Binary::kPower:
      for (size_t i = 0; i < count; i++) y[i] = powf(a[sa ? i : 0], b[sb ? i : 0]);
  }
}

// A row is summed in interleaved partial sums, one a lane, independently of neighbouring rows.
template <typename Function>
float reduce(const float* x, int size, Function term) {
  Vec total = all(0.0f);
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) total = term(load(x + i), total);
  if (i < size) total = term(load_some(x + i, size - i), total);
  return sum(total);
}

void rms_norm(const float* x, const float* weight, float epsilon, float* y, int size) {
  float squares = reduce(x, size, [](Vec v, Vec total) { return fma(v, v, total); });
  Vec factor = all(1.0f / sqrtf(squares / float(size) + epsilon));
  int i = 0;
  if (!weight) return map(x, y, size_t(size), [=](Vec v) { return v * factor; });
  for (; i + kLanes <= size; i += kLanes) store(y + i, load(x + i) * factor * load(weight + i));
  if (int rest = size - i; rest > 0)
    store_some(y + i, load_some(x + i, rest) * factor * load_some(weight + i, rest), rest);
}

void layer_norm(const float* x, const float* weight, const float* bias, float epsilon, float* y, int size) {
  float mean = reduce(x, size, [](Vec v, Vec total) { return total + v; }) / float(size);
  float squares = 0;
  {
    Vec total = all(0.0f), center = all(mean);
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) {
      Vec d = load(x + i) - center;
      total = fma(d, d, total);
    }
    if (i < size) {
      float padded[kLanes] = {};
      for (int j = i; j < size; j++) padded[j - i] = x[j] - mean;
      total = fma(load(padded), load(padded), total);
    }
    squares = sum(total);
  }
  float factor = 1.0f / sqrtf(squares / float(size) + epsilon);
  for (int i = 0; i < size; i++) {
    float scaled = (x[i] - mean) * factor;
    if (weight) scaled = scaled * weight[i];
    y[i] = bias ? scaled + bias[i] : scaled;
  }
}

// Masked numbers contribute exact zeros to the ordered sum, so their positions change no bit.
void softmax(const float* x, float* y, int size) {
  float most = -__builtin_inff(), total = 0;
  for (int i = 0; i < size; i++) most = x[i] > most || x[i] != x[i] ? x[i] : most;
  Vec center = all(most == -__builtin_inff() ? 0.0f : most);
  map(x, y, size_t(size), [=](Vec v) { return exp(v - center); });
  for (int i = 0; i < size; i++) total += y[i];
  Vec factor = all(1.0f / total);
  map(y, y, size_t(size), [=](Vec v) { return v * factor; });
}

float dot(const float* a, const float* b, int size) {
  Vec total = all(0.0f);
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) total = fma(load(a + i), load(b + i), total);
  if (i < size) total = fma(load_some(a + i, size - i), load_some(b + i, size - i), total);
  return sum(total);
}

void rotate(const float* x, const float* cos, const float* sin, float* y, int size, int rotated, bool interleaved) {
  int half = rotated / 2;
  if (interleaved) {
    for (int i = 0; i < half; i++) {
      float u = x[2 * i], v = x[2 * i + 1];
      y[2 * i] = u * cos[i] - v * sin[i];
      y[2 * i + 1] = v * cos[i] + u * sin[i];
    }
  } else {
    for (int i = 0; i < half; i++) {
      float u = x[i], v = x[half + i];
      y[i] = u * cos[i] - v * sin[i];
      y[half + i] = v * cos[i] + u * sin[i];
    }
  }
  for (int i = rotated; i < size; i++) y[i] = x[i];
}

}  // namespace
}  // namespace specexport
