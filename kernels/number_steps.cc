// Steps on few numbers of any type, element by element: positions, masks, and the choice of draft tokens. They are here
// so that a pass of a draft is one group, not dozens of nodes, each of which takes ONNX Runtime longer than its work.

#include <cstring>

#include "step_tools.h"

namespace specexport {
namespace {

// Calls function with a number of an element type.
template <typename Function>
void with_type(Type type, Function function) {
  switch (type) {
    case Type::kFloat: return function(float());
    case Type::kInt64: return function(int64_t());
    case Type::kInt32: return function(int32_t());
    case Type::kInt8: return function(int8_t());
    default: return function(uint8_t());
  }
}

template <typename T>
T number_of(const View& view) {
  if (view.count() != 1) fail("an input has " + std::to_string(view.count()) + " numbers; expected one");
  return *view.as<T>();
}

bool one_type(const Graph& graph, const Node& node) {
  return any_type(graph, node) && input(graph, node, 0).type == input(graph, node, 1).type && node.inputs.size() == 2;
}
bool is_integer(const Graph& graph, const Node& node) {
  const Type type = input(graph, node, 0).type;
  return type == Type::kInt64 || type == Type::kInt32;
}
bool is_truth(const Graph& graph, const Node& node) { return input(graph, node, 0).type == Type::kBool; }

// y = function(a, b), of an element type A each, or of B where y has another.
template <typename A, typename Y, typename Function>
void zip(Frame& frame, const Step& step, Type type, Function function) {
  const View &a = frame[step.inputs[0]], &b = frame[step.inputs[1]];
  const Broadcast<2> both(a, b);
  const View& y = frame.create(step.outputs[0], type, both.dims);
  const int64_t step_a = both.step(0), step_b = both.step(1);
  both.runs(0, y.count(), [&](int64_t first, int64_t count, const auto& at) {
    const A *from = a.as<A>() + at[0], *other = b.as<A>() + at[1];
    Y* to = y.as<Y>() + first;
    for (int64_t i = 0; i < count; i++) to[i] = Y(function(from[i * step_a], other[i * step_b]));
  });
}

enum class Comparison { kLess, kLessOrEqual, kGreater, kGreaterOrEqual, kEqual };

template <Comparison comparison>
class Compare : public Step {
 public:
  void run(Frame& frame) const override {
    with_type(frame[inputs[0]].type, [&](auto number) {
      using T = decltype(number);
      zip<T, uint8_t>(frame, *this, Type::kBool, [](T a, T b) {
        switch (comparison) {
          case Comparison::kLess: return a < b;
          case Comparison::kLessOrEqual: return a <= b;
          case Comparison::kGreater: return a > b;
          case Comparison::kGreaterOrEqual: return a >= b;
          default: return a == b;
        }
      });
    });
  }
};

class Logic : public Step {
 public:
  explicit Logic(bool both) : both_(both) {}
  void run(Frame& frame) const override {
    if (both_) zip<uint8_t, uint8_t>(frame, *this, Type::kBool, [](uint8_t a, uint8_t b) { return a && b; });
    else zip<uint8_t, uint8_t>(frame, *this, Type::kBool, [](uint8_t a, uint8_t b) { return a || b; });
  }

 private:
  const bool both_;
};

template <Binary function>
class IntegerStep : public Step {
 public:
  void run(Frame& frame) const override {
    const Type type = frame[inputs[0]].type;
    if (type == Type::kInt64) apply<int64_t, uint64_t>(frame, type);
    else apply<int32_t, uint32_t>(frame, type);
  }

 private:
  template <typename T, typename U>
  void apply(Frame& frame, Type type) const {
    zip<T, T>(frame, *this, type, [](T a, T b) -> T {
      switch (function) {  // unsigned, as overflow has to wrap around
        case Binary::kAdd: return T(U(a) + U(b));
        case Binary::kSubtract: return T(U(a) - U(b));
        case Binary::kMultiply: return T(U(a) * U(b));
        case Binary::kMaximum: return std::max(a, b);
        default: return std::min(a, b);
      }
    });
  }
};

// y = function(x), element by element.
template <typename T, typename Function>
void map(Frame& frame, const Step& step, Function function) {
  const View x = frame.packed(frame[step.inputs[0]]);
  const View& y = frame.create(step.outputs[0], x.type, x.shape());
  for (int64_t i = 0, count = x.count(); i < count; i++) y.as<T>()[i] = function(x.as<T>()[i]);
}

class Not : public Step {
 public:
  void run(Frame& frame) const override {
    map<uint8_t>(frame, *this, [](uint8_t x) { return uint8_t(!x); });
  }
};

class NegateIntegers : public Step {
 public:
  void run(Frame& frame) const override {
    if (frame[inputs[0]].type == Type::kInt64) map<int64_t>(frame, *this, [](int64_t x) { return int64_t(0 - uint64_t(x)); });
    else map<int32_t>(frame, *this, [](int32_t x) { return int32_t(0 - uint32_t(x)); });
  }
};

class Clip : public Step {
 public:
  void run(Frame& frame) const override {
    with_type(frame[inputs[0]].type, [&](auto number) {
      using T = decltype(number);
      const bool below = inputs.size() > 1 && inputs[1] >= 0, above = inputs.size() > 2 && inputs[2] >= 0;
      const T least = below ? number_of<T>(frame[inputs[1]]) : T(), most = above ? number_of<T>(frame[inputs[2]]) : T();
      map<T>(frame, *this, [=](T x) {
        if (below && x < least) x = least;
        return above && x > most ? most : x;
      });
    });
  }
};

class Where : public Step {
 public:
  void run(Frame& frame) const override {
    const View &condition = frame[inputs[0]], &a = frame[inputs[1]], &b = frame[inputs[2]];
    const Broadcast<3> all(condition, a, b);
    const View& y = frame.create(outputs[0], a.type, all.dims);
    const int parts = parts_of(frame, y.count(), 16384);
    with_type(a.type, [&](auto number) {
      using T = decltype(number);
      const auto choose = [&](int64_t first, int64_t count, const auto& at) {
        const uint8_t* is = condition.as<uint8_t>() + at[0];
        const T *from = a.as<T>() + at[1], *other = b.as<T>() + at[2];
        T* to = y.as<T>() + first;
        const size_t chosen = *is ? 1 : 2;
        if (all.step(0) == 0 && all.step(chosen) == 1) std::copy_n(*is ? from : other, count, to);  // such as a state
        else
          for (int64_t i = 0; i < count; i++) to[i] = is[i * all.step(0)] ? from[i * all.step(1)] : other[i * all.step(2)];
      };
      frame.team.split(parts, [&](int p) { all.runs(y.count() * p / parts, y.count() * (p + 1) / parts, choose); });
    });
  }
};

class CumSum : public Step {
 public:
  void run(Frame& frame) const override {
    const View x = frame.packed(frame[inputs[0]]);
    const std::vector<int64_t> axes = integers_of(frame[inputs[1]]);
    if (axes.size() != 1) fail("CumSum has not one axis");
    const int axis = axis_of(axes[0], x.rank);
    const View& y = frame.create(outputs[0], x.type, x.shape());
    const int64_t inner = y.strides[axis], length = x.dims[axis], outer = length && inner ? x.count() / (length * inner) : 0;
    with_type(x.type, [&](auto number) {
      using T = decltype(number);
      for (int64_t o = 0; o < outer; o++)
        for (int64_t i = 0; i < inner; i++) {
          T sum = 0;
          for (int64_t at = o * length * inner + i, end = at + length * inner; at < end; at += inner)
            y.as<T>()[at] = sum = T(sum + x.as<T>()[at]);
        }
    });
  }
};

// The greatest numbers of rows; of equal ones those that come first.
class TopK : public Step {
 public:
  explicit TopK(bool largest) : largest_(largest) {}
  void run(Frame& frame) const override {
    View x = frame[inputs[0]];
    if (!x.dense_rows()) x = frame.packed(x);
    const std::vector<int64_t> counts = integers_of(frame[inputs[1]]);
    const int64_t count = counts.size() == 1 ? counts[0] : -1, size = x.last();
    if (x.rank < 1 || count < 0 || count > size) fail("TopK's k does not fit its input");
    std::vector<int64_t> dims = x.shape();
    dims.back() = count;
    const View y = outputs[0] >= 0 ? frame.create(outputs[0], x.type, dims) : View();
    const View places = outputs.size() > 1 && outputs[1] >= 0 ? frame.create(outputs[1], Type::kInt64, dims) : View();
    const int64_t rows = x.rows();
    with_type(x.type, [&](auto number) {
      using T = decltype(number);
      std::vector<std::pair<T, int64_t>> best;
      for (int64_t r = 0; r < rows && count; r++) {
        const T* row = x.as<T>() + x.row_offset(r);
        if (largest_) choose(row, size, size_t(count), best, [](T a, T b) { return a > b; });
        else choose(row, size, size_t(count), best, [](T a, T b) { return a < b; });
        for (int64_t i = 0; i < count; i++) {
          if (y.data) y.as<T>()[r * count + i] = best[size_t(i)].first;
          if (places.data) places.as<int64_t>()[r * count + i] = best[size_t(i)].second;
        }
      }
    });
  }

 private:
  // `better` orders numbers; best has `count` numbers and their places afterwards, the best first.
  template <typename T, typename Better>
  static void choose(const T* row, int64_t size, size_t count, std::vector<std::pair<T, int64_t>>& best, Better better) {
    using Place = std::pair<T, int64_t>;
    auto before = [&](const Place& a, const Place& b) {
      return better(a.first, b.first) || (!better(b.first, a.first) && a.second < b.second);
    };
    best.clear();
    auto offer = [&](T number, int64_t at) {  // to a heap whose front is the worst
      if (best.size() < count) {
        best.emplace_back(number, at);
        if (best.size() == count) std::make_heap(best.begin(), best.end(), before);
      } else if (better(number, best.front().first)) {
        std::pop_heap(best.begin(), best.end(), before);
        best.back() = {number, at};
        std::push_heap(best.begin(), best.end(), before);
      }
    };
    // At least `count` numbers are no worse than the worst of the `count` blocks with the best ones: mostly few more.
    const int64_t width = size / int64_t(2 * count);
    if (width >= 8) {
      std::vector<T> tops;
      for (int64_t from = 0; from < size; from += width) tops.push_back(best_of(row + from, std::min(width, size - from), better));
      for (size_t block = 0; block < tops.size(); block++) offer(tops[block], int64_t(block));
      const T limit = best.front().first;
      best.clear();
      for (int64_t from = 0; from < size; from += width) {
        if (better(limit, tops[size_t(from / width)])) continue;
        for (int64_t i = from, end = std::min(from + width, size); i < end; i++)
          if (!better(limit, row[i])) offer(row[i], i);
      }
    }
    if (best.size() < count) {  // a short row, or one with NaNs
      best.clear();
      for (int64_t i = 0; i < size; i++) offer(row[i], i);
    }
    std::sort_heap(best.begin(), best.end(), before);
  }

  template <typename T, typename Better>
  static T best_of(const T* row, int64_t size, Better better) {
    constexpr int kPartial = 16;  // which compilers turn into vectors
    T partial[kPartial];
    std::fill(partial, partial + kPartial, row[0]);
    int64_t i = 0;
    for (; i + kPartial <= size; i += kPartial)
      for (int j = 0; j < kPartial; j++) partial[j] = better(row[i + j], partial[j]) ? row[i + j] : partial[j];
    for (; i < size; i++) partial[0] = better(row[i], partial[0]) ? row[i] : partial[0];
    for (int j = 1; j < kPartial; j++) partial[0] = better(partial[j], partial[0]) ? partial[j] : partial[0];
    return partial[0];
  }

  const bool largest_;
};

enum class Reduction { kSum, kMaximum, kMinimum };

template <Reduction reduction>
class Reduce : public Step {  // along the last dimension
 public:
  explicit Reduce(bool keeps) : keeps_(keeps) {}
  void run(Frame& frame) const override {
    View x = frame[inputs[0]];
    if (!x.dense_rows()) x = frame.packed(x);
    std::vector<int64_t> dims = x.shape();
    if (keeps_) dims.back() = 1;
    else dims.pop_back();
    const View& y = frame.create(outputs[0], x.type, dims);
    const int64_t rows = y.count(), size = x.last();
    if (!size && rows && reduction != Reduction::kSum) fail("there is no extreme of no numbers");
    with_type(x.type, [&](auto number) {
      using T = decltype(number);
      for (int64_t r = 0; r < rows; r++) y.as<T>()[r] = of_row(x.as<T>() + (size ? x.row_offset(r) : 0), size);
    });
  }

 private:
  template <typename T>
  static T of_row(const T* row, int64_t size) {
    constexpr int kPartial = 16;  // which compilers turn into vectors; a row's order of sums depends on its length alone
    T partial[kPartial];
    std::fill(partial, partial + kPartial, reduction == Reduction::kSum || !size ? T() : row[0]);
    int64_t i = 0;
    for (; i + kPartial <= size; i += kPartial)
      for (int j = 0; j < kPartial; j++) partial[j] = with(partial[j], row[i + j]);
    for (; i < size; i++) partial[i % kPartial] = with(partial[i % kPartial], row[i]);
    for (int j = 1; j < kPartial; j++) partial[0] = with(partial[0], partial[j]);
    return partial[0];
  }
  template <typename T>
  static T with(T a, T b) {
    if (reduction == Reduction::kSum) return T(a + b);
    if (reduction == Reduction::kMaximum) return a < b ? b : a;
    return b < a ? b : a;
  }

  const bool keeps_;
};

class ShapeOf : public Step {
 public:
  ShapeOf(int64_t start, int64_t end) : start_(start), end_(end) {}
  void run(Frame& frame) const override {
    const View x = frame[inputs[0]];
    auto clamped = [&](int64_t at) { return std::clamp<int64_t>(at < 0 ? at + x.rank : at, 0, x.rank); };
    const int64_t start = clamped(start_), count = std::max<int64_t>(0, clamped(end_) - start);
    const View& y = frame.create(outputs[0], Type::kInt64, {count});
    std::copy_n(x.dims + start, count, y.as<int64_t>());
  }

 private:
  const int64_t start_, end_;
};

class Range : public Step {
 public:
  void run(Frame& frame) const override {
    const auto [start, limit, delta] = std::array{number(frame, 0), number(frame, 1), number(frame, 2)};
    if (delta == 0) fail("Range has a step of 0");
    const int64_t distance = delta > 0 ? limit - start : start - limit, by = delta > 0 ? delta : -delta;
    const View& y = frame.create(outputs[0], Type::kInt64, {distance > 0 ? (distance + by - 1) / by : 0});
    for (int64_t i = 0; i < y.count(); i++) y.as<int64_t>()[i] = start + i * delta;
  }

 private:
  int64_t number(const Frame& frame, size_t index) const { return number_of<int64_t>(frame[inputs[index]]); }
};

// Elements at places of the first dimensions.
class GatherPlaces : public Step {
 public:
  void run(Frame& frame) const override {
    const View x = frame.packed(frame[inputs[0]]), places = frame.packed(frame[inputs[1]]);
    const int known = int(places.last());
    if (places.rank < 1 || known < 1 || known > x.rank) fail("GatherND's indices do not fit its input");
    std::vector<int64_t> dims(places.dims, places.dims + places.rank - 1);
    dims.insert(dims.end(), x.dims + known, x.dims + x.rank);
    const View& y = frame.create(outputs[0], x.type, dims);
    const size_t bytes = size_t(x.strides[known - 1]) * element_size(x.type);
    for (int64_t r = 0, rows = places.rows(); r < rows; r++) {
      int64_t at = 0;
      for (int i = 0; i < known; i++) {
        int64_t index = places.as<int64_t>()[r * known + i];
        if (index < 0) index += x.dims[i];
        if (index < 0 || index >= x.dims[i]) fail("GatherND reads outside its input");
        at += index * x.strides[i];
      }
      std::memcpy(y.data + size_t(r) * bytes, x.data + size_t(at) * element_size(x.type), bytes);
    }
  }
};

class ScatterElements : public Step {
 public:
  explicit ScatterElements(int64_t axis) : axis_(axis) {}
  void run(Frame& frame) const override {
    const View x = frame[inputs[0]], places = frame.packed(frame[inputs[1]]), updates = frame.packed(frame[inputs[2]]);
    const int axis = axis_of(axis_, x.rank);
    if (!same_dims(places, updates) || places.rank != x.rank) fail("ScatterElements' inputs do not fit each other");
    const View& y = frame.create(outputs[0], x.type, x.shape());
    frame.copy(x, y);
    const size_t size = element_size(x.type);
    int64_t place[kMostDims] = {};
    for (int64_t i = 0; i < places.count(); i++) {
      int64_t at = 0;
      for (int d = 0; d < x.rank; d++) {
        int64_t index = d == axis ? places.as<int64_t>()[i] : place[d];
        if (index < 0) index += x.dims[d];
        if (index < 0 || index >= x.dims[d]) fail("ScatterElements writes outside its input");
        at += index * y.strides[d];
      }
      std::memcpy(y.data + size_t(at) * size, updates.data + size_t(i) * size, size);
      for (int d = x.rank - 1; d >= 0 && ++place[d] == places.dims[d]; d--) place[d] = 0;
    }
  }

 private:
  const int64_t axis_;
};

template <typename S, bool (*is)(const Graph&, const Node&)>
Maker maker() {
  return {is, [](const Graph&, const Node&) { return make<S>(); }};
}

template <Reduction reduction>
Maker reduction_maker() {
  return {[](const Graph& g, const Node& n) {
            const Value &x = input(g, n, 0), &axes = input(g, n, 1);
            if (!any_type(g, n) || rank_of(x) < 1 || axes.type != Type::kInt64 || !axes.data || axes.bytes != 8) return false;
            const int64_t axis = *static_cast<const int64_t*>(axes.data);
            return axis == -1 || axis == rank_of(x) - 1;
          },
          [](const Graph&, const Node& n) { return make<Reduce<reduction>>(n.integer("keepdims", 1) != 0); }};
}

bool has_places(const Graph& graph, const Node& node) {
  return any_type(graph, node) && input(graph, node, 1).type == Type::kInt64;
}

}  // namespace

const std::map<std::string, Maker>& number_makers() {
  static const std::map<std::string, Maker> table = {
      {"Less", maker<Compare<Comparison::kLess>, one_type>()},
      {"LessOrEqual", maker<Compare<Comparison::kLessOrEqual>, one_type>()},
      {"Greater", maker<Compare<Comparison::kGreater>, one_type>()},
      {"GreaterOrEqual", maker<Compare<Comparison::kGreaterOrEqual>, one_type>()},
      {"Equal", maker<Compare<Comparison::kEqual>, one_type>()},
      {"And", {is_truth, [](const Graph&, const Node&) { return make<Logic>(true); }}},
      {"Or", {is_truth, [](const Graph&, const Node&) { return make<Logic>(false); }}},
      {"Not", maker<Not, is_truth>()},
      {"Add", maker<IntegerStep<Binary::kAdd>, is_integer>()},
      {"Sub", maker<IntegerStep<Binary::kSubtract>, is_integer>()},
      {"Mul", maker<IntegerStep<Binary::kMultiply>, is_integer>()},
      {"Max", {[](const Graph& g, const Node& n) { return is_integer(g, n) && n.inputs.size() == 2; },
               [](const Graph&, const Node&) { return make<IntegerStep<Binary::kMaximum>>(); }}},
      {"Min", {[](const Graph& g, const Node& n) { return is_integer(g, n) && n.inputs.size() == 2; },
               [](const Graph&, const Node&) { return make<IntegerStep<Binary::kMinimum>>(); }}},
      {"Neg", maker<NegateIntegers, is_integer>()},
      {"Clip", maker<Clip, any_type>()},
      {"Where", {[](const Graph& g, const Node& n) { return is_truth(g, n) && is_any(input(g, n, 1).type); },
                 [](const Graph&, const Node&) { return make<Where>(); }}},
      {"CumSum", {[](const Graph& g, const Node& n) { return any_type(g, n) && !n.integer("exclusive", 0) && !n.integer("reverse", 0); },
                  [](const Graph&, const Node&) { return make<CumSum>(); }}},
      {"TopK", {[](const Graph& g, const Node& n) {
                  const int64_t axis = n.integer("axis", -1);
                  return any_type(g, n) && n.since >= 11 && (axis == -1 || axis == rank_of(input(g, n, 0)) - 1);
                },
                [](const Graph&, const Node& n) { return make<TopK>(n.integer("largest", 1) != 0); }}},
      {"ReduceSum", reduction_maker<Reduction::kSum>()},
      {"ReduceMax", reduction_maker<Reduction::kMaximum>()},
      {"ReduceMin", reduction_maker<Reduction::kMinimum>()},
      {"Shape", {any_type, [](const Graph&, const Node& n) { return make<ShapeOf>(n.integer("start", 0), n.integer("end", INT64_MAX)); }}},
      {"Range", {[](const Graph& g, const Node& n) { return input(g, n, 0).type == Type::kInt64; },
                 [](const Graph&, const Node&) { return make<Range>(); }}},
      {"GatherND", {[](const Graph& g, const Node& n) { return has_places(g, n) && !n.integer("batch_dims", 0); },
                    [](const Graph&, const Node&) { return make<GatherPlaces>(); }}},
      {"ScatterElements", {[](const Graph& g, const Node& n) {
                             auto reduction = n.attributes.find("reduction");
                             return has_places(g, n) && (reduction == n.attributes.end() || reduction->second.text == "none");
                           },
                           [](const Graph&, const Node& n) { return make<ScatterElements>(n.integer("axis", 0)); }}},
  };
  return table;
}

}  // namespace specexport
