// Functions of elements, norms, softmax and rotations: a number's place in a vector must not matter.
#include "check.h"

namespace specexport::tests {
namespace {

const double kPi = std::acos(-1.0);

double reference(Unary function, double x) {
  switch (function) {
    case Unary::kSigmoid: return 1 / (1 + std::exp(-x));
    case Unary::kTanh: return std::tanh(x);
    case Unary::kExp: return std::exp(x);
    case Unary::kErf: return std::erf(x);
    case Unary::kSqrt: return std::sqrt(x);
    case Unary::kReciprocal: return 1 / x;
    case Unary::kCos: return std::cos(x);
    case Unary::kSin: return std::sin(x);
    case Unary::kNegate: return -x;
    case Unary::kAbs: return std::fabs(x);
    case Unary::kRelu: return x < 0 ? 0 : x;
    case Unary::kSoftplus: return std::log1p(std::exp(x));
    case Unary::kLog: return std::log(x);
    case Unary::kSilu: return x / (1 + std::exp(-x));
    case Unary::kGelu: return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    case Unary::kGeluTanh: return 0.5 * x * (1 + std::tanh(std::sqrt(2 / kPi) * (x + 0.044715 * x * x * x)));
    case Unary::kFloor: return std::floor(x);
  }
  return 0;
}

double reference(Binary function, double a, double b) {
  switch (function) {
    case Binary::kAdd: return a + b;
    case Binary::kSubtract: return a - b;
    case Binary::kMultiply: return a * b;
    case Binary::kDivide: return a / b;
    case Binary::kMaximum: return a > b ? a : b;
    case Binary::kMinimum: return a < b ? a : b;
    case Binary::kPower: return std::pow(a, b);
  }
  return 0;
}

void test_unary(const Kernels& kernels, Random& random) {
  for (int f = 0; f <= int(Unary::kFloor); f++) {
    const Unary function = Unary(f);
    const int count = random.integer(1, 70);
    std::vector<float> x = random.normals(size_t(count), random.any_of({0.1f, 3.0f, 20.0f})), y(size_t(count) + 1, 7.0f);
    if (function == Unary::kSqrt || function == Unary::kLog)
      for (float& number : x) number = std::fabs(number);
    if (count > 4) {
      x[1] = NAN;
      x[size_t(random.integer(2, count - 1))] = random.any_of({0.0f, INFINITY, 100.0f, 1e-30f});
    }
    kernels.unary(function, x.data(), y.data(), size_t(count));
    expect(y[size_t(count)] == 7.0f, "%s unary %d writes behind its end", kernels.name, f);
    for (int i = 0; i < count; i++) {
      // The bound: sixteen roundings, of the result and of numbers up to one (for functions that take sums near one).
      double expected = reference(function, double(x[size_t(i)]));
      if (std::isfinite(expected)) expected = double(float(expected)) == INFINITY ? INFINITY : expected;
      const double bound = 16 * kUnit * (std::fabs(expected) + 1) + (function == Unary::kGelu || function == Unary::kGeluTanh ? 16 * kUnit * std::fabs(double(x[size_t(i)])) : 0);
      const bool limit = std::isinf(x[size_t(i)]);  // where a gate of -infinity is 0 or NaN
      expect(limit || is_near(y[size_t(i)], expected, bound), "%s unary %d of %.9g is %.9g, expected %.9g", kernels.name, f,
             double(x[size_t(i)]), double(y[size_t(i)]), expected);
      float alone;
      kernels.unary(function, &x[size_t(i)], &alone, 1);
      expect(same_bits(&alone, &y[size_t(i)], 1), "%s unary %d of %.9g depends on its place", kernels.name, f, double(x[size_t(i)]));
    }
  }
}

void test_binary(const Kernels& kernels, Random& random) {
  for (int f = 0; f <= int(Binary::kPower); f++) {
    const Binary function = Binary(f);
    const int count = random.integer(1, 50), sa = random.integer(0, 1), sb = random.integer(0, 1);
    std::vector<float> a = random.normals(size_t(count)), b = random.normals(size_t(count)), y(size_t(count) + 1, 7.0f);
    if (function == Binary::kPower)
      for (float& number : a) number = std::fabs(number);
    kernels.binary(function, a.data(), sa, b.data(), sb, y.data(), size_t(count));
    expect(y[size_t(count)] == 7.0f, "%s binary %d writes behind its end", kernels.name, f);
    for (int i = 0; i < count; i++) {
      const float u = a[size_t(i * sa)], v = b[size_t(i * sb)];
      const double expected = reference(function, double(u), double(v));
      expect(is_near(y[size_t(i)], expected, 4 * kUnit * std::fabs(expected)), "%s binary %d of %.9g and %.9g is %.9g", kernels.name, f,
             double(u), double(v), double(y[size_t(i)]));
      float alone;
      kernels.binary(function, &u, 1, &v, 1, &alone, 1);
      expect(same_bits(&alone, &y[size_t(i)], 1), "%s binary %d depends on its place", kernels.name, f);
    }
  }
}

// Norms and softmax; the bounds: a rounding for each number of a row, of the sum and of what it is divided by.
void test_rows(const Kernels& kernels, Random& random) {
  const int size = random.any_of({1, 3, 8, 31, 64, 100, 577}), offset = random.integer(0, 7);
  std::vector<float> memory = random.normals(size_t(size + offset), random.any_of({0.01f, 1.0f, 50.0f}));
  const std::vector<float> weight = random.normals(size_t(size)), bias = random.normals(size_t(size));
  float* const x = memory.data() + offset;
  const std::vector<float> aligned(x, x + size);
  std::vector<float> y(aligned), again(aligned);
  auto require_same = [&](const char* what) {
    expect(same_bits(y.data(), again.data(), size_t(size)), "%s %s of %d depends on its place", kernels.name, what, size);
  };
  double squares = 0, mean = 0, variance = 0, most = -INFINITY, total = 0, largest = 0;
  for (int i = 0; i < size; i++) {
    squares += double(x[i]) * double(x[i]) / size;
    mean += double(x[i]) / size;
    most = std::fmax(most, double(x[i]));
    largest = std::fmax(largest, std::fabs(double(x[i])));
  }
  for (int i = 0; i < size; i++) {
    variance += (double(x[i]) - mean) * (double(x[i]) - mean) / size;
    total += std::exp(double(x[i]) - most);
  }
  const double units = (size + 16) * kUnit;
  const bool weighted = random.chance(0.7);
  kernels.rms_norm(x, weighted ? weight.data() : nullptr, 1e-5f, y.data(), size);
  kernels.rms_norm(aligned.data(), weighted ? weight.data() : nullptr, 1e-5f, again.data(), size);
  require_same("rms_norm");
  for (int i = 0; i < size; i++) {
    const double expected = double(x[i]) / std::sqrt(squares + double(1e-5f)) * (weighted ? double(weight[size_t(i)]) : 1);
    expect(is_near(y[size_t(i)], expected, units * std::fabs(expected)), "%s rms_norm of %d: %.9g, expected %.9g", kernels.name, size,
           double(y[size_t(i)]), expected);
  }
  kernels.layer_norm(x, weight.data(), bias.data(), 1e-5f, y.data(), size);
  kernels.layer_norm(aligned.data(), weight.data(), bias.data(), 1e-5f, again.data(), size);
  require_same("layer_norm");
  for (int i = 0; i < size; i++) {
    const double factor = 1 / std::sqrt(variance + double(1e-5f)), w = double(weight[size_t(i)]);
    const double expected = (double(x[i]) - mean) * factor * w + double(bias[size_t(i)]);
    const double bound = 4 * units * (largest * factor * std::fabs(w) * (1 + factor * units * largest) + std::fabs(double(bias[size_t(i)])));
    expect(is_near(y[size_t(i)], expected, bound), "%s layer_norm of %d: %.9g, expected %.9g", kernels.name, size, double(y[size_t(i)]), expected);
  }
  kernels.softmax(x, y.data(), size);
  kernels.softmax(aligned.data(), again.data(), size);
  require_same("softmax");
  for (int i = 0; i < size; i++) {
    const double expected = std::exp(double(x[i]) - most) / total;
    expect(is_near(y[size_t(i)], expected, (units + 4 * kUnit * largest) * expected + 1e-37), "%s softmax of %d: %.9g, expected %.9g", kernels.name,
           size, double(y[size_t(i)]), expected);
  }
  std::vector<float> masked;  // what a mask leaves out between them
  for (int i = 0; i < size; i++) {
    masked.insert(masked.end(), size_t(random.integer(0, 2)), random.any_of({-INFINITY, -3.4028235e38f}));
    masked.push_back(aligned[size_t(i)]);
  }
  std::vector<float> spread(masked);
  kernels.softmax(masked.data(), spread.data(), int(masked.size()));
  size_t at = 0;
  for (size_t i = 0; i < masked.size(); i++)
    if (masked[i] > -1e38f) again[at++] = spread[i];
  require_same("masked softmax");
  x[random.integer(0, size - 1)] = NAN;
  kernels.softmax(x, y.data(), size);
  for (float number : y) expect(std::isnan(number), "%s softmax of a row with NaN: %g", kernels.name, double(number));
  kernels.rms_norm(x, nullptr, 1e-5f, y.data(), size);
  for (float number : y) expect(std::isnan(number), "%s rms_norm of a row with NaN: %g", kernels.name, double(number));
}

void test_rotate(const Kernels& kernels, Random& random) {
  const int half = random.integer(1, 40), rotated = 2 * half, size = rotated + random.integer(0, 9);
  const bool interleaved = random.chance(0.5);
  const std::vector<float> x = random.normals(size_t(size));
  std::vector<float> cos(size_t(half), 0.0f), sin(size_t(half), 0.0f), y(x);
  for (int i = 0; i < half; i++) {
    const float angle = random.normal() * 3;
    cos[size_t(i)] = std::cos(angle);
    sin[size_t(i)] = std::sin(angle);
  }
  kernels.rotate(x.data(), cos.data(), sin.data(), y.data(), size, rotated, interleaved);
  for (int i = 0; i < half; i++) {
    const size_t first = size_t(interleaved ? 2 * i : i), second = size_t(interleaved ? 2 * i + 1 : half + i);
    const double u = double(x[first]), v = double(x[second]), c = double(cos[size_t(i)]), s = double(sin[size_t(i)]);
    const double bound = 4 * kUnit * (std::fabs(u) + std::fabs(v));
    expect(is_near(y[first], u * c - v * s, bound) && is_near(y[second], v * c + u * s, bound), "%s rotate of %d%s", kernels.name, size,
           interleaved ? ", interleaved" : "");
  }
  for (int i = rotated; i < size; i++) expect(y[size_t(i)] == x[size_t(i)], "%s rotate changes what it should copy", kernels.name);
}

// Each column alone equals it among others, whichever dimension is dense.
void test_multiply(const Kernels& kernels, Random& random) {
  const int depth = random.integer(1, 150), columns = random.integer(1, 150);
  const bool turned = random.chance(0.5);
  const ptrdiff_t step_depth = turned ? 1 : columns + random.integer(0, 9), step_column = turned ? depth + random.integer(0, 9) : 1;
  std::vector<float> x = random.normals(size_t(depth)), y(static_cast<size_t>(columns)), alone(1);
  std::vector<float> w = random.normals(size_t((depth - 1) * step_depth + (columns - 1) * step_column + 1));
  if (!turned && random.chance(0.5)) {  // as after a mask
    const int k = random.integer(0, depth - 1);
    x[size_t(k)] = 0;
    for (int n = 0; n < columns; n++) w[size_t(k * step_depth + n)] = NAN;
  }
  kernels.multiply(x.data(), w.data(), step_depth, step_column, depth, columns, y.data());
  for (int n = 0; n < columns; n++) {
    const float* column = w.data() + n * step_column;
    kernels.multiply(x.data(), column, step_depth, step_column, depth, 1, alone.data());
    double sum = 0, bound = 0;
    for (int k = 0; k < depth; k++) {
      if (x[size_t(k)] == 0) continue;
      const double product = double(x[size_t(k)]) * double(column[k * step_depth]);
      sum += product;
      bound += std::fabs(product) * (depth + 4) * kUnit;
    }
    expect(is_near(y[size_t(n)], sum, bound), "%s multiply of %d by %d", kernels.name, depth, columns);
    expect(same_bits(&y[size_t(n)], alone.data(), 1), "%s multiply of %d by %d: a column alone differs", kernels.name, depth, columns);
  }
}

}  // namespace

void test_elementwise(const Kernels& kernels, Random& random) {
  test_unary(kernels, random);
  test_binary(kernels, random);
  test_rows(kernels, random);
  test_rotate(kernels, random);
  test_multiply(kernels, random);
}

}  // namespace specexport::tests
