// What the files of steps share: checks of shapes, broadcasting, the table of operators.
#pragma once

#include <algorithm>
#include <array>
#include <initializer_list>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "steps.h"

namespace specexport {

[[noreturn]] inline void fail(const std::string& what) { throw std::runtime_error(what); }

inline std::vector<int64_t> integers_of(const View& view) {
  std::vector<int64_t> list;
  for (int64_t i = 0; i < view.count(); i++) {
    const int64_t at = view.rank ? i * view.strides[view.rank - 1] : 0;
    list.push_back(view.type == Type::kInt32 ? view.as<int32_t>()[at] : view.as<int64_t>()[at]);
  }
  return list;
}

inline int axis_of(int64_t axis, int rank) {
  if (axis < -rank || axis >= rank) fail("an axis is " + std::to_string(axis) + ", of a tensor of rank " + std::to_string(rank));
  return int(axis < 0 ? axis + rank : axis);
}

inline bool same_dims(const View& a, const View& b) {
  if (a.rank != b.rank) return false;
  return std::equal(a.dims, a.dims + a.rank, b.dims);
}

inline void require_dims(const View& view, std::initializer_list<int64_t> dims, const char* what) {
  if (view.rank != int(dims.size()) || !std::equal(dims.begin(), dims.end(), view.dims))
    fail(std::string(what) + " does not have the shape that goes with the other inputs");
}

// How many parts of work are worth handing out: one for every `least` elements.
inline int parts_of(const Frame& frame, int64_t elements, int64_t least) {
  return int(std::clamp<int64_t>(elements / least, 1, 4 * frame.team.threads()));
}

// Strides that let a view take part in a broadcast to these dimensions; throws where it does not fit.
inline void broadcast(const View& view, const std::vector<int64_t>& dims, int64_t* strides) {
  const int rank = int(dims.size());
  for (int i = 0; i < rank; i++) {
    const int from = i - (rank - view.rank);
    const bool repeated = from < 0 || view.dims[from] == 1;
    if (!repeated && view.dims[from] != dims[size_t(i)]) fail("shapes do not fit each other");
    strides[i] = repeated ? 0 : view.strides[from];
  }
}

inline std::vector<int64_t> broadcast_dims(std::initializer_list<const View*> views) {
  int rank = 0;
  for (const View* view : views) rank = std::max(rank, view->rank);
  std::vector<int64_t> dims(size_t(rank), 1);
  for (const View* view : views)
    for (int i = 0; i < view->rank; i++) {
      int64_t& size = dims[size_t(i + rank - view->rank)];
      if (view->dims[i] != 1) size = view->dims[i];
    }
  return dims;
}

// N views in a common shape. Neighbouring dimensions that all views go through like one count as one, so that there are
// few runs of elements at equal distances.
template <size_t N>
struct Broadcast {
  using Places = std::array<int64_t, N>;  // an element's offset in each view

  template <typename... Views>
  explicit Broadcast(const Views&... views) : dims(broadcast_dims({&views...})) {
    std::array<std::array<int64_t, kMostDims>, N> each;
    size_t v = 0;
    (broadcast(views, dims, each[v++].data()), ...);
    for (size_t i = dims.size(); i-- > 0;) {
      if (dims[i] == 1) continue;
      bool joins = depth_ > 0;
      for (v = 0; joins && v < N; v++) joins = each[v][i] == strides_[depth_ - 1][v] * lengths_[depth_ - 1];
      if (joins) {
        lengths_[depth_ - 1] *= dims[i];
        continue;
      }
      lengths_[depth_] = dims[i];
      for (v = 0; v < N; v++) strides_[depth_][v] = each[v][i];
      depth_++;
    }
    if (depth_ == 0) depth_ = 1;  // a single element
  }

  // Elements between neighbours of a run: 0 where a view repeats one.
  int64_t step(size_t view) const { return strides_[0][view]; }

  // Calls function(first element, count, Places) for each run from one element to another.
  template <typename Function>
  void runs(int64_t from, int64_t to, Function function) const {
    while (from < to) {
      int64_t rest = from / lengths_[0];
      const int64_t inner = from % lengths_[0], count = std::min(lengths_[0] - inner, to - from);
      Places at;
      for (size_t v = 0; v < N; v++) at[v] = inner * strides_[0][v];
      for (size_t i = 1; i < depth_; i++) {
        for (size_t v = 0; v < N; v++) at[v] += rest % lengths_[i] * strides_[i][v];
        rest /= lengths_[i];
      }
      function(from, count, at);
      from += count;
    }
  }

  const std::vector<int64_t> dims;

 private:  // the innermost dimension first
  size_t depth_ = 0;
  std::array<int64_t, kMostDims> lengths_ = {1};
  std::array<Places, kMostDims> strides_ = {};
};

inline const Value& input(const Graph& graph, const Node& node, size_t index) {
  static const Value none;
  return index < node.inputs.size() && node.inputs[index] >= 0 ? graph.values[size_t(node.inputs[index])] : none;
}
inline bool has_input(const Node& node, size_t index) { return index < node.inputs.size() && node.inputs[index] >= 0; }
inline bool is_float(const Graph& graph, const Node& node, size_t index = 0) {
  return input(graph, node, index).type == Type::kFloat;
}
inline bool is_any(Type type) {
  switch (type) {
    case Type::kFloat: case Type::kInt8: case Type::kUint8: case Type::kBool: case Type::kInt32: case Type::kInt64: return true;
    default: return false;
  }
}
inline bool any_type(const Graph& graph, const Node& node) { return is_any(input(graph, node, 0).type); }
inline int rank_of(const Value& value) { return value.ranked ? int(value.dims.size()) : -1; }

template <typename T, typename... Arguments>
std::unique_ptr<Step> make(Arguments&&... arguments) {
  return std::make_unique<T>(std::forward<Arguments>(arguments)...);
}

// The step of an operator, for the nodes that fit it.
struct Maker {
  bool (*fits)(const Graph&, const Node&);
  std::unique_ptr<Step> (*make)(const Graph&, const Node&);
};

// Operators on numbers of any type: see number_steps.cc.
const std::map<std::string, Maker>& number_makers();

}  // namespace specexport
