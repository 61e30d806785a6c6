// Attention: trees against chains, what is masked, and sums in double precision.
#include <algorithm>

#include "check.h"

namespace specexport::tests {
namespace {

struct Cache {
  int size, value_size, length;
  std::vector<float> keys, values;

  Cache(Random& random, int size, int value_size, int length)
      : size(size), value_size(value_size), length(length), keys(random.normals(size_t(length * size))),
        values(random.normals(size_t(length * value_size))) {}
  void copy(const Cache& from, int source, int target) {
    std::copy_n(&from.keys[size_t(source * size)], size, &keys[size_t(target * size)]);
    std::copy_n(&from.values[size_t(source * value_size)], value_size, &values[size_t(target * value_size)]);
  }
  void spoil(int row) {
    std::fill_n(&keys[size_t(row * size)], size, NAN);
    std::fill_n(&values[size_t(row * value_size)], value_size, INFINITY);
  }
};

using Mask = std::vector<uint8_t>;

std::vector<float> attend(const Kernels& kernels, Random& random, const Cache& cache, const float* query,
                          const std::vector<Mask>& masks, float softcap, const float* sinks) {
  const int rows = int(masks.size()), apart = cache.value_size + random.integer(0, 2);
  const int mask_stride = cache.length + random.integer(0, 9);
  std::vector<uint8_t> mask(size_t(rows * mask_stride), 1);
  for (int r = 0; r < rows; r++) std::copy_n(masks[size_t(r)].begin(), cache.length, mask.begin() + r * mask_stride);
  std::vector<float> result(size_t(rows * apart)), scratch(attention_scratch(cache.length, rows));
  std::vector<AttentionRow> list;
  for (int r = 0; r < rows; r++)
    list.push_back({query + r * cache.size, mask.data() + r * mask_stride, result.data() + r * apart, sinks ? sinks + r : nullptr});
  // Those after the first may lie elsewhere.
  const int first = random.chance(0.5) ? random.integer(0, cache.length) : cache.length;
  Cache before = cache;
  const std::vector<float> later_keys(cache.keys.begin() + first * cache.size, cache.keys.end());
  const std::vector<float> later_values(cache.values.begin() + first * cache.value_size, cache.values.end());
  for (int j = first; j < cache.length; j++) before.spoil(j);
  AttentionCall call = {};
  call.rows = list.data();
  call.keys = before.keys.data();
  call.values = before.values.data();
  call.later_keys = later_keys.data();
  call.later_values = later_values.data();
  call.count = rows;
  call.first = first;
  call.length = cache.length;
  call.size = cache.size;
  call.value_size = cache.value_size;
  call.scale = 1 / std::sqrt(float(cache.size));
  call.softcap = softcap;
  call.scratch = scratch.data();
  kernels.attention(call);
  std::vector<float> dense;
  for (int r = 0; r < rows; r++)
    dense.insert(dense.end(), result.begin() + r * apart, result.begin() + r * apart + cache.value_size);
  return dense;
}

// The bound: a score is wrong by the roundings of its sum, which changes its weight by that much relatively; the weights
// and the sum over values are rounded once for every key.
void compare(const char* text, const Cache& cache, const float* q, const Mask& mask, float softcap, const float* sink,
             const float* result) {
  std::vector<double> weights(size_t(cache.length), 0);
  const double scale = 1 / std::sqrt(double(cache.size));
  double most = sink ? double(*sink) : -INFINITY, wrong = 0, total = 0, largest = 0;
  int count = 0;
  for (int j = 0; j < cache.length; j++) {
    if (!mask[size_t(j)]) continue;
    double score = 0, sum = 0;
    for (int d = 0; d < cache.size; d++) {
      const double term = double(q[d]) * double(cache.keys[size_t(j * cache.size + d)]);
      score += term;
      sum += std::fabs(term);
    }
    wrong = std::fmax(wrong, (cache.size + 6) * kUnit * sum * scale + (softcap > 0 ? 8 * kUnit * double(softcap) : 0));
    score *= scale;
    weights[size_t(j)] = softcap > 0 ? std::tanh(score / double(softcap)) * double(softcap) : score;
    most = std::fmax(most, weights[size_t(j)]);
    count++;
  }
  if (sink) total += std::exp(double(*sink) - most);
  for (int j = 0; j < cache.length; j++) {
    if (!mask[size_t(j)]) continue;
    weights[size_t(j)] = std::exp(weights[size_t(j)] - most);
    total += weights[size_t(j)];
    for (int d = 0; d < cache.value_size; d++)
      largest = std::fmax(largest, std::fabs(double(cache.values[size_t(j * cache.value_size + d)])));
  }
  for (int d = 0; d < cache.value_size; d++) {
    double expected = 0;
    for (int j = 0; j < cache.length; j++)
      if (mask[size_t(j)]) expected += weights[size_t(j)] / total * double(cache.values[size_t(j * cache.value_size + d)]);
    const double bound = (4 * wrong + (count + 32) * 4 * kUnit) * largest;
    expect(is_near(result[d], expected, bound), "%s: element %d is %.9g, expected %.9g within %.3g", text, d,
           double(result[d]), expected, bound);
  }
}

}  // namespace

void test_attention(const Kernels& kernels, Random& random) {
  const int size = random.any_of({64, 128, 1, 5, 20, 80, 96, 131}), value_size = random.chance(0.5) ? size : random.integer(1, 140);
  const int prefix = random.integer(0, 90), tokens = random.integer(1, 17), spare = random.integer(0, 30);
  const int length = prefix + tokens + spare;
  const float softcap = random.chance(0.4) ? 3.0f : 0.0f;
  char text[160];
  std::snprintf(text, sizeof text, "%s seed %llu attention size %d values %d prefix %d tokens %d spare %d softcap %g",
                kernels.name, static_cast<unsigned long long>(random.seed), size, value_size, prefix, tokens, spare, double(softcap));
  Cache cache(random, size, value_size, length);
  const std::vector<float> query = random.normals(size_t(tokens * size), random.any_of({0.1f, 1.0f, 8.0f}));
  std::vector<float> sink_scores = random.normals(size_t(tokens));
  const float* const sinks = random.chance(0.4) ? sink_scores.data() : nullptr;

  // A tree of tokens behind a prefix, of which a window may hide the beginning.
  const int window = random.chance(0.4) ? random.integer(0, prefix) : 0;
  std::vector<std::vector<int>> paths;
  std::vector<Mask> masks(size_t(tokens), Mask(size_t(length), 0));
  for (int t = 0; t < tokens; t++) {
    std::vector<int> path;
    if (t && random.chance(0.8)) path = paths[size_t(random.integer(0, t - 1))];
    path.push_back(t);
    for (int j = window; j < prefix; j++) masks[size_t(t)][size_t(j)] = 1;
    for (int ancestor : path) masks[size_t(t)][size_t(prefix + ancestor)] = 1;
    paths.push_back(path);
  }
  const std::vector<float> all = attend(kernels, random, cache, query.data(), masks, softcap, sinks);
  for (int t = 0; t < tokens; t++) {
    const float *const expected = &all[size_t(t * value_size)], *const q = &query[size_t(t * size)];
    const float* const sink = sinks ? sinks + t : nullptr;
    const Mask& mask = masks[size_t(t)];
    compare(text, cache, q, mask, softcap, sink, expected);
    auto require = [&](const Cache& other, const Mask& seen, const char* what) {
      const std::vector<float> y = attend(kernels, random, other, q, {seen}, softcap, sink);
      expect(same_bits(y.data(), expected, size_t(value_size)), "%s: row %d differs %s", text, t, what);
    };
    require(cache, mask, "alone");
    Cache spoiled = cache;
    for (int j = 0; j < length; j++)
      if (!mask[size_t(j)]) spoiled.spoil(j);
    require(spoiled, mask, "with NaN where it does not see");
    // The path as a chain, right behind the prefix, in a cache of another length that begins with the window.
    const int depth = int(paths[size_t(t)].size()), seen = prefix - window + depth;
    Cache chain(random, size, value_size, seen + random.integer(0, 20));
    for (int j = window; j < prefix; j++) chain.copy(cache, j, j - window);
    for (int j = 0; j < depth; j++) chain.copy(cache, prefix + paths[size_t(t)][size_t(j)], prefix - window + j);
    Mask chain_mask(size_t(chain.length), 0);
    std::fill_n(chain_mask.begin(), seen, uint8_t(1));
    require(chain, chain_mask, "from a chain");
  }
  // Any keys at all, perhaps none.
  Mask holes(size_t(length), 0);
  const double density = random.any_of({0.0, 0.1, 0.5, 0.95});
  for (uint8_t& bit : holes) bit = random.chance(density);
  const std::vector<float> y = attend(kernels, random, cache, query.data(), {holes}, softcap, sinks);
  if (std::count(holes.begin(), holes.end(), 1)) {
    compare(text, cache, query.data(), holes, softcap, sinks, y.data());
  } else {
    for (float x : y) expect(x == 0, "%s: a row that sees nothing is %g", text, double(x));
  }
  // A NaN in a row stays there.
  std::vector<float> bad = query;
  const int row = random.integer(0, tokens - 1);
  bad[size_t(row * size)] = NAN;
  const std::vector<float> with_bad = attend(kernels, random, cache, bad.data(), masks, softcap, sinks);
  for (int t = 0; t < tokens; t++) {
    const float* const result = &with_bad[size_t(t * value_size)];
    if (t != row) expect(same_bits(result, &all[size_t(t * value_size)], size_t(value_size)), "%s: row %d changes with NaN in row %d", text, t, row);
    else for (int d = 0; d < value_size; d++) expect(std::isnan(result[d]), "%s: a query of NaN gives %g", text, double(result[d]));
  }
}

}  // namespace specexport::tests
