#include "steps.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "half.h"
#include "step_tools.h"

namespace specexport {

View& Frame::create(int value, Type type, const std::vector<int64_t>& dims) {
  View& view = views[size_t(value)];
  view = View();
  view.type = type;
  view.set(dims);
  if (const int index = output_index[size_t(value)]; index >= 0) {
    view.data = static_cast<char*>(run.output(size_t(index), dims));
  } else {
    view.data = buffers[size_t(value)] = arena.take(size_t(view.count()) * element_size(type));
  }
  return view;
}

void Frame::alias(int value, const View& view) {
  if (output_index[size_t(value)] >= 0) {
    copy(view, create(value, view.type, view.shape()));
  } else {
    views[size_t(value)] = view;
  }
}

View Frame::packed(const View& view) {
  if (view.contiguous()) return view;
  View copy = view;
  copy.set(view.shape());
  copy.data = scratch(size_t(view.count()) * element_size(view.type));
  this->copy(view, copy);
  return copy;
}

char* Frame::scratch(size_t bytes) {
  scratch_memory.push_back(arena.take(bytes));
  return scratch_memory.back();
}

void Frame::free_scratch() {
  for (char* data : scratch_memory) arena.give(data);
  scratch_memory.clear();
}

void Frame::copy(const View& from, const View& to) {
  const size_t size = element_size(from.type);
  const int64_t rows = from.rows(), last = from.last(), stride = from.dense_rows() ? 1 : from.strides[from.rank - 1];
  const int parts = int(std::min(rows, int64_t(parts_of(*this, from.count(), 16384))));
  team.split(parts, [&](int p) {
    for (int64_t r = rows * p / parts, end = rows * (p + 1) / parts; r < end; r++) {
      const char* source = from.data + from.row_offset(r) * int64_t(size);
      char* target = to.data + to.row_offset(r) * int64_t(size);
      if (stride == 1) {
        std::memcpy(target, source, size_t(last) * size);
      } else {
        for (int64_t i = 0; i < last; i++) std::memcpy(target + size_t(i) * size, source + i * stride * int64_t(size), size);
      }
    }
  });
}

namespace {

class Alias : public Step {  // another shape or order of the same elements
 public:
  using Look = View (*)(const Frame&, const Step&, const Node&);
  Alias(const Node& node, Look look) : node_(node), look_(look) { looks = true; }
  void run(Frame& frame) const override { frame.alias(outputs[0], look_(frame, *this, node_)); }

 private:
  const Node node_;
  const Look look_;
};

class Reshape : public Step {
 public:
  explicit Reshape(bool zero_is_zero) : zero_is_zero_(zero_is_zero) { looks = true; }
  void run(Frame& frame) const override {
    const View& x = frame[inputs[0]];
    std::vector<int64_t> dims = integers_of(frame[inputs[1]]);
    int64_t known = 1, free = -1;
    for (size_t i = 0; i < dims.size(); i++) {
      if (dims[i] == 0 && !zero_is_zero_) {
        if (int(i) >= x.rank) fail("Reshape copies a dimension that its input lacks");
        dims[i] = x.dims[i];
      }
      if (dims[i] < -1 || (dims[i] == -1 && free >= 0)) fail("Reshape to a shape with more than one free dimension");
      if (dims[i] == -1) free = int64_t(i);
      else known *= dims[i];
    }
    if (free >= 0) dims[size_t(free)] = known ? x.count() / known : 0;
    View view;
    int64_t count = 1;
    for (int64_t size : dims) count *= size;
    if (count != x.count()) fail("Reshape changes the number of elements");
    if (reshape_view(x, dims, &view)) return frame.alias(outputs[0], view);
    View y = frame.create(outputs[0], x.type, dims);
    y.set(x.shape());
    frame.copy(x, y);
  }

 private:
  const bool zero_is_zero_;
};

View transposed(const Frame& frame, const Step& step, const Node& node) {
  const View& x = frame[step.inputs[0]];
  View y = x;
  auto it = node.attributes.find("perm");
  if (it != node.attributes.end() && it->second.integers.size() != size_t(x.rank)) fail("perm is not of the input's rank");
  for (int i = 0; i < x.rank; i++) {
    const int from = it == node.attributes.end() ? x.rank - 1 - i : axis_of(it->second.integers[size_t(i)], x.rank);
    y.dims[i] = x.dims[from];
    y.strides[i] = x.strides[from];
  }
  return y;
}

View unsqueezed(const Frame& frame, const Step& step, const Node&) {
  const View& x = frame[step.inputs[0]];
  std::vector<int64_t> axes = integers_of(frame[step.inputs[1]]);
  View y = x;
  y.rank = x.rank + int(axes.size());
  if (y.rank > kMostDims) fail("Unsqueeze makes more than 8 dimensions");
  bool is_new[kMostDims] = {};
  for (int64_t axis : axes) {
    bool& at = is_new[axis_of(axis, y.rank)];
    if (at) fail("Unsqueeze names an axis twice");
    at = true;
  }
  for (int i = 0, from = 0; i < y.rank; i++) {
    y.dims[i] = is_new[i] ? 1 : x.dims[from];
    y.strides[i] = is_new[i] ? 0 : x.strides[from++];
  }
  return y;
}

View squeezed(const Frame& frame, const Step& step, const Node&) {
  const View& x = frame[step.inputs[0]];
  bool gone[kMostDims] = {};
  if (step.inputs.size() > 1 && step.inputs[1] >= 0)
    for (int64_t axis : integers_of(frame[step.inputs[1]])) gone[axis_of(axis, x.rank)] = true;
  else
    for (int i = 0; i < x.rank; i++) gone[i] = x.dims[i] == 1;
  View y = x;
  y.rank = 0;
  for (int i = 0; i < x.rank; i++) {
    if (gone[i] && x.dims[i] != 1) fail("Squeeze takes away a dimension that is not 1");
    if (gone[i]) continue;
    y.dims[y.rank] = x.dims[i];
    y.strides[y.rank++] = x.strides[i];
  }
  return y;
}

View sliced(const Frame& frame, const Step& step, const Node&) {
  View y = frame[step.inputs[0]];
  const std::vector<int64_t> starts = integers_of(frame[step.inputs[1]]), ends = integers_of(frame[step.inputs[2]]);
  std::vector<int64_t> axes, steps(starts.size(), 1);
  if (step.inputs.size() > 3 && step.inputs[3] >= 0) axes = integers_of(frame[step.inputs[3]]);
  else
    for (size_t i = 0; i < starts.size(); i++) axes.push_back(int64_t(i));
  if (step.inputs.size() > 4 && step.inputs[4] >= 0) steps = integers_of(frame[step.inputs[4]]);
  if (ends.size() != starts.size() || axes.size() != starts.size() || steps.size() != starts.size())
    fail("Slice's starts, ends, axes and steps are not of one length");
  for (size_t i = 0; i < starts.size(); i++) {
    const int axis = axis_of(axes[i], y.rank);
    const int64_t size = y.dims[axis], by = steps[i];
    if (by < 1) fail("Slice goes backwards, which is not supported here");
    const int64_t start = std::clamp<int64_t>(starts[i] < 0 ? starts[i] + size : starts[i], 0, size);
    const int64_t end = std::clamp<int64_t>(ends[i] < 0 ? ends[i] + size : ends[i], start, size);
    y.data += start * y.strides[axis] * int64_t(element_size(y.type));
    y.dims[axis] = (end - start + by - 1) / by;
    y.strides[axis] *= by;
  }
  return y;
}

View same(const Frame& frame, const Step& step, const Node&) { return frame[step.inputs[0]]; }

View expanded(const Frame& frame, const Step& step, const Node&) {
  const View& x = frame[step.inputs[0]];
  const std::vector<int64_t> dims = integers_of(frame[step.inputs[1]]);
  View y = x;
  if (dims.size() > size_t(kMostDims)) fail("Expand makes more than 8 dimensions");
  y.rank = std::max(x.rank, int(dims.size()));
  for (int i = 0; i < y.rank; i++) {
    const int from = i - (y.rank - x.rank), wanted = i - (y.rank - int(dims.size()));
    const int64_t has = from < 0 ? 1 : x.dims[from], asked = wanted < 0 ? 1 : dims[size_t(wanted)];
    if (asked < 0 || (has != asked && has != 1 && asked != 1)) fail("Expand does not fit");
    y.dims[i] = has == 1 ? asked : has;
    y.strides[i] = from < 0 || has == 1 ? 0 : x.strides[from];
  }
  return y;
}

class Split : public Step {
 public:
  explicit Split(int64_t axis) : axis_(axis) { looks = true; }
  void run(Frame& frame) const override {
    const View x = frame[inputs[0]];
    const int axis = axis_of(axis_, x.rank);
    std::vector<int64_t> sizes;
    if (inputs.size() > 1 && inputs[1] >= 0) {
      sizes = integers_of(frame[inputs[1]]);
    } else {
      const int64_t parts = int64_t(outputs.size()), each = (x.dims[axis] + parts - 1) / parts;
      for (int64_t i = 0; i < parts; i++) sizes.push_back(std::min(each, x.dims[axis] - i * each));
    }
    if (sizes.size() != outputs.size()) fail("Split has not one size for each output");
    View y = x;
    int64_t total = 0;
    for (size_t i = 0; i < outputs.size(); i++) {
      if (sizes[i] < 0) fail("Split has a negative size");
      y.dims[axis] = sizes[i];
      total += sizes[i];
      if (total > x.dims[axis]) fail("Split's parts are larger than its input");
      if (outputs[i] >= 0) frame.alias(outputs[i], y);
      y.data += sizes[i] * x.strides[axis] * int64_t(element_size(x.type));
    }
  }

 private:
  const int64_t axis_;
};

class Concat : public Step {
 public:
  explicit Concat(int64_t axis) : axis_(axis) {}
  void run(Frame& frame) const override {
    const View& first = frame[inputs[0]];
    const int axis = axis_of(axis_, first.rank);
    std::vector<int64_t> dims = first.shape();
    dims[size_t(axis)] = 0;
    for (int input : inputs) {
      View other = frame[input];
      if (other.rank == first.rank) dims[size_t(axis)] += std::exchange(other.dims[axis], first.dims[axis]);
      if (!same_dims(other, first)) fail("Concat's inputs do not fit each other");
    }
    View& y = frame.create(outputs[0], first.type, dims);
    const size_t size = element_size(y.type);
    int64_t inner = 1, outer = 1;
    for (int i = axis + 1; i < y.rank; i++) inner *= dims[size_t(i)];
    for (int i = 0; i < axis; i++) outer *= dims[size_t(i)];
    int64_t at = 0;
    for (int input : inputs) {
      const View x = frame.packed(frame[input]);
      const size_t bytes = size_t(x.dims[axis] * inner) * size;
      for (int64_t o = 0; o < outer; o++)
        std::memcpy(y.data + size_t((o * dims[size_t(axis)] + at) * inner) * size, x.data + size_t(o) * bytes, bytes);
      at += x.dims[axis];
    }
  }

 private:
  const int64_t axis_;
};

class UnaryStep : public Step {
 public:
  explicit UnaryStep(Unary function) : function_(function) {}
  void run(Frame& frame) const override {
    const View x = frame.packed(frame[inputs[0]]);
    View& y = frame.create(outputs[0], Type::kFloat, x.shape());
    const int64_t count = x.count();
    const int parts = parts_of(frame, count, 2048);
    frame.team.split(parts, [&](int p) {
      const int64_t from = count * p / parts, to = count * (p + 1) / parts;
      frame.kernels.unary(function_, x.floats() + from, y.floats() + from, size_t(to - from));
    });
  }

 private:
  const Unary function_;
};

class Gate : public Step {
 public:
  explicit Gate(Unary function) : function_(function) {}
  void run(Frame& frame) const override {
    View a = frame[inputs[0]], b = frame[inputs[1]];
    if (!same_dims(a, b)) fail("an activation and its gate do not have the same shape");
    if (!a.dense_rows()) a = frame.packed(a);
    if (!b.dense_rows()) b = frame.packed(b);
    View& y = frame.create(outputs[0], Type::kFloat, a.shape());
    constexpr int64_t kPiece = 512;
    const int64_t size = y.last(), rows = y.rows(), pieces = (size + kPiece - 1) / kPiece, all = rows * pieces;
    const int parts = parts_of(frame, y.count(), 1024);
    frame.team.split(parts, [&](int p) {
      for (int64_t i = all * p / parts; i < all * (p + 1) / parts; i++) {
        const int64_t row = i / pieces, from = i % pieces * kPiece, count = std::min(kPiece, size - from);
        float* to = y.floats() + row * size + from;
        frame.kernels.unary(function_, a.floats() + a.row_offset(row) + from, to, size_t(count));
        frame.kernels.binary(Binary::kMultiply, to, 1, b.floats() + b.row_offset(row) + from, 1, to, size_t(count));
      }
    });
  }

 private:
  const Unary function_;
};

class BinaryStep : public Step {
 public:
  explicit BinaryStep(Binary function) : function_(function) {}
  void run(Frame& frame) const override {
    View a = frame[inputs[0]], b = frame[inputs[1]];
    const Broadcast<2> strided(a, b);
    if (strided.step(0) > 1) a = frame.packed(a);
    if (strided.step(1) > 1) b = frame.packed(b);
    const Broadcast<2> both(a, b);
    View& y = frame.create(outputs[0], a.type, both.dims);
    const int parts = parts_of(frame, y.count(), 8192);
    frame.team.split(parts, [&](int p) {
      both.runs(y.count() * p / parts, y.count() * (p + 1) / parts, [&](int64_t first, int64_t count, const auto& at) {
        frame.kernels.binary(function_, a.floats() + at[0], int(both.step(0)), b.floats() + at[1], int(both.step(1)),
                             y.floats() + first, size_t(count));
      });
    });
  }

 private:
  const Binary function_;
};

class Norm : public Step {
 public:
  Norm(bool centered, float epsilon) : centered_(centered), epsilon_(epsilon) {}
  void run(Frame& frame) const override {
    View x = frame[inputs[0]];
    if (!x.dense_rows()) x = frame.packed(x);
    require_dims(frame[inputs[1]], {x.last()}, "the weight of a norm");
    if (inputs.size() > 2 && inputs[2] >= 0) require_dims(frame[inputs[2]], {x.last()}, "the bias of a norm");
    const float* weight = frame[inputs[1]].floats();
    const float* bias = inputs.size() > 2 && inputs[2] >= 0 ? frame[inputs[2]].floats() : nullptr;
    View& y = frame.create(outputs[0], Type::kFloat, x.shape());
    const int size = int(x.last());
    const int64_t rows = x.rows();
    const int parts = int(std::min<int64_t>(rows, parts_of(frame, x.count(), 2048)));
    frame.team.split(parts, [&](int p) {
      for (int64_t r = rows * p / parts; r < rows * (p + 1) / parts; r++) {
        const float* from = x.floats() + x.row_offset(r);
        float* to = y.floats() + r * size;
        if (centered_) frame.kernels.layer_norm(from, weight, bias, epsilon_, to, size);
        else frame.kernels.rms_norm(from, weight, epsilon_, to, size);
      }
    });
  }

 private:
  const bool centered_;
  const float epsilon_;
};

class Softmax : public Step {
 public:
  void run(Frame& frame) const override {
    View x = frame[inputs[0]];
    if (!x.dense_rows()) x = frame.packed(x);
    View& y = frame.create(outputs[0], Type::kFloat, x.shape());
    const int size = int(x.last());
    const int64_t rows = x.rows();
    const int parts = int(std::min<int64_t>(rows, parts_of(frame, x.count(), 2048)));
    frame.team.split(parts, [&](int p) {
      for (int64_t r = rows * p / parts; r < rows * (p + 1) / parts; r++)
        frame.kernels.softmax(x.floats() + x.row_offset(r), y.floats() + r * size, size);
    });
  }
};

class Rotary : public Step {
 public:
  Rotary(bool interleaved, int rotated) : interleaved_(interleaved), rotated_(rotated) {}
  void run(Frame& frame) const override {
    View x = frame[inputs[0]];
    if (!x.dense_rows()) x = frame.packed(x);
    const View cos = frame.packed(frame[inputs[1]]), sin = frame.packed(frame[inputs[2]]);
    const int64_t batch = x.dims[0], heads = x.dims[1], tokens = x.dims[2];
    const int size = int(x.dims[3]), rotated = rotated_ ? rotated_ : size;
    if (rotated > size || rotated % 2 || !same_dims(cos, sin)) fail("RotaryEmbedding's inputs do not fit each other");
    if (cos.rank != 3 || cos.dims[1] != tokens || cos.last() != rotated / 2 || (cos.dims[0] != batch && cos.dims[0] != 1))
      fail("RotaryEmbedding's cosines do not fit its input");
    View& y = frame.create(outputs[0], Type::kFloat, x.shape());
    const int64_t rows = x.rows();
    const int parts = parts_of(frame, x.count(), 8192);
    frame.team.split(parts, [&](int p) {
      for (int64_t r = rows * p / parts; r < rows * (p + 1) / parts; r++) {
        const int64_t t = r % tokens, b = cos.dims[0] == 1 ? 0 : r / tokens / heads, at = (b * tokens + t) * (rotated / 2);
        frame.kernels.rotate(x.floats() + x.row_offset(r), cos.floats() + at, sin.floats() + at, y.floats() + r * size,
                             size, rotated, interleaved_);
      }
    });
  }

 private:
  const bool interleaved_;
  const int rotated_;
};

class TensorScatter : public Step {
 public:
  void run(Frame& frame) const override {
    const View cache = frame[inputs[0]], update = frame[inputs[1]];
    if (update.rank != 4 || cache.rank != 4) fail("TensorScatter's inputs are not of rank 4");
    require_dims(update, {cache.dims[0], cache.dims[1], update.dims[2], cache.dims[3]}, "TensorScatter's update");
    if (inputs.size() > 2 && inputs[2] >= 0) require_dims(frame[inputs[2]], {cache.dims[0]}, "TensorScatter's index");
    View& y = frame.create(outputs[0], cache.type, cache.shape());
    if (y.data != cache.data) frame.copy(cache, y);
    const int64_t tokens = update.dims[2];
    for (int64_t b = 0; b < cache.dims[0]; b++) {
      const int64_t at = inputs.size() > 2 && inputs[2] >= 0 ? frame[inputs[2]].as<int64_t>()[b] : 0;
      if (at < 0 || at + tokens > cache.dims[2]) fail("TensorScatter writes outside the cache");
      View from = update, to = y;
      from.dims[0] = to.dims[0] = 1;
      to.dims[2] = tokens;
      from.data += b * update.strides[0] * int64_t(sizeof(float));
      to.data += (b * y.strides[0] + at * y.strides[2]) * int64_t(sizeof(float));
      frame.copy(from, to);
    }
  }
};

// With keys and values in two parts, those of the cache and later ones, a mask has a row for each token, which the rows
// of a group repeat.
class Attention : public Step {
 public:
  Attention(float scale, float softcap) : scale_(scale), softcap_(softcap) {}
  void run(Frame& frame) const override {
    const Inputs in = read(frame);
    const int64_t groups = in.k.dims[1], first = in.k.dims[2], batch = in.q.dims[0], heads = in.q.dims[1], rows = in.q.dims[2];
    const int size = int(in.q.dims[3]), value_size = int(in.v.dims[3]);
    View& y = frame.create(outputs[0], Type::kFloat, {batch, heads, rows, value_size});
    // Rows in the order of groups, tokens and heads: neighbours share keys, and often what they see.
    const int64_t shared = heads / groups, of_group = rows * shared, every = batch * groups * of_group;
    const int parts = int(std::min<int64_t>(every, 4 * frame.team.threads()));
    const size_t scratch = attention_scratch(int(in.length), of_group);
    float* const memory = reinterpret_cast<float*>(frame.scratch(size_t(parts) * scratch * sizeof(float)));
    frame.team.split(parts, [&](int p) {
      AttentionRow list[kRowsAttending];
      for (int64_t row = every * p / parts, end = every * (p + 1) / parts; row < end;) {
        const int64_t group = row / of_group, b = group / groups;
        const int64_t count = std::min<int64_t>({end - row, of_group - row % of_group, kRowsAttending});
        for (int64_t i = 0; i < count; i++) {
          const int64_t at = (row + i) % of_group, t = at / shared, h = group % groups * shared + at % shared;
          list[i].query = in.q.floats() + b * in.q.strides[0] + h * in.q.strides[1] + t * in.q.strides[2];
          list[i].mask = in.mask.as<uint8_t>() + b * in.masks[0] + h * in.masks[1] + t % in.tokens * in.masks[2];
          list[i].result = y.floats() + ((b * heads + h) * rows + t) * value_size;
          list[i].sink = nullptr;
        }
        AttentionCall call = {};
        call.rows = list;
        call.keys = in.k.floats() + group * first * size;
        call.values = in.v.floats() + group * first * value_size;
        if (in_parts()) {
          call.later_keys = in.later_k.floats() + group * (in.length - first) * size;
          call.later_values = in.later_v.floats() + group * (in.length - first) * value_size;
        }
        call.count = int(count);
        call.first = int(first);
        call.length = int(in.length);
        call.size = size;
        call.value_size = value_size;
        call.scale = scale_ > 0 ? scale_ : 1.0f / std::sqrt(float(size));
        call.softcap = softcap_;
        call.scratch = memory + size_t(p) * scratch;
        frame.kernels.attention(call);
        row += count;
      }
    });
  }

 private:
  struct Inputs {
    View q, k, v, mask, later_k, later_v;
    int64_t length, tokens;  // of all keys, and of the mask
    int64_t masks[4];        // its strides
  };

  bool in_parts() const { return inputs.size() > 4; }

  Inputs read(Frame& frame) const {
    Inputs in;
    in.q = frame[inputs[0]];
    if (!in.q.dense_rows()) in.q = frame.packed(in.q);
    in.k = frame.packed(frame[inputs[1]]);
    in.v = frame.packed(frame[inputs[2]]);
    in.mask = frame[inputs[3]];
    const int64_t batch = in.q.dims[0], heads = in.q.dims[1], rows = in.q.dims[2], size = in.q.dims[3];
    const int64_t groups = in.k.dims[1], first = in.k.dims[2], value_size = in.v.dims[3];
    in.length = first;
    in.tokens = rows;
    if (groups < 1 || heads % groups) fail("Attention's heads do not fit each other");
    require_dims(in.k, {batch, groups, first, size}, "Attention's keys");
    require_dims(in.v, {batch, groups, first, value_size}, "Attention's values");
    if (in.mask.rank > 4) fail("Attention's mask is not of rank 4 or less");
    if (in_parts()) {
      in.later_k = frame.packed(frame[inputs[4]]);
      in.later_v = frame.packed(frame[inputs[5]]);
      const int64_t later = in.later_k.dims[2];
      require_dims(in.later_k, {batch, groups, later, size}, "Attention's later keys");
      require_dims(in.later_v, {batch, groups, later, value_size}, "Attention's later values");
      in.length += later;
      in.tokens = in.mask.rank > 1 ? in.mask.dims[in.mask.rank - 2] : 1;
      if (in.tokens < 1 || rows % in.tokens) fail("Attention's mask does not fit its rows");
    }
    const std::vector<int64_t> dims = {batch, heads, in.tokens, in.length};
    broadcast(in.mask, dims, in.masks);
    if (in.masks[3] != 1 && in.length != 1) {
      in.mask = frame.packed(in.mask);
      broadcast(in.mask, dims, in.masks);
    }
    return in;
  }

  const float scale_, softcap_;
};

void widen(Type type, const char* from, float* to, size_t count) {
  for (size_t i = 0; i < count; i++) {
    uint16_t bits;
    std::memcpy(&bits, from + 2 * i, 2);
    to[i] = type == Type::kBfloat16 ? bfloat_to_float(bits) : half_to_float(bits);
  }
}

class Gather : public Step {
 public:
  explicit Gather(int64_t axis = 0) : axis_(axis) {}
  void run(Frame& frame) const override {
    const View table = frame.packed(frame[inputs[0]]), indices = frame.packed(frame[inputs[1]]);
    const int axis = axis_of(axis_, table.rank);
    std::vector<int64_t> dims(table.dims, table.dims + axis);
    dims.insert(dims.end(), indices.dims, indices.dims + indices.rank);
    dims.insert(dims.end(), table.dims + axis + 1, table.dims + table.rank);
    const bool wide = table.type == Type::kBfloat16 || table.type == Type::kFloat16;
    View& y = frame.create(outputs[0], wide ? Type::kFloat : table.type, dims);
    const size_t numbers = size_t(table.strides[axis]), row = numbers * element_size(table.type);
    const int64_t length = table.dims[axis];
    const std::vector<int64_t> list = integers_of(flat(indices));
    size_t to = 0;
    for (int64_t first = 0, all = y.count() ? table.count() / int64_t(numbers) : 0; first < all; first += length)
      for (int64_t index : list) {
        if (index < 0) index += length;
        if (index < 0 || index >= length) fail("Gather reads outside its table");
        const char* from = table.data + size_t(first + index) * row;
        if (!wide) std::memcpy(y.data + to * row, from, row);
        else widen(table.type, from, y.floats() + to * numbers, numbers);
        to++;
      }
  }

 private:
  const int64_t axis_;
  static View flat(View view) {
    const int64_t count = view.count();
    view.set({count});
    return view;
  }
};

class GatherRows : public Step {  // GatherElements whose indices are the same along a row
 public:
  explicit GatherRows(int64_t axis) : axis_(axis) {}
  void run(Frame& frame) const override {
    const View x = frame[inputs[0]], indices = frame[inputs[1]];
    const int axis = axis_of(axis_, x.rank);
    if (indices.rank != x.rank) fail("GatherElements' indices are not of its input's rank");
    for (int i = 0; i < x.rank; i++)
      if (i != axis && indices.dims[i] > x.dims[i]) fail("GatherElements' indices are larger than its input");
    View& y = frame.create(outputs[0], x.type, indices.shape());
    const size_t size = element_size(x.type);
    const int64_t rows = y.rows(), last = y.last();
    const bool whole = indices.strides[indices.rank - 1] == 0 && axis != x.rank - 1 && x.dense_rows();
    for (int64_t r = 0; r < rows; r++) {
      int64_t place[kMostDims] = {}, rest = r;
      for (int i = y.rank - 2; i >= 0; i--) {
        place[i] = rest % y.dims[i];
        rest /= y.dims[i];
      }
      const int64_t* row = indices.as<int64_t>() + indices.row_offset(r);
      for (int64_t c = 0; c < last; c += whole ? last : 1) {
        int64_t index = row[c * indices.strides[indices.rank - 1]];
        if (index < 0) index += x.dims[axis];
        if (index < 0 || index >= x.dims[axis]) fail("GatherElements reads outside its input");
        place[y.rank - 1] = c;
        int64_t at = 0;
        for (int i = 0; i < x.rank; i++) at += (i == axis ? index : place[i]) * x.strides[i];
        std::memcpy(y.data + size_t(r * last + c) * size, x.data + at * int64_t(size), whole ? size_t(last) * size : size);
      }
    }
  }

 private:
  const int64_t axis_;
};

class MatMul : public Step {  // of two tensors that are not constant
 public:
  void run(Frame& frame) const override {
    View a = frame[inputs[0]], b = frame[inputs[1]];
    if (a.rank < 2 || b.rank < 2) fail("MatMul of vectors is not supported here");
    if (!a.dense_rows()) a = frame.packed(a);
    if (!b.dense_rows() && b.strides[b.rank - 2] != 1) b = frame.packed(b);
    const int64_t rows = a.dims[a.rank - 2], depth = a.last(), columns = b.last();
    if (b.dims[b.rank - 2] != depth) fail("MatMul's inputs do not fit each other");
    View outer_a = a, outer_b = b;
    outer_a.rank -= 2;
    outer_b.rank -= 2;
    std::vector<int64_t> dims = broadcast_dims({&outer_a, &outer_b});
    int64_t sa[kMostDims], sb[kMostDims];
    broadcast(outer_a, dims, sa);
    broadcast(outer_b, dims, sb);
    const std::vector<int64_t> outer = dims;
    dims.push_back(rows);
    dims.push_back(columns);
    View& y = frame.create(outputs[0], Type::kFloat, dims);
    int64_t stacks = 1;
    for (int64_t size : outer) stacks *= size;
    // A single column is dense whatever its step, and so is a single row along the depth.
    const int64_t stride_k = depth == 1 ? 1 : b.strides[b.rank - 2], stride_n = b.strides[b.rank - 1], all = stacks * rows;
    const int parts = int(std::min<int64_t>(all, parts_of(frame, all * depth * columns, 16384)));
    frame.team.split(parts, [&](int p) {
      for (int64_t i = all * p / parts; i < all * (p + 1) / parts; i++) {
        int64_t stack = i / rows, at_a = i % rows * a.strides[a.rank - 2], at_b = 0;
        for (int d = int(outer.size()) - 1; d >= 0; d--) {
          at_a += stack % outer[size_t(d)] * sa[d];
          at_b += stack % outer[size_t(d)] * sb[d];
          stack /= outer[size_t(d)];
        }
        frame.kernels.multiply(a.floats() + at_a, b.floats() + at_b, stride_k, stride_n, int(depth), int(columns), y.floats() + i * columns);
      }
    });
  }
};

class Cast : public Step {
 public:
  explicit Cast(Type to) : to_(to) { looks = true; }
  void run(Frame& frame) const override {
    const View x = frame.packed(frame[inputs[0]]);
    if (x.type == to_) return frame.alias(outputs[0], frame[inputs[0]]);
    View& y = frame.create(outputs[0], to_, x.shape());
    const int64_t count = x.count();
    switch (x.type) {
      case Type::kInt8: return fill(x.as<int8_t>(), y, count);
      case Type::kUint8: case Type::kBool: return fill(x.as<uint8_t>(), y, count);
      case Type::kInt32: return fill(x.as<int32_t>(), y, count);
      case Type::kInt64: return fill(x.as<int64_t>(), y, count);
      default: return fill(x.floats(), y, count);
    }
  }

 private:
  template <typename From>
  void fill(const From* from, const View& y, int64_t count) const {
    switch (to_) {
      case Type::kFloat: for (int64_t i = 0; i < count; i++) y.floats()[i] = float(from[i]); break;
      case Type::kInt64: for (int64_t i = 0; i < count; i++) y.as<int64_t>()[i] = int64_t(from[i]); break;
      case Type::kInt32: for (int64_t i = 0; i < count; i++) y.as<int32_t>()[i] = int32_t(from[i]); break;
      default: for (int64_t i = 0; i < count; i++) y.as<uint8_t>()[i] = from[i] != 0; break;
    }
  }
  const Type to_;
};

class Product : public Step {
 public:
  Product(const PackedWeights& weights, const PackedWeights* offsets)
      : weights_(weights), offsets_(offsets ? *offsets : PackedWeights{}) {}
  const PackedWeights* weights() const override { return &weights_; }
  void run(Frame& frame) const override {
    View x = frame[inputs[0]];
    const int64_t depth = weights_.depth, columns = weights_.columns;
    if (x.last() != depth) fail("the input of a product has " + std::to_string(x.last()) + " columns; expected " + std::to_string(depth));
    int64_t stride = depth;
    if (!x.dense_rows() || !x.even_rows(&stride)) {
      x = frame.packed(x);
      stride = depth;
    }
    std::vector<int64_t> dims = x.shape();
    dims.back() = columns;
    View& y = frame.create(outputs[0], Type::kFloat, dims);
    const int64_t rows = x.rows();
    if (!rows) return;
    const Addend addend = addend_to(frame, y);
    const int64_t panel = rows_of_panel(frame, rows);
    const Memory memory = memory_for(frame, std::min(rows, panel));
    for (int64_t first = 0; first < rows; first += panel) {
      Activations a = {};
      a.rows = int(std::min(panel, rows - first));
      a.depth = int(depth);
      a.block = weights_.block;
      a.stride = stride;
      a.values = x.floats() + first * stride;
      a.integers = memory.integers;
      a.scales = memory.scales;
      a.sums = memory.sums;
      a.panels = panel_bytes(frame, a.rows) ? memory.panels : nullptr;
      if (blocks()) quantize(frame, a, memory);
      if (memory.block_sums) sum_blocks(frame, a, memory.block_sums);
      multiply(frame, a, memory.block_sums, addend.from(first), y.floats() + first * columns);
    }
  }

 private:
  // What is added to the rows of a product: a row for each, or one for all.
  struct Addend {
    const float* values = nullptr;
    int64_t stride = 0;
    Addend from(int64_t row) const { return {values ? values + row * stride : nullptr, stride}; }
  };

  // Of the rows that are multiplied together.
  struct Memory {
    int16_t* integers = nullptr;
    float* scales = nullptr;
    int32_t* sums = nullptr;
    float* block_sums = nullptr;  // to multiply by the offsets
    uint8_t* panels = nullptr;
  };

  int blocks() const { return weights_.quantized() ? weights_.depth / weights_.block : 0; }

  Addend addend_to(Frame& frame, const View& y) const {
    if (inputs.size() < 2) return {};
    View other = frame[inputs[1]];
    int64_t stride = 0;
    const bool row = other.count() == weights_.columns;
    if (!(other.rank == 1 && row) && !same_dims(other, y)) fail("what is added to a product does not fit it");
    if (!row && !(other.dense_rows() && other.even_rows(&stride))) {
      other = frame.packed(other);
      other.even_rows(&stride);
    }
    return {other.floats(), row ? 0 : stride};
  }

  size_t panel_bytes(const Frame& frame, int64_t rows) const {
    return blocks() && frame.kernels.panel_bytes ? frame.kernels.panel_bytes(weights_, int(rows)) : 0;
  }

  // Rows that stay in the cache while the tiles go by; of floats only slices must (see tiles.h).
  int64_t rows_of_panel(const Frame& frame, int64_t rows) const {
    const int64_t depth = weights_.depth, for_registers = std::clamp<int64_t>((256 << 10) / depth, 32, 320) / 16 * 16;
    if (panel_bytes(frame, std::min(rows, for_registers))) return for_registers;
    return blocks() ? std::clamp<int64_t>((128 << 10) / depth, 20, 320) / 20 * 20 : 240;
  }

  Memory memory_for(Frame& frame, int64_t rows) const {
    Memory memory;
    const size_t pieces = size_t(rows * blocks());
    if (blocks()) {
      memory.integers = reinterpret_cast<int16_t*>(frame.scratch(size_t(rows * weights_.depth) * 2));
      memory.scales = reinterpret_cast<float*>(frame.scratch(pieces * 4));
      memory.sums = reinterpret_cast<int32_t*>(frame.scratch(pieces * 4));
    }
    if (offsets_.data) memory.block_sums = reinterpret_cast<float*>(frame.scratch(pieces * 4));
    if (const size_t bytes = panel_bytes(frame, rows)) memory.panels = reinterpret_cast<uint8_t*>(frame.scratch(bytes));
    return memory;
  }

  // To panels, if there are any, and to integers in rows for all or the columns that products with panels leave to others:
  // those of a partial tile.
  void quantize(Frame& frame, const Activations& a, const Memory& memory) const {
    const int count = blocks();
    const int parts = parts_of(frame, int64_t(a.rows) * a.depth, 2048);
    if (a.panels) {
      const int some = std::min(count, parts);
      frame.team.split(some, [&](int p) {
        frame.kernels.to_panels(weights_, a, count * p / some, count * (p + 1) / some, memory.panels);
      });
      if (weights_.columns % kTile == 0) return;
    }
    const int64_t pieces = int64_t(a.rows) * count;
    frame.team.split(parts, [&](int p) {
      for (int64_t i = pieces * p / parts, end = pieces * (p + 1) / parts; i < end;) {
        const int64_t row = i / count, block = i % count, next = std::min<int64_t>(count - block, end - i);
        const int64_t at = block * a.block;
        frame.kernels.quantize(a.values + row * a.stride + at, int(next) * a.block, a.block,
                               memory.integers + row * a.depth + at, memory.scales + i, memory.sums + i);
        i += next;
      }
    });
  }

  void sum_blocks(Frame& frame, const Activations& a, float* sums) const {
    const int64_t count = blocks(), pieces = a.rows * count;
    const int parts = parts_of(frame, int64_t(a.rows) * a.depth, 16384);
    frame.team.split(parts, [&](int p) {
      for (int64_t i = pieces * p / parts; i < pieces * (p + 1) / parts; i++)
        sums[i] = sum_of(a.values + i / count * a.stride + i % count * a.block, a.block);
    });
  }

  void multiply(Frame& frame, const Activations& a, const float* block_sums, const Addend& addend, float* to) const {
    Activations sums = {};
    sums.rows = a.rows;
    sums.depth = sums.stride = blocks();
    sums.values = block_sums;
    sums.adds = true;
    const int64_t columns = weights_.columns;
    const int tiles = weights_.tiles();
    const int parts = int(std::min<int64_t>(tiles, int64_t(frame.team.threads()) * (tiles > 512 ? 16 : 6)));
    // Parts begin at even tiles, as some products take two at once.
    auto begin_of = [&](int p) { return p == parts ? tiles : int(int64_t(tiles) * p / parts) / 2 * 2; };
    frame.team.split(parts, [&](int p) {
      const int from = begin_of(p), end = begin_of(p + 1);
      frame.kernels.product(weights_, a, from, end, to, columns);
      if (block_sums) frame.kernels.product(offsets_, sums, from, end, to, columns);
      if (!addend.values) return;
      const int64_t c = int64_t(from) * kTile, count = std::min<int64_t>(int64_t(end) * kTile, columns) - c;
      for (int64_t r = 0; r < a.rows; r++) {
        float* row = to + r * columns + c;
        frame.kernels.binary(Binary::kAdd, row, 1, addend.values + r * addend.stride + c, 1, row, size_t(count));
      }
    });
  }

  // In an order that depends on the number of numbers alone, a multiple of sixteen.
  static float sum_of(const float* x, int count) {
    float partial[16] = {};
    for (int i = 0; i < count; i += 16)
      for (int j = 0; j < 16; j++) partial[j] += x[i + j];
    for (int half = 8; half; half /= 2)
      for (int j = 0; j < half; j++) partial[j] += partial[j + half];
    return partial[0];
  }

  const PackedWeights weights_, offsets_;  // the latter without data if there are none
};

template <Unary function>
Maker unary_maker() {
  return {[](const Graph& g, const Node& n) { return is_float(g, n); },
          [](const Graph&, const Node&) { return make<UnaryStep>(function); }};
}
template <Binary function>
Maker binary_maker() {
  return {[](const Graph& g, const Node& n) { return is_float(g, n) && is_float(g, n, 1) && n.inputs.size() == 2; },
          [](const Graph&, const Node&) { return make<BinaryStep>(function); }};
}
template <Alias::Look look>
Maker alias_maker() {
  return {[](const Graph& g, const Node& n) { return any_type(g, n); },
          [](const Graph&, const Node& n) { return make<Alias>(n, look); }};
}

const std::map<std::string, Maker>& makers() {
  static const std::map<std::string, Maker> table = {
      {"Reshape", {any_type, [](const Graph&, const Node& n) { return make<Reshape>(n.integer("allowzero", 0) != 0); }}},
      {"Transpose", alias_maker<transposed>()},
      {"Unsqueeze", {[](const Graph& g, const Node& n) { return any_type(g, n) && has_input(n, 1); },
                     [](const Graph&, const Node& n) { return make<Alias>(n, unsqueezed); }}},
      {"Squeeze", alias_maker<squeezed>()},
      {"Slice", {[](const Graph& g, const Node& n) {
                   if (!any_type(g, n)) return false;
                   if (!has_input(n, 4)) return true;
                   const Value& steps = input(g, n, 4);
                   if (!steps.data || steps.type != Type::kInt64) return false;
                   for (size_t i = 0; i < steps.bytes / 8; i++)
                     if (static_cast<const int64_t*>(steps.data)[i] < 1) return false;
                   return true;
                 },
                 [](const Graph&, const Node& n) { return make<Alias>(n, sliced); }}},
      {"Expand", alias_maker<expanded>()},
      {"Identity", alias_maker<same>()},
      {"Split", {[](const Graph& g, const Node& n) { return any_type(g, n); },
                 [](const Graph&, const Node& n) { return make<Split>(n.integer("axis", 0)); }}},
      {"Concat", {[](const Graph& g, const Node& n) { return any_type(g, n); },
                  [](const Graph&, const Node& n) { return make<Concat>(n.integer("axis", 0)); }}},
      {"Sigmoid", unary_maker<Unary::kSigmoid>()},
      {"Tanh", unary_maker<Unary::kTanh>()},
      {"Exp", unary_maker<Unary::kExp>()},
      {"Erf", unary_maker<Unary::kErf>()},
      {"Sqrt", unary_maker<Unary::kSqrt>()},
      {"Reciprocal", unary_maker<Unary::kReciprocal>()},
      {"Cos", unary_maker<Unary::kCos>()},
      {"Sin", unary_maker<Unary::kSin>()},
      {"Neg", unary_maker<Unary::kNegate>()},
      {"Abs", unary_maker<Unary::kAbs>()},
      {"Relu", unary_maker<Unary::kRelu>()},
      {"Softplus", unary_maker<Unary::kSoftplus>()},
      {"Log", unary_maker<Unary::kLog>()},
      {"Floor", unary_maker<Unary::kFloor>()},
      {"Gelu", {[](const Graph& g, const Node& n) { return is_float(g, n); },
                [](const Graph&, const Node& n) {
                  auto it = n.attributes.find("approximate");
                  const bool tanh = it != n.attributes.end() && it->second.text == "tanh";
                  return make<UnaryStep>(tanh ? Unary::kGeluTanh : Unary::kGelu);
                }}},
      {"Add", binary_maker<Binary::kAdd>()},
      {"Sub", binary_maker<Binary::kSubtract>()},
      {"Mul", binary_maker<Binary::kMultiply>()},
      {"Div", binary_maker<Binary::kDivide>()},
      {"Max", binary_maker<Binary::kMaximum>()},
      {"Min", binary_maker<Binary::kMinimum>()},
      {"Pow", binary_maker<Binary::kPower>()},
      {"RMSNormalization", {[](const Graph& g, const Node& n) {
                              const Value& scale = input(g, n, 1);
                              return is_float(g, n) && scale.type == Type::kFloat && rank_of(scale) == 1 && n.integer("axis", -1) == -1;
                            },
                            [](const Graph&, const Node& n) { return make<Norm>(false, n.number("epsilon", 1e-5f)); }}},
      {"LayerNormalization", {[](const Graph& g, const Node& n) {
                                const Value& scale = input(g, n, 1);
                                return is_float(g, n) && scale.type == Type::kFloat && rank_of(scale) == 1 &&
                                       n.integer("axis", -1) == -1 && n.outputs.size() == 1;
                              },
                              [](const Graph&, const Node& n) { return make<Norm>(true, n.number("epsilon", 1e-5f)); }}},
      {"Softmax", {[](const Graph& g, const Node& n) {
                     const int rank = rank_of(input(g, n, 0));
                     const int64_t axis = n.integer("axis", -1);
                     return is_float(g, n) && n.since >= 13 && (axis == -1 || axis == rank - 1);
                   },
                   [](const Graph&, const Node&) { return make<Softmax>(); }}},
      {"RotaryEmbedding", {[](const Graph& g, const Node& n) {
                             return n.domain.empty() && is_float(g, n) && rank_of(input(g, n, 0)) == 4 &&
                                    rank_of(input(g, n, 1)) == 3 && !has_input(n, 3);
                           },
                           [](const Graph&, const Node& n) {
                             return make<Rotary>(n.integer("interleaved", 0) != 0, int(n.integer("rotary_embedding_dim", 0)));
                           }}},
      {"TensorScatter", {[](const Graph& g, const Node& n) {
                           auto mode = n.attributes.find("mode");
                           const int64_t axis = n.integer("axis", -2);
                           return is_float(g, n) && rank_of(input(g, n, 0)) == 4 && (axis == -2 || axis == 2) &&
                                  (mode == n.attributes.end() || mode->second.text == "linear");
                         },
                         [](const Graph&, const Node&) { return make<TensorScatter>(); }}},
      {"Attention", {[](const Graph& g, const Node& n) {
                       for (size_t i = 0; i < 3; i++)
                         if (!is_float(g, n, i) || rank_of(input(g, n, i)) != 4) return false;
                       return n.domain.empty() && input(g, n, 3).type == Type::kBool && !has_input(n, 4) && !has_input(n, 5) &&
                              !has_input(n, 6) && n.outputs.size() == 1 && !n.integer("is_causal", 0) &&
                              n.integer("qk_matmul_output_mode", 0) == 0 && n.number("softcap", 0) >= 0;
                     },
                     [](const Graph&, const Node& n) {
                       return make<Attention>(n.number("scale", 0), n.number("softcap", 0));
                     }}},
      {"Gather", {[](const Graph& g, const Node& n) {
                    const Type index = input(g, n, 1).type;
                    return any_type(g, n) && (index == Type::kInt64 || index == Type::kInt32);
                  },
                  [](const Graph&, const Node& n) { return make<Gather>(n.integer("axis", 0)); }}},
      {"GatherElements", {[](const Graph& g, const Node& n) { return any_type(g, n) && input(g, n, 1).type == Type::kInt64; },
                          [](const Graph&, const Node& n) { return make<GatherRows>(n.integer("axis", 0)); }}},
      {"MatMul", {[](const Graph& g, const Node& n) {
                    return is_float(g, n) && is_float(g, n, 1) && rank_of(input(g, n, 0)) >= 2 && rank_of(input(g, n, 1)) >= 2;
                  },
                  [](const Graph&, const Node&) { return make<MatMul>(); }}},
      {"Cast", {[](const Graph& g, const Node& n) {
                  const Type to = Type(n.integer("to", 0));
                  return any_type(g, n) && (to == Type::kFloat || to == Type::kInt64 || to == Type::kInt32 || to == Type::kBool);
                },
                [](const Graph&, const Node& n) { return make<Cast>(Type(n.integer("to", 0))); }}},
  };
  return table;
}

// The first table's steps are tuned for floats.
const Maker* maker_of(const Graph& graph, const Node& node) {
  if (node.has_subgraph || !(node.domain.empty() || node.domain == "ai.onnx")) return nullptr;
  for (const auto* table : {&makers(), &number_makers()})
    if (auto it = table->find(node.type); it != table->end() && it->second.fits(graph, node)) return &it->second;
  return nullptr;
}

}  // namespace

bool has_step(const Graph& graph, const Node& node) { return maker_of(graph, node) != nullptr; }

std::unique_ptr<Step> make_step(const Graph& graph, const Node& node) {
  const Maker* maker = maker_of(graph, node);
  if (!maker) fail("there is no step for the operator " + node.type);
  std::unique_ptr<Step> step = maker->make(graph, node);
  step->inputs = node.inputs;
  step->outputs = node.outputs;
  step->name = node.name.empty() ? node.type : node.name;
  return step;
}

std::unique_ptr<Step> make_product(const PackedWeights& weights, const PackedWeights* offsets, int x, int y, int addend) {
  std::unique_ptr<Step> step = make<Product>(weights, offsets);
  step->inputs = addend < 0 ? std::vector<int>{x} : std::vector<int>{x, addend};
  step->outputs = {y};
  return step;
}

std::unique_ptr<Step> make_attention(float scale, float softcap, std::vector<int> inputs, int y) {
  std::unique_ptr<Step> step = make<Attention>(scale, softcap);
  step->inputs = std::move(inputs);
  step->outputs = {y};
  return step;
}

std::unique_ptr<Step> make_gate(Unary function, int a, int b, int y) {
  std::unique_ptr<Step> step = make<Gate>(function);
  step->inputs = {a, b};
  step->outputs = {y};
  return step;
}

std::unique_ptr<Step> make_gather(int table, int indices, int y) {
  std::unique_ptr<Step> step = make<Gather>();
  step->inputs = {table, indices};
  step->outputs = {y};
  return step;
}

std::unique_ptr<Step> make_unary(Unary function, int x, int y) {
  std::unique_ptr<Step> step = make<UnaryStep>(function);
  step->inputs = {x};
  step->outputs = {y};
  return step;
}

}  // namespace specexport
