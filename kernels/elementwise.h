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

// Sums along the depth that lie side by side: of each column in turn.
template <int kColumns>
void multiply_beside(const float* x, const float* w, ptrdiff_t step, int depth, float* y) {
  constexpr int kCount = kColumns / kLanes;
  Vec total[kCount];
  for (int j = 0; j < kCount; j++) total[j] = all(0.0f);
  for (int k = 0; k < depth; k++, w += step) {
    if (x[k] == 0) continue;  // as after a masked softmax: what is not seen may hold anything
    for (int j = 0; j < kCount; j++) total[j] = fma(all(x[k]), load(w + kLanes * j), total[j]);
  }
  for (int j = 0; j < kCount; j++) store(y + kLanes * j, total[j]);
}

void multiply(const float* x, const float* w, ptrdiff_t step_depth, ptrdiff_t step_column, int depth, int columns, float* y) {
  int n = 0;
  if (step_depth != 1) {
    for (; n + 64 <= columns; n += 64) multiply_beside<64>(x, w + n, step_depth, depth, y + n);
    for (; n + kLanes <= columns; n += kLanes) multiply_beside<kLanes>(x, w + n, step_depth, depth, y + n);
    for (; n < columns; n++) {
      float total = 0;
      for (int k = 0; k < depth; k++)
        if (x[k] != 0) total = fma(all(x[k]), all(w[k * step_depth + n]), all(total))[0];
      y[n] = total;
    }
    return;
  }
  const int whole = depth / kLanes * kLanes, rest = depth - whole;
  for (; n < columns; n += kLanes) {
    const float* column[kLanes];
    Vec total[kLanes];
    for (int j = 0; j < kLanes; j++) {
      column[j] = w + (n + j < columns ? n + j : n) * step_column;
      total[j] = all(0.0f);
    }
    for (int k = 0; k < whole; k += kLanes) {
      const Vec v = load(x + k);
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; j++) total[j] = fma(v, load(column[j] + k), total[j]);
    }
    if (rest)
      for (int j = 0; j < kLanes; j++) total[j] = fma(load_some(x + whole, rest), load_some(column[j] + whole, rest), total[j]);
    if (n + kLanes <= columns) store(y + n, sums(total));
    else store_some(y + n, sums(total), columns - n);
  }
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
